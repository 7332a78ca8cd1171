"""Jobs that a Kubernetes cluster places on Slurm: which, as what, and what their status says of it."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from slackwater_operator.kube.types import Object
from slackwater_operator.resources.cleaning import CleaningJob as Placed
from slackwater_operator.resources.parse import parse
from slackwater_operator.testing.kube import FakeKube
from slackwater_operator.testing.resources import a_flavor, a_job
from slackwater_slurm import placed, service
from slackwater_slurm.config import CleaningJob, Config, Kubernetes
from slackwater_slurm.placed import FLAVORS, JOBS, follow, job_name, translated
from slackwater_slurm.service import Service
from slackwater_slurm.testing import FakeSlurm, OpenLedger

GRES = {"h200": "gpu:h200", "rtx5090": "gpu:rtx5090", "any": "gpu"}
SIDE = {"inputPath": "/shared/in", "ledgerPath": "/shared/ledger", "settings": {"shard_items": "8"}}
PATIENCE_S = 10.0


def a_shared_job(name: str = "podcasts", namespace: str = "data", **spec: Any) -> Object:
    return a_job(name, namespace, **{"placement": ["Kubernetes", "Slurm"], "slurm": SIDE} | spec)


def settings(**changes: Any) -> Kubernetes:
    return Kubernetes(**{"pools": ("east",)} | changes)


def read(obj: Object) -> CleaningJob | str | None:
    return translated(parse(Placed, obj), GRES, settings())


def until(is_so: Callable[[], bool]) -> bool:
    deadline_s = time.monotonic() + PATIENCE_S
    while not is_so() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return is_so()


def test_a_placed_job_reads_as_one_of_ours() -> None:
    job = read(a_shared_job(flavors=["rtx5090", "h200"], maxWorkers=40))

    assert isinstance(job, CleaningJob)
    assert (job.name, job.max_workers, job.gpu_types) == ("data-podcasts", 39, ("rtx5090", "h200"))
    assert job.ledger_job == "podcasts"
    assert (str(job.input), str(job.output), job.settings) == ("/shared/in", "/shared/ledger", {"shard_items": "8"})


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param({"placement": ["Kubernetes"]}, id="not placed on Slurm"),
        pytest.param({"suspend": True}, id="suspended"),
        pytest.param({"pools": ["west"]}, id="of another pool"),
    ],
)
def test_a_job_that_is_not_for_this_cluster_is_passed_over(spec: dict[str, Any]) -> None:
    assert read(a_shared_job(**spec)) is None


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        pytest.param({"flavors": ["mi300"]}, "flavors: none of mi300 has a slurmGres", id="no type that Slurm knows"),
        pytest.param({"gpusPerWorker": 2}, "gpusPerWorker: must be 1 on Slurm, got 2", id="several GPUs"),
    ],
)
def test_a_job_that_cannot_run_here_says_why(spec: dict[str, Any], problem: str) -> None:
    assert read(a_shared_job(**spec)) == problem


def test_both_sides_share_one_maximum() -> None:
    obj = a_shared_job(maxWorkers=10) | {"status": {"workers": {"running": 6, "starting": 1}}}

    job = read(obj)

    assert isinstance(job, CleaningJob)
    assert job.max_workers == 3


@pytest.mark.parametrize(
    ("there", "here", "max_workers"),
    [
        pytest.param(6, 4, 4, id="all are there"),
        pytest.param(6, 7, 7, id="too many together: Kubernetes gives way"),
        pytest.param(6, 0, 4, id="training took ours: only what is left"),
        pytest.param(0, 14, 9, id="a person lowered the maximum"),
    ],
)
def test_what_runs_here_is_not_sent_back_for_what_runs_there(there: int, here: int, max_workers: int) -> None:
    status = {"workers": {"running": there}, "slurm": {"cluster": "hpc", "running": here}}

    job = read(a_shared_job(maxWorkers=10) | {"status": status})

    assert isinstance(job, CleaningJob)
    assert job.max_workers == max_workers


@pytest.mark.parametrize(
    ("placement", "max_workers"),
    [
        pytest.param(["Kubernetes", "Slurm"], 9, id="both, and none there yet"),
        pytest.param(["Slurm"], 10, id="Slurm alone"),
    ],
)
def test_one_worker_is_left_to_the_other_side_before_it_has_any(placement: list[str], max_workers: int) -> None:
    job = read(a_shared_job(maxWorkers=10, placement=placement))

    assert isinstance(job, CleaningJob)
    assert job.max_workers == max_workers


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(("a-b", "c"), ("a", "b-c"), id="the same letters"),
        pytest.param(("a", "b.c"), ("a", "b-c"), id="a dot and a dash"),
        pytest.param(("a", "x" * 60), ("a", "x" * 61), id="longer than a name may be"),
    ],
)
def test_two_jobs_never_share_a_name_here(one: tuple[str, str], other: tuple[str, str]) -> None:
    assert job_name(*one) != job_name(*other)
    assert all(len(job_name(*key)) <= 40 for key in (one, other))


@contextmanager
def controller(fake: FakeKube, slurm: FakeSlurm, folder: Path) -> Iterator[Service]:
    """`slackwater slurm run` in threads, with its jobs from a Kubernetes cluster."""
    kubernetes = settings()
    stop = threading.Event()
    with follow(kubernetes, fake.connection()) as source:
        config = Config(kubernetes=kubernetes, state_dir=folder / "state", tick_s=0.1)
        one = Service(config, lambda _: slurm, source, user="cleaner", epoch_s=lambda: slurm.now_s)
        thread = threading.Thread(target=one.run, args=(stop,), daemon=True)
        thread.start()
        try:
            yield one
        finally:
            stop.set()
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    monkeypatch.setattr(service, "LedgerWatch", OpenLedger)
    monkeypatch.setattr(placed, "RETRY_S", 0.05)
    return FakeSlurm({"h1": ("h200", 4), "r1": ("rtx5090", 2)})


@pytest.fixture
def fake() -> Iterator[FakeKube]:
    with FakeKube.in_thread() as kube:
        kube.put(FLAVORS, a_flavor("h200", slurmGres="gpu:h200"))
        kube.put(FLAVORS, a_flavor("rtx5090", slurmGres="gpu:rtx5090"))
        yield kube


def shared_in(folder: Path, **spec: Any) -> Object:
    side = {"inputPath": str(folder / "in"), "ledgerPath": str(folder / "ledger")}
    return a_shared_job(**{"slurm": side} | spec)


def said(fake: FakeKube) -> Any:
    return (fake.get(JOBS, "podcasts", "data") or {}).get("status", {}).get("slurm")


def test_fills_idle_gpus_with_a_job_that_appears_and_says_so_in_its_status(
    fake: FakeKube, slurm: FakeSlurm, tmp_path: Path
) -> None:
    with controller(fake, slurm, tmp_path):
        fake.put(JOBS, shared_in(tmp_path))

        assert until(lambda: len(slurm.running()) == 4)
        assert until(lambda: (said(fake) or {}).get("running") == 4)


def test_a_lower_maximum_and_the_end_of_a_job_reach_slurm(fake: FakeKube, slurm: FakeSlurm, tmp_path: Path) -> None:
    with controller(fake, slurm, tmp_path):
        fake.put(JOBS, shared_in(tmp_path))
        assert until(lambda: len(slurm.running()) == 4)

        fake.update(JOBS, "podcasts", {"spec": {"maxWorkers": 2}}, "data")
        assert until(lambda: set(slurm.throttles.values()) == {1})
        fake.remove(JOBS, "podcasts", "data")

        assert until(lambda: any(call in ("hold", "cancel") for call, _ in slurm.calls))


def test_a_job_that_cannot_run_is_told_in_its_status_and_stops_no_other(
    fake: FakeKube, slurm: FakeSlurm, tmp_path: Path
) -> None:
    fake.put(FLAVORS, a_flavor("mi300", slurmGres="gpu:mi300"))
    fake.put(JOBS, shared_in(tmp_path, flavors=["mi300"]))
    other = {"inputPath": str(tmp_path / "in"), "ledgerPath": str(tmp_path / "other")}
    fake.put(JOBS, a_shared_job("calls", slurm=other))

    with controller(fake, slurm, tmp_path):
        assert until(lambda: len(slurm.running()) == 4)
        assert until(lambda: "has GPUs of type 'mi300'" in (said(fake) or {}).get("message", ""))


def test_a_cluster_that_is_away_changes_nothing(fake: FakeKube, slurm: FakeSlurm, tmp_path: Path) -> None:
    with controller(fake, slurm, tmp_path):
        fake.put(JOBS, shared_in(tmp_path))
        assert until(lambda: len(slurm.running()) == 4)

        fake.pause()
        fake.cut_watches()
        time.sleep(0.5)  # some ticks

        assert len(slurm.running()) == 4
        assert slurm.changes() == ["submit"]
        fake.resume()
