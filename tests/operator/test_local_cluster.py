"""LocalCluster on real child processes that do as a control file says."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from slackwater_operator.cluster.local import LocalCluster
from slackwater_operator.cluster.members import Owner
from slackwater_operator.cluster.programs import Programs
from slackwater_operator.cluster.slots import Slot
from slackwater_operator.config import Config
from slackwater_operator.core import Action, Kind, Phase, Reason, TemporaryError, Verb
from slackwater_operator.testing.children import write_control

pytestmark = pytest.mark.e2e

QUIET = {"in_flight": 0, "queued": 0, "arrivals_total": 0}
DEADLINE_S = 20.0  # a bound on waiting, not a speed: these steps take milliseconds


async def until(holds: Callable[[], Any]) -> None:
    """Wait for a condition of real processes; fails after DEADLINE_S."""
    end_s = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < end_s, "the condition never held"
        await asyncio.sleep(0.01)


@asynccontextmanager
async def cluster_of(
    folder: Path, *, slots: int = 3, standby: int = 0, grace_s: float = 10, **control: Any
) -> AsyncIterator[tuple[LocalCluster, Path]]:
    """A started cluster, ended also when the test fails."""
    (folder / "in").mkdir()
    control_file = folder / "control.json"
    write_control(control_file, signals=QUIET, **control)
    config = Config.model_validate(
        {
            "state_dir": folder / "state",
            "inference": {"standby_replicas": standby, "max_replicas": 3},
            "cleaning": [{"name": "job", "input": folder / "in", "output": folder / "out", "grace_s": grace_s}],
        }
    )
    programs = Programs(
        config.inference, (sys.executable, "-m", "slackwater_operator.testing.children", str(control_file))
    )
    cluster = LocalCluster(config, tuple(Slot(index, "cpu") for index in range(slots)), programs)
    others = set(psutil.Process().children(recursive=True))  # servers of other tests' sessions
    try:
        await cluster.start()
        yield cluster, control_file
    finally:
        cluster.kill()
        await cluster.stop(5)
        assert set(psutil.Process().children(recursive=True)) <= others


async def act(cluster: LocalCluster, verb: Verb, uid: str, reason: Reason, count: int = 1) -> None:
    """Raises what the cluster refuses with."""
    for refusal in await cluster.apply((Action(verb, uid, count, reason),), time.monotonic()):
        raise refusal.error


def phase_of(cluster: LocalCluster, kind: Kind) -> list[Phase]:
    return [workload.phase for workload in cluster.observe(time.monotonic()).workloads if workload.kind is kind]


async def working(cluster: LocalCluster) -> str:
    """Start one worker and wait for its first durable item; returns its uid."""
    await act(cluster, Verb.START, "job", Reason.IDLE)
    uid = next(member.uid for member in cluster.members.values() if member.owner == "job")
    await until(lambda: cluster.members[uid].receipt)
    return uid


async def test_an_evicted_worker_leaves_durable_work_and_its_slot(tmp_path: Path) -> None:
    async with cluster_of(tmp_path) as (cluster, _):
        uid = await working(cluster)
        assert len(cluster.observe(time.monotonic()).nodes[0].idle_since_s) == 2

        await act(cluster, Verb.EVICT, uid, Reason.TRAFFIC)
        assert phase_of(cluster, Kind.CLEANING) == [Phase.LEAVING]
        await until(lambda: cluster.reclaims)

        [reclaim] = cluster.reclaims
        assert (reclaim.outcome, reclaim.verified, reclaim.reason) == ("checkpointed", True, Reason.TRAFFIC)
        assert reclaim.items > 0
        assert len(cluster.observe(time.monotonic()).nodes[0].idle_since_s) == 3


async def test_a_worker_evicted_before_it_began_has_lost_nothing(tmp_path: Path) -> None:
    async with cluster_of(tmp_path) as (cluster, _):
        await act(cluster, Verb.START, "job", Reason.IDLE)
        [uid] = cluster.members

        await act(cluster, Verb.EVICT, uid, Reason.TRAFFIC)
        await until(lambda: cluster.reclaims)

        assert (cluster.reclaims[0].outcome, cluster.reclaims[0].items) == ("checkpointed", 0)


async def test_a_receipt_that_does_not_read_back_is_not_counted_as_lossless(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, worker="lies") as (cluster, _):
        uid = await working(cluster)

        await act(cluster, Verb.EVICT, uid, Reason.TRAFFIC)
        await until(lambda: cluster.reclaims)

        assert (cluster.reclaims[0].outcome, cluster.reclaims[0].verified) == ("lost", False)


async def test_a_worker_that_ignores_sigterm_is_killed_after_its_grace(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, worker="hangs", grace_s=0.2) as (cluster, _):
        uid = await working(cluster)

        await act(cluster, Verb.EVICT, uid, Reason.TRAFFIC)
        with pytest.raises(TemporaryError, match="leaving already"):
            await act(cluster, Verb.EVICT, uid, Reason.TRAFFIC)
        while not cluster.reclaims:
            await cluster.tend()
            await asyncio.sleep(0.02)

        assert cluster.reclaims[0].outcome == "timeout"
        assert len(cluster.observe(time.monotonic()).nodes[0].idle_since_s) == 3


async def test_a_crashing_worker_is_not_started_again_before_its_back_off_ends(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, worker="crash") as (cluster, _):
        await act(cluster, Verb.START, "job", Reason.IDLE)
        await until(lambda: not phase_of(cluster, Kind.CLEANING))

        assert cluster.observe(time.monotonic()).jobs[0].open_units == 0
        with pytest.raises(TemporaryError, match="backing off"):
            await act(cluster, Verb.START, "job", Reason.IDLE)
        assert cluster.observe(time.monotonic() + 61).jobs[0].open_units > 0


async def test_a_worker_with_bad_input_is_never_started_again_and_says_why(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, worker="bad input") as (cluster, _):
        await act(cluster, Verb.START, "job", Reason.IDLE)
        await until(lambda: cluster.owners["job"].broken)

        assert "no audio files" in cluster.owners["job"].broken
        assert cluster.observe(time.monotonic() + 3600).jobs[0].open_units == 0


async def test_a_job_whose_worker_ends_with_0_is_done(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, worker="done") as (cluster, _):
        await act(cluster, Verb.START, "job", Reason.IDLE)
        await until(lambda: cluster.owners["job"].done)

        assert cluster.observe(time.monotonic()).jobs[0].open_units == 0
        assert cluster.owners["job"].progress["items_done"] == cluster.owners["job"].progress["items_total"]
        assert not cluster.reclaims


def test_the_count_of_items_never_passes_their_total() -> None:
    owner = Owner(progress={"items_done": 9, "items_total": 10, "items_open": 1})

    for _ in range(3):
        owner.settle_one()

    assert (owner.progress["items_done"], owner.progress["items_open"]) == (10, 0)


async def test_an_engine_that_stands_by_holds_no_slot_and_is_woken_first(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, standby=1) as (cluster, _):
        await until(lambda: any(member.loaded for member in cluster.members.values()))
        [asleep] = cluster.members
        assert cluster.observe(time.monotonic()).workloads == ()

        await act(cluster, Verb.START, "tts/cpu", Reason.FLOOR)
        await until(lambda: phase_of(cluster, Kind.INFERENCE) == [Phase.RUNNING])

        assert [w.uid for w in cluster.observe(time.monotonic()).workloads] == [asleep]


async def test_a_drained_replica_leaves_only_after_its_last_stream(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, engine={"running": 2}) as (cluster, control):
        await act(cluster, Verb.START, "tts/cpu", Reason.FLOOR)
        await until(lambda: any(member.running == 2 for member in cluster.members.values()))
        [uid] = cluster.members

        await act(cluster, Verb.DRAIN, uid, Reason.QUIET)
        await cluster.tend()
        assert phase_of(cluster, Kind.INFERENCE) == [Phase.DRAINING]

        write_control(control, signals=QUIET, engine={"running": 0})
        while cluster.members:
            await cluster.tend()
            await asyncio.sleep(0.02)
        assert cluster.owners["tts"].failures == 0


async def test_a_drain_can_be_cancelled_while_streams_live(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, engine={"running": 2}) as (cluster, _):
        await act(cluster, Verb.START, "tts/cpu", Reason.FLOOR)
        await until(lambda: any(member.running == 2 for member in cluster.members.values()))
        [uid] = cluster.members
        await act(cluster, Verb.DRAIN, uid, Reason.QUIET)

        await act(cluster, Verb.CANCEL, uid, Reason.TRAFFIC)

        assert phase_of(cluster, Kind.INFERENCE) == [Phase.RUNNING]


async def test_traffic_samples_of_the_gateway_reach_the_observation(tmp_path: Path) -> None:
    async with cluster_of(tmp_path) as (cluster, control):
        write_control(control, signals={"in_flight": 3, "queued": 2, "arrivals_total": 9})

        seen: list[int] = []
        await until(lambda: seen.extend(s.queued for _, s in cluster.observe(time.monotonic()).samples) or 2 in seen)


async def test_no_start_without_a_free_slot(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, slots=1) as (cluster, _):
        await working(cluster)

        with pytest.raises(TemporaryError, match="no free slot"):
            await act(cluster, Verb.START, "tts/cpu", Reason.TRAFFIC)


async def test_a_worker_that_cannot_be_started_gives_its_slot_back(tmp_path: Path) -> None:
    async with cluster_of(tmp_path) as (cluster, _):
        (tmp_path / "state" / "logs").rename(tmp_path / "state" / "elsewhere")  # no log can be opened

        with pytest.raises(TemporaryError, match="could not be started"):
            await act(cluster, Verb.START, "job", Reason.IDLE)

        assert len(cluster.observe(time.monotonic()).nodes[0].idle_since_s) == 3
        assert not cluster.observe(time.monotonic()).workloads


async def test_a_standby_engine_that_cannot_be_started_is_left_for_later(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, standby=1) as (cluster, _):
        await until(lambda: any(member.loaded for member in cluster.members.values()))
        await act(cluster, Verb.START, "tts/cpu", Reason.FLOOR)
        await until(lambda: phase_of(cluster, Kind.INFERENCE) == [Phase.RUNNING])
        (tmp_path / "state" / "logs").rename(tmp_path / "state" / "elsewhere")  # no log can be opened

        await cluster.tend()

        assert cluster.owners["tts"].failures == 1
        assert phase_of(cluster, Kind.INFERENCE) == [Phase.RUNNING]


async def test_stopping_lets_workers_make_their_work_durable(tmp_path: Path) -> None:
    async with cluster_of(tmp_path) as (cluster, _):
        uid = await working(cluster)
        child = cluster.members[uid].child
        assert child is not None

        await cluster.stop(10)

        assert not cluster.members
        assert "Traceback" not in child.last_words()
