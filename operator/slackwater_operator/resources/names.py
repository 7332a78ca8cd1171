"""Every name that our resources, pods and manifests share, each written once.

Owns constants and the few functions that join names.  Owns no behaviour.  Read by `cluster.kube`, `operate` and the
tests of the manifests.
"""

from dataclasses import dataclass
from typing import Final

GROUP: Final = "slackwater.dev"
VERSION: Final = "v1alpha1"
API_VERSION: Final = f"{GROUP}/{VERSION}"
CATEGORY: Final = "gpu"  # `kubectl get gpu` lists all five kinds

OPERATOR_NAMESPACE: Final = "slackwater-system"
SERVICE_ACCOUNT: Final = "slackwater-operator"
LEASE: Final = "slackwater-operator"
VIEW_CLUSTER_ROLE: Final = "slackwater-view-cluster"  # of people who look at the whole fleet


@dataclass(frozen=True, slots=True)
class KindNames:
    """How the API server spells one of our kinds."""

    kind: str
    plural: str
    singular: str
    short: str
    namespaced: bool

    @property
    def crd(self) -> str:
        """Name of its CustomResourceDefinition."""
        return f"{self.plural}.{GROUP}"


GPU_FLAVOR: Final = KindNames("GPUFlavor", "gpuflavors", "gpuflavor", "gpf", namespaced=False)
CAPACITY_POOL: Final = KindNames("CapacityPool", "capacitypools", "capacitypool", "cpool", namespaced=False)
INFERENCE_DEPLOYMENT: Final = KindNames(
    "InferenceDeployment", "inferencedeployments", "inferencedeployment", "infd", namespaced=True
)
CLEANING_JOB: Final = KindNames("CleaningJob", "cleaningjobs", "cleaningjob", "clj", namespaced=True)
RECLAIM: Final = KindNames("Reclaim", "reclaims", "reclaim", "rcl", namespaced=True)
KINDS: Final = (GPU_FLAVOR, CAPACITY_POOL, INFERENCE_DEPLOYMENT, CLEANING_JOB, RECLAIM)

# Field managers, one a concern, so that no two writers of ours fight over a field.
MANAGER_CHILDREN: Final = "slackwater/children"
MANAGER_STATUS: Final = "slackwater/status"
MANAGER_HOLD: Final = "slackwater/hold"  # annotations on pods
MANAGER_RECLAIM: Final = "slackwater/reclaim"
MANAGER_LEASE: Final = "slackwater/lease"
MANAGERS: Final = (MANAGER_CHILDREN, MANAGER_STATUS, MANAGER_HOLD, MANAGER_RECLAIM, MANAGER_LEASE)


@dataclass(frozen=True, slots=True)
class Priority:
    """One of our PriorityClasses."""

    name: str
    value: int
    preempts: bool  # False: `preemptionPolicy: Never`


# Never: taking GPUs back is ours to do, one worker at a time and by what is lost.
PRIORITY_INFERENCE: Final = Priority("slackwater-inference", 1_000_000, preempts=False)
PRIORITY_TRAINING: Final = Priority("slackwater-training", 500_000, preempts=True)
PRIORITY_CLEANING: Final = Priority("slackwater-cleaning", -1_000, preempts=False)
PRIORITIES: Final = (PRIORITY_INFERENCE, PRIORITY_TRAINING, PRIORITY_CLEANING)

LABEL_MANAGED_BY: Final = "app.kubernetes.io/managed-by"
MANAGED_BY: Final = "slackwater"
LABEL_KIND: Final = f"{GROUP}/kind"
LABEL_OWNER: Final = f"{GROUP}/owner"
LABEL_FLAVOR: Final = f"{GROUP}/flavor"
LABEL_POOL: Final = f"{GROUP}/pool"

# Values of LABEL_KIND.
POD_INFERENCE: Final = "inference"
POD_CLEANING: Final = "cleaning"
POD_GATEWAY: Final = "gateway"
POD_KEEPER: Final = "keeper"
POD_GATE: Final = "gate"
POD_KINDS: Final = (POD_INFERENCE, POD_CLEANING, POD_GATEWAY, POD_KEEPER, POD_GATE)

ANNOTATION_BOOKED: Final = f"{GROUP}/booked"  # on an ended pod that stays for its logs: its end is taken in
ANNOTATION_REASON: Final = f"{GROUP}/reason"  # why the pod was started, a core.Reason
ANNOTATION_DRAINING_SINCE: Final = f"{GROUP}/draining-since"  # RFC 3339
ANNOTATION_RECLAIM: Final = f"{GROUP}/reclaim"  # the Reclaim that a replica was reserved by
ANNOTATION_REVISION: Final = f"{GROUP}/revision"  # digest of the template
ANNOTATION_KEEPS: Final = f"{GROUP}/keeps"  # the ledger of which job a keeper reads

ENGINE_CONTAINER: Final = "engine"
WORKER_CONTAINER: Final = "worker"
ENGINE_PORT: Final = 8080
CONTROL_PORT: Final = 9090  # of gateways and keepers
RECEIPT_PATH: Final = "/dev/termination-log"  # terminationMessagePath: the receipt outlives the container
DEFAULT_GPU_RESOURCE: Final = "nvidia.com/gpu"


def policy_flavor(pool: str, flavor: str) -> str:
    """A GPU type of one pool, as the policy names it."""
    return f"{pool}/{flavor}"


def split_policy_flavor(name: str) -> tuple[str, str]:
    """`(pool, flavor)` of a policy flavor."""
    pool, _, flavor = name.partition("/")
    return pool, flavor


def object_uid(namespace: str, name: str) -> str:
    """A service, a cleaning job or a pod, as the policy names it."""
    return f"{namespace}/{name}"


def variant_uid(namespace: str, name: str, pool: str, flavor: str) -> str:
    """A service on one GPU type of one pool, as the policy names it."""
    return f"{namespace}/{name}/{pool}/{flavor}"


def split_variant_uid(uid: str) -> tuple[str, str, str, str] | None:
    """`(namespace, name, pool, flavor)`, or None for the uid of something else.

    A service and a cleaning job may share a name; the number of slashes tells them apart.
    """
    parts = uid.split("/")
    return (parts[0], parts[1], parts[2], parts[3]) if len(parts) == 4 else None
