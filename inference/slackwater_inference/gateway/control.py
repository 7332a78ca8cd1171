"""The gateway's second address, for the operator of a cluster: told which replicas there are, asked for the signals.

Owns its paths, its long poll and its answers.  Owns no number (`routing`) and no membership (`membership`).  It is
the supervised gateway's talk in another form: same signals, same replicas, same checks.  Clients never see it.
"""

import asyncio
import json
import logging
import secrets
from collections.abc import Callable
from dataclasses import asdict
from typing import Any
from urllib.parse import parse_qs

from slackwater_inference.gateway.app import ClientLeft, Exchange, Gateway, Receive, Scope, Send, body_parts
from slackwater_inference.gateway.backlog import MIN_BETWEEN_S, Backlog
from slackwater_inference.gateway.membership import BadReplicas, Membership
from slackwater_inference.gateway.metrics import CONTENT_TYPE
from slackwater_inference.gateway.slots import Refusal
from slackwater_inference.gateway.upstream import Headers

logger = logging.getLogger(__name__)

MAX_WAIT_S = 1.0  # the policy counts on a sample a second
MAX_BODY_BYTES = 4 * 2**20  # tens of thousands of replicas
REQUESTS = ("GET /signals", "PUT /replicas", "GET /ready", "GET /metrics")


class Control:
    """The ASGI application of the control address.  Same event loop as the gateway; runs under `server.Server`.

    max_wait_s: longest wait of one poll.   boot: tells one life of the process from the next, whose totals begin
    at 0 again.
    """

    def __init__(
        self, gateway: Gateway, membership: Membership, backlog: Backlog, max_wait_s: float = MAX_WAIT_S
    ) -> None:
        self._gateway = gateway
        self._membership = membership
        self._backlog = backlog
        self._max_wait_s = max_wait_s
        self._told = backlog.count  # backlogs that some answer has reported
        self._answered_s = float("-inf")
        self._is_leaving = False
        self._is_ending = False
        self.boot = secrets.token_hex(8)

    def leave(self) -> None:
        """Be not ready from now on; the signals of the streams that still run are told as ever."""
        self._is_leaving = True

    def end(self) -> None:
        """Answer every poll at once."""
        self._is_ending = True
        self._backlog.wake()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        assert scope["type"] == "http", "the server runs without lifespan and takes no websockets here"
        exchange = Exchange(scope, send)
        try:
            match f"{exchange.method} {exchange.path}":
                case "GET /signals":
                    await self._say_signals(exchange, scope["query_string"])
                case "PUT /replicas":
                    await self._take_replicas(exchange, receive)
                case "GET /ready":
                    await self._say_ready(exchange)
                case "GET /metrics":
                    await exchange.start(200, [(b"content-type", CONTENT_TYPE)])
                    await exchange.body(self._gateway.metrics_text(), more=False)
                case unknown:
                    raise Refusal(404, f"there is no {unknown} here; there are {', '.join(REQUESTS)}")
        except ClientLeft:
            return
        except Refusal as refusal:
            await exchange.refuse(refusal)

    async def _say_signals(self, exchange: Exchange, query: bytes) -> None:
        fields = parse_qs(query.decode("ascii", "replace"))
        wait_s = _number(fields, "wait", float, 0.0)
        if not 0 <= wait_s <= self._max_wait_s:
            raise Refusal(422, f"wait must be 0 to {self._max_wait_s:g} seconds, got {wait_s:g}")
        await self._wait(_number(fields, "seen", int, self._told), wait_s)
        self._answered_s = asyncio.get_running_loop().time()
        self._told = self._backlog.count
        await _answer(
            exchange,
            {
                **asdict(self._gateway.signals()),
                "replicas": self._gateway.in_flight_by_replica(),
                "backlogs": self._backlog.count,
                "boot": self.boot,
            },
        )

    async def _wait(self, seen: int, wait_s: float) -> None:
        """Until there is something to say: a backlog that was not reported, or wait_s later."""
        now_s = asyncio.get_running_loop().time
        deadline_s = now_s() + wait_s
        if (early_s := self._answered_s + MIN_BETWEEN_S - now_s()) > 0 and not self._is_ending:
            await asyncio.sleep(min(early_s, wait_s))
        if (left_s := deadline_s - now_s()) > 0 and not self._is_ending:
            await self._backlog.wait(seen, left_s)

    async def _take_replicas(self, exchange: Exchange, receive: Receive) -> None:
        body = bytearray()
        async for part in body_parts(receive):
            body += part
            if len(body) > MAX_BODY_BYTES:
                raise Refusal(413, f"the body may have {MAX_BODY_BYTES} bytes")
        try:
            self._membership.tell(json.loads(body))
        except BadReplicas as error:
            logger.error("replicas ignored: %s", error)
            raise Refusal(422, str(error)) from error
        except ValueError as error:  # broken JSON, or broken UTF-8 inside it
            raise Refusal(422, f"the body must be JSON: {error}") from error
        await exchange.start(204, [])
        await exchange.body(b"", more=False)

    async def _say_ready(self, exchange: Exchange) -> None:
        if self._is_leaving or not self._membership.is_told:
            raise Refusal(503, "leaving" if self._is_leaving else "not told its replicas yet; PUT /replicas does it")
        await _answer(exchange, {"status": 200, "message": "ok"})


def _number(fields: dict[str, list[str]], name: str, kind: Callable[[str], Any], default: float) -> Any:
    """One number of a query.  Raises Refusal."""
    text = fields.get(name, [str(default)])[-1]
    try:
        return kind(text)
    except ValueError:
        raise Refusal(422, f"{name} must be a number, got {text!r:.40}") from None


async def _answer(exchange: Exchange, fields: dict[str, Any]) -> None:
    data = json.dumps(fields, allow_nan=False).encode()
    headers: Headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
    await exchange.start(200, headers)
    await exchange.body(data, more=False)
