"""Another process that is asked again and again over HTTP, and may not answer.

Owns the connections, the words of a failure and when they are logged: once an outage, not once a poll.  Called by
`gateway` and `progress`.
"""

import logging
from collections.abc import Mapping
from typing import Any

import aiohttp

logger = logging.getLogger(__name__)

RETRY_S = 0.25  # after a first failure, then twice that
MAX_RETRY_S = 2.0
LONG_RETRY_S = 5.0  # of one that has been silent for a minute: hundreds of them must not cost the others anything
LONG_FAILURES = 30
STARTING_S = 15.0  # a process that never answered is given so long before anybody hears of it


class Unheard(Exception):
    """No good answer came; the words say why.   status: of the answer, None = there was none."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class BadAnswer(Unheard):
    """An answer that is not what was asked for."""


class Asker:
    """The connections to all gateways and keepers.

    By aiohttp, as those to the API server: at hundreds of polls a second it counts that each costs httpx several times
    as much CPU (`make bench NAME=polls`).
    """

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def ask(
        self,
        method: str,
        url: str,
        timeout_s: float,
        *,
        params: Mapping[str, str] | None = None,
        json: Mapping[str, Any] | None = None,
    ) -> bytes:
        """The body of a good answer.  Raises Unheard."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), cookie_jar=aiohttp.DummyCookieJar()
            )
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._session.request(method, url, params=params, json=json, timeout=timeout) as response:
                answer = await response.read()
        except TimeoutError:
            raise Unheard("no answer in time") from None
        except aiohttp.ServerDisconnectedError:
            raise Unheard("it closed the connection") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise Unheard(str(error) or type(error).__name__) from None
        if response.status >= 300:
            said = answer[:200].decode(errors="replace").strip()
            raise Unheard(f"status {response.status}: {said}", response.status)
        return answer

    async def aclose(self) -> None:
        """End all connections."""
        if self._session is not None:
            await self._session.close()


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
            logger.warning("%s does not answer: %s; %s", self._what, error, self._effect)
        if self.failures > LONG_FAILURES:
            return LONG_RETRY_S
        return min(MAX_RETRY_S, RETRY_S * 2.0 ** (self.failures - 1))
