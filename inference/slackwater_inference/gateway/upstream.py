"""One try of one request on one replica, over HTTP.

Owns the connection and the hop's own headers.  Decides nothing: `app` reads from the kind of error
whether another replica may be tried.
"""

import uuid
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx

Headers = list[tuple[bytes, bytes]]

# RFC 9110 section 7.6.1, and what each hop writes itself.
HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
MAX_REQUEST_ID_CHARS = 128
OURS = frozenset({b"host", b"content-length", b"expect"})  # the body is read, and sent as one


class UpstreamError(Exception):
    """Root: this try did not work."""


class Unreachable(UpstreamError):
    """No connection: the replica has seen nothing of the request."""


class Died(UpstreamError):
    """The connection ended after the request was sent and before the first byte of the answer."""


class TooSlow(UpstreamError):
    """No first byte within the time limit; another replica would take as long."""


class Broken(UpstreamError):
    """The answer ended in its middle."""


@dataclass(frozen=True, slots=True)
class Request:
    """A client's request, its body read whole so that it can be sent again."""

    method: str
    target: bytes  # raw path and query
    headers: Headers
    body: bytes


class Answer:
    """A replica's answer of which the first body bytes are here."""

    def __init__(self, status: int, headers: Headers, first: bytes, rest: AsyncIterator[bytes]) -> None:
        self.status = status
        self.headers = headers
        self._first = first
        self._rest = rest

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body's bytes as they come.  Raises Broken when the replica ends it early."""
        if self._first:
            yield self._first
        try:
            async for chunk in self._rest:
                yield chunk
        except httpx.TransportError as error:
            raise Broken(error_text(error)) from error


class Upstream:
    """The client side of the gateway.  Use as an async context manager.

    connect_timeout_s: short, since a replica is near; silence_timeout_s: longest gap without a byte.
    """

    def __init__(self, connect_timeout_s: float = 2.0, silence_timeout_s: float = 300.0) -> None:
        self.connect_timeout_s = connect_timeout_s
        self.silence_timeout_s = silence_timeout_s
        self._client = httpx.AsyncClient(
            # A connection each: an idle one that the replica closes just now would look like its death.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            timeout=httpx.Timeout(silence_timeout_s, connect=connect_timeout_s),
            follow_redirects=False,
            trust_env=False,  # a proxy of the environment is not for replicas
        )

    async def __aenter__(self) -> "Upstream":
        await self._client.__aenter__()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._client.aclose()

    @asynccontextmanager
    async def open(self, base_url: str, request: Request) -> AsyncIterator[Answer]:
        """Send the request and wait for the first body bytes; leaving the block ends the exchange.

        Raises Unreachable, Died or TooSlow; the client has seen nothing then.
        """
        outgoing = httpx.Request(
            request.method,
            base_url,
            headers=end_to_end(request.headers, also_drop=OURS),
            content=request.body,
            # As it came: httpx would resolve `..` in a URL, and so leave the paths that the gateway lets through.
            extensions={"target": request.target},
        )
        try:
            response = await self._client.send(outgoing, stream=True)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise Unreachable(error_text(error)) from error
        except httpx.TransportError as error:
            raise _before_first_byte(error) from error
        try:
            rest = response.aiter_raw()
            try:
                first = await anext(rest, b"")
            except httpx.TransportError as error:
                raise _before_first_byte(error) from error
            yield Answer(response.status_code, end_to_end(response.headers.raw), first, rest)
        finally:
            await response.aclose()


def end_to_end(headers: Iterable[tuple[bytes, bytes]], also_drop: frozenset[bytes] = frozenset()) -> Headers:
    """The headers that are meant for the far end, names in lower case."""
    lowered = [(name.lower(), value) for name, value in headers]
    dropped = HOP_BY_HOP | also_drop
    for name, value in lowered:
        if name == b"connection":
            dropped |= {token.strip().lower() for token in value.split(b",")}
    return [(name, value) for name, value in lowered if name not in dropped]


def request_id_of(headers: Headers) -> bytes:
    """The client's id if it is harmless in a log line, else a new one."""
    given = dict(headers).get(b"x-request-id", b"")
    harmless = 0 < len(given) <= MAX_REQUEST_ID_CHARS and all(0x21 <= byte <= 0x7E for byte in given)
    return given if harmless else uuid.uuid4().hex.encode()


def error_text(error: Exception) -> str:
    """What an error says, or its kind where it says nothing."""
    return str(error) or type(error).__name__


def _before_first_byte(error: httpx.TransportError) -> UpstreamError:
    kind = TooSlow if isinstance(error, httpx.TimeoutException) else Died
    return kind(error_text(error))
