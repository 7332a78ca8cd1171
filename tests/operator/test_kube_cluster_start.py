"""`KubeCluster`: what it sees, and starting replicas and workers on GPUs that are seen free."""

import math

import pytest

from slackwater_operator.core import Kind, PermanentError, Phase, Reason, TemporaryError
from slackwater_operator.kube.types import NODES, PODS
from slackwater_operator.resources import names
from slackwater_operator.testing.kube_operator import JOBS
from slackwater_operator.testing.kube_world import World, by_uid, phases

FLAVOR = "east/h200"


async def test_nodes_belong_to_the_pool_and_flavor_that_both_select_them() -> None:
    async with World() as world:
        world.pool("east")
        world.pool("west")
        world.nodes(2)
        world.nodes(1, zone="west", first=3)
        world.nodes(1, zone="north", first=4)

        seen = await world.observe()

        assert [(node.name, node.flavor, node.gpus) for node in seen.nodes] == [
            ("n1", "east/h200", 8),
            ("n2", "east/h200", 8),
            ("n3", "west/h200", 8),
        ]
        assert {flavor.name for flavor in seen.flavors} == {"east/h200", "west/h200"}


async def test_a_node_that_two_pools_select_is_used_by_neither_and_shown() -> None:
    async with World() as world:
        world.pool("east")
        world.pool("also-east", nodeSelector={"zone": "east"})
        world.nodes(1)

        seen = await world.observe()

        assert seen.nodes == ()
        assert [(pool.name, pool.disputed) for pool in world.cluster.pools()] == [
            ("also-east", ("n1",)),
            ("east", ("n1",)),
        ]


async def test_a_pool_counts_no_more_gpus_than_it_states() -> None:
    async with World() as world:
        world.pool(flavors=[{"name": "h200", "count": 12}])
        world.nodes(3)

        seen = await world.observe()

        assert [(node.name, node.gpus) for node in seen.nodes] == [("n1", 8), ("n2", 4)]


async def test_broken_cordoned_and_unready_nodes_are_told_apart() -> None:
    async with World() as world:
        world.pool()
        world.nodes(3)
        world.fake.update(NODES, "n1", {"status": {"allocatable": {names.DEFAULT_GPU_RESOURCE: "6"}}})
        world.fake.update(NODES, "n2", {"spec": {"unschedulable": True}})
        world.fake.update(NODES, "n3", {"status": {"conditions": [{"type": "Ready", "status": "Unknown"}]}})

        seen = await world.observe()

        assert [(node.broken_gpus, node.schedulable, len(node.idle_since_s)) for node in seen.nodes] == [
            (2, True, 6),
            (0, False, 8),
            (0, False, 8),
        ]


async def test_workers_fill_the_fullest_node_first_and_are_bound_when_created() -> None:
    async with World() as world:
        world.pool()
        world.nodes(2)
        job = world.job()
        await world.start(job, 9)
        world.run_all()

        seen = await world.observe()

        assert [node.idle_since_s for node in seen.nodes] == [(), (1000.0,) * 7]
        assert phases(seen, Kind.CLEANING) == [Phase.RUNNING] * 9
        assert {(w.owner, w.flavor, w.preemptible) for w in seen.workloads} == {(job, FLAVOR, True)}
        assert world.kube.counts["list", "pods"] == 1


async def test_a_created_pod_holds_its_gpu_before_the_watch_has_brought_it() -> None:
    async with World() as world:
        world.pool()
        world.nodes(1, gpus=2)
        job = world.job()
        await world.observe()
        world.fake.cut_watches()
        await world.start(job, 1)

        seen = world.cluster.observe(world.clock())

        assert len(seen.nodes[0].idle_since_s) == 1
        assert phases(seen, Kind.CLEANING) == [Phase.STARTING]


async def test_more_starts_than_free_gpus_are_refused_in_one_sentence() -> None:
    async with World() as world:
        world.pool()
        world.nodes(1, gpus=2)
        job, variant = world.job(), world.service()
        await world.start(job, 2)

        refusals = [*await world.start(job), *await world.start(variant, reason=Reason.TRAFFIC)]

        assert [str(refusal.error) for refusal in refusals] == [
            "no node of east/h200 has 1 GPUs to lend to default/clean",
            "no node of east/h200 has 1 GPUs free for default/tts/east/h200",
        ]
        assert all(isinstance(refusal.error, TemporaryError) for refusal in refusals)
        assert world.over_allocated() == []


async def test_a_pod_of_somebody_else_holds_its_gpus_without_being_a_workload() -> None:
    async with World() as world:
        world.pool()
        world.nodes(1, gpus=4)
        world.training_pod("notebook", gpus=3, node="n1", priorityClassName="")

        seen = await world.observe()

        assert (seen.workloads, len(seen.nodes[0].idle_since_s)) == ((), 1)


async def test_an_ended_pod_holds_nothing_and_is_removed() -> None:
    async with World() as world:
        world.pool()
        world.nodes(1, gpus=1)
        [worker] = await world.fill(world.job(), 1)
        world.finish(worker, 75)

        seen = await world.observe()
        await world.tend()

        assert (len(seen.nodes[0].idle_since_s), seen.workloads) == (1, ())
        assert world.pods() == []


async def test_the_idle_clock_starts_when_a_gpu_is_seen_free() -> None:
    async with World() as world:
        world.pool(lending={"lendAfter": "20s"})
        world.nodes(1, gpus=2)
        job = world.job()
        await world.observe()
        world.clock.now_s += 30
        await world.start(job, 1, Reason.FLOOR)
        world.run_all()
        await world.observe()
        world.clock.now_s += 30
        world.finish(world.pods()[0], 1)

        seen = await world.observe()

        assert seen.nodes[0].idle_since_s == (1000.0, 1060.0)


async def test_an_idle_gpu_is_lent_only_after_the_pool_s_time() -> None:
    async with World() as world:
        world.pool(lending={"lendAfter": "20s"})
        world.nodes(1, gpus=2)
        job = world.job()
        await world.observe()

        early = await world.start(job)
        world.clock.now_s += 20
        late = await world.start(job)

        assert (len(early), late) == (1, ())


async def test_reserved_gpus_are_never_lent_and_look_busy_to_a_lender() -> None:
    async with World() as world:
        world.pool(inference={"reservedGPUs": 3})
        world.nodes(1, gpus=8)
        job = world.job()

        await world.start(job, 8)
        seen = await world.observe()

        assert len(world.pods(names.POD_CLEANING)) == 5
        assert seen.nodes[0].idle_since_s == (math.inf,) * 3


async def test_a_lent_fraction_counts_over_the_whole_pool() -> None:
    async with World() as world:
        world.pool(lending={"lendAfter": "0s", "maxLentFraction": "0.5"})
        world.nodes(2, gpus=4)
        job = world.job()

        await world.start(job, 8)

        assert len(world.pods(names.POD_CLEANING)) == 4


async def test_a_replica_runs_when_it_is_ready_and_its_time_to_that_is_learned() -> None:
    async with World() as world:
        world.pool()
        world.nodes(1)
        variant = world.service()
        await world.start(variant, 1, Reason.TRAFFIC)
        [uid] = world.pods()
        before = await world.observe()
        world.clock.now_s += 3
        world.run_all()

        after = await world.observe()

        assert (by_uid(before)[uid].phase, by_uid(after)[uid].phase) == (Phase.STARTING, Phase.RUNNING)
        assert dict(after.lead_s) == {variant: pytest.approx(3.0)}
        assert [(one.uid, one.url, one.slots) for one in world.signals.tellings["default/tts"]] == [
            (uid, "http://127.0.0.1:8080", 64)
        ]


async def test_no_replica_starts_before_a_revision_has_passed_its_gate() -> None:
    async with World() as world:
        world.pool()
        world.nodes(1)
        variant = world.service()
        world.revisions.gated.add("default/tts")

        [refusal] = await world.start(variant, 1, Reason.TRAFFIC)

        assert str(refusal.error) == "default/tts: no revision of its template has passed its gate yet"


async def test_a_template_that_the_server_refuses_is_permanent_and_backed_off_from() -> None:
    async with World() as world:
        world.pool()
        world.nodes(1)
        job = world.job()
        world.fake.fail("create", "pods", code=422, reason="Invalid", message="spec.volumes: duplicate", times=9)

        [first] = await world.start(job)
        [second] = await world.start(job)

        assert isinstance(first.error, PermanentError)
        assert isinstance(second.error, TemporaryError)
        assert "backing off" in str(second.error)
        assert len([write for write in world.writes if write[0] == "create"]) == 1
        assert "duplicate" in world.cluster.jobs()[0].refused


async def test_a_lost_answer_to_a_create_leads_to_one_pod() -> None:
    async with World() as world:
        world.pool()
        world.nodes(1, gpus=1)
        job = world.job()
        world.fake.lose("create", "pods")

        refusals = [*await world.start(job), *await world.start(job)]

        assert len(world.pods()) == 1
        assert len(refusals) == 1
        assert world.over_allocated() == []


async def test_a_create_that_may_have_been_carried_out_keeps_its_gpu_until_somebody_has_looked() -> None:
    async with World() as world:
        world.pool()
        world.nodes(1, gpus=1)
        job = world.job()
        world.fake.drop("create", "pods", times=2)
        [lost] = await world.start(job)

        [meanwhile] = await world.start(job)
        await world.tend()
        afterwards = await world.start(job)

        assert isinstance(lost.error, TemporaryError)
        assert "to lend" in str(meanwhile.error)
        assert afterwards == ()


async def test_a_pod_that_the_kubelet_refuses_is_no_failure_and_goes_elsewhere() -> None:
    async with World() as world:
        world.pool()
        world.nodes(2, gpus=1)
        job = world.job()
        await world.start(job)
        [refused] = world.pods()
        world.fake.refuse_pod(*refused.split("/"))
        await world.tend()

        again = await world.start(job)

        [uid] = world.pods()
        assert again == ()
        assert (uid != refused, world.pod(uid)["spec"]["nodeName"]) == (True, "n2")
        assert world.cluster.jobs()[0].lost == 0


async def test_failing_workers_back_off_and_bad_configuration_ends_the_job_until_it_is_edited() -> None:
    async with World() as world:
        world.pool()
        world.nodes(1)
        job = world.job()
        [first] = await world.fill(job, 1)
        world.finish(first, 1, "Traceback\nOSError: no space left")
        await world.tend()
        [refused] = await world.start(job)
        await world.tend(1.0)
        [second] = await world.fill(job, 1)
        world.finish(second, 2, "the input folder /input does not exist")
        await world.tend(100.0)

        [ended] = await world.start(job)
        [view] = world.cluster.jobs()
        world.fake.update(JOBS, "clean", {"spec": {"minWorkers": 1}}, "default")
        await world.settle()
        edited = await world.start(job)

        assert "OSError: no space left" in str(refused.error)
        assert "does not exist" in str(ended.error)
        assert view.failure == "the input folder /input does not exist"
        assert edited == ()


async def test_an_image_that_cannot_be_had_gives_its_gpu_back() -> None:
    async with World() as world:
        world.pool()
        world.nodes(1, gpus=1)
        job = world.job()
        await world.start(job)
        [uid] = world.pods()
        waiting = [{"name": "worker", "state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}}]
        world.fake.update(PODS, uid.split("/")[1], {"status": {"containerStatuses": waiting}}, "default")
        await world.tend(61.0)
        world.finish(uid, 137)
        await world.tend()

        assert world.pods() == []
        assert "ImagePullBackOff: no such image" in world.cluster.jobs()[0].refusal
