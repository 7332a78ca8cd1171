"""The loop: which services it serves, and what it makes of refusals."""

import logging
import math
from collections.abc import Sequence

import pytest

from slackwater_operator.cluster.base import Observation, Refusal
from slackwater_operator.core import Action, CleaningJob, Limits, Node, TemporaryError, TrafficSample
from slackwater_operator.loop import Loop, ServiceSpec, VariantSpec
from slackwater_operator.traffic import Window


class Cluster:
    """Two idle GPUs; refuses what it is told to refuse."""

    def __init__(self) -> None:
        self.refusing: set[str] = set()

    def observe(self, now_s: float) -> Observation:
        return Observation(
            nodes=(Node("a", "h200", 2, idle_since_s=(0.0, 0.0)),),
            workloads=(),
            jobs=(CleaningJob("clean", 0, 1, 9, ("h200",)),),
            samples=(("tts", TrafficSample(now_s, 3, 0, 3)),),
            lead_s=(),
        )

    async def apply(self, actions: Sequence[Action], now_s: float) -> tuple[Refusal, ...]:
        return tuple(
            Refusal(action, TemporaryError("no room after 3 tries"))
            for action in actions
            if action.uid in self.refusing
        )


def spec(window: Window | None = None) -> ServiceSpec:
    return ServiceSpec("tts", 0, 9, (VariantSpec("tts/h200", "h200", 4),), 0, 1, window or Window())


async def test_refused_actions_are_not_taken_and_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    cluster = Cluster()
    cluster.refusing = {"clean"}
    loop = Loop(cluster, [spec()], Limits())

    taken = [await loop.tick(second) for second in (10.0, 11.0, 12.0)]

    assert [[action.uid for action in actions] for actions in taken] == [["tts/h200"]] * 3
    assert [record.message for record in caplog.records if record.levelno == logging.WARNING] == [
        "start uid=clean not possible now: no room after 3 tries"
    ]


async def test_a_service_that_stays_keeps_what_is_known_of_its_traffic_unless_its_window_changes() -> None:
    def covered() -> bool:
        assert loop.snapshot is not None
        return math.isfinite(loop.snapshot.services[0].load.window_max_slots)

    short, long = Window(down_s=3.0), Window(down_s=3.0, panic_s=2.0)
    loop = Loop(Cluster(), [spec(short)], Limits())
    seen = []
    for second in range(6):
        await loop.tick(10.0 + second)
        seen.append(covered())
    loop.serve([spec(short), ServiceSpec("other", 1, 1, (), 0, 1)])
    await loop.tick(16.0)
    seen.append(covered())
    loop.serve([spec(long)])
    await loop.tick(17.0)
    seen.append(covered())

    assert seen == [False, False, False, True, True, True, True, False]


async def test_a_service_that_is_gone_is_planned_for_no_more() -> None:
    loop = Loop(Cluster(), [spec()], Limits())
    await loop.tick(10.0)

    loop.serve([])
    await loop.tick(11.0)

    assert loop.snapshot is not None
    assert loop.snapshot.services == ()
