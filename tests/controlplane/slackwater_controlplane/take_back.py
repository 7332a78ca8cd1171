"""A take-back for the tests that break something in the midst of it: two kwok nodes, a service, a job, a keeper.

Owns what such a test starts from and the words that it looks at the records with.  Owns no fault and no
expectation.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from slackwater_controlplane.keeper import Keeper, worker_notes
from slackwater_controlplane.kwok import PRODUCT
from slackwater_controlplane.operator_rig import FLEET, SLOTS, Object, Rig, all_words
from slackwater_operator.resources import names
from slackwater_operator.testing.processes import OperatorProcess, wait_until
from slackwater_operator.testing.resources import a_flavor, a_job, a_pool, a_service

GPUS = 8
FLUSH_S = 5.0  # of a worker: long enough for something to happen meanwhile
RECLAIMS = "reclaims.slackwater.dev"


@contextmanager
def prepared(rig: Rig, folder: Path) -> Iterator[Rig]:
    """Two nodes, a service and a job whose preemptions are verified; afterwards nothing of them."""
    keeper = Keeper()
    rig.folder = folder
    rig.gateway.say(in_flight=0, queued=0)
    rig.kwok.add_nodes(2, gpus=GPUS // 2)
    rig.admin.create(a_flavor(nodeSelector={PRODUCT: "NVIDIA-H200"}))
    rig.admin.create(a_pool(lending={"lendAfter": "1s"}, reclaim={"deadline": "25s", "retargetAfter": "20s"}))
    variants = [{"flavor": "h200", "slotsPerReplica": SLOTS}]
    service = {"gateway": {"controlURL": rig.gateway.real.url}, "variants": variants, "maxReplicas": 3}
    rig.admin.create(a_service(namespace=FLEET, **service))
    worker = {"name": names.WORKER_CONTAINER, "image": "worker:1"}
    template = {
        "metadata": {"annotations": worker_notes(FLUSH_S)},
        "spec": {"terminationGracePeriodSeconds": 20, "containers": [worker]},
    }
    job = a_job(namespace=FLEET, ledger=None, keeper={"url": keeper.real.url}, maxWorkers=GPUS, template=template)
    rig.admin.create(job)
    try:
        yield rig
    finally:
        rig.clean()
        keeper.close()


def demand(rig: Rig, replicas: int) -> None:
    """So much traffic that this many replicas are needed, and no more however steeply it rose."""
    rig.admin.patch("inferencedeployments.slackwater.dev", "tts", {"spec": {"maxReplicas": replicas}}, FLEET)
    rig.gateway.say(in_flight=replicas * SLOTS, queued=0, arrivals_total=replicas * SLOTS)


def begin_take_back(rig: Rig, leader: OperatorProcess, other: OperatorProcess) -> None:
    """Cleaning everywhere, the other replica ready to lead; then two workers are told to leave."""
    wait_until(lambda: rig.bound("cleaning") == GPUS - 1, 60, all_words(leader, other))
    wait_until(lambda: other.health()[0] == 200, 60, all_words(other))
    demand(rig, 3)
    wait_until(lambda: len(leaving(rig)) == 2, 30, all_words(leader, other))


def reclaims(rig: Rig) -> list[Object]:
    return rig.admin.list(RECLAIMS, FLEET)


def leaving(rig: Rig) -> list[Object]:
    pods = rig.admin.list("pods", FLEET, labels=f"{names.LABEL_KIND}={names.POD_CLEANING}")
    return [pod for pod in pods if pod["metadata"].get("deletionTimestamp")]


def is_finished(rig: Rig) -> bool:
    """Every record has its last phase."""
    phases = [one.get("status", {}).get("phase") for one in reclaims(rig)]
    return bool(phases) and set(phases) <= {"Serving", "Freed", "Cancelled"}


def victims(rig: Rig) -> list[Object]:
    return [victim for one in reclaims(rig) for victim in (one.get("status") or {}).get("victims", ())]


def outcomes(rig: Rig) -> set[tuple[str, object]]:
    return {(victim["outcome"], victim.get("verified")) for victim in victims(rig)}


def state(rig: Rig, *operators: OperatorProcess) -> Callable[[], str]:
    return lambda: (
        f"{[(one['metadata']['name'], one.get('status')) for one in reclaims(rig)]}\n{all_words(*operators)()}"
    )
