"""`KubeCluster`: taking GPUs back, whom they go to, and what hangs."""

import json

import pytest

from slackwater_operator.core import Action, Kind, PermanentError, Phase, Reason, TemporaryError, Verb
from slackwater_operator.kube.types import NODES, PODS
from slackwater_operator.resources import Reclaim, names, parse
from slackwater_operator.testing.kube_operator import SERVICES
from slackwater_operator.testing.kube_world import World, by_uid, phases

RECEIPT = json.dumps({"path": "/ledger/part/h0/1", "size_bytes": 9, "sha256": "ab" * 32, "unit": "u", "items": 7})


@pytest.mark.parametrize("count", [1, 8])
async def test_takes_back_exactly_as_many_as_it_was_asked_for(count: int) -> None:
    async with World() as world:
        variant, workers = await world.full_node()

        refusals = await world.evict(workers[:count], variant)
        seen = await world.observe()

        assert refusals == ()
        assert world.leaving() == workers[:count]
        assert phases(seen, Kind.CLEANING) == [Phase.LEAVING] * count + [Phase.RUNNING] * (8 - count)
        assert world.pods(names.POD_INFERENCE) == []


async def test_one_reclaim_is_written_first_and_names_all_victims() -> None:
    async with World() as world:
        variant, workers = await world.full_node()
        world.writes.clear()

        await world.evict(workers[:3], variant)

        [obj] = world.reclaims()
        reclaim = parse(Reclaim, obj)
        assert world.writes[0][:2] == ("create", "reclaims")
        assert (reclaim.spec.for_ref.name, reclaim.spec.gpus, reclaim.spec.deadline) == ("tts", 3, "15s")
        assert [(one.pod, one.job, one.node) for one in reclaim.spec.victims or ()] == [
            (uid, "default/clean", "n1") for uid in workers[:3]
        ]


async def test_where_a_rival_waits_a_replica_waits_for_its_victim_s_gpu_on_that_node_alone_and_hidden() -> None:
    async with World() as world:
        variant, workers = await world.full_node(rival=True)
        await world.evict(workers[:1], variant)

        hidden = await world.observe()

        [uid] = world.pods(names.POD_INFERENCE)
        pod = world.pod(uid)
        assert "nodeName" not in pod["spec"]
        assert pod["spec"]["schedulingGates"] == [{"name": "slackwater.dev/gpu"}]
        assert pod["status"]["nominatedNodeName"] == "n1"
        assert pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"] == {
            "nodeSelectorTerms": [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]}]
        }
        assert phases(hidden, Kind.INFERENCE) == []


async def test_the_gpu_is_given_on_only_when_it_is_seen_free() -> None:
    async with World() as world:
        variant, workers = await world.full_node()
        await world.evict(workers[:1], variant)

        early = await world.start(variant, 1, Reason.TRAFFIC)
        world.finish(workers[0])
        freed = await world.observe()
        late = await world.start(variant, 1, Reason.TRAFFIC)

        assert (len(early), late) == (1, ())
        assert len(freed.nodes[0].idle_since_s) == 1
        assert world.over_allocated() == []


async def test_a_replica_that_waits_gets_the_gpu_the_moment_that_it_is_free_and_nobody_else_does() -> None:
    async with World() as world:
        variant, workers = await world.full_node(rival=True)
        await world.evict(workers[:1], variant)
        world.finish(workers[0])

        freed = await world.observe()
        refused = await world.start("default/clean")
        await world.tend()
        world.run_all()
        served = await world.observe()

        assert freed.nodes[0].idle_since_s == ()
        assert phases(freed, Kind.INFERENCE) == [Phase.STARTING]
        assert len(refused) == 1
        assert phases(served, Kind.INFERENCE) == [Phase.RUNNING]
        assert world.over_allocated() == []


async def test_a_victim_that_hangs_is_replaced_and_nobody_waits_for_its_gpu_any_more() -> None:
    async with World() as world:
        variant, workers = await world.full_node(gpus=2, rival=True)
        await world.evict(workers[:1], variant)
        [first] = world.pods(names.POD_INFERENCE)
        await world.tend(9.0)

        refusals = await world.evict(workers[1:], variant, Reason.RETARGET)
        world.finish(workers[1])
        await world.tend()

        [second] = world.pods(names.POD_INFERENCE)
        assert refusals == ()
        assert (second != first, world.pod(second)["spec"]["nodeName"]) == (True, "n1")
        assert world.over_allocated() == []


async def test_pods_of_a_node_that_is_gone_are_removed() -> None:
    async with World() as world:
        _, workers = await world.full_node(gpus=1)
        world.fake.remove(NODES, "n1")
        await world.tend()
        early = world.pods()

        await world.tend(6.0)

        assert (early, world.pods()) == (workers, [])


async def test_nobody_is_sent_away_for_a_pod_that_the_server_refuses() -> None:
    async with World() as world:
        variant, workers = await world.full_node()
        world.fake.fail("create", "pods", code=403, reason="Forbidden", message="exceeded quota")

        refusals = await world.evict(workers[:2], variant)
        again = await world.evict(workers[:2], variant)
        seen = await world.observe()

        assert [isinstance(refusal.error, PermanentError) for refusal in refusals] == [True, True]
        assert "exceeded quota" in str(again[0].error)
        assert world.leaving() == []
        assert phases(seen, Kind.CLEANING) == [Phase.RUNNING] * 8
        assert world.reclaims() == []


async def test_an_eviction_of_who_leaves_already_or_is_gone_is_refused() -> None:
    async with World() as world:
        variant, workers = await world.full_node()
        await world.evict(workers[:1], variant)

        refusals = await world.evict([workers[0], "default/never-was"], variant)

        assert [str(refusal.error) for refusal in refusals] == [
            f"{workers[0]} is leaving already",
            "default/never-was is gone already",
        ]
        assert all(isinstance(refusal.error, TemporaryError) for refusal in refusals)


async def test_a_reclaim_whose_answer_was_lost_for_good_holds_its_victims_until_somebody_has_looked() -> None:
    async with World() as world:
        variant, workers = await world.full_node()
        world.fake.drop("create", "reclaims", times=2)

        [refusal] = await world.evict(workers[:1], variant)
        in_doubt = await world.observe()
        await world.tend()
        looked = await world.observe()

        assert isinstance(refusal.error, TemporaryError)
        assert by_uid(in_doubt)[workers[0]].phase is Phase.LEAVING
        assert by_uid(looked)[workers[0]].phase is Phase.RUNNING
        assert world.leaving() == []


async def test_a_delete_that_failed_is_sent_again() -> None:
    async with World() as world:
        variant, workers = await world.full_node()
        world.fake.fail("delete", "pods", code=500, times=5)

        await world.evict(workers[:1], variant)
        before = world.leaving()
        await world.tend(1.0)

        assert (before, world.leaving()) == ([], workers[:1])


async def test_a_place_that_is_kept_for_nobody_is_given_back() -> None:
    async with World() as world:
        variant, workers = await world.full_node(rival=True)
        await world.evict(workers[:1], variant)
        world.finish(workers[0])
        world.fake.fail("create", "pods", code=403, reason="Forbidden", message="exceeded quota", times=99)
        await world.tend()

        await world.tend(6.0)
        seen = await world.observe()

        assert world.pods(names.POD_INFERENCE) == []
        assert len(seen.nodes[0].idle_since_s) == 1


async def test_a_service_that_is_gone_spares_the_victims_that_were_not_told() -> None:
    async with World() as world:
        variant, workers = await world.full_node()
        world.fake.fail("delete", "pods", code=500, times=99)
        await world.evict(workers[:2], variant)
        world.fake.release()
        world.fake.remove(SERVICES, "tts", "default")

        await world.tend(1.0)
        seen = await world.observe()

        assert world.leaving() == []
        assert phases(seen, Kind.CLEANING) == [Phase.RUNNING] * 8
        assert world.reclaims()[0]["status"]["phase"] == "Cancelled"


async def test_a_larger_victim_makes_room_for_one_replica_and_leaves_the_rest_free() -> None:
    async with World() as world:
        world.pool()
        world.nodes(1, gpus=4)
        variant = world.service()
        workers = await world.fill(world.job(gpusPerWorker=4), 1)
        world.rival()

        await world.evict(workers, variant)
        world.finish(workers[0])
        seen = await world.observe()

        assert len(world.pods(names.POD_INFERENCE)) == 1
        assert len(seen.nodes[0].idle_since_s) == 3


async def test_two_victims_make_room_for_one_replica_of_two_gpus() -> None:
    async with World() as world:
        variant, workers = await world.full_node(
            gpus=4, rival=True, variants=[{"flavor": "h200", "slotsPerReplica": 64, "gpus": 2}]
        )

        await world.evict(workers[:2], variant)
        world.finish(workers[0])
        one_free = await world.observe()
        world.finish(workers[1])
        both_free = await world.observe()

        assert len(world.pods(names.POD_INFERENCE)) == 1
        assert (phases(one_free, Kind.INFERENCE), phases(both_free, Kind.INFERENCE)) == ([], [Phase.STARTING])


async def test_no_more_replicas_wait_than_the_service_may_have() -> None:
    async with World() as world:
        variant, workers = await world.full_node(rival=True, maxReplicas=2)

        await world.evict(workers[:4], variant)

        assert len(world.pods(names.POD_INFERENCE)) == 2


async def test_where_somebody_else_waits_for_gpus_a_victim_goes_only_after_its_gpu_is_promised() -> None:
    async with World() as world:
        variant, workers = await world.full_node(rival=True)
        world.writes.clear()

        await world.evict(workers[:3], variant)

        verbs = [verb for verb, plural, _ in world.writes if plural == "pods"]
        assert verbs.index("delete") > verbs.index("merge")
        assert all(verbs[: number + 1].count("merge") >= verbs[: number + 1].count("delete") for number in range(9))


async def test_a_training_pod_s_reclaim_names_it_and_keeps_nothing_for_anybody() -> None:
    async with World() as world:
        _, workers = await world.full_node()
        world.training_pod()

        await world.evict(workers[:1], "default/train", Reason.TRAINING)

        [reclaim] = world.reclaims()
        assert reclaim["spec"]["forRef"] == {"kind": "Pod", "name": "train"}
        assert (world.leaving(), world.pods(names.POD_INFERENCE)) == (workers[:1], [])


async def test_usage_counts_each_gpu_once() -> None:
    async with World() as world:
        variant, workers = await world.full_node(rival=True)
        await world.evict(workers[:2], variant)
        world.finish(workers[0])
        world.finish(workers[5], 1)
        world.fake.update(NODES, "n1", {"status": {"capacity": {names.DEFAULT_GPU_RESOURCE: "9"}}})
        await world.observe()

        [usage] = world.cluster.pools()[0].usage

        assert (usage.total, usage.inference, usage.cleaning, usage.releasing) == (9, 2, 5, 1)
        assert (usage.idle, usage.broken, usage.training) == (0, 1, 0)


async def test_a_pod_of_another_life_with_a_victim_s_name_is_not_touched() -> None:
    async with World() as world:
        variant, workers = await world.full_node()
        await world.observe()
        other = world.pod(workers[0])
        world.fake.remove(PODS, workers[0].split("/")[1], "default")
        world.fake.put(
            PODS,
            {key: other[key] for key in ("spec", "status")}
            | {"metadata": {key: other["metadata"][key] for key in ("name", "namespace", "labels", "annotations")}},
        )

        await world.cluster.apply([Action(Verb.EVICT, workers[0], 1, Reason.TRAFFIC, variant)], world.clock())
        await world.tend()

        assert world.leaving() == []
