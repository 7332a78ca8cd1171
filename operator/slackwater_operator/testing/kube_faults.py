"""What goes wrong at the pretended API server, and when.

Owns the list of faults that tests have ordered; `FakeKube` asks it at each request.
"""

import asyncio
from dataclasses import dataclass
from enum import Enum


class Harm(Enum):
    """What is done to a request."""

    FAIL = "fail"  # it is answered with an error and not carried out
    DROP = "drop"  # the connection breaks before it is carried out
    LOSE = "lose"  # it is carried out, and the connection breaks before the answer
    HANG = "hang"  # nothing happens until `release`
    CUT = "cut"  # a watch: the connection breaks after so many bytes


@dataclass(slots=True)
class Fault:
    """One order.  "*" stands for any verb, collection or name; it is used up after `times` requests."""

    harm: Harm
    verb: str
    plural: str
    name: str
    times: int
    code: int = 503
    reason: str = ""
    message: str = "injected"
    retry_after: str | None = None
    causes: tuple[tuple[str, str], ...] = ()
    after_bytes: int = 0


class Faults:
    """The orders of a test.  All of them take `verb` (get, list, watch, create, apply, merge, replace, delete, raw),
    `plural` and `name`, with "*" for any, and how many requests are hit."""

    def __init__(self) -> None:
        self._orders: list[Fault] = []
        self._released = asyncio.Event()

    def fail(
        self,
        verb: str = "*",
        plural: str = "*",
        *,
        code: int = 503,
        reason: str = "",
        message: str = "injected",
        retry_after: float | None = None,
        causes: tuple[tuple[str, str], ...] = (),
        name: str = "*",
        times: int = 1,
    ) -> None:
        """Answer with an error.  causes: (field, message) of an Invalid."""
        after = None if retry_after is None else f"{retry_after:g}"
        self._orders.append(Fault(Harm.FAIL, verb, plural, name, times, code, reason, message, after, causes))

    def drop(self, verb: str = "*", plural: str = "*", *, name: str = "*", times: int = 1) -> None:
        """Break the connection before the request is carried out."""
        self._orders.append(Fault(Harm.DROP, verb, plural, name, times))

    def lose(self, verb: str = "*", plural: str = "*", *, name: str = "*", times: int = 1) -> None:
        """Carry the request out and break the connection before the answer."""
        self._orders.append(Fault(Harm.LOSE, verb, plural, name, times))

    def hang(self, verb: str = "*", plural: str = "*", *, name: str = "*", times: int = 1) -> None:
        """Do nothing until `release`."""
        self._released = asyncio.Event()
        self._orders.append(Fault(Harm.HANG, verb, plural, name, times))

    def release(self) -> None:
        """Go on with all requests that hang, and forget all orders."""
        self._orders.clear()
        self._released.set()

    def cut(self, plural: str = "*", *, after_bytes: int, times: int = 1) -> None:
        """Break the next watch after so many bytes of events."""
        self._orders.append(Fault(Harm.CUT, "watch", plural, "*", times, after_bytes=after_bytes))

    def take(self, verb: str, plural: str, name: str) -> Fault | None:
        """The first order that means this request; it has one use less from now on."""
        for order in self._orders:
            if order.verb in ("*", verb) and order.plural in ("*", plural) and order.name in ("*", name):
                order.times -= 1
                if order.times <= 0:
                    self._orders.remove(order)
                return order
        return None

    async def released(self) -> None:
        """Wait for `release`."""
        await self._released.wait()
