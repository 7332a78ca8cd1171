"""How the stores fail.

Owns the room's errors below `core` that only a store raises.  The API gives each its status.
"""

from slackwater_inference.core import PermanentError, TemporaryError


class StoreUnavailable(TemporaryError):
    """The database or the object store does not answer now, is busy, or its disk is full."""


class StoreFault(PermanentError):
    """The database or the object store refuses us, or what it holds is damaged; its operator must act."""


class NotFound(PermanentError):
    """There is no such voice, key or object."""


class Forbidden(PermanentError):
    """It exists, and this user may not do that with it."""


class CreditExhausted(PermanentError):
    """The key's credit does not cover the charge."""
