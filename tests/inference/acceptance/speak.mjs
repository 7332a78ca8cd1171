// Speaks a text and reads the audio as it comes: node speak.mjs URL KEY TEXT
const [url, key, text] = process.argv.slice(2);
const began = performance.now();

const response = await fetch(`${url}/v1/tts`, {
  method: "POST",
  headers: { Authorization: `Bearer ${key}`, "Content-Type": "application/json", model: "s2.1-pro-free" },
  body: JSON.stringify({ text, format: "pcm" }),
});
const said = { status: response.status, type: response.headers.get("content-type") };

if (response.ok) {
  const reader = response.body.getReader();
  Object.assign(said, { pieces: 0, bytes: 0 });
  for (let piece = await reader.read(); !piece.done; piece = await reader.read()) {
    said.first_ms ??= performance.now() - began;
    said.pieces += 1;
    said.bytes += piece.value.length;
  }
  said.last_ms = performance.now() - began;
} else {
  said.error = await response.json();
}
console.log(JSON.stringify(said));
