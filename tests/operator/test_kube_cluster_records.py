"""`KubeCluster`: what is written of take-backs, and when."""

import asyncio
import json

import pytest

from slackwater_operator.cluster.kube.endings import VERIFY_FOR_S
from slackwater_operator.cluster.kube.ports import WorkerProgress
from slackwater_operator.core import Reason
from slackwater_operator.kube.types import NODES, PODS
from slackwater_operator.resources import Reclaim, names, parse
from slackwater_operator.testing.kube_operator import RECLAIMS
from slackwater_operator.testing.kube_world import World

RECEIPT = json.dumps({"path": "/ledger/part/h0/1", "size_bytes": 9, "sha256": "ab" * 32, "unit": "u", "items": 7})
NEVER = {"exitCode": 137, "reason": "ContainerStatusUnknown", "message": "The container could not be located"}


async def test_a_take_back_costs_few_writes_and_its_record_tells_all() -> None:
    async with World() as world:
        variant, workers = await world.full_node()
        world.writes.clear()
        world.clock.now_s += 1.25
        await world.evict(workers, variant)
        world.clock.now_s += 0.5
        for worker in workers:
            world.finish(worker, 75, RECEIPT)
        await world.start(variant, 8, Reason.TRAFFIC)
        world.run_all()

        await world.tend(0.25)

        reclaim = parse(Reclaim, world.reclaims()[0])
        [view] = world.cluster.take_reclaims()
        assert len(world.writes) == 2 * len(workers) + 2
        assert (reclaim.status.phase, reclaim.status.took, reclaim.status.lost_s) == ("Serving", "0.5s", 0.0)
        assert {(one.outcome, one.verified, one.durable_unit) for one in reclaim.status.victims} == {
            ("Checkpointed", True, 7)
        }
        assert [(one.type, one.reason) for one in reclaim.status.conditions] == [
            ("InTime", "WithinDeadline"),
            ("Lossless", "AllCheckpointed"),
        ]
        assert (view.freed_s, view.serving_s, len(view.victims)) == (0.5, 0.75, 8)
        assert world.cluster.take_reclaims() == ()


@pytest.mark.parametrize(("leaving_s", "phases_written"), [(2.0, ["Freed"]), (4.0, ["Signalled", "Freed"])])
async def test_only_victims_that_take_their_time_are_written_while_they_leave(
    leaving_s: float, phases_written: list[str]
) -> None:
    async with World() as world:
        variant, workers = await world.full_node()
        await world.evict(workers, variant)
        seen = []

        for step in range(8):
            if step == leaving_s:
                for worker in workers:
                    world.finish(worker, 75, RECEIPT)
                await world.start(variant, 8, Reason.TRAFFIC)
            await world.tend(1.0)
            seen.append(parse(Reclaim, world.reclaims()[0]).status.phase)

        assert list(dict.fromkeys(phase for phase in seen if phase)) == phases_written


async def test_a_status_that_arrives_after_another_leader_has_written_the_end_changes_nothing() -> None:
    async with World() as world:
        variant, workers = await world.full_node()
        await world.evict(workers[:1], variant)
        await world.settle()
        world.clock.now_s += 4.0  # so that it is written while the victim leaves
        world.fake.hang("apply", RECLAIMS.plural)

        late = asyncio.create_task(world.cluster.tend(world.clock()))
        await asyncio.sleep(0.05)
        world.fake.put(RECLAIMS, world.reclaims()[0] | {"status": {"phase": "Serving"}})
        world.fake.release()
        await late

        assert world.reclaims()[0]["status"]["phase"] == "Serving"


@pytest.mark.parametrize(
    ("code", "message", "holds", "outcome", "verified", "lost_s"),
    [
        pytest.param(75, RECEIPT, True, "Checkpointed", True, 0.0, id="receipt found in the ledger"),
        pytest.param(75, RECEIPT, False, "Lost", False, 2.0, id="receipt not found"),
        pytest.param(137, RECEIPT, False, "Lost", False, 2.0, id="killed, and its receipt not found"),
        pytest.param(75, "", False, "Checkpointed", True, 0.0, id="nothing was claimed"),
        pytest.param(143, "", False, "Checkpointed", True, 0.0, id="it had not begun"),
        pytest.param(2, "", False, "Checkpointed", True, 0.0, id="its runtime was still making the container"),
        pytest.param(137, RECEIPT, True, "Timeout", True, 2.0, id="killed"),
        pytest.param(137, "", False, "Timeout", True, 2.0, id="killed with nothing durable"),
        pytest.param(1, RECEIPT, True, "Checkpointed", True, 2.0, id="failed on its way out"),
        pytest.param(75, RECEIPT, None, "Unverified", None, 2.0, id="no keeper for so long"),
    ],
)
async def test_only_a_receipt_that_the_keeper_does_not_find_is_lost_work(
    code: int, message: str, holds: bool | None, outcome: str, verified: bool | None, lost_s: float
) -> None:
    async with World() as world:
        _, workers = await world.full_node()
        world.progress.holds = holds
        world.progress.workers[workers[0].split("/")[1]] = WorkerProgress(998.0, 1, "h0")
        await world.evict(workers[:1], reason=Reason.LIMIT)
        world.finish(workers[0], code, message)

        await world.tend()
        await world.tend(VERIFY_FOR_S + 1.0)

        [victim] = parse(Reclaim, world.reclaims()[0]).status.victims
        job = world.cluster.jobs()[0]
        assert (victim.outcome, victim.verified, victim.lost_s) == (outcome, verified, lost_s)
        assert (job.lost, job.unverified) == (verified is False, verified is None)
        assert (job.durable_wall_s is not None) == (message == RECEIPT and verified is True)


async def test_a_worker_that_is_killed_or_never_ran_has_lost_nothing_durable() -> None:
    async with World() as world:
        _, workers = await world.full_node(4)
        world.progress.holds = False
        await world.evict(workers[:1], reason=Reason.LIMIT)
        gone = world.pod(workers[0])
        gone["status"] |= {"phase": "Failed", "containerStatuses": [{"name": "worker", "state": {"terminated": NEVER}}]}
        world.fake.put(PODS, gone)
        world.finish(workers[1], 137, RECEIPT)  # nobody asked it to go

        await world.tend()

        [victim] = parse(Reclaim, world.reclaims()[0]).status.victims
        assert (victim.outcome, victim.verified, victim.lost_s) == ("Checkpointed", True, 0.0)
        assert world.cluster.jobs()[0].lost == 0


@pytest.mark.parametrize(
    ("code", "message", "holds", "status", "reason", "said"),
    [
        pytest.param(75, RECEIPT, True, "True", "AllCheckpointed", "", id="lossless"),
        pytest.param(1, RECEIPT, True, "True", "AllCheckpointed", "2 GPU-seconds after them are done again", id="late"),
        pytest.param(75, RECEIPT, False, "False", "WorkLost", "slackwater clean verify", id="lost"),
        pytest.param(137, RECEIPT, True, "False", "KilledAtDeadline", "nothing durable is lost", id="killed"),
        pytest.param(75, RECEIPT, None, "Unknown", "NotVerified", "nobody could look", id="unverified"),
    ],
)
async def test_a_take_back_says_of_which_workers_it_speaks_and_what_was_lost(
    code: int, message: str, holds: bool | None, status: str, reason: str, said: str
) -> None:
    async with World() as world:
        _, workers = await world.full_node()
        world.progress.holds = holds
        world.progress.workers[workers[0].split("/")[1]] = WorkerProgress(998.0, 1, "h0")
        await world.evict(workers[:1], reason=Reason.LIMIT)
        world.finish(workers[0], code, message)

        await world.tend()
        await world.tend(VERIFY_FOR_S + 1.0)

        found = parse(Reclaim, world.reclaims()[0]).status.condition("Lossless")
        assert found is not None
        assert (found.status, found.reason) == (status, reason)
        assert said in found.message
        assert (workers[0] in found.message) == (reason != "AllCheckpointed")


async def test_a_late_victim_is_said_once_and_forced_out_only_where_no_kubelet_can() -> None:
    async with World() as world:
        variant, workers = await world.full_node()
        await world.evict(workers[:1], variant)
        for _ in range(3):
            await world.tend(16.0)
        there = world.pods(names.POD_CLEANING)
        [late] = world.reclaims()
        world.fake.update(NODES, "n1", {"status": {"conditions": [{"type": "Ready", "status": "Unknown"}]}})

        await world.tend(1.0)

        [in_time] = late["status"]["conditions"]
        assert (in_time["status"], in_time["message"]) == ("False", f"still there: {workers[0]}")
        assert workers[0] in there
        assert workers[0] not in world.pods(names.POD_CLEANING)
        assert world.events.count((late["metadata"]["name"], "ReclaimDeadlineExceeded")) == 1


async def test_a_killed_worker_s_receipt_is_told_in_words(caplog: pytest.LogCaptureFixture) -> None:
    async with World() as world:
        _, workers = await world.full_node(1)
        world.finish(workers[0], 137, RECEIPT)

        await world.tend()

        said = world.cluster.jobs()[0].refusal
        assert "ended with 137: it left no word on why; its first 7 items are durable" in said
        assert "sha256" not in said + caplog.text
