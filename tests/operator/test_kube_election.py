"""The elector: one leader, never two, and a new one in time."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from slackwater_operator.kube.client import Kube
from slackwater_operator.kube.election import Elector
from slackwater_operator.kube.errors import KubeTemporary
from slackwater_operator.kube.transport import Limits
from slackwater_operator.kube.types import EVENTS, LEASES, PODS, Object, parse_stamp
from slackwater_operator.testing.kube import FakeKube
from slackwater_operator.testing.kube_clock import MovedClock

STEP_S = 0.25
PATIENT = Limits(tries=1)


class Candidate:
    """An elector that notes when it led, on a clock of its own: no two clocks agree."""

    def __init__(self, kube: Kube, name: str, skew_s: float = 0.0) -> None:
        self.clock = MovedClock(now_s=500.0 + skew_s, wall_s=1_796_000_000.0 + 1000 * skew_s)
        self.leads = False
        self.slow_end = False
        self.fails: Exception | None = None
        self.done = asyncio.Event()
        self.elector = Elector(
            kube, "slackwater-system", "slackwater-operator", name,
            clock=self.clock, wall=self.clock.wall, sleep=self.clock.sleep,
        )  # fmt: skip
        self.task = asyncio.create_task(self.elector.run(self.lead))

    async def lead(self) -> None:
        self.leads = True
        try:
            await self.done.wait()
            if self.fails:
                raise self.fails
        finally:
            if self.slow_end:
                await self.clock.sleep(20)
            self.leads = False

    async def stop(self) -> None:
        self.task.cancel()
        with suppress(asyncio.CancelledError):
            await self.task


async def pass_time(
    fake: FakeKube, seconds: float, *candidates: Candidate, until: Callable[[], object] = lambda: False
) -> float:
    """Move all clocks together in small steps; the seconds that passed until it held.  Never two leaders."""
    passed_s = 0.0
    while passed_s < seconds and not until():
        for one in candidates:
            await one.clock.advance(STEP_S, settle=fake.settle)
        passed_s += STEP_S
        assert sum(one.elector.is_leader for one in candidates) <= 1
        assert sum(one.leads for one in candidates) <= 1
    return passed_s


async def test_the_first_leads_and_the_second_waits() -> None:
    async with FakeKube() as fake, fake.kube(limits=PATIENT) as kube:
        a = Candidate(kube, "a")
        await pass_time(fake, 2, a, until=lambda: a.leads)
        b = Candidate(kube, "b", skew_s=777)
        await pass_time(fake, 30, a, b)

        lease = fake.get(LEASES, "slackwater-operator", "slackwater-system")
        assert lease is not None
        assert (a.leads, b.leads) == (True, False)
        assert b.elector.leader == "a"
        assert lease["spec"]["holderIdentity"] == "a"
        assert lease["spec"]["leaseDurationSeconds"] == 7
        assert len(lease["spec"]["renewTime"]) == len("2026-11-29T10:00:02.000250Z")
        assert abs(parse_stamp(lease["spec"]["renewTime"]) - a.clock.wall()) <= 2
        await a.stop()
        await b.stop()


async def test_a_leader_that_dies_is_followed_within_ten_seconds() -> None:
    async with FakeKube() as fake, fake.kube(limits=PATIENT) as first, fake.kube(limits=PATIENT) as kube:
        a, b = Candidate(first, "a"), Candidate(kube, "b", skew_s=-333)
        await pass_time(fake, 30, a, b, until=lambda: a.leads or b.leads)
        dead, other = (a, b) if a.leads else (b, a)
        await pass_time(fake, 3, a, b)

        # Its process is gone: it does nothing more, and releases nothing.
        dead.elector._release = lambda: asyncio.sleep(0)  # type: ignore[method-assign]
        await dead.stop()
        passed_s = await pass_time(fake, 20, other, until=lambda: other.leads)

        assert other.leads
        assert 5.0 <= passed_s <= 9.0
        await other.stop()


async def test_a_leader_that_ends_hands_over_at_once() -> None:
    async with FakeKube() as fake, fake.kube(limits=PATIENT) as kube:
        a = Candidate(kube, "a")
        await pass_time(fake, 2, a, until=lambda: a.leads)
        b = Candidate(kube, "b")
        await pass_time(fake, 3, a, b)

        await a.stop()
        passed_s = await pass_time(fake, 20, b, until=lambda: b.leads)

        assert passed_s <= 1.5
        assert fake.get(LEASES, "slackwater-operator", "slackwater-system")["spec"]["leaseTransitions"] >= 1  # type: ignore[index]
        await b.stop()


async def test_a_leader_that_ends_during_a_renewal_hands_over_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with FakeKube() as fake, fake.kube(limits=PATIENT) as first, fake.kube(limits=PATIENT) as kube:
        a = Candidate(first, "a")
        await pass_time(fake, 2, a, until=lambda: a.leads)
        b = Candidate(kube, "b")
        carried_out = asyncio.Event()
        replace = first.replace

        async def carry_out_and_hang(*what: Any, **options: Any) -> Object:
            await replace(*what, **options)
            carried_out.set()
            await asyncio.Event().wait()
            raise AssertionError

        monkeypatch.setattr(first, "replace", carry_out_and_hang)
        await pass_time(fake, 3, a, b, until=carried_out.is_set)
        monkeypatch.undo()
        await a.stop()
        passed_s = await pass_time(fake, 20, b, until=lambda: b.leads)

        assert carried_out.is_set()
        assert passed_s <= 1.5
        await b.stop()


async def test_a_leader_cut_off_stops_before_another_starts() -> None:
    async with FakeKube() as fake, fake.kube(limits=PATIENT) as lonely, fake.kube(limits=PATIENT) as kube:
        a = Candidate(lonely, "a")
        await pass_time(fake, 2, a, until=lambda: a.leads)
        b = Candidate(kube, "b", skew_s=5)
        await pass_time(fake, 3, a, b)

        async def cut(verb: str, resource: object, name: str) -> None:
            raise KubeTemporary("no network")

        lonely.before_write = cut
        stopped_s = await pass_time(fake, 20, a, b, until=lambda: not a.leads)
        started_s = stopped_s + await pass_time(fake, 20, a, b, until=lambda: b.leads)

        assert stopped_s <= 4.5
        assert 6.0 <= started_s <= 9.0
        assert a.elector.terms == 1
        await a.stop()
        await b.stop()


async def test_a_server_that_does_not_answer_ends_leading_in_time() -> None:
    async with FakeKube() as fake, fake.kube(limits=PATIENT) as kube:
        a = Candidate(kube, "a")
        await pass_time(fake, 2, a, until=lambda: a.leads)
        fake.pause()

        stopped_s = await pass_time(fake, 20, a, until=lambda: not a.leads)
        fake.resume()
        again_s = await pass_time(fake, 20, a, until=lambda: a.leads)

        assert stopped_s <= 4.5
        assert again_s <= 8.0
        await a.stop()


async def test_a_process_that_was_frozen_knows_at_once_that_it_does_not_lead() -> None:
    async with FakeKube() as fake, fake.kube(limits=PATIENT) as kube:
        a = Candidate(kube, "a")
        await pass_time(fake, 2, a, until=lambda: a.leads)
        before = a.elector.is_leader

        a.clock.now_s += 5.0  # no task of it has run since

        assert before
        assert not a.elector.is_leader
        with pytest.raises(KubeTemporary, match="a does not lead"):
            await a.elector.fence("create", PODS, "x")
        await a.elector.fence("create", EVENTS, "x")
        await a.stop()


async def test_a_lost_answer_does_not_cost_the_lead() -> None:
    async with FakeKube() as fake, fake.kube(limits=PATIENT) as kube:
        a = Candidate(kube, "a")
        fake.lose("create", "leases")
        await pass_time(fake, 5, a, until=lambda: a.leads)
        fake.lose("replace", "leases", times=2)
        fake.fail("replace", "leases", code=409, reason="Conflict")
        await pass_time(fake, 10, a)

        assert a.leads
        assert a.elector.terms == 1
        await a.stop()


async def test_a_lease_taken_by_hand_ends_leading_at_the_next_look() -> None:
    async with FakeKube() as fake, fake.kube(limits=PATIENT) as kube:
        a = Candidate(kube, "a")
        await pass_time(fake, 2, a, until=lambda: a.leads)

        fake.update(LEASES, "slackwater-operator", {"spec": {"holderIdentity": "thief"}}, "slackwater-system")
        passed_s = await pass_time(fake, 20, a, until=lambda: not a.leads)
        back_s = await pass_time(fake, 20, a, until=lambda: a.leads)

        assert passed_s <= 1.5
        assert 6.0 <= back_s <= 9.0
        await a.stop()


async def test_the_lease_is_kept_while_the_work_takes_long_to_end() -> None:
    async with FakeKube() as fake, fake.kube(limits=PATIENT) as kube:
        a = Candidate(kube, "a")
        a.slow_end = True
        await pass_time(fake, 2, a, until=lambda: a.leads)
        b = Candidate(kube, "b")
        await pass_time(fake, 2, a, b)

        a.task.cancel()
        ended_s = await pass_time(fake, 40, a, b, until=lambda: not a.leads)
        started_s = await pass_time(fake, 40, a, b, until=lambda: b.leads)

        assert not a.elector.is_leader
        assert 19.0 <= ended_s <= 21.5
        assert started_s <= 2.0
        with suppress(asyncio.CancelledError):
            await a.task
        await b.stop()


async def test_work_that_fails_releases_and_is_raised() -> None:
    async with FakeKube() as fake, fake.kube(limits=PATIENT) as kube:
        a = Candidate(kube, "a")
        await pass_time(fake, 2, a, until=lambda: a.leads)
        a.fails = RuntimeError("broken")
        a.done.set()
        await pass_time(fake, 2, a, until=a.task.done)

        with pytest.raises(RuntimeError, match="broken"):
            await a.task
        lease = fake.get(LEASES, "slackwater-operator", "slackwater-system")
        assert lease is not None
        assert lease["spec"]["holderIdentity"] == ""


async def test_periods_that_could_make_two_leaders_are_refused() -> None:
    async with FakeKube() as fake, fake.kube() as kube:
        with pytest.raises(ValueError, match="retry < renew < lease"):
            Elector(kube, "a", "b", "c", lease_s=4, renew_s=4)
