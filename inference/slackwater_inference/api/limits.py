"""What a caller may use: requests at once, requests a minute, credit.

Owns the counters, in this process's memory: several replicas behind one gateway each count for themselves.
Does not own the keys' numbers (store).  Called by the speech, websocket and transcription routes.
"""

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal

from starlette.requests import HTTPConnection

from slackwater_inference.api.auth import Caller, caller_of
from slackwater_inference.api.errors import ApiError
from slackwater_inference.metrics import EngineMetrics
from slackwater_inference.store.keys import ApiKey, KeyStore

_MINUTE_S = 60.0
_MILLION = Decimal(1_000_000)
_BUSY_RETRY_S = 1  # a place comes free when a request ends, which nobody can foretell


@dataclass(slots=True)
class _Bucket:
    """A token bucket: `tokens` at the time `at_s`."""

    tokens: float
    at_s: float


class Limits:
    """Requests at once and in a minute, for each key."""

    def __init__(self, max_open: int, metrics: EngineMetrics, clock: Callable[[], float] = time.monotonic) -> None:
        """max_open: requests at once over all callers."""
        self._max_open = max_open
        self._metrics = metrics
        self._clock = clock
        self._open: Counter[str] = Counter()
        self._buckets: dict[str, _Bucket] = {}
        self._total = 0

    @contextlib.contextmanager
    def slot(self, caller: Caller) -> Iterator[None]:
        """Count one request of `caller` for as long as the block lasts.  Raises ApiError 429."""
        if self._total >= self._max_open:
            raise self._refused(f"the server has {self._total} requests open, which is all it takes", _BUSY_RETRY_S)
        key = caller.key
        if key is not None:
            if self._open[key.key_id] >= key.max_concurrent:
                message = f"this key may have {key.max_concurrent} requests at once, and has them; wait for one to end"
                raise self._refused(message, _BUSY_RETRY_S)
            self._take_token(key)
        self._total += 1
        if key is not None:
            self._open[key.key_id] += 1
        try:
            yield
        finally:
            self._total -= 1
            if key is not None:
                self._open[key.key_id] -= 1
                self._open += Counter()  # drops the keys that have none open

    def _take_token(self, key: ApiKey) -> None:
        per_minute = key.requests_per_minute
        if per_minute is None:
            return
        now_s = self._clock()
        bucket = self._buckets.setdefault(key.key_id, _Bucket(per_minute, now_s))
        bucket.tokens = min(per_minute, bucket.tokens + (now_s - bucket.at_s) * per_minute / _MINUTE_S)
        bucket.at_s = now_s
        if bucket.tokens < 1:
            wait_s = (1 - bucket.tokens) * _MINUTE_S / max(per_minute, 1)
            raise self._refused(f"this key may send {per_minute} requests a minute", math.ceil(wait_s))
        bucket.tokens -= 1

    def _refused(self, message: str, retry_after_s: int) -> ApiError:
        self._metrics.count_rejected("rate")
        return ApiError(429, message, {"Retry-After": str(retry_after_s)})


async def admitted(connection: HTTPConnection) -> AsyncIterator[Caller]:
    """The caller, counted against its limits until the answer is sent; a FastAPI dependency.

    Raises ApiError 401 or 429.
    """
    caller = await caller_of(connection)
    limits: Limits = connection.app.state.limits
    with limits.slot(caller):
        yield caller


class Meter:
    """What one request costs: its text's UTF-8 bytes at its model's price, paid part by part as each begins to sound.

    So a text that was refused, or that nobody heard, is never paid.
    """

    def __init__(self, keys: KeyStore | None, caller: Caller, model: str, price: Decimal) -> None:
        """price: of a million bytes."""
        self._keys = keys
        self._key = caller.key
        self._model = model
        self._price = price

    def check(self, num_bytes: int) -> None:
        """Raise ApiError 402 if the caller's credit, as it was when the request came, does not cover `num_bytes`."""
        credit = None if self._key is None else self._key.credit
        if credit is not None and self._price * num_bytes / _MILLION > credit:
            raise ApiError(
                402,
                f"this key's credit of {credit} US dollars does not cover {num_bytes} bytes of text with "
                f"{self._model}; add credit, or use a free model",
            )

    async def charge(self, num_bytes: int) -> None:
        """Take the price of `num_bytes` from the caller's credit.  Raises CreditExhausted, or a store's error."""
        if self._keys is not None and self._key is not None:
            await asyncio.to_thread(self._keys.charge, self._key.key_id, self._model, num_bytes, self._price)
