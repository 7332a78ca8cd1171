"""A cluster with our kinds, the operator's own rights and GPUs of kwok, for tests of the real operator process.

Owns the setting up and the few words that those tests speak in.  Owns no expectation.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from slackwater_controlplane.build import Programs, cache_folder
from slackwater_controlplane.client import Admin
from slackwater_controlplane.cluster import ControlPlane
from slackwater_controlplane.fixtures import new_control_plane
from slackwater_controlplane.kwok import PRODUCT, Kwok
from slackwater_controlplane.threaded import Gateway
from slackwater_operator.resources import names
from slackwater_operator.testing.processes import OperatorProcess
from slackwater_operator.testing.resources import a_flavor, a_job, a_pool, a_service

MANIFESTS = Path(__file__).parents[3] / "manifests"
ACCOUNT = f"system:serviceaccount:{names.OPERATOR_NAMESPACE}:{names.SERVICE_ACCOUNT}"
GROUPS = ("system:serviceaccounts", f"system:serviceaccounts:{names.OPERATOR_NAMESPACE}", "system:authenticated")
FLEET = "fleet"
SLOTS = 8
PLURALS = [f"{kind.plural}.{names.GROUP}" for kind in names.KINDS]
Object = dict[str, Any]


@dataclass(slots=True)
class Rig:
    """A cluster with our kinds, the operator's rights and GPUs, and what a test does with it."""

    plane: ControlPlane
    kwok: Kwok
    gateway: Gateway
    folder: Path

    @property
    def admin(self) -> Admin:
        return self.plane.admin

    def operator(self, name: str) -> OperatorProcess:
        kubeconfig = self.plane.kubeconfig(ACCOUNT, GROUPS)
        return OperatorProcess(name, kubeconfig, self.folder, os.environ)

    def add_fleet(self, *, nodes: int = 2, gpus: int = 4, workers: int = 8, **service: Any) -> None:
        """GPUs, a service with the stand-in gateway and a job that would fill everything."""
        self.kwok.add_nodes(nodes, gpus=gpus)
        self.admin.create(a_flavor(nodeSelector={PRODUCT: "NVIDIA-H200"}))
        self.admin.create(a_pool(lending={"lendAfter": "1s"}))
        spec = {
            "gateway": {"controlURL": self.gateway.real.url},
            "variants": [{"flavor": "h200", "slotsPerReplica": SLOTS}],
            "maxReplicas": nodes * gpus,
        }
        self.admin.create(a_service(namespace=FLEET, **(spec | service)))
        self.admin.create(a_job(namespace=FLEET, ledger=None, checkpoint={"verify": "None"}, maxWorkers=workers))

    def pods(self, kind: str) -> list[Object]:
        pods = self.admin.list("pods", FLEET, labels=f"{names.LABEL_KIND}={kind}")
        return [pod for pod in pods if not pod["metadata"].get("deletionTimestamp")]

    def bound(self, kind: str) -> int:
        return sum(bool(pod["spec"].get("nodeName")) for pod in self.pods(kind))

    def service(self) -> Object:
        return self.admin.get("inferencedeployments.slackwater.dev", "tts", FLEET)

    def condition(self, obj: Object, type_: str) -> Object:
        found = [one for one in (obj.get("status") or {}).get("conditions", ()) if one["type"] == type_]
        return found[0] if found else {"status": "?", "reason": "?"}

    def holder(self) -> str:
        lease = self.admin.find("leases.coordination.k8s.io", names.LEASE, names.OPERATOR_NAMESPACE)
        return str((lease or {}).get("spec", {}).get("holderIdentity") or "")

    def clean(self) -> None:
        for plural in PLURALS:
            namespaced = plural.split(".")[0] in {kind.plural for kind in names.KINDS if kind.namespaced}
            self.admin.delete_all(plural, FLEET if namespaced else None)
        self.admin.delete_all("pods", FLEET)
        self.kwok.remove_nodes()
        self.admin.delete("leases.coordination.k8s.io", names.LEASE, names.OPERATOR_NAMESPACE)


def set_up(plane: ControlPlane) -> None:
    """Our kinds, the operator's namespace and rights, and a namespace that it may make pods in."""
    admin = plane.admin
    admin.apply_file(*sorted((MANIFESTS / "crd").glob("*s.yaml")))
    admin.wait_established(*(kind.crd for kind in names.KINDS))
    for name in (names.OPERATOR_NAMESPACE, FLEET, "slackwater-inference", "slackwater-workers"):
        admin.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    admin.wait_for("serviceaccounts", "default", namespace=FLEET)
    files = [MANIFESTS / "operator" / f"{name}.yaml" for name in ("rbac", "priority-classes", "admission")]
    admin.apply_file(*files)
    subject = {"kind": "ServiceAccount", "name": names.SERVICE_ACCOUNT, "namespace": names.OPERATOR_NAMESPACE}
    admin.apply(
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "RoleBinding",
            "metadata": {"name": "slackwater-operator", "namespace": FLEET},
            "roleRef": {
                "apiGroup": "rbac.authorization.k8s.io",
                "kind": "ClusterRole",
                "name": "slackwater-operator-namespace",
            },
            "subjects": [subject],
        }
    )


@contextmanager
def new_rig(programs: Programs, folder: Path) -> Iterator[Rig]:
    if (reason := programs.why_not("control-plane", "kwok")) is not None:
        pytest.skip(reason)
    with new_control_plane(programs, cache_folder(os.environ)) as plane:
        set_up(plane)
        with Kwok(plane) as kwok:
            gateway = Gateway()
            try:
                yield Rig(plane, kwok, gateway, folder)
            finally:
                gateway.close()


def all_words(*operators: OperatorProcess) -> Callable[[], str]:
    return lambda: "\n".join(f"--- {one.name}\n{one.words()[-4000:]}" for one in operators)
