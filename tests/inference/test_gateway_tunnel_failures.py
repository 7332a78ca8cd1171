"""Websockets through the gateway when replicas refuse or die, when clients leave or sleep, when it leaves itself."""

import asyncio
import contextlib
import json
import socket

import pytest

from slackwater_inference.gateway.routing import ReplicaSpec
from slackwater_inference.gateway.slots import Limits
from slackwater_inference.gateway.testing import metric, rig, until, unused_url
from slackwater_inference.gateway.tunnel import reset
from slackwater_inference.testing.tunnel import (
    AUDIO,
    BINARY,
    CLOSE,
    FINISH,
    PING,
    Visit,
    ask,
    frame,
    hold,
    live,
    masked,
    opened,
    refused,
)

# Refusals and deaths of replicas


async def test_a_replicas_refusal_is_passed_on_as_it_is() -> None:
    async def script(visit: Visit) -> None:
        body = b'{"status": 401, "message": "no"}'
        await visit.say(b"HTTP/1.1 401 Unauthorized\r\nX-More: 1\r\nTransfer-Encoding: chunked\r\n\r\n")
        await visit.say(b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))
        await visit.gone()

    async with live(script) as (_, spec), rig(spec) as made:
        status, headers, body = await refused(await ask(made))

        assert (status, headers[b"x-more"], json.loads(body)) == (401, b"1", {"status": 401, "message": "no"})
        assert (made.gateway.signals().in_flight, made.gateway.signals().failed_total) == (0, 0)


@pytest.mark.parametrize("how", ["unreachable", "dies", "closes", "declines", "babbles"])
async def test_a_replica_that_fails_before_the_answer_costs_the_client_nothing(how: str) -> None:
    async def bad(visit: Visit) -> None:
        if how == "dies":
            visit.die()
        elif how == "declines":
            await visit.say(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n")
            await visit.gone()
        elif how == "babbles":
            await visit.say(b"\x00\x01nonsense\r\n\r\n")

    async with live(bad) as (_, one), live(hold) as (played, two):
        first = ReplicaSpec("dead", unused_url(), 1) if how == "unreachable" else one
        async with rig(first, two) as made:
            client = await opened(made)

            assert len(played.visits) == 1
            reason = {"unreachable": "unreachable", "declines": "declined"}.get(how, "died")
            assert await metric(made, f'edge_retries_total{{reason="{reason}"}}') == 1
            client.die()


@pytest.mark.parametrize("how", ["resets", "closes in order"])
async def test_a_replica_that_dies_in_a_session_is_a_reset_at_the_client(how: str) -> None:
    async def dying(visit: Visit) -> None:
        await visit.accept(frame(BINARY, AUDIO))
        await visit.reader.read(1)
        if how == "resets":
            visit.die()

    async with live(dying) as (played, spec), live(hold) as (other, spare), rig(spec, spare) as made:
        client = await opened(made)
        await client.reader.readexactly(len(frame(BINARY, AUDIO)))
        await client.say(masked(BINARY, b"go"))

        assert await client.is_cut()
        await until(lambda: made.gateway.signals().in_flight == 0)
        assert (len(played.visits), len(other.visits)) == (1, 0), "nothing may be tried again after the 101"
        assert made.gateway.signals().failed_total == 1
        assert await metric(made, "edge_broken_streams_total") == 1


async def test_a_close_frame_that_says_server_error_counts_as_failed() -> None:
    async def failing(visit: Visit) -> None:
        await visit.accept(frame(CLOSE, b"\x03\xf3"))

    async with live(failing) as (_, spec), rig(spec) as made:
        client = await opened(made)

        assert await client.reader.read() == frame(CLOSE, b"\x03\xf3"), "it still ends in order"
        await until(lambda: made.gateway.signals().failed_total == 1)


# Clients that leave, sleep or read slowly


@pytest.mark.parametrize("how", ["reset", "close"])
async def test_a_client_that_vanishes_ends_the_replicas_work_and_frees_the_slot(how: str) -> None:
    async with live(hold) as (played, spec), rig(spec) as made:
        client = await opened(made)
        if how == "reset":
            client.die()
        else:
            client.writer.close()

        await until(lambda: made.gateway.signals().in_flight == 0 and played.num_open == 0)

        assert made.gateway.signals().failed_total == 0
        assert await metric(made, 'edge_client_aborts_total{phase="streaming"}') == 1


async def test_a_client_that_only_stops_sending_still_hears_the_rest() -> None:
    async def script(visit: Visit) -> None:
        await visit.accept()
        assert await visit.reader.read() == masked(BINARY, b"last")
        await visit.say(frame(BINARY, FINISH), frame(CLOSE, b"\x03\xe8"))

    async with live(script) as (_, spec), rig(spec) as made:
        client = await opened(made)
        await client.say(masked(BINARY, b"last"))
        client.writer.write_eof()

        assert await client.reader.read() == frame(BINARY, FINISH) + frame(CLOSE, b"\x03\xe8")
        await until(lambda: made.gateway.signals().in_flight == 0)
        assert made.gateway.signals().failed_total == 0


async def test_pings_do_not_keep_a_forgotten_session() -> None:
    async with live(hold) as (_, spec), rig(spec, limits=Limits(idle_timeout_s=0.3)) as made:
        client = await opened(made)
        cut = asyncio.create_task(client.is_cut())
        with contextlib.suppress(ConnectionError):
            while not cut.done():
                await client.say(masked(PING))
                await asyncio.sleep(0.02)

        assert await cut
        await until(lambda: made.gateway.signals().in_flight == 0)
        assert made.gateway.signals().failed_total == 0


async def test_no_more_is_read_from_a_replica_than_its_client_takes() -> None:
    sent = 0

    async def pouring(visit: Visit) -> None:
        nonlocal sent
        await visit.accept()
        visit.writer.transport.set_write_buffer_limits(high=0)
        with contextlib.suppress(ConnectionError):
            while True:
                await visit.say(frame(BINARY, b"x" * 60_000))
                sent += 60_000

    async with live(pouring) as (_, spec), rig(spec) as made:
        client = await opened(made)
        client.writer.transport.pause_reading()
        before = -1
        while sent != before:  # until the buffers of both kernels are full, some MB
            before = sent
            await asyncio.sleep(0.1)
        stuck = sent

        client.writer.transport.resume_reading()
        await client.reader.readexactly(stuck)
        assert sent > stuck - 2**20
        assert stuck < 64 * 2**20
        client.die()


# A gateway that leaves


async def test_cutting_resets_sessions_as_it_does_streams() -> None:
    async with live(hold) as (_, spec), rig(spec) as made:
        client = await opened(made)

        made.gateway.leave()
        made.gateway.cut()

        assert await client.is_cut()
        await until(lambda: made.gateway.signals().in_flight == 0)


def test_reset_of_a_closed_connection_is_no_error() -> None:
    class Closed(asyncio.Transport):
        aborted = False

        def get_extra_info(self, name: str, default: object = None) -> socket.socket:
            left, right = socket.socketpair()
            left.close(), right.close()
            return left

        def abort(self) -> None:
            self.aborted = True

    transport = Closed()

    reset(transport)

    assert transport.aborted
