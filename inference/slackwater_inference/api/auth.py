"""Who calls: bearer keys.

Owns the Authorization header and what a caller may see.  Does not own the keys (store) nor what a key may
use (limits).  Called by every route that needs a caller.
"""

import asyncio
from dataclasses import dataclass

from starlette.requests import HTTPConnection

from slackwater_inference.api.errors import ApiError
from slackwater_inference.store.keys import ApiKey, KeyStore

SELF = "self"
_MAX_KEY_CHARS = 512  # longer than any key; a longer header is not worth a look-up


@dataclass(frozen=True, slots=True)
class Caller:
    """Who a request comes from.  key: None where no key is needed, and then user_id is "self"."""

    key: ApiKey | None
    user_id: str

    @property
    def tier(self) -> str:
        """The tier of the key, a label of metrics."""
        return "default" if self.key is None else self.key.tier.value


async def caller_of(connection: HTTPConnection) -> Caller:
    """The caller of an HTTP request or a websocket; a FastAPI dependency.

    Raises ApiError 401 if keys are needed and the header holds none that is known and valid.
    """
    keys: KeyStore | None = connection.app.state.services.keys
    if keys is None:
        return Caller(None, SELF)
    key = _bearer(connection.headers.get("authorization"))
    found = await asyncio.to_thread(keys.find, key)
    if found is None:
        raise _unauthorized("unknown or revoked API key")
    caller = Caller(found, found.user_id)
    connection.state.tier = caller.tier
    return caller


def _bearer(header: str | None) -> str:
    scheme, _, key = (header or "").partition(" ")
    key = key.strip()
    if scheme.lower() != "bearer" or not key:
        raise _unauthorized("no API key; send the header Authorization: Bearer <key>")
    if len(key) > _MAX_KEY_CHARS:
        raise _unauthorized("unknown or revoked API key")
    return key


def _unauthorized(message: str) -> ApiError:
    return ApiError(401, message, {"WWW-Authenticate": "Bearer"})
