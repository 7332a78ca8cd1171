"""The Slurm side of an operator: the same controller, led by the operator's Lease, on clusters in memory."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from slackwater_operator.core import PermanentError, TemporaryError
from slackwater_operator.kube.types import LEASES, Object, custom
from slackwater_operator.operate.process import Operator
from slackwater_operator.resources import names
from slackwater_operator.testing.kube import FakeKube
from slackwater_operator.testing.replicas import replica
from slackwater_operator.testing.resources import a_flavor, a_job, a_pool
from slackwater_slurm import service, side
from slackwater_slurm.config import CleaningJob, Config
from slackwater_slurm.core import Partition, SlurmUnavailable
from slackwater_slurm.placed import FLAVORS, JOBS
from slackwater_slurm.service import Service, this_user
from slackwater_slurm.side import open_side
from slackwater_slurm.testing import FakeSlurm, OpenLedger

PATIENCE_S = 20.0
POOLS = custom(names.CAPACITY_POOL.plural, names.CAPACITY_POOL.kind, names.CAPACITY_POOL.namespaced)


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    slurm = FakeSlurm({"h1": ("h200", 4), "r1": ("rtx5090", 2)}, user=this_user(), now_s=time.time())
    monkeypatch.setattr(service, "LedgerWatch", OpenLedger)
    monkeypatch.setattr(side, "connector", lambda *_: lambda _exporter: slurm)
    return slurm


def a_file(folder: Path, name: str = "slurm") -> Path:
    """A side's configuration; each replica has a state folder of its own, as on machines of their own."""
    file = folder / f"{name}.yaml"
    file.write_text(f"state_dir: state-{name}\ntick_s: 0.1\nkubernetes: {{pools: [east]}}\n")
    return file


def shared_in(folder: Path, **spec: Any) -> Object:
    places = {"inputPath": str(folder / "in"), "ledgerPath": str(folder / "ledger")}
    return a_job("podcasts", "data", **{"placement": ["Kubernetes", "Slurm"], "slurm": places} | spec)


def operator(fake: FakeKube, file: Path, name: str = "one") -> AbstractAsyncContextManager[Operator]:
    """One replica with a Slurm side."""
    connection = fake.connection()
    return replica(connection, name, {"slurm": open_side(file, connection, {})})


@asynccontextmanager
async def cluster(folder: Path) -> AsyncIterator[FakeKube]:
    async with FakeKube() as fake:
        fake.put(FLAVORS, a_flavor("h200", slurmGres="gpu:h200"))
        fake.put(POOLS, a_pool(slurm={"cluster": "fake"}))
        fake.put(JOBS, shared_in(folder))
        yield fake


async def until(what: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not what():
            await asyncio.sleep(0.01)


def said(fake: FakeKube) -> Any:
    return ((fake.get(JOBS, "podcasts", "data") or {}).get("status") or {}).get("slurm") or {}


def reachable(fake: FakeKube) -> tuple[str, str]:
    status = (fake.get(POOLS, "east") or {}).get("status") or {}
    found = [one for one in status.get("conditions") or () if one["type"] == "SlurmReachable"]
    return (found[0]["status"], found[0]["message"]) if found else ("", "")


def holder(fake: FakeKube) -> str:
    leases = fake.objects(LEASES)
    return str(leases[0]["spec"]["holderIdentity"]) if leases else ""


def number(one: Operator, name: str, **labels: str) -> float | None:
    return one._metrics.registry.get_sample_value(name, labels)


async def test_the_leader_fills_slurms_idle_gpus_and_leaves_them_as_they_are_at_its_end(
    slurm: FakeSlurm, tmp_path: Path
) -> None:
    async with cluster(tmp_path) as fake:
        async with operator(fake, a_file(tmp_path)) as one:
            await until(lambda: said(fake).get("running") == 4)

            shown = {"cluster": "fake", "gpu_type": "h200", "state": "background"}
            assert number(one, "slurm_bridge_gpus", **shown) == 4
            assert said(fake)["cluster"] == "fake"

        assert number(one, "slurm_bridge_gpus", **shown) is None
        assert len(slurm.running()) == 4
        assert slurm.changes() == ["submit"]
        assert holder(fake) == ""


async def test_another_replica_adopts_what_runs_and_goes_on_with_it(slurm: FakeSlurm, tmp_path: Path) -> None:
    async with cluster(tmp_path) as fake, operator(fake, a_file(tmp_path, "one"), "one") as one:
        await until(lambda: said(fake).get("running") == 4)
        async with operator(fake, a_file(tmp_path, "two"), "two") as two:
            one.stop()
            await until(lambda: holder(fake) == "two")
            shown = {"cluster": "fake", "gpu_type": "h200", "state": "background"}
            await until(lambda: number(two, "slurm_bridge_gpus", **shown) == 4)
            assert slurm.changes() == ["submit"]

            fake.update(JOBS, "podcasts", {"spec": {"maxWorkers": 2}}, "data")

            await until(lambda: [*slurm.throttles.values()] == [1])
            assert len(slurm.submissions) == 1


async def test_one_replica_ends_and_begins_the_controller_as_often_as_it_leads(
    slurm: FakeSlurm, tmp_path: Path
) -> None:
    async with cluster(tmp_path) as fake, operator(fake, a_file(tmp_path)) as one:
        await until(lambda: said(fake).get("running") == 4)
        lease = fake.objects(LEASES)[0]["metadata"]
        shown = {"cluster": "fake", "gpu_type": "h200", "state": "background"}

        fake.update(LEASES, lease["name"], {"spec": {"holderIdentity": "another"}}, lease["namespace"])
        await until(lambda: number(one, "slurm_bridge_gpus", **shown) is None)

        await until(lambda: number(one, "slurm_bridge_gpus", **shown) == 4)
        assert slurm.changes() == ["submit"]


async def test_what_a_person_must_mend_at_slurm_is_said_once_and_the_operator_goes_on(
    slurm: FakeSlurm, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good = slurm.partitions_list
    slurm.partitions_list = [Partition("train", "UP", ("h1", "r1"), 100, "OFF")]
    async with cluster(tmp_path) as fake, operator(fake, a_file(tmp_path)) as one:
        await until(lambda: (number(one, "fleet_reconcile_errors_total", kind="side") or 0) >= 2)
        assert number(one, "fleet_leader") == 1
        assert number(one, "fleet_reconcile_errors_total", kind="tick") == 0

        slurm.partitions_list = good

        await until(lambda: said(fake).get("running") == 4)
    assert caplog.text.count("side slurm failed") == 1
    assert "partition 'cleaning' is not on cluster 'fake'; there are: train" in caplog.text


async def test_a_slurm_that_does_not_answer_is_told_to_the_pools_and_keeps_nobody_from_ending(
    slurm: FakeSlurm, tmp_path: Path
) -> None:
    async with cluster(tmp_path) as fake, operator(fake, a_file(tmp_path)) as one:
        await until(lambda: one._sides.word("east") == "")

        slurm.failing = SlurmUnavailable("squeue gave no answer within 10 s")
        await until(lambda: one._sides.word("east") == "squeue gave no answer within 10 s")
        await until(lambda: reachable(fake) == ("False", "squeue gave no answer within 10 s"))
        slurm.failing = None
        await until(lambda: one._sides.word("east") == "")
        slurm.failing = SlurmUnavailable("squeue gave no answer within 10 s")
        began_s = time.monotonic()
    assert time.monotonic() - began_s < 5.0


def test_a_controller_whose_fence_has_fallen_changes_nothing(slurm: FakeSlurm, tmp_path: Path) -> None:
    job = CleaningJob(name="pod", input=tmp_path / "in", output=tmp_path / "ledger")
    config = Config(jobs=(job,), state_dir=tmp_path / "state", tick_s=0.1)

    def fallen() -> None:
        raise TemporaryError("this replica does not lead")

    with pytest.raises(TemporaryError, match="does not lead"):
        Service(config, lambda _: slurm, fence=fallen).run(threading.Event())

    assert slurm.changes() == []


GOOD = "kubernetes: {pools: [east]}\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("", "must hold a mapping", id="empty"),
        pytest.param("jobs: [{name: pod, input: in, output: out}]\n", "kubernetes.pools: is required", id="no pools"),
        pytest.param("kubernetes: {pools: []}\n", "kubernetes.pools", id="pools empty"),
        pytest.param(
            "kubernetes: {pools: [east], kubeconfig: k}\n", "kubernetes.kubeconfig: leave it out", id="kubeconfig"
        ),
        pytest.param("kubernetes: {pools: [east], context: k}\n", "kubernetes.context: leave it out", id="context"),
        pytest.param(GOOD + "metrics_port: 9464\n", "metrics_port: leave it out in the operator", id="port"),
        pytest.param(GOOD + "tick: 3\n", "unknown key; did you mean 'tick_s'?", id="unknown key"),
    ],
)
async def test_a_file_that_cannot_be_a_side_is_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "side.yaml"
    file.write_text(text)

    async with FakeKube() as fake:
        with pytest.raises(PermanentError) as refusal:
            open_side(file, fake.connection(), {})

    assert str(file) in str(refusal.value)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)
