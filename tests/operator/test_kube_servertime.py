"""The API server's clock by its answers."""

import time
from email.utils import formatdate

import pytest

from slackwater_operator.kube.servertime import ServerTime
from slackwater_operator.kube.types import PODS
from slackwater_operator.testing.kube import FakeKube

SERVER_S = 1_796_000_000.25  # the server's wall clock when our monotonic one shows 0


class Case:
    """Our monotonic clock, and a wall clock of ours that is wrong."""

    def __init__(self, wrong_by_s: float = 3600.0) -> None:
        self.now_s = 100.0
        self.wrong_by_s = wrong_by_s
        self.time = ServerTime(lambda: self.now_s, lambda: SERVER_S + self.now_s + self.wrong_by_s)

    def ask(self, took_s: float = 0.01, server_set_by_s: float = 0.0) -> None:
        asked_s = self.now_s
        self.now_s += took_s
        stamp = formatdate(int(SERVER_S + server_set_by_s + self.now_s - took_s / 2), usegmt=True)
        self.time.note(stamp, asked_s, self.now_s)

    @property
    def error_s(self) -> float:
        return self.time.wall() - (SERVER_S + self.now_s)


def test_before_the_first_answer_our_own_clock_is_taken() -> None:
    assert Case(wrong_by_s=7.0).error_s == pytest.approx(7.0)


@pytest.mark.parametrize("wrong_by_s", [3600.0, -3600.0])
def test_one_answer_is_within_a_second_and_many_are_close(wrong_by_s: float) -> None:
    case = Case(wrong_by_s)

    case.ask()
    first_s = abs(case.error_s)
    for _ in range(50):
        case.now_s += 0.37
        case.ask()

    assert first_s <= 0.6
    assert abs(case.error_s) < 0.05


def test_an_answer_that_took_long_widens_nothing() -> None:
    case = Case()
    for _ in range(50):
        case.now_s += 0.37
        case.ask()

    case.ask(took_s=20.0)

    assert abs(case.error_s) < 0.05


def test_a_server_whose_clock_was_set_is_followed_at_once() -> None:
    case = Case()
    case.ask()

    case.ask(server_set_by_s=-120.0)

    assert case.error_s == pytest.approx(-120.0, abs=0.6)


@pytest.mark.parametrize("date", [None, "", "yesterday"])
def test_an_answer_without_a_date_tells_nothing(date: str | None) -> None:
    case = Case()
    case.ask()
    before_s = case.error_s

    case.time.note(date, case.now_s, case.now_s)

    assert case.error_s == before_s


async def test_a_client_reads_it_from_what_the_server_answers() -> None:
    async with FakeKube() as fake, fake.kube() as kube:
        await kube.list(PODS)

        # The pretended server is a real one of HTTP, so it stamps real time.
        assert kube.wall() == pytest.approx(time.time(), abs=1.5)
