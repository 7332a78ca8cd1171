"""Everything that can go wrong with an API call, as errors that say whether another try can help.

Owns the mapping from the server's `Status` to an error.  A message names the verb, the kind, the object
and what the server said: `create Pod serving/tts-1: exceeded quota: gpus (403 Forbidden)`; `refusals` puts what a
person has to mend into a sentence.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slackwater_operator.core import PermanentError, TemporaryError
from slackwater_operator.kube.refusals import Denial, denial, insecure, shortened, without_value


class KubeTemporary(TemporaryError):
    """A later call may succeed.  code: the HTTP status, 0 if no answer came."""

    def __init__(self, message: str, delay_s: float = 1.0, *, code: int = 0, reason: str = "") -> None:
        super().__init__(message, delay_s)
        self.code = code
        self.reason = reason


class Unreachable(KubeTemporary):
    """No answer, or one that says that the server cannot serve now (5xx).

    unknown: True if the request may have been carried out all the same.
    """

    def __init__(
        self, message: str, delay_s: float = 1.0, *, code: int = 0, reason: str = "", unknown: bool = True
    ) -> None:
        super().__init__(message, delay_s, code=code, reason=reason)
        self.unknown = unknown


class Conflict(KubeTemporary):
    """The object has changed since it was read, or another manager owns a field.  causes: those fields."""

    def __init__(
        self,
        message: str,
        delay_s: float = 0.1,
        *,
        code: int = 409,
        reason: str = "Conflict",
        causes: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message, delay_s, code=code, reason=reason)
        self.causes = causes


class TooManyRequests(KubeTemporary):
    """The server throttles us, or an eviction would break a disruption budget; `delay_s` is its Retry-After."""


class KubePermanent(PermanentError):
    """The same call will fail again.  code: the HTTP status."""

    def __init__(self, message: str, *, code: int = 0, reason: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason


class NotFound(KubePermanent):
    """No such object, or no such kind."""


class AlreadyExists(KubePermanent):
    """An object of that name is there."""


class Forbidden(KubePermanent):
    """RBAC, an admission policy or a quota says no.   denial: the right that is missing, if it is RBAC."""

    def __init__(self, message: str, *, code: int = 0, reason: str = "", denial: Denial | None = None) -> None:
        super().__init__(message, code=code, reason=reason)
        self.denial = denial


class Unauthorized(Forbidden):
    """The server does not know who we are: the credentials are wrong or have run out."""


class Invalid(KubePermanent):
    """The object breaks its schema or a rule.  causes: `path: what is wrong with it`."""

    def __init__(self, message: str, *, code: int = 422, reason: str = "Invalid", causes: tuple[str, ...] = ()) -> None:
        super().__init__(message, code=code, reason=reason)
        self.causes = causes


class Gone(KubePermanent):
    """The server does not know the resourceVersion, or the continuation of a list, any more: list again."""


KUBE_ERRORS = (KubeTemporary, KubePermanent)  # for `except`
KubeError = KubeTemporary | KubePermanent

_TOO_NEW = "Too large resource version"  # the server has gone back, to a backup

MAX_DELAY_S = 60.0  # a Retry-After beyond it is cut: the state it speaks of will have changed


def error_code(error: Exception) -> int:
    """The HTTP status behind an error; 0 if no answer came."""
    return error.code if isinstance(error, KUBE_ERRORS) else 0


@dataclass(frozen=True, slots=True)
class Call:
    """What was tried, for messages."""

    verb: str
    title: str  # "Pod serving/tts-1"
    unique: bool = False  # the call carried a uid as its precondition

    def __str__(self) -> str:
        return f"{self.verb} {self.title}"


def from_answer(call: Call, code: int, body: bytes, retry_after: str | None = None) -> KubeError:
    """The error that an answer of 400 and above means."""
    try:
        status = json.loads(body)
    except ValueError:
        status = None
    if not isinstance(status, dict) or "message" not in status:
        text = body[:200].decode(errors="replace").strip()
        status = {"message": text or "no text came with the answer"}
    return from_status(call, code, status, retry_after)


def from_status(call: Call, code: int, status: Mapping[str, Any], retry_after: str | None = None) -> KubeError:
    """The error that a `Status` object means.  retry_after: the header's value."""
    details = status.get("details") or {}
    reason = status.get("reason") or ""
    causes = tuple(
        f"{cause.get('field') or '(object)'}: {without_value(str(cause.get('message', '')))}"
        for cause in details.get("causes") or ()
    )
    said = f"{call}: {status.get('message', '')} ({code}{f' {reason}' if reason else ''})"
    delay_s = _delay_s(retry_after, details)
    match code:
        case 401:
            return Unauthorized(said, code=code, reason=reason)
        case 403:
            return _forbidden(call, str(status.get("message", "")), said, reason)
        case 404:
            return NotFound(said, code=code, reason=reason)
        case 409 if reason == "AlreadyExists":
            return AlreadyExists(said, code=code, reason=reason)
        case 409 if call.unique and "uid" in str(status.get("message", "")).lower():
            # Another object bears the name by now, so the one that was meant is gone.
            return NotFound(said, code=code, reason=reason)
        case 409:
            return Conflict(said, delay_s or 0.1, code=code, reason=reason, causes=causes)
        case 410:
            return Gone(said, code=code, reason=reason)
        case 504 if _TOO_NEW in str(status.get("message", "")):
            return Gone(said, code=code, reason=reason)
        case 422:
            if causes:
                said = f"{call}: {shortened(causes)} ({code} {reason})"
            return Invalid(said, code=code, reason=reason, causes=causes)
        case 429:
            return TooManyRequests(said, delay_s or 1.0, code=code, reason=reason)
        case _ if code >= 500:
            # A 503 with Retry-After is refused before any work; the others may come after it.
            refused = code == 503 and retry_after is not None
            return Unreachable(said, delay_s or 1.0, code=code, reason=reason, unknown=not refused)
        case _:
            return KubePermanent(said, code=code, reason=reason)


def _forbidden(call: Call, message: str, said: str, reason: str) -> Forbidden:
    """With what to do about it, the command last, so that it can be copied."""
    missing = denial(message)
    told = str(missing) if missing else insecure(message)
    return Forbidden(f"{call}: 403 {reason}: {told}" if told else said, code=403, reason=reason, denial=missing)


def _delay_s(retry_after: str | None, details: Mapping[str, Any]) -> float:
    """Seconds to wait as the header or the body says, 0 if neither does."""
    for value in (retry_after, details.get("retryAfterSeconds")):
        try:
            delay_s = float(value) if value is not None else 0.0
        except ValueError:  # an HTTP date, which no API server sends
            continue
        if delay_s > 0:
            return min(delay_s, MAX_DELAY_S)
    return 0.0
