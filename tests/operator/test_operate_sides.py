"""Sides: found by name, run while a replica leads, ended before it hands over, and never in the way of a tick."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Gauge, generate_latest

from slackwater_operator import cli
from slackwater_operator.core import PermanentError, TemporaryError
from slackwater_operator.kube.types import LEASES
from slackwater_operator.operate import sides as module
from slackwater_operator.operate.process import Operator
from slackwater_operator.operate.sides import GROUP, Side, Sides, Term, open_sides
from slackwater_operator.testing.kube import FakeKube
from slackwater_operator.testing.replicas import replica

PATIENCE_S = 20.0


class StandIn:
    """A side that does what it is told.

    errors: raised by its next runs, one each.   hangs: it does not end when it is told to, until this is set.
    at_its_end: called as it ends.
    """

    def __init__(self, *errors: Exception, hangs: threading.Event | None = None) -> None:
        self.pools = ("east",)
        self.errors = [*errors]
        self.hangs = hangs
        self.at_its_end: Callable[[], object] = lambda: None
        self.terms: list[Term] = []
        self.is_running = False

    def run(self, term: Term) -> None:
        self.terms.append(term)
        if self.errors:
            raise self.errors.pop(0)
        term.tell("")
        self.is_running = True
        try:
            term.stop.wait()
            if self.hangs is not None:
                self.hangs.wait()
        finally:
            self.at_its_end()
            self.is_running = False


async def until(what: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not what():
            await asyncio.sleep(0.01)


class Rig:
    """Sides as a leader has them.   delays_s: between an end and the next begin."""

    def __init__(self, side: Side) -> None:
        self.sides = Sides({"odd": side}, sleep=self._sleep)
        self.delays_s: list[float] = []
        self.failures = 0
        self.leads = True

    @asynccontextmanager
    async def term(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.sides.run(lambda: self.leads, self._failed))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _failed(self) -> None:
        self.failures += 1

    async def _sleep(self, delay_s: float) -> None:
        self.delays_s.append(delay_s)
        await asyncio.sleep(0.05)  # some looks of a test's `until`


async def test_a_side_that_fails_is_begun_again_ever_more_seldom_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    side = StandIn(*[PermanentError("partition 'batch' is not there")] * 8)
    rig = Rig(side)

    async with rig.term():
        await until(lambda: side.is_running)

    assert rig.failures == len(rig.delays_s) == 8
    assert rig.delays_s[0] <= module.FIRST_S < rig.delays_s[3] <= rig.delays_s[7] <= module.LONGEST_S
    assert caplog.text.count("side odd failed, begun again with back-off: partition 'batch' is not there") == 1


async def test_the_same_words_are_said_again_in_another_term_and_a_delay_that_is_asked_for_is_kept(
    caplog: pytest.LogCaptureFixture,
) -> None:
    side = StandIn(TemporaryError("not now", delay_s=30.0))
    rig = Rig(side)
    async with rig.term():
        await until(lambda: side.is_running)
    side.errors = [TemporaryError("not now", delay_s=30.0)]

    async with rig.term():
        await until(lambda: side.is_running)

    assert rig.delays_s == [30.0, 30.0]
    assert caplog.text.count("not now") == 2


async def test_an_error_that_nobody_thought_of_is_told_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    side = StandIn(KeyError("gres"))

    async with Rig(side).term():
        await until(lambda: side.is_running)

    assert "please report this: 'gres'" in caplog.text
    assert "Traceback" in caplog.text


async def test_what_its_pools_are_told_is_its_newest_word() -> None:
    side = StandIn(PermanentError("no Slurm here"))
    rig = Rig(side)
    assert rig.sides.word("east") is None

    async with rig.term():
        await until(lambda: rig.sides.word("east") == "no Slurm here")
        await until(lambda: rig.sides.word("east") == "")
        side.terms[-1].tell("slurmctld does not answer")
        await until(lambda: rig.sides.word("east") == "slurmctld does not answer")

        assert rig.sides.word("west") is None
    assert rig.sides.word("east") is None


async def test_a_side_that_hangs_holds_nobody_up_and_may_change_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "END_S", 0.1)
    hangs = threading.Event()
    side = StandIn(hangs=hangs)
    rig = Rig(side)

    async with rig.term():
        await until(lambda: side.is_running)
        side.terms[0].fence()

    assert "side odd has not ended within 0.1 s" in caplog.text
    with pytest.raises(TemporaryError, match="does not lead"):
        side.terms[0].fence()
    async with rig.term():
        await until(lambda: rig.failures)
        assert len(side.terms) == 1, "never two of them at once"
        hangs.set()
        await until(lambda: len(side.terms) == 2 and side.is_running)


async def test_a_replica_that_woke_and_leads_no_longer_may_change_nothing_though_nobody_has_told_it_yet() -> None:
    side = StandIn()
    rig = Rig(side)

    async with rig.term():
        await until(lambda: side.is_running)
        rig.leads = False

        with pytest.raises(TemporaryError, match="side odd: this replica does not lead"):
            side.terms[0].fence()


async def test_its_metrics_are_shown_until_it_ends() -> None:
    side = StandIn()
    rig = Rig(side)
    ours, its = CollectorRegistry(), CollectorRegistry()
    ours.register(rig.sides.shown)
    Gauge("odd_workers", "Workers", registry=its).set(3)

    async with rig.term():
        await until(lambda: side.is_running)
        side.terms[0].show(its)
        await until(lambda: b"odd_workers 3.0" in generate_latest(ours))

    assert generate_latest(ours) == b""


# --- within the process ------------------------------------------------------------------------------


def holder(fake: FakeKube) -> str:
    leases = fake.objects(LEASES)
    return str(leases[0]["spec"]["holderIdentity"]) if leases else ""


def number(one: Operator, name: str, **labels: str) -> float:
    return one._metrics.registry.get_sample_value(name, labels) or 0.0


async def test_only_the_leader_runs_it_and_it_has_ended_before_another_may_lead() -> None:
    first, second = StandIn(), StandIn()
    async with FakeKube() as fake:
        holders: list[str] = []

        def look_late() -> None:
            time.sleep(0.5)  # another would lead by then
            holders.append(holder(fake))

        first.at_its_end = look_late
        async with replica(fake.connection(), "one", {"odd": first}) as one:
            await until(lambda: first.is_running)
            async with replica(fake.connection(), "two", {"odd": second}):
                await until(lambda: number(one, "fleet_reconcile_seconds_count") > 4)
                assert not second.terms

                one.stop()
                await until(lambda: second.is_running)

                assert holders == ["one"]
                assert holder(fake) == "two"
        assert not first.is_running
        assert not second.is_running


async def test_a_side_that_fails_is_counted_and_ticks_go_on() -> None:
    side = StandIn(*[PermanentError("no Slurm here")] * 2)
    async with FakeKube() as fake, replica(fake.connection(), "one", {"odd": side}) as one:
        await until(lambda: side.is_running)
        ticks = number(one, "fleet_reconcile_seconds_count")

        await until(lambda: number(one, "fleet_reconcile_seconds_count") >= ticks + 2)

        assert number(one, "fleet_reconcile_errors_total", kind="side") == 2
        assert number(one, "fleet_reconcile_errors_total", kind="tick") == 0
        assert number(one, "fleet_leader") == 1


async def test_losing_the_lease_ends_it_and_winning_it_again_begins_it_again() -> None:
    side = StandIn()
    async with FakeKube() as fake, replica(fake.connection(), "one", {"odd": side}):
        await until(lambda: side.is_running)

        lease = fake.objects(LEASES)[0]["metadata"]
        fake.update(LEASES, lease["name"], {"spec": {"holderIdentity": "another"}}, lease["namespace"])
        await until(lambda: not side.is_running)

        await until(lambda: len(side.terms) == 2 and side.is_running)
        assert holder(fake) == "one"


# --- the command line --------------------------------------------------------------------------------


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    file = tmp_path / "side.yaml"
    file.write_text("pools: [east]\n")
    return file


def made(file: Path, *_: object) -> StandIn:
    """What the entry point `odd` of these tests names."""
    if "east" not in file.read_text():
        raise PermanentError(f"{file}: pools: is required")
    return StandIn()


@pytest.fixture
def points(monkeypatch: pytest.MonkeyPatch) -> None:
    odd = EntryPoint("odd", f"{__name__}:made", GROUP)
    monkeypatch.setattr(EntryPoint, "load", lambda self: made if self == odd else load(self))
    absent = EntryPoint("absent", "slackwater_absent.side:open_side", GROUP)
    monkeypatch.setattr(module, "entry_points", lambda group: [odd, absent] if group == GROUP else [])


load = EntryPoint.load


@pytest.mark.usefixtures("points")
async def test_a_side_is_made_from_its_file_and_the_operators_connection(settings: Path) -> None:
    async with FakeKube() as fake:
        found = open_sides([f"odd={settings}"], fake.connection(), {})

    assert [*found] == ["odd"]
    assert isinstance(found["odd"], StandIn)


@pytest.mark.usefixtures("points")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        pytest.param(["odd"], "a side is given as NAME=FILE, such as slurm=slurm.yaml; got 'odd'", id="no file"),
        pytest.param(["=odd.yaml"], "a side is given as NAME=FILE", id="no name"),
        pytest.param(["pbs=x.yaml"], "there is no side 'pbs'; there are: absent, odd", id="unknown side"),
        pytest.param(["odd=/none.yaml"], "side odd: there is no file /none.yaml", id="no such file"),
        pytest.param(["odd=/"], "side odd: there is no file /", id="a folder"),
        pytest.param(["odd=BAD"], "pools: is required", id="not valid"),
        pytest.param(["odd=GOOD", "odd=GOOD"], "side odd is given twice", id="given twice"),
        pytest.param(["absent=GOOD"], "needs the Python package 'slackwater_absent': pip install", id="not installed"),
    ],
)
def test_a_side_that_cannot_be_run_is_one_line_before_anything_starts(
    settings: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    (tmp_path / "bad.yaml").write_text("pools: []\n")
    files = {"GOOD": str(settings), "BAD": str(tmp_path / "bad.yaml")}
    told = []
    for word in words:
        name, _, file = word.partition("=")
        told += ["--side", f"{name}={files.get(file, file)}" if "=" in word else word]
    with FakeKube.in_thread() as fake:
        kubeconfig = str(fake.write_kubeconfig(tmp_path / "kubeconfig"))
        point = EntryPoint("operator", "slackwater_operator.operate.cli:operator", cli.GROUP)

        code = cli.call(point, ["run", "--kubeconfig", kubeconfig, *told])

        assert code == cli.BAD_INPUT
        assert fake.requests == []
    said = capsys.readouterr()
    assert message in said.err
    assert len(said.err.splitlines()) == 1
    assert said.out == ""
