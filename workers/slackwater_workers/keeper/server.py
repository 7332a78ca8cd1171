"""The keeper's few paths over HTTP.

Owns the wire and the errors on it, `{"status", "message"}`.  Owns no knowledge of the ledger (`keeper`).
"""

import json
import logging
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pydantic

from slackwater_workers.core import PermanentError, Receipt, TemporaryError
from slackwater_workers.keeper.keeper import Keeper

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 1 << 16
LOOK_EVERY_S = 0.25  # who asks more often gets the same answer
_STOP_POLL_S = 0.1
_LINGER_S = 2.0
REQUESTS = ("GET /progress", "POST /verify", "GET /ready")


class _ReceiptMessage(pydantic.BaseModel):
    """A worker's receipt; fields that we do not need are ignored."""

    path: str
    size_bytes: int = pydantic.Field(ge=1)
    sha256: str = pydantic.Field(pattern="^[0-9a-f]{64}$")


class _VerifyMessage(pydantic.BaseModel):
    receipt: _ReceiptMessage


class _Refusal(Exception):
    """An answer that is an error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Server(ThreadingHTTPServer):
    """A thread a connection: there are one or two, from the operator."""

    request_queue_size = 64

    def __init__(self, address: tuple[str, int], keeper: Keeper, monotonic_s: Callable[[], float]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, _Handler)
        self.keeper = keeper
        self._monotonic_s = monotonic_s
        self._lock = threading.Lock()
        self._looked_s = float("-inf")
        self._found: dict[str, Any] = {}

    def server_bind(self) -> None:
        """Bind, and ask no name server for our own name."""
        socketserver.TCPServer.server_bind(self)

    def progress(self) -> dict[str, Any]:
        """The keeper's newest look, at most LOOK_EVERY_S old."""
        with self._lock:
            if self._monotonic_s() - self._looked_s >= LOOK_EVERY_S:
                self._found = self.keeper.look()
                self._looked_s = self._monotonic_s()
            return self._found

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 - as the base class has it
        """A caller that went away is nothing; anything else is our fault."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            logger.exception("request of %s failed", client_address)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    timeout = 60.0  # of a connection that is kept and not used
    _is_unread = False

    def finish(self) -> None:
        """Take what a refused caller still sends: closing on it would reset the connection, and the answer with it."""
        super().finish()
        if not self._is_unread:
            return
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            until_s = time.monotonic() + _LINGER_S
            while (left_s := until_s - time.monotonic()) > 0:
                self.connection.settimeout(left_s)
                if not self.connection.recv(1 << 16):
                    return

    def do_GET(self) -> None:
        """Answer, or refuse."""
        self._serve()

    def do_POST(self) -> None:
        """Answer, or refuse."""
        self._serve()

    def do_PUT(self) -> None:
        """Refuse."""
        self._serve()

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: there is a request each second."""

    def _serve(self) -> None:
        try:
            body = self._body()
            status, answer = 200, self._answer(f"{self.command} {self.path.partition('?')[0]}", body)
        except _Refusal as refusal:
            status, answer = refusal.status, {"status": refusal.status, "message": str(refusal)}
        except TemporaryError as error:
            status, answer = 503, {"status": 503, "message": str(error)}
        except PermanentError as error:
            status, answer = 500, {"status": 500, "message": str(error)}
        data = json.dumps(answer, allow_nan=False).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if self.close_connection:
            self.send_header("Connection", "close")  # or the caller would send its next request into it
        self.end_headers()
        self.wfile.write(data)

    def _answer(self, request: str, body: bytes) -> dict[str, Any]:
        match request:
            case "GET /progress":
                return self.server.progress()
            case "POST /verify":
                return {"holds": self.server.keeper.holds(_receipt(body))}
            case "GET /ready":
                return {"status": 200, "message": "ok"}
        raise _Refusal(404, f"there is no {request} here; there are {', '.join(REQUESTS)}")

    def _body(self) -> bytes:
        length = self.headers.get("Content-Length", "0")
        if "Transfer-Encoding" in self.headers or not length.isdecimal() or int(length) > MAX_BODY_BYTES:
            self.close_connection = self._is_unread = True  # what follows on it cannot be told apart
            raise _Refusal(413, f"the body must have a Content-Length of at most {MAX_BODY_BYTES} bytes")
        return self.rfile.read(int(length))


def _receipt(body: bytes) -> Receipt:
    try:
        message = _VerifyMessage.model_validate_json(body)
    except pydantic.ValidationError as error:
        faults = [f"{'.'.join(map(str, fault['loc'])) or 'body'}: {fault['msg']}" for fault in error.errors()]
        raise _Refusal(422, "; ".join(faults)) from None
    return Receipt(**message.receipt.model_dump())


@contextmanager
def serving(keeper: Keeper, host: str, port: int, monotonic_s: Callable[[], float] = time.monotonic) -> Iterator[str]:
    """Serve from a thread as long as the block runs; yields the URL.  port: 0 takes a free one.

    Raises PermanentError when the address cannot be had.
    """
    try:
        server = _Server((host, port), keeper, monotonic_s)
    except OSError as error:
        raise PermanentError(
            f"cannot listen on {host} port {port}: {error.strerror or error}; give another --host or --port"
        ) from error
    thread = threading.Thread(target=server.serve_forever, args=(_STOP_POLL_S,), name="http", daemon=True)
    thread.start()
    name, taken = server.server_address[:2]
    try:
        yield f"http://[{name!s}]:{taken}" if ":" in str(name) else f"http://{name!s}:{taken}"
    finally:
        server.shutdown()
        server.server_close()
