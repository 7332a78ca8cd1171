"""One HTTP session to the API server: requests with time limits, safe retries and errors that speak.

Owns the aiohttp session and the count of requests; knows nothing of kinds or verbs beyond their names.
Called by `client` alone.
"""

import asyncio
import logging
import random
import socket
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import Any
from urllib.parse import urlencode

import aiohttp
from yarl import URL

from slackwater_operator.kube.backoff import Backoff
from slackwater_operator.kube.connection import Connection
from slackwater_operator.kube.errors import (
    Call,
    KubePermanent,
    KubeTemporary,
    TooManyRequests,
    Unauthorized,
    Unreachable,
    from_answer,
)
from slackwater_operator.kube.servertime import ServerTime

logger = logging.getLogger(__name__)

JSON = "application/json"
_MAX_LINE_BYTES = 64 * 2**20  # of a watch; etcd refuses objects above 1.5 MiB, and a few servers allow more
_READ_BUFFER_BYTES = 512 * 2**10  # of a watch: one wake-up of the loop then brings some hundred events


@dataclass(frozen=True, slots=True)
class Limits:
    """How long and how often.  Each phase of a request has a bound of its own, and all tries together have one."""

    connections: int = 96  # 64 writes at once, a dozen watches, some reads
    connect_s: float = 5.0  # TCP and TLS
    silence_s: float = 30.0  # nothing more of an answer; the API server itself gives up after 60
    request_s: float = 60.0  # one try, with the wait for a free connection
    watch_silence_s: float = 75.0  # a bookmark comes about each minute, so this silence is a dead connection
    tries: int = 5
    retry_within_s: float = 15.0  # no further try begins later than this


class Retry(Enum):
    """When a request may be sent again without asking."""

    SAFE = "safe"  # it does no harm twice: after a lost answer too
    REFUSED = "refused"  # only if the server cannot have carried it out


@dataclass(slots=True)
class Tries:
    """What became of the tries of one request.  lost: one of them may have been carried out unseen."""

    lost: bool = False


class Transport:
    """Sends requests.  `counts[(verb, plural)]` grows with each try, so it is what the server sees."""

    def __init__(
        self,
        connection: Connection,
        user_agent: str,
        limits: Limits,
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]],
        rng: random.Random,
    ) -> None:
        self.connection = connection
        self.limits = limits
        self.counts: Counter[tuple[str, str]] = Counter()
        self.server_time = ServerTime(clock)
        self._user_agent = user_agent
        self._clock = clock
        self._sleep = sleep
        self._rng = rng
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "Transport":
        limits = self.limits
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=limits.connections,
                ssl=self.connection.tls or True,
                keepalive_timeout=60.0,
                socket_factory=_socket,
            ),
            # Compression costs both ends more than the bytes cost a cluster's network.
            headers={"Accept": JSON, "Accept-Encoding": "identity", "User-Agent": self._user_agent},
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(
                total=limits.request_s, sock_connect=limits.connect_s, sock_read=limits.silence_s
            ),
        )
        # aiohttp would send a PUT or DELETE again by itself after a lost answer; that is for `Retry` to judge.
        self._session._retry_connection = False
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def send(
        self,
        call: Call,
        plural: str,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: bytes | None = None,
        content_type: str = JSON,
        retry: Retry = Retry.REFUSED,
        tries: Tries | None = None,
        before: Callable[[], Awaitable[None]] | None = None,
    ) -> bytes:
        """The body of a good answer.  Raises what the last try raised.

        tries: filled in, for callers whose next step depends on a lost answer.  before: awaited before each try,
        since what allows the first may be over before the last.
        """
        tries = tries or Tries()
        backoff = Backoff(first_s=0.1, max_s=2.0, rng=self._rng)
        began_s = self._clock()
        renewed = False
        while True:
            if before is not None:
                await before()
            try:
                return await self._once(call, plural, method, path, params, body, content_type)
            except Unauthorized:
                if renewed or not self.connection.credentials.renew():
                    raise
                renewed = True
            except (Unreachable, TooManyRequests) as error:
                unknown = isinstance(error, Unreachable) and error.unknown
                tries.lost = tries.lost or unknown
                asked_s = error.delay_s if error.code else 0.0
                delay_s = backoff.next_s(at_least_s=asked_s if error.code in (429, 503) else 0.0)
                late = self._clock() - began_s + delay_s > self.limits.retry_within_s
                if late or backoff.tries >= self.limits.tries or (unknown and retry is not Retry.SAFE):
                    raise
                logger.debug("again in %.2f s: %s", delay_s, error)
                await self._sleep(delay_s)

    async def lines(
        self, call: Call, plural: str, path: str, params: Mapping[str, str], opened: Callable[[], None] | None = None
    ) -> AsyncGenerator[bytes, None]:
        """The lines of an answer that does not end by itself.  Ends when the server ends it in good order.

        opened: called when the server has accepted the request.  Raises Unreachable if the connection breaks,
        falls silent, or ends within a line.
        """
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=self.limits.connect_s, sock_read=self.limits.watch_silence_s
        )
        self.counts[call.verb, plural] += 1
        parts: list[bytes] = []  # of a line that is not whole yet
        size = 0
        try:
            headers = await self.connection.credentials.headers()
            async with self._open.get(
                self._url(path, params),
                headers=headers,
                timeout=timeout,
                read_bufsize=_READ_BUFFER_BYTES,
                server_hostname=self.connection.server_name,
                proxy=self.connection.proxy,
            ) as response:
                if response.status >= 400:
                    raise self._failure(call, response, await response.read())
                if opened is not None:
                    opened()
                async for chunk in response.content.iter_any():
                    first, *rest = chunk.split(b"\n")
                    parts.append(first)
                    if not rest:
                        size += len(first)
                        if size > _MAX_LINE_BYTES:
                            raise Unreachable(f"{call}: a line of more than {_MAX_LINE_BYTES} bytes", unknown=False)
                        continue
                    yield b"".join(parts)
                    for line in rest[:-1]:
                        yield line
                    parts, size = [rest[-1]], len(rest[-1])
        except (aiohttp.ClientError, OSError) as error:  # a TimeoutError is an OSError
            raise self._no_answer(call, error) from error
        if any(parts):
            raise Unreachable(f"{call}: the connection to {self.connection.server} ended within a line")

    async def _once(
        self,
        call: Call,
        plural: str,
        method: str,
        path: str,
        params: Mapping[str, str] | None,
        body: bytes | None,
        content_type: str,
    ) -> bytes:
        self.counts[call.verb, plural] += 1
        headers = dict(await self.connection.credentials.headers())
        if body is not None:
            headers["Content-Type"] = content_type
        asked_s = self._clock()
        try:
            async with self._open.request(
                method,
                self._url(path, params),
                data=body,
                headers=headers,
                allow_redirects=False,
                server_hostname=self.connection.server_name,
                proxy=self.connection.proxy,
            ) as response:
                self.server_time.note(response.headers.get("Date"), asked_s, self._clock())
                answer = await response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise self._no_answer(call, error) from error
        if response.status >= 300:
            raise self._failure(call, response, answer)
        return answer

    @property
    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("use `async with Kube(…)` before the first call")
        if self._session.closed:
            raise KubePermanent(f"the client of {self.connection.server} is closed")
        return self._session

    def _url(self, path: str, params: Mapping[str, str] | None) -> URL:
        query = f"?{urlencode(params)}" if params else ""
        return URL(f"{self.connection.server}{path}{query}", encoded=True)

    def _failure(self, call: Call, response: aiohttp.ClientResponse, body: bytes) -> KubeTemporary | KubePermanent:
        if response.status == 401:
            self.connection.credentials.renew()
        return from_answer(call, response.status, body, response.headers.get("Retry-After"))

    def _no_answer(self, call: Call, error: Exception) -> KubeTemporary | KubePermanent:
        """What a broken connection means."""
        server = self.connection.server
        if isinstance(error, aiohttp.ClientConnectorCertificateError):
            return KubePermanent(f"{call}: the certificate of {server} is not to be trusted: {error}")
        if isinstance(error, aiohttp.InvalidURL):
            return KubePermanent(f"{call}: {server!r} is no address of a server")
        # Neither of the two sent a byte of the request.
        unsent = isinstance(error, (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError))
        why = str(error) or type(error).__name__
        return Unreachable(f"{call}: no answer from {server}: {why}", unknown=not unsent)


def _socket(address: tuple[int, int, int, str, tuple[Any, ...]]) -> socket.socket:
    """A socket that notices within half a minute that its peer is gone without a word."""
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):  # Linux has all of them, macOS only some
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return made


async def wait(seconds: float) -> None:
    """The sleep of real programs; tests pass one of a clock that they move."""
    await asyncio.sleep(seconds)
