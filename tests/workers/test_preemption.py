"""Signals set a flag; a hanging step ends its process."""

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from slackwater_workers.core import Stopped
from slackwater_workers.preemption import StopFlag, Watchdog


@pytest.fixture
def stop() -> Iterator[StopFlag]:
    before = [(number, signal.getsignal(number)) for number in (signal.SIGTERM, signal.SIGINT)]
    flag = StopFlag()
    flag.install()
    yield flag
    for number, handler in before:
        signal.signal(number, handler)


def test_sigterm_sets_the_flag_and_the_next_look_raises(stop: StopFlag) -> None:
    os.kill(os.getpid(), signal.SIGTERM)

    assert stop.reason == "preempted"
    with pytest.raises(Stopped, match="preempted"):
        stop.check()


def test_the_first_reason_stays(stop: StopFlag) -> None:
    stop.set("parent gone")
    os.kill(os.getpid(), signal.SIGTERM)

    assert stop.reason == "parent gone"


def test_a_wait_ends_at_once_when_a_stop_is_asked_for(stop: StopFlag) -> None:
    timer = threading.Timer(0.05, stop.set, ["preempted"])
    timer.start()

    with pytest.raises(Stopped):
        stop.wait(timeout_s=60.0)

    timer.join()


def test_the_watchdog_ends_a_process_that_does_nothing() -> None:
    ended = threading.Event()
    watchdog = Watchdog(stall_s=0.05, end_process=lambda code: ended.set())

    watchdog.start()

    assert ended.wait(10.0)
    watchdog.stop()


def test_the_watchdog_is_quiet_while_it_is_petted() -> None:
    ended: list[int] = []
    watchdog = Watchdog(stall_s=30.0, end_process=ended.append)
    watchdog.start()

    for _ in range(10):
        watchdog.pet()
    watchdog.stop()

    assert ended == []
