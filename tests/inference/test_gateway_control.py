"""The gateway's control address: what an operator on the network asks and tells."""

import asyncio
import json
import signal
import sys
from typing import Any

import httpx
import pytest

from slackwater_inference.gateway.backlog import MIN_BETWEEN_S
from slackwater_inference.gateway.routing import ReplicaSpec
from slackwater_inference.gateway.testing import (
    Call,
    Controlled,
    ScriptedReplica,
    controlled,
    in_two_parts,
    replica,
    say_hello,
    serving,
    until,
    unused_url,
)

LONG_S = 600  # longer than any test may take: such a poll ends only when it is woken


def told(*specs: ReplicaSpec) -> dict[str, Any]:
    return {"replicas": [{"uid": spec.uid, "url": spec.url, "slots": spec.slots} for spec in specs]}


async def poll(rig: Controlled, **params: Any) -> dict[str, Any]:
    response = await rig.client.get("/signals", params=params)
    assert response.status_code == 200, response.text
    return dict(response.json())


async def test_signals_are_those_of_the_event_with_the_replicas_and_the_life_of_the_process() -> None:
    async def speak(call: Call) -> None:
        await call.answer(200, b"audio", content_type="audio/mpeg")

    async with replica(speak, slots=2) as (_, spec), controlled(spec) as rig:
        await rig.made.client.post("/v1/tts")

        said = await poll(rig)

    assert said["first_audio_p95_s"] > 0
    assert said | {"first_audio_p95_s": None} == {
        "in_flight": 0,
        "queued": 0,
        "arrivals_total": 1,
        "rejected_total": 0,
        "failed_total": 0,
        "oldest_queued_s": 0.0,
        "first_audio_p95_s": None,
        "replicas": {spec.uid: 0},
        "backlogs": 0,
        "boot": rig.control.boot,
    }


async def test_two_lives_of_the_process_differ() -> None:
    async with controlled() as one, controlled() as other:
        assert (await poll(one))["boot"] != (await poll(other))["boot"]


async def test_a_poll_waits_as_long_as_it_may_when_nothing_happens() -> None:
    async with controlled() as rig:
        began_s = asyncio.get_running_loop().time()

        said = await poll(rig, wait=0.3)

        assert asyncio.get_running_loop().time() - began_s >= 0.29
        assert said["queued"] == 0


async def test_every_poll_that_waits_ends_when_requests_begin_to_wait() -> None:
    async with controlled() as rig:
        polls = [asyncio.create_task(poll(rig, wait=LONG_S)) for _ in range(2)]
        await poll(rig)  # both are on their way before it
        request = asyncio.create_task(rig.made.client.post("/v1/tts"))

        said = await asyncio.gather(*polls)

        assert [(signals["queued"], signals["backlogs"]) for signals in said] == [(1, 1), (1, 1)]
        request.cancel()


async def test_a_backlog_between_two_polls_ends_the_next_one_at_once() -> None:
    async with controlled() as rig:
        await poll(rig)
        rig.backlog.began()

        said = await poll(rig, wait=LONG_S)

        assert said["backlogs"] == 1


async def test_a_backlog_is_told_once() -> None:
    async with controlled() as rig:
        rig.backlog.began()
        await poll(rig, wait=LONG_S)
        began_s = asyncio.get_running_loop().time()

        await poll(rig, wait=0.3)

        assert asyncio.get_running_loop().time() - began_s >= 0.29


async def test_a_poll_that_names_what_it_has_seen_is_not_robbed_by_another_one() -> None:
    async with controlled() as rig:
        before = await poll(rig)
        rig.backlog.began()
        await poll(rig)  # the other leader hears of it first

        said = await poll(rig, wait=LONG_S, seen=before["backlogs"])

        assert said["backlogs"] == 1


async def test_backlogs_that_come_and_go_do_not_make_a_busy_loop() -> None:
    async with controlled() as rig:
        await poll(rig)
        began_s = asyncio.get_running_loop().time()

        for _ in range(3):
            rig.backlog.began()
            await poll(rig, wait=LONG_S)

        assert asyncio.get_running_loop().time() - began_s >= 2.5 * MIN_BETWEEN_S


async def test_a_replica_that_left_the_set_is_told_until_its_last_stream_has_ended() -> None:
    release = asyncio.Event()

    async with replica(in_two_parts(release)) as (_, spec), controlled() as rig:
        await rig.client.put("/replicas", json=told(spec))
        stream = asyncio.create_task(rig.made.client.post("/v1/tts"))
        while (await poll(rig))["replicas"] != {spec.uid: 1}:
            await asyncio.sleep(0.01)

        assert (await rig.client.put("/replicas", json=told())).status_code == 204
        during = await poll(rig)
        release.set()
        body = (await stream).content
        await until(lambda: rig.made.gateway.in_flight_by_replica() == {})

        assert during["replicas"] == {spec.uid: 1}
        assert body == b"first second"
        assert (await poll(rig))["replicas"] == {}


async def test_the_replicas_that_it_is_told_serve() -> None:
    async with replica(say_hello) as (_, spec), controlled() as rig:
        waiting = asyncio.create_task(rig.made.client.post("/v1/tts"))

        response = await rig.client.put("/replicas", json=told(spec))

        assert (response.status_code, response.content) == (204, b"")
        assert (await waiting).content == b"hello"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        pytest.param(b"", "must be JSON", id="nothing"),
        pytest.param(b"{", "must be JSON", id="broken"),
        pytest.param(b"\xff", "must be JSON", id="no text"),
        pytest.param(b"[]", "valid dictionary", id="no object"),
        pytest.param(b'{"replicas": [{"uid": "a", "url": "http://h:1", "slots": 0}]}', "replicas.0.slots", id="slots"),
    ],
)
async def test_a_wrong_set_is_refused_in_the_usual_shape_and_the_last_good_one_stays(body: bytes, says: str) -> None:
    async with replica(say_hello) as (_, spec), controlled(spec) as rig:
        response = await rig.client.put("/replicas", content=body)

        assert response.status_code == 422
        assert response.json().keys() == {"status", "message"}
        assert says in response.json()["message"]
        assert (await poll(rig))["replicas"] == {spec.uid: 0}


async def test_a_body_without_end_is_refused() -> None:
    async with controlled() as rig:
        response = await rig.client.put("/replicas", content=b" " * (4 * 2**20 + 1))

    assert response.status_code == 413


@pytest.mark.parametrize(
    ("path", "status", "says"),
    [
        pytest.param("/signals?wait=soon", 422, "wait must be a number, got 'soon'", id="no number"),
        pytest.param("/signals?wait=2", 422, "wait must be 0 to 1 seconds, got 2", id="too long"),
        pytest.param("/signals?wait=-1", 422, "wait must be 0 to 1 seconds, got -1", id="negative"),
        pytest.param("/signals?wait=nan", 422, "wait must be 0 to 1 seconds, got nan", id="no finite number"),
        pytest.param("/signals?seen=x", 422, "seen must be a number, got 'x'", id="seen"),
        pytest.param("/replicas", 404, "there is no GET /replicas here", id="other method"),
        pytest.param("/v1/tts", 404, "there is no GET /v1/tts here", id="what clients want"),
    ],
)
async def test_a_wrong_question_is_refused_in_one_line(path: str, status: int, says: str) -> None:
    async with controlled(max_wait_s=1.0) as rig:
        response = await rig.client.get(path)

    assert response.status_code == response.json()["status"] == status
    assert says in response.json()["message"]


async def test_is_ready_once_it_was_told_also_that_there_are_none_and_until_it_leaves() -> None:
    async with controlled() as rig:
        before = await rig.client.get("/ready")
        await rig.client.put("/replicas", json=told())
        after = await rig.client.get("/ready")
        rig.control.leave()
        leaving = await rig.client.get("/ready")

    assert [before.status_code, after.status_code, leaving.status_code] == [503, 200, 503]
    assert "PUT /replicas" in before.json()["message"]


async def test_replicas_of_the_command_line_make_it_ready() -> None:
    async with controlled(ReplicaSpec("one", unused_url(), 1)) as rig:
        assert (await rig.client.get("/ready")).status_code == 200


async def test_clients_do_not_reach_the_control_paths() -> None:
    async with controlled() as rig:
        for method, path in (("GET", "/signals"), ("PUT", "/replicas"), ("GET", "/ready")):
            assert (await rig.made.client.request(method, path)).status_code == 404


async def test_metrics_are_those_of_the_gateway() -> None:
    async with controlled() as rig:
        here = await rig.client.get("/metrics")
        there = await rig.made.client.get("/metrics")

    assert here.text == there.text
    assert here.headers["content-type"] == there.headers["content-type"]
    assert "edge_in_flight 0.0" in here.text


@pytest.mark.e2e
async def test_the_control_address_answers_until_the_last_stream_has_ended() -> None:
    release = asyncio.Event()

    command = "from slackwater_inference.gateway.cli import app; app()"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", command, "--supervised", "--port=0", "--control-port=0"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        ready = json.loads(await process.stdout.readline())
        async with (
            serving(ScriptedReplica(in_two_parts(release))) as url,
            httpx.AsyncClient(base_url=ready["control_url"], timeout=20) as control,
            httpx.AsyncClient(base_url=ready["url"], timeout=60) as client,
        ):
            stream = asyncio.create_task(client.post("/v1/tts"))
            await control.put("/replicas", json=told(ReplicaSpec("one", url, 1)))
            while (await control.get("/signals")).json()["replicas"] != {"one": 1}:
                await asyncio.sleep(0.01)

            process.send_signal(signal.SIGTERM)
            while (await control.get("/ready")).status_code == 200:
                await asyncio.sleep(0.01)
            during = (await control.get("/signals")).json()
            release.set()

            assert during["replicas"] == {"one": 1}
            assert (await stream).content == b"first second"
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
