"""A replica that writes on each chunk when it was sent: `python scripted_replica.py PORT`, in a pod of a test.

Owns the program and what it is asked for; stands alone, with the standard library only.  `POST` with
`{"chunks": N, "every_s": S}` is answered by N lines, one in S seconds; a websocket gets the same lines as messages.
"""

import base64
import hashlib
import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

LINE_BYTES = 960  # a tenth of a second of speech as MP3
_GUID = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # RFC 6455


class Replica(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Open a websocket, or say that all is well."""
        if self.headers.get("Upgrade", "").lower() == "websocket":
            query = parse_qs(urlsplit(self.path).query)
            self._talk(int(query["chunks"][0]), float(query["every_s"][0]))
            return
        self._answer(b"ok", "text/plain")

    def do_POST(self) -> None:
        """Stream what the body asks for."""
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.send_header("Content-Type", "audio/mpeg")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for number in range(asked["chunks"]):
            line = line_of(number)
            self.wfile.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
            self.wfile.flush()
            time.sleep(asked["every_s"])
        self.wfile.write(b"0\r\n\r\n")

    def _talk(self, chunks: int, every_s: float) -> None:
        accept = base64.b64encode(hashlib.sha1((self.headers["Sec-WebSocket-Key"] + _GUID).encode()).digest())
        self.send_response(101)
        self.send_header("Upgrade", "websocket")
        self.send_header("Connection", "Upgrade")
        self.send_header("Sec-WebSocket-Accept", accept.decode())
        self.end_headers()
        for number in range(chunks):
            line = line_of(number)
            self.wfile.write(b"\x82\x7e" + len(line).to_bytes(2, "big") + line)  # one whole binary message
            self.wfile.flush()
            time.sleep(every_s)
        self.wfile.write(b"\x88\x02\x03\xe8")  # close, 1000
        self.close_connection = True

    def _answer(self, body: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: a test reads the answers."""


def line_of(number: int) -> bytes:
    """`NUMBER TIME` and blanks, LINE_BYTES long."""
    return f"{number} {time.time():.4f}".ljust(LINE_BYTES - 1).encode() + b"\n"


if __name__ == "__main__":
    server = ThreadingHTTPServer(("0.0.0.0", int(sys.argv[1])), Replica)
    server.daemon_threads = True
    server.serve_forever()
