"""A job or a service that is deleted and made again at once under its name, on a real API server with real controllers.

Kubernetes' own garbage collection runs against the operator here: it deletes what the old object owned, some time
after the new one is there.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from slackwater_controlplane.build import Programs
from slackwater_controlplane.kwok import PRODUCT
from slackwater_controlplane.operator_rig import FLEET, Object, Rig, all_words, new_rig
from slackwater_controlplane.threaded import Threaded
from slackwater_operator.resources import names
from slackwater_operator.testing.processes import wait_until
from slackwater_operator.testing.remotes import StandInKeeper
from slackwater_operator.testing.resources import a_flavor, a_job, a_pool, a_service

pytestmark = [pytest.mark.controlplane, pytest.mark.timeout(240)]

JOBS, SERVICES = "cleaningjobs.slackwater.dev", "inferencedeployments.slackwater.dev"
COUNTS = ("items_total", "items_done", "items_open", "shards_open")


@pytest.fixture(scope="module")
def rig(controlplane_programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with new_rig(controlplane_programs, tmp_path_factory.mktemp("again")) as rig:
        yield rig


@pytest.fixture
def keeper() -> Iterator[Threaded[StandInKeeper]]:
    keeper = Threaded(StandInKeeper())
    try:
        yield keeper
    finally:
        keeper.close()


def add_claim(rig: Rig, name: str) -> None:
    """A claim that is bound, so that pods which want it run."""
    size, modes = {"storage": "1Mi"}, ["ReadWriteMany"]
    spec = {"capacity": size, "accessModes": modes, "hostPath": {"path": "/nowhere"}, "storageClassName": ""}
    rig.admin.create({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": spec})
    wanted = {"accessModes": modes, "resources": {"requests": size}, "volumeName": name, "storageClassName": ""}
    metadata = {"name": name, "namespace": FLEET}
    rig.admin.create({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": wanted})


def owners(obj: Object | None) -> list[str]:
    return [one["uid"] for one in (obj or {"metadata": {}})["metadata"].get("ownerReferences", ())]


def test_what_is_made_again_starts_clean_and_gets_children_of_its_own(
    rig: Rig, keeper: Threaded[StandInKeeper], tmp_path: Path
) -> None:
    rig.folder = tmp_path
    keeper.real.progress |= {"items_total": 3, "items_done": 3, "items_open": 0, "shards_open": 0}
    rig.kwok.add_nodes(1, gpus=4)
    add_claim(rig, "ledger")
    rig.admin.create(a_flavor(nodeSelector={PRODUCT: "NVIDIA-H200"}))
    rig.admin.create(a_pool(lending={"lendAfter": "1s"}))
    done = a_job("done", FLEET, ledger=None, keeper={"url": keeper.real.url}, maxWorkers=2)
    kept = a_job("kept", FLEET, suspend=True)
    service = a_service(namespace=FLEET, minReplicas=1, gateway={"controlURL": rig.gateway.real.url})

    def condition(name: str, type_: str) -> Object:
        return rig.condition(rig.admin.get(JOBS, name, FLEET), type_)

    def made_for() -> set[str]:
        """The uids of those that all pods and the keeper's Deployment are of, as the operator reads it."""
        keepers = rig.pods("keeper")
        marks = [pod["metadata"]["annotations"][names.ANNOTATION_KEEPS].partition(":")[0] for pod in keepers]
        pods = [uid for kind in ("inference", "cleaning") for pod in rig.pods(kind) for uid in owners(pod)]
        return {*marks, *pods, *owners(rig.admin.find("deployments.apps", "kept-keeper", FLEET))}

    with rig.operator("one") as one:
        for body in (done, kept, service):
            rig.admin.create(body)
        wait_until(lambda: condition("done", "Complete")["status"] == "True", 60, all_words(one))
        wait_until(lambda: rig.bound("inference") == 1 and rig.bound("keeper") == 1, 60, all_words(one))
        old = made_for()

        keeper.real.progress |= dict.fromkeys(COUNTS)
        for plural, body in ((JOBS, done), (JOBS, kept), (SERVICES, service)):
            rig.admin.delete(plural, body["metadata"]["name"], FLEET)
            rig.admin.create(body)

        new = {rig.admin.get(JOBS, name, FLEET)["metadata"]["uid"] for name in ("done", "kept")}
        new.add(rig.service()["metadata"]["uid"])
        wait_until(lambda: condition("done", "Complete")["status"] == "False", 60, all_words(one))
        wait_until(lambda: rig.bound("cleaning") == 2 and rig.bound("inference") == 1, 60, all_words(one))
        wait_until(lambda: made_for() == new, 60, lambda: f"{made_for()}, wanted {new}\n{all_words(one)()}")
        assert old.isdisjoint(new)
        assert "Traceback" not in one.words()
