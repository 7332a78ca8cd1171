"""One line a request on the log, its id, and its place in the metrics; never its text.

Owns the ASGI middleware around the whole app, for HTTP and websockets.
"""

import logging
import re
import time
import uuid
from collections.abc import MutableMapping
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from slackwater_inference.api.errors import CLIENT_CLOSED
from slackwater_inference.metrics import EngineMetrics

logger = logging.getLogger(__name__)

_PLAIN_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_QUIET_PATHS = ("/healthz", "/readyz", "/metrics")
_SPEECH_PATHS = ("/v1/tts", "/v1/tts/stream/with-timestamp", "/v1/tts/live")
_STARTS = ("http.response.start", "websocket.accept", "websocket.http.response.start")
_BODIES = ("http.response.body", "websocket.send", "websocket.http.response.body")
_UNSAFE = re.compile(r"[^!-~]")  # a path may hold anything, a line break too


class AccessLog:
    """Wraps the app.

    A route may leave in the scope's state: `tier`, the caller's, and `outcome`, a websocket's, as an HTTP status.
    """

    def __init__(self, app: ASGIApp, metrics: EngineMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on; add `X-Request-Id` to its answer and log it once it is over."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        is_http = scope["type"] == "http"
        state = scope.setdefault("state", {})
        request_id = _request_id(scope)
        began_s = time.perf_counter()
        status, num_bytes, is_complete = 0, 0, False  # status 0: no answer began

        async def send_noting(message: MutableMapping[str, Any]) -> None:
            nonlocal status, num_bytes, is_complete
            if message["type"] in _STARTS:
                status = message.get("status", 101)
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
            elif message["type"] in _BODIES:
                num_bytes += len(message.get("body") or message.get("bytes") or b"")
                is_complete = not message.get("more_body", False)
            await send(message)

        outcome = 500  # of an answer that breaks; the exception goes on to the server, which cuts the connection
        try:
            await self._app(scope, receive, send_noting)
            outcome = state.get("outcome") or (status if is_complete else CLIENT_CLOSED)
        finally:
            path = scope["path"]
            method = scope["method"] if is_http else "WS"
            if path in _SPEECH_PATHS and method in ("POST", "WS"):
                self._metrics.count_request(outcome, "http" if is_http else "ws", state.get("tier", "default"))
            logger.log(
                logging.DEBUG if path in _QUIET_PATHS else logging.INFO,
                "%s %s status=%d outcome=%d bytes=%d seconds=%.3f id=%s",
                method,
                _UNSAFE.sub("?", path)[:200],
                status,
                outcome,
                num_bytes,
                time.perf_counter() - began_s,
                request_id.decode(),
            )


def _request_id(scope: Scope) -> bytes:
    """The caller's own id if it is a plain word, else a new one.  For people; the engine uses ids of its own."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _PLAIN_ID.fullmatch(value):
            return bytes(value)
    return uuid.uuid4().hex.encode()
