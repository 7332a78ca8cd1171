"""The controller's loop, its judgement of jobs, its metrics and its settings, on a cluster in memory."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slackwater_operator.core import PermanentError
from slackwater_slurm import service
from slackwater_slurm.changes import Changes
from slackwater_slurm.config import CleaningJob, Config
from slackwater_slurm.core import OutputCut, SlurmError, SlurmMissing, SlurmRefused, SlurmUnavailable
from slackwater_slurm.exporter import Exporter
from slackwater_slurm.ledger import LedgerWatch, Progress, parse
from slackwater_slurm.service import JobWatch, Service
from slackwater_slurm.testing import FakeSlurm

MACHINES = {"h1": ("h200", 4), "r1": ("rtx5090", 2)}
PATIENCE_S = 10.0


class StubLedger(LedgerWatch):
    """A ledger that is answered by the test."""

    def __init__(self, ledger: Path = Path("ledger"), every_s: float = 1.0) -> None:
        super().__init__(ledger, every_s)
        self.answer(Progress())

    def answer(self, progress: Progress) -> None:
        self.progress = progress
        self.answers += 1

    def poll(self, now_s: float) -> None:
        pass


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setattr(service, "LedgerWatch", StubLedger)  # no process for each question
    monkeypatch.setattr(service, "FIRST_WAIT_S", 0.01)
    job = CleaningJob(name="pod", input=tmp_path / "in", output=tmp_path / "ledger", max_workers=50)
    return Config(jobs=(job,), state_dir=tmp_path / "state", tick_s=0.1)


@pytest.fixture
def started() -> Iterator[Callable[[Config, FakeSlurm], Exporter]]:
    """Runs services in threads; all are stopped with the test."""
    running: list[tuple[threading.Thread, threading.Event]] = []

    def start(config: Config, slurm: FakeSlurm) -> Exporter:
        exporters: list[Exporter] = []

        def connect(exporter: Exporter) -> FakeSlurm:
            exporters.append(exporter)
            return slurm

        stop = threading.Event()
        one = Service(config, connect, user="cleaner", epoch_s=lambda: slurm.now_s)
        thread = threading.Thread(target=one.run, args=(stop,), daemon=True)
        running.append((thread, stop))
        thread.start()
        assert until(lambda: bool(exporters))
        return exporters[0]

    yield start
    for thread, stop in running:
        stop.set()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def until(is_so: Callable[[], bool]) -> bool:
    deadline_s = time.monotonic() + PATIENCE_S
    while not is_so() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return is_so()


@pytest.mark.parametrize(
    "trouble",
    [
        pytest.param(SlurmUnavailable("squeue gave no answer within 10 s"), id="down or slow"),
        pytest.param(SlurmUnavailable("squeue: the credential was not accepted"), id="expired credential"),
        pytest.param(OutputCut("squeue: the output ends inside a record"), id="cut output"),
        pytest.param(SlurmRefused("squeue: access denied"), id="a right that was lost while it runs"),
    ],
)
def test_trouble_with_slurm_is_waited_out_and_said_once(
    config: Config,
    started: Callable[[Config, FakeSlurm], Exporter],
    caplog: pytest.LogCaptureFixture,
    trouble: SlurmError,
) -> None:
    caplog.set_level("INFO")
    slurm = FakeSlurm(MACHINES)
    started(config, slurm)
    assert until(lambda: len(slurm.running()) == 6)

    slurm.failing = trouble
    assert until(lambda: str(trouble) in caplog.text)
    slurm.failing = None

    assert until(lambda: "Slurm answers again" in caplog.text)
    assert caplog.text.count(str(trouble)) == 1
    assert slurm.changes() == ["submit"]


def test_starts_while_slurm_is_still_down(config: Config, started: Callable[[Config, FakeSlurm], Exporter]) -> None:
    slurm = FakeSlurm(MACHINES, failing=SlurmUnavailable("the controller does not answer"))
    started(config, slurm)

    slurm.failing = None

    assert until(lambda: len(slurm.running()) == 6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"partition": "batch"}, "partition 'batch' is not on cluster 'fake'", id="partition"),
        pytest.param({"slurm_conf": Path("/nowhere/slurm.conf")}, "slurm_conf: .* is not a file", id="slurm.conf"),
    ],
)
def test_what_a_person_must_mend_ends_it_at_its_start(config: Config, changes: dict[str, object], message: str) -> None:
    one = Service(config.model_copy(update=changes), lambda _exporter: FakeSlurm(MACHINES), user="cleaner")

    with pytest.raises(PermanentError, match=message):
        one.run(threading.Event())


def test_no_slurm_at_all_ends_it_at_its_start(config: Config) -> None:
    slurm = FakeSlurm(MACHINES, failing=SlurmMissing("squeue cannot be run; install slurm-client"))

    with pytest.raises(PermanentError, match="install slurm-client"):
        Service(config, lambda _exporter: slurm, user="cleaner").run(threading.Event())


def test_a_second_controller_with_the_same_folder_is_refused(
    config: Config, started: Callable[[Config, FakeSlurm], Exporter]
) -> None:
    slurm = FakeSlurm(MACHINES)
    started(config, slurm)
    assert until(lambda: len(slurm.running()) == 6)

    with pytest.raises(PermanentError, match="another supervisor runs"):
        Service(config, lambda _exporter: slurm, user="cleaner").run(threading.Event())


def test_its_end_leaves_the_arrays_as_they_are(config: Config) -> None:
    slurm = FakeSlurm(MACHINES)
    stop = threading.Event()
    thread = threading.Thread(
        target=Service(config, lambda _exporter: slurm, user="cleaner", epoch_s=lambda: slurm.now_s).run, args=(stop,)
    )
    thread.start()
    assert until(lambda: len(slurm.running()) == 6)

    stop.set()
    thread.join(PATIENCE_S)

    assert len(slurm.running()) == 6
    assert slurm.changes() == ["submit"]


# --- what is thought of a job ----------------------------------------------------------------------------


def job_watch(max_failures: int = 3) -> tuple[JobWatch, StubLedger]:
    ledger = StubLedger()
    spec = CleaningJob(name="pod", input=Path("in"), output=Path("ledger"), max_failures=max_failures)
    return JobWatch(spec, ledger), ledger


def ends(count: int, *, early: bool = True) -> Changes:
    found = (("pod", count),)
    return Changes(ended=found, ended_early=found if early else ())


def test_a_job_whose_workers_end_at_once_and_settle_nothing_is_stopped() -> None:
    watch, ledger = job_watch()

    watch.count(ends(3))
    ledger.answer(Progress(items_total=10))
    watch.look(0.0)

    assert not watch.is_open
    assert "3 workers ended within 120 s" in watch.failure
    assert "ledger-logs" in watch.failure


def test_a_job_that_settles_items_is_never_stopped_for_short_lives() -> None:
    watch, ledger = job_watch()

    for settled in range(1, 6):
        watch.count(ends(3))
        ledger.answer(Progress(items_total=10, items_done=settled, shards_open=1))
        watch.look(0.0)

    assert watch.is_open


def test_workers_that_reach_their_time_limit_are_no_reason_to_stop() -> None:
    watch, ledger = job_watch()

    watch.count(ends(500, early=False))
    ledger.answer(Progress(items_total=10, shards_open=1))
    watch.look(0.0)

    assert watch.is_open


def test_short_lives_at_the_end_of_a_job_are_no_reason_to_stop() -> None:
    watch, ledger = job_watch()
    ledger.answer(Progress(items_total=2, items_done=2, shards_open=1))
    watch.look(0.0)

    watch.count(ends(9))
    ledger.answer(Progress(items_total=2, items_done=2, shards_open=0))
    watch.look(0.0)

    assert (watch.is_finished, watch.failure) == (True, "")


def test_what_is_finished_stays_finished_when_the_ledger_cannot_be_read_any_more() -> None:
    watch, ledger = job_watch()
    ledger.answer(Progress(items_total=1, items_quarantined=1))
    watch.look(0.0)

    ledger.answer(Progress())
    watch.look(0.0)

    assert watch.is_finished


@pytest.mark.parametrize("answer", ["", "{", "[]", '{"items_total": 3}', '{"items_done": "many"}'])
def test_an_answer_that_is_none_is_refused(answer: str) -> None:
    with pytest.raises(ValueError, match="the answer of `clean status --json` was expected"):
        parse(answer)


def test_a_ledger_that_does_not_exist_yet_is_open(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    watch = LedgerWatch(tmp_path / "ledger", 1.0)

    def has_answered() -> bool:
        watch.poll(0.5)
        return watch.progress is not None

    assert until(has_answered)
    assert watch.progress == Progress()
    assert not watch.progress.is_finished
    assert caplog.text == ""


def test_a_ledger_that_hangs_is_given_up_and_costs_no_tick(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hanging = tmp_path / "python"
    hanging.write_text("#!/bin/sh\nexec sleep 600\n")
    hanging.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(hanging))
    watch = LedgerWatch(tmp_path / "ledger", 1000.0)

    watch.poll(0.0)
    watch.poll(59.0)
    assert watch.answers == 0
    watch.poll(61.0)

    assert watch.progress == Progress()
    assert "no answer within 60 s" in caplog.text


# --- metrics ----------------------------------------------------------------------------------------


def test_metrics_tell_gpus_by_use_and_what_was_preempted(
    config: Config, started: Callable[[Config, FakeSlurm], Exporter]
) -> None:
    slurm = FakeSlurm(MACHINES)
    exporter = started(config, slurm)

    def value(name: str, **labels: str) -> float | None:
        return exporter.registry.get_sample_value(f"slurm_bridge_{name}", labels)

    assert until(lambda: value("gpus", cluster="fake", gpu_type="h200", state="background") == 4)

    slurm.train(3, "h200")
    slurm.train(4, "h200")
    slurm.now_s += 10

    assert until(lambda: value("requeues_total", cluster="fake", reason="preempted") == 3)
    assert value("gpus", cluster="fake", gpu_type="h200", state="training") == 3
    assert value("gpus", cluster="fake", gpu_type="h200", state="background") == 1
    # A look may have come between the two submissions.
    assert until(lambda: value("pending_gpus", cluster="fake", partition="train", reason="Resources") == 4)
    assert until(lambda: value("preempt_seconds_count", cluster="fake") == 1)
    assert value("workers", cluster="fake", job="pod", state="displaced") == 3
    seconds = {"cluster": "fake", "gpu_type": "h200", "state": "background"}
    assert until(lambda: (value("gpu_seconds_total", **seconds) or 0) >= 10)
