"""How far jobs are, as their keepers say."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest

from slackwater_operator.operate import progress
from slackwater_operator.operate.progress import Keepers, Place, read_progress
from slackwater_operator.operate.remote import Asker, BadAnswer
from slackwater_operator.testing.remotes import StandInKeeper

JOB = "ns/podcasts"


@asynccontextmanager
async def following(url: str) -> AsyncIterator[Keepers]:
    async with aclosing(Asker()) as asker:
        keepers = Keepers(asker, asyncio.get_running_loop().time, lambda: None)
        await keepers.follow({JOB: Place(url)})
        try:
            yield keepers
        finally:
            await keepers.close()


async def until(what: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not what():
            await asyncio.sleep(0.01)


async def test_what_is_not_known_yet_is_none_and_what_is_known_is_told() -> None:
    async with StandInKeeper() as keeper, following(keeper.url) as keepers:
        assert keepers.job(JOB) is None
        await until(lambda: keepers.job(JOB))
        first = keepers.job(JOB)
        assert first is not None
        assert first.items_total is None
        assert first.shards_open is None


async def test_the_moment_of_a_workers_durable_point_is_on_our_clock() -> None:
    async with StandInKeeper() as keeper:
        keeper.progress |= {
            "items_total": 10,
            "shards_open": 2,
            "workers": {
                "w-1": {"durable_age_s": 3.0, "items": 4, "shard": "s-1"},
                "w-2": {"durable_age_s": None, "items": 0, "shard": None},
            },
        }
        async with following(keeper.url) as keepers:
            await until(lambda: keepers.job(JOB))

            worker, new = keepers.worker(JOB, "w-1"), keepers.worker(JOB, "w-2")

            now_s = asyncio.get_running_loop().time()
            assert worker is not None
            assert worker.durable_s == pytest.approx(now_s - 3.0, abs=1.0)
            assert (worker.items, worker.shard) == (4, "s-1")
            assert new is not None
            assert new.durable_s is None
            assert keepers.worker(JOB, "w-3") is None


@pytest.mark.parametrize(("polls_per_s", "is_rare"), [(1000.0, False), (0.01, True)])
async def test_many_keepers_together_are_asked_only_so_often(
    monkeypatch: pytest.MonkeyPatch, polls_per_s: float, is_rare: bool
) -> None:
    monkeypatch.setattr(progress, "QUIET_S", 0.01)
    monkeypatch.setattr(progress, "POLLS_PER_S", polls_per_s)

    async with StandInKeeper() as keeper, following(keeper.url) as keepers:
        await until(lambda: keepers.job(JOB))
        await asyncio.sleep(0.5)

        assert (keeper.polls == 1) is is_rare


async def test_a_receipt_holds_does_not_hold_or_cannot_be_told() -> None:
    async with StandInKeeper() as keeper, following(keeper.url) as keepers:
        keeper.holds = {"good"}
        assert await keepers.verify(JOB, {"path": "p", "size_bytes": 1, "sha256": "good"}) is True
        assert await keepers.verify(JOB, {"path": "p", "size_bytes": 1, "sha256": "bad"}) is False
        assert await keepers.verify(JOB, {"path": "p"}) is False  # no keeper will ever take it

        keeper.failing = True
        assert await keepers.verify(JOB, {"path": "p", "size_bytes": 1, "sha256": "good"}) is None
        await keeper.stop()
        assert await keepers.verify(JOB, {"path": "p", "size_bytes": 1, "sha256": "good"}) is None
        assert await keepers.verify("ns/other", {"path": "p", "size_bytes": 1, "sha256": "good"}) is None


async def test_what_a_keeper_said_stands_while_another_one_takes_its_place() -> None:
    async with StandInKeeper() as keeper, StandInKeeper() as other:
        keeper.progress |= {"items_total": 10}
        other.failing = True
        async with following(keeper.url) as keepers:
            await until(lambda: keepers.job(JOB))

            await keepers.follow({JOB: Place(other.url)})

            known = keepers.job(JOB)
            assert known is not None
            assert known.items_total == 10


async def test_what_a_keeper_said_of_another_ledger_is_forgotten() -> None:
    async with StandInKeeper() as keeper:
        keeper.progress |= {"shards_open": 0}
        async with following(keeper.url) as keepers:
            await until(lambda: keepers.job(JOB))
            keeper.failing = True

            await keepers.follow({JOB: Place(keeper.url, "of another job under that name")})

            assert keepers.follows(JOB)
            assert keepers.job(JOB) is None


def test_another_servers_answer_is_no_progress() -> None:
    with pytest.raises(BadAnswer, match="not the progress of a keeper"):
        read_progress(b"[1]", 0.0)


async def test_the_real_keeper_is_understood(tmp_path: Path) -> None:
    from slackwater_workers.keeper.keeper import Keeper
    from slackwater_workers.keeper.server import serving
    from slackwater_workers.ledger.store import PosixStore

    with serving(Keeper(PosixStore(tmp_path)), "127.0.0.1", 0) as url:
        async with following(url) as keepers:
            await until(lambda: keepers.job(JOB))
            found = keepers.job(JOB)
            assert found is not None
            assert found.items_total is None
            receipt = {"path": "parts/none", "size_bytes": 1, "sha256": "0" * 64, "worker": "w", "unit": 1}
            assert await keepers.verify(JOB, receipt) is False


def test_polls_are_frequent_enough_for_the_choice_of_victims() -> None:
    assert progress.BUSY_S <= 1.0
