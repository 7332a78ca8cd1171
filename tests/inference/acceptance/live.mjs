// Speaks a text over the websocket: node live.mjs URL KEY TEXT
// Node's own WebSocket takes headers, which a browser's does not; messages are msgpack, of which a few lines are enough.
const [url, key, text] = process.argv.slice(2);

const bytes = (value) => new TextEncoder().encode(value);
const str = (value) => {
  const data = bytes(value);
  const head = data.length < 32 ? [0xa0 | data.length] : [0xda, data.length >> 8, data.length & 0xff];
  return [...head, ...data];
};
const map = (object) => [
  0x80 | Object.keys(object).length,
  ...Object.entries(object).flatMap(([name, value]) => [...str(name), ...(typeof value === "object" ? map(value) : str(value))]),
];
const send = (event) => socket.send(new Uint8Array(map(event)));
const begins = (data, object) => map(object).slice(1).every((byte, at) => data[at + 1] === byte);

const said = { audio: 0, bytes: 0, finish: null };
const socket = new WebSocket(`${url.replace("http", "ws")}/v1/tts/live`, { headers: { Authorization: `Bearer ${key}` } });
socket.binaryType = "arraybuffer";
socket.onopen = () => {
  send({ event: "start", request: { text: "", format: "pcm" } });
  send({ event: "text", text });
  send({ event: "stop" });
};
socket.onmessage = ({ data }) => {
  const message = new Uint8Array(data);
  if (begins(message, { event: "audio" })) {
    said.audio += 1;
    said.bytes += message.length;
  } else {
    said.finish = begins(message, { event: "finish", reason: "stop" }) ? "stop" : "error";
  }
};
socket.onclose = ({ code }) => console.log(JSON.stringify({ ...said, code }));
