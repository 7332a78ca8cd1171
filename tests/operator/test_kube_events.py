"""The recorder: Events that count, in a bounded queue, and that never disturb who emits them."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from slackwater_operator.kube.client import Kube
from slackwater_operator.kube.events import Recorder
from slackwater_operator.kube.transport import Limits
from slackwater_operator.kube.types import EVENTS, Object
from slackwater_operator.testing.kube import FakeKube
from slackwater_operator.testing.kube_clock import MovedClock


def thing(name: str = "tts", namespace: str | None = "serving") -> Object:
    metadata = {"name": name, "uid": f"uid-{name}", "resourceVersion": "7"}
    if namespace:
        metadata["namespace"] = namespace
    return {"apiVersion": "slackwater.dev/v1alpha1", "kind": "InferenceDeployment", "metadata": metadata}


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(5):
        while not holds():
            await asyncio.sleep(0.001)


@asynccontextmanager
async def running(kube: Kube, clock: MovedClock) -> AsyncIterator[Recorder]:
    recorder = Recorder(kube, "slackwater-operator", instance="pod-1", clock=clock, wall=clock.wall, sleep=clock.sleep)
    task = asyncio.create_task(recorder.run())
    try:
        yield recorder
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_an_event_says_what_happened_to_whom() -> None:
    clock = MovedClock()
    async with FakeKube() as fake, fake.kube() as kube, running(kube, clock) as recorder:
        recorder.emit(thing(), "Normal", "ReplicaStarted", "started tts-1", "Start")
        await until(lambda: fake.objects(EVENTS))

        (event,) = fake.objects(EVENTS, "serving")
        assert event["regarding"] == {
            "apiVersion": "slackwater.dev/v1alpha1",
            "kind": "InferenceDeployment",
            "namespace": "serving",
            "name": "tts",
            "uid": "uid-tts",
            "resourceVersion": "7",
        }
        assert (event["type"], event["reason"], event["action"]) == ("Normal", "ReplicaStarted", "Start")
        assert event["note"] == "started tts-1"
        assert event["reportingController"] == "slackwater-operator"
        assert event["reportingInstance"] == "pod-1"
        assert event["eventTime"].endswith("000Z")
        assert "series" not in event


async def test_the_same_words_are_counted_in_one_event_with_few_writes() -> None:
    clock = MovedClock()
    async with FakeKube() as fake, fake.kube() as kube, running(kube, clock) as recorder:
        recorder.emit(thing(), "Warning", "SignalsStale", "no sample", "Observe")
        await until(lambda: fake.objects(EVENTS))
        for _ in range(60):
            recorder.emit(thing(), "Warning", "SignalsStale", "no sample", "Observe")
            await clock.advance(1.0, settle=fake.settle)
        await clock.advance(10.0, settle=fake.settle)

        (event,) = fake.objects(EVENTS)
        assert event["series"]["count"] == 61
        assert kube.counts["create", "events"] == 1
        assert kube.counts["merge", "events"] <= 8


async def test_after_a_long_silence_it_is_a_new_event() -> None:
    clock = MovedClock()
    async with FakeKube() as fake, fake.kube() as kube, running(kube, clock) as recorder:
        recorder.emit(thing(), "Normal", "R", "m", "A")
        await until(lambda: len(fake.objects(EVENTS)) == 1)
        await clock.advance(400.0)
        recorder.emit(thing(), "Normal", "R", "m", "A")
        await until(lambda: len(fake.objects(EVENTS)) == 2)


async def test_many_wordings_of_one_matter_do_not_flood() -> None:
    clock = MovedClock()
    async with FakeKube() as fake, fake.kube() as kube, running(kube, clock) as recorder:
        for number in range(100):
            recorder.emit(thing(), "Normal", "Reclaimed", f"took {number} GPUs", "Evict")
        await clock.advance(11.0, settle=fake.settle)
        await until(lambda: sum(event.get("series", {}).get("count", 1) for event in fake.objects(EVENTS)) == 100)

        assert len(fake.objects(EVENTS)) == 10


async def test_the_queue_is_bounded_and_what_is_dropped_is_counted() -> None:
    clock = MovedClock()
    async with FakeKube() as fake, fake.kube() as kube:
        recorder = Recorder(kube, "x", clock=clock, wall=clock.wall, sleep=clock.sleep)
        for number in range(1500):
            recorder.emit(thing(f"n{number}"), "Normal", "R", "m", "A")

        assert recorder.dropped == 500


async def test_events_of_cluster_wide_objects_live_in_default() -> None:
    clock = MovedClock()
    async with FakeKube() as fake, fake.kube() as kube, running(kube, clock) as recorder:
        recorder.emit(thing("dc-east", None), "Normal", "R", "m", "A")
        await until(lambda: fake.objects(EVENTS, "default"))


async def test_a_refusing_server_disturbs_nobody() -> None:
    clock = MovedClock()
    async with FakeKube() as fake, fake.kube(limits=Limits(tries=1)) as kube, running(kube, clock) as recorder:
        fake.fail("create", "events", code=403, reason="Forbidden")
        recorder.emit(thing("a"), "Normal", "R", "m", "A")
        await until(lambda: recorder.dropped == 1)
        fake.fail("create", "events", code=500, times=2)
        recorder.emit(thing("b"), "Normal", "R", "m", "A")
        await until(lambda: kube.counts["create", "events"] == 3)
        await clock.advance(5.0, settle=fake.settle)
        await until(lambda: fake.objects(EVENTS))

        assert [event["regarding"]["name"] for event in fake.objects(EVENTS)] == ["b"]


async def test_an_event_that_the_server_has_forgotten_is_made_again() -> None:
    clock = MovedClock()
    async with FakeKube() as fake, fake.kube() as kube, running(kube, clock) as recorder:
        recorder.emit(thing(), "Normal", "R", "m", "A")
        await until(lambda: fake.objects(EVENTS))
        fake.remove(EVENTS, fake.objects(EVENTS)[0]["metadata"]["name"], "serving")
        recorder.emit(thing(), "Normal", "R", "m", "A")
        await until(lambda: fake.objects(EVENTS))

        assert fake.objects(EVENTS)[0]["series"]["count"] == 2


async def test_other_threads_may_emit() -> None:
    clock = MovedClock()
    async with FakeKube() as fake, fake.kube() as kube, running(kube, clock) as recorder:
        await asyncio.sleep(0.01)
        thread = threading.Thread(target=recorder.emit, args=(thing(), "Normal", "R", "m", "A"))
        thread.start()
        await until(lambda: fake.objects(EVENTS))
        thread.join()


async def test_what_waits_is_written_at_the_end() -> None:
    clock = MovedClock()
    async with FakeKube() as fake, fake.kube() as kube:
        async with running(kube, clock) as recorder:
            await asyncio.sleep(0.01)
            recorder.emit(thing(), "Normal", "HandedOver", "m", "Release")

        assert len(fake.objects(EVENTS)) == 1
