"""What the gateways of a service say together, and how they are told."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager

import pytest

from slackwater_operator.cluster.kube.ports import Replica
from slackwater_operator.operate.remote import Asker
from slackwater_operator.operate.signals import Gateways
from slackwater_operator.testing.remotes import StandInGateway

A = Replica("ns/a", "http://10.0.0.1:8080", 8)
B = Replica("ns/b", "http://10.0.0.2:8080", 8)


class Clock:
    """The loop's clock, which a test may move on."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return asyncio.get_running_loop().time() + self.ahead_s


@asynccontextmanager
async def following(*gateways: StandInGateway, clock: Clock | None = None) -> AsyncIterator[Gateways]:
    async with aclosing(Asker()) as asker:
        signals = Gateways(asker, clock or Clock(), lambda: None)
        await signals.follow({"ns/tts": [(gateway.url, True) for gateway in gateways]})
        try:
            yield signals
        finally:
            await signals.close()


async def until(what: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not what():
            await asyncio.sleep(0.01)


async def test_a_sample_comes_with_each_answer_and_at_once_when_a_backlog_begins() -> None:
    async with StandInGateway() as gateway, following(gateway) as signals:
        await until(lambda: gateway.polls >= 2)
        signals.take_samples()

        gateway.say(in_flight=3, queued=2, arrivals_total=5)

        await until(lambda: (newest := signals.newest("ns/tts")) and newest.queued == 2)
        ((service, sample),) = signals.take_samples()
        assert (service, sample.in_flight, sample.queued, sample.arrivals_total) == ("ns/tts", 3, 2, 5)


async def test_a_rise_of_demand_asks_for_a_tick() -> None:
    pokes = []
    async with StandInGateway() as gateway, aclosing(Asker()) as asker:
        signals = Gateways(asker, Clock(), lambda: pokes.append(1))
        await signals.follow({"ns/tts": [(gateway.url, True)]})
        await until(lambda: pokes)
        pokes.clear()

        gateway.say(in_flight=1)
        await until(lambda: pokes)
        await signals.close()


async def test_several_gateways_of_one_service_are_summed() -> None:
    async with StandInGateway() as one, StandInGateway() as two, following(one, two) as signals:
        one.say(in_flight=3, queued=1, arrivals_total=10, first_audio_p95_s=0.1)
        two.say(in_flight=4, queued=0, arrivals_total=20, first_audio_p95_s=0.3)
        one.replicas = two.replicas = {"ns/a": 2}

        await until(lambda: (newest := signals.newest("ns/tts")) and newest.in_flight == 7)
        newest = signals.newest("ns/tts")

        assert newest is not None
        assert (newest.queued, newest.arrivals_total, newest.first_audio_p95_s) == (1, 30, 0.3)
        await until(lambda: signals.in_flight("ns/tts", "ns/a") == 4)
        assert signals.in_flight("ns/tts", "ns/b") == 0


async def test_no_sample_comes_while_one_of_the_gateways_is_silent() -> None:
    clock = Clock()
    async with StandInGateway() as one, StandInGateway() as two, following(one, two, clock=clock) as signals:
        await until(lambda: signals.newest("ns/tts"))
        await two.stop()
        clock.ahead_s += 5.0
        await until(lambda: one.polls >= 3)
        signals.take_samples()

        one.say(in_flight=9)
        await until(lambda: one.polls >= 5)

        assert signals.take_samples() == ()
        assert signals.newest("ns/tts") is None
        assert signals.in_flight("ns/tts", "ns/a") is None


async def test_one_that_leaves_counts_while_it_answers_and_is_not_missed_when_it_is_gone() -> None:
    clock = Clock()
    async with StandInGateway() as one, StandInGateway() as two, following(one, two, clock=clock) as signals:
        one.say(in_flight=1, arrivals_total=1)
        two.say(in_flight=2, arrivals_total=2)
        await until(lambda: (newest := signals.newest("ns/tts")) and newest.in_flight == 3)

        await signals.follow({"ns/tts": [(one.url, True), (two.url, False)]})
        assert (newest := signals.newest("ns/tts"))
        assert newest.in_flight == 3
        await two.stop()
        await signals.follow({"ns/tts": [(one.url, True)]})

        await until(lambda: (newest := signals.newest("ns/tts")) and newest.in_flight == 1)
        assert (newest := signals.newest("ns/tts"))
        assert newest.arrivals_total == 3  # a total never falls


async def test_a_gateway_that_was_restarted_is_told_again_and_its_arrivals_add_up() -> None:
    async with StandInGateway() as gateway, following(gateway) as signals:
        gateway.say(arrivals_total=7)
        await until(lambda: (newest := signals.newest("ns/tts")) and newest.arrivals_total == 7)
        signals.tell("ns/tts", [A])
        await until(lambda: signals.told("ns/tts") == {"ns/a"})

        gateway.restart()
        gateway.say(arrivals_total=2)

        await until(lambda: (newest := signals.newest("ns/tts")) and newest.arrivals_total == 9)
        await until(lambda: gateway.told is not None and set(gateway.told) == {"ns/a"})
        await until(lambda: signals.told("ns/tts") == {"ns/a"})


async def test_only_a_change_is_told() -> None:
    async with StandInGateway() as gateway, following(gateway) as signals:
        await until(lambda: signals.newest("ns/tts"))
        signals.tell("ns/tts", [A, B])
        await until(lambda: signals.told("ns/tts") == {"ns/a", "ns/b"})
        await until(lambda: gateway.polls >= 2)
        puts = gateway.puts

        for _ in range(20):
            signals.tell("ns/tts", [B, A])
        await until(lambda: gateway.polls >= 3)
        assert gateway.puts == puts

        signals.tell("ns/tts", [A])
        await until(lambda: signals.told("ns/tts") == {"ns/a"})
        assert gateway.told == {"ns/a": {"uid": "ns/a", "url": "http://10.0.0.1:8080", "slots": 8}}


async def test_what_some_gateway_may_still_use_is_told_of_all_together() -> None:
    async with StandInGateway() as one, StandInGateway() as two, following(one, two) as signals:
        await until(lambda: signals.newest("ns/tts"))
        signals.tell("ns/tts", [A, B])
        await until(lambda: signals.told("ns/tts") == {"ns/a", "ns/b"})

        two.refusal = "no"
        signals.tell("ns/tts", [A])

        await until(lambda: one.told is not None and set(one.told) == {"ns/a"})
        await until(lambda: two.puts >= 2)
        assert signals.told("ns/tts") == {"ns/a", "ns/b"}


async def test_an_outage_is_logged_once_with_its_reason_and_its_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "slackwater_operator.operate")
    async with StandInGateway() as gateway, following(gateway) as signals:
        await until(lambda: signals.newest("ns/tts"))
        await gateway.stop()
        await until(lambda: [r for r in caplog.records if r.levelno == logging.WARNING])
        await asyncio.sleep(1.5)  # some more polls fail
        warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
        assert len(warnings) == 1
        assert gateway.url in warnings[0]
        assert "does not answer: " in warnings[0]
        assert "does not answer: ;" not in warnings[0]

        await gateway.start()
        await until(lambda: [r for r in caplog.records if "answers again after" in r.getMessage()])


async def test_a_refused_set_of_replicas_is_logged_once_and_is_no_outage(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "slackwater_operator.operate")
    async with StandInGateway() as gateway, following(gateway) as signals:
        gateway.refusal = "replicas.0.url: not a URL"
        signals.tell("ns/tts", [A])
        await until(lambda: gateway.puts >= 2)

        messages = [r.getMessage() for r in caplog.records]
        assert [message for message in messages if "replicas.0.url: not a URL" in message] == messages
        assert len(messages) == 1
        gateway.refusal = ""
        await until(lambda: signals.told("ns/tts") == {"ns/a"})


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(b"<html>", id="no JSON"),
        pytest.param(b"[]", id="no object"),
        pytest.param(b"{}", id="nothing in it"),
        pytest.param(b'{"in_flight": "many", "queued": 0, "arrivals_total": 0}', id="no number"),
    ],
)
def test_another_servers_answer_is_no_signal(answer: bytes) -> None:
    from slackwater_operator.operate.gateway import read_answer
    from slackwater_operator.operate.remote import BadAnswer

    with pytest.raises(BadAnswer, match="not the signals of a gateway"):
        read_answer(answer, 0.0)
