"""Bearer keys.

Owns the comparison; keys are kept as digests only.  Called by the speech route.
"""

import hashlib
import hmac
from collections.abc import Iterable


class Unauthorized(Exception):
    """The request carries no key that we know."""


class KeyRing:
    """The keys that may speak.  An empty ring lets everybody in."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    @property
    def is_open(self) -> bool:
        """True if no key is needed."""
        return not self._digests

    def check(self, authorization: str | None) -> None:
        """Raise Unauthorized unless the header's value is `Bearer` and a known key."""
        if self.is_open:
            return
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise Unauthorized("no API key; send the header Authorization: Bearer <key>")
        digest = _digest(key.strip())
        # Every key is compared, each in constant time, so that time says nothing about any of them.
        if not sum(hmac.compare_digest(digest, known) for known in self._digests):
            raise Unauthorized("unknown API key")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
