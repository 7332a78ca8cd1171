"""Another process that is asked again and again over HTTP, and may not answer.

Owns its connection, the words of a failure and when they are logged: once an outage, not once a poll.  Called by
`gateway` and `progress`.
"""

import logging
import ssl
from collections.abc import Callable

import httpx

logger = logging.getLogger(__name__)

RETRY_S = 0.25  # after a first failure, then twice that
MAX_RETRY_S = 2.0
LONG_RETRY_S = 5.0  # of one that has been silent for a minute: hundreds of them must not cost the others anything
LONG_FAILURES = 30
STARTING_S = 15.0  # a process that never answered is given so long before anybody hears of it


NewClient = Callable[[], httpx.AsyncClient]


def clients() -> NewClient:
    """Makes a client for each of many servers.

    One client for all of them looks through all of its connections for each request; a client each costs little, as
    long as they share what they know of certificates.
    """
    tls = ssl.create_default_context()
    return lambda: httpx.AsyncClient(verify=tls, trust_env=False)


class Outage:
    """Whether one process answers.  what: how messages name it; effect: what its silence means."""

    def __init__(self, what: str, effect: str, now_s: float) -> None:
        self._what = what
        self._effect = effect
        self._begun_s = now_s
        self._since_s: float | None = None
        self._said = False
        self._was_up = False
        self.failures = 0

    @property
    def is_up(self) -> bool:
        """It answered the newest request."""
        return self._was_up and self._since_s is None

    def answered(self, now_s: float) -> None:
        """It answers."""
        if self._said:
            logger.info("%s answers again after %.1f s", self._what, now_s - (self._since_s or now_s))
        self._since_s, self._said, self._was_up, self.failures = None, False, True, 0

    def failed(self, error: Exception, now_s: float) -> float:
        """It does not; returns the seconds after which to ask again."""
        self._since_s = now_s if self._since_s is None else self._since_s
        self.failures += 1
        patience_s = 0.0 if self._was_up else self._begun_s + STARTING_S - now_s
        if not self._said and patience_s <= 0:
            self._said = True
            logger.warning("%s does not answer: %s; %s", self._what, words(error), self._effect)
        if self.failures > LONG_FAILURES:
            return LONG_RETRY_S
        return min(MAX_RETRY_S, RETRY_S * 2.0 ** (self.failures - 1))


class BadAnswer(Exception):
    """An answer that is not what was asked for."""


def words(error: Exception) -> str:
    """An error in words; httpx often raises one without any."""
    match error:
        case httpx.ConnectTimeout():
            return "no connection in time"
        case httpx.TimeoutException():
            return "no answer in time"
        case httpx.HTTPStatusError():
            return f"status {error.response.status_code}: {error.response.text[:200].strip()}"
        case httpx.RemoteProtocolError():
            return str(error) or "it closed the connection"
    return str(error) or type(error).__name__
