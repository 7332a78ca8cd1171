"""One line a request on the log, its id, and its place in the metrics; never its text.

Owns the ASGI middleware around the whole app.
"""

import logging
import re
import time
import uuid
from collections.abc import MutableMapping
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from slackwater_inference.metrics import EngineMetrics

logger = logging.getLogger(__name__)

_PLAIN_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_QUIET_PATHS = ("/healthz", "/readyz", "/metrics")
_CLIENT_CLOSED = 499  # the outcome of an answer whose client left before its end


class AccessLog:
    """Wraps the app."""

    def __init__(self, app: ASGIApp, metrics: EngineMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on; add `X-Request-Id` to its answer and log it once it is over."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        began_s = time.perf_counter()
        status, num_bytes, is_complete = 0, 0, False  # status 0: no answer began

        async def send_noting(message: MutableMapping[str, Any]) -> None:
            nonlocal status, num_bytes, is_complete
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
            else:
                num_bytes += len(message.get("body", b""))
                is_complete = not message.get("more_body", False)
            await send(message)

        outcome = 500  # of an answer that breaks; the exception goes on to the server, which cuts the connection
        try:
            await self._app(scope, receive, send_noting)
            outcome = status if is_complete else _CLIENT_CLOSED
        finally:
            if (scope["method"], scope["path"]) == ("POST", "/v1/tts"):
                self._metrics.count_request(outcome)
            logger.log(
                logging.DEBUG if scope["path"] in _QUIET_PATHS else logging.INFO,
                "%s %s status=%d outcome=%d bytes=%d seconds=%.3f id=%s",
                scope["method"],
                scope["path"],
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
