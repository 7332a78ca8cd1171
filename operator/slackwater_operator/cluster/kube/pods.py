"""What a pod is: whose, where, what it holds, how far it is, how it ended.

Owns the reading of a pod's JSON, pure.  Owns no clock: times are wall seconds, as the API server wrote them.
"""

import json
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache

from slackwater_operator.cluster.kube.fits import Wishes, read_wishes
from slackwater_operator.cluster.kube.keep import is_device
from slackwater_operator.kube.types import Object
from slackwater_operator.resources import names

CHECKPOINTED = 75  # exit code: preempted with its work durable
KILLED = 137  # exit code: SIGKILL, so it outlasted its grace or its memory
BAD_INPUT = 2  # exit code: a person has to change something
TERMINATED = 143  # exit code: it had not begun when it was told to go
PLAIN = ("Completed", "Error")  # reasons that say no more than the exit code
STUCK = (  # reasons for which a container waits and will not run by waiting
    "CreateContainerConfigError",
    "CreateContainerError",
    "ErrImageNeverPull",
    "ErrImagePull",
    "ImagePullBackOff",
    "InvalidImageName",
    "RunContainerError",
)


@dataclass(frozen=True, slots=True)
class Ended:
    """How the container of a replica or worker ended.  words: its termination message."""

    code: int
    words: str
    started_s: float | None
    finished_s: float | None

    @property
    def receipt(self) -> Object | None:
        """The worker's newest durable record; None if it never had one, or the words are not one."""
        if not self.words.lstrip().startswith("{"):
            return None
        try:
            found = json.loads(self.words)
        except ValueError:
            return None
        return found if isinstance(found, dict) and {"path", "size_bytes", "sha256"} <= found.keys() else None

    @property
    def has_begun(self) -> bool:
        """Its program ran.  A container that was never made has no start; one that is told to go while its runtime
        still prepares it ends with that one's 2, and without a word."""
        return self.started_s is not None and self.code != TERMINATED and (self.code != BAD_INPUT or bool(self.words))


@dataclass(frozen=True, slots=True)
class Pod:
    """One pod as this package sees it.

    kind: of our pods, "" for one of somebody else.   owner_uid: of the object that it was made for; another one may
    have its name by now.   target: the only node that it may go to, for our reservations.   devices: what it wants of
    each extended resource.   is_booked: its end is taken in, it stays for its logs alone.   refused: why the kubelet
    did not take it.   waiting: why its container waits.
    """

    uid: str
    namespace: str
    name: str
    k8s_uid: str
    kind: str
    owner: str
    owner_uid: str
    pool: str
    flavor: str
    node: str
    nominated: str
    target: str
    devices: tuple[tuple[str, int], ...]
    phase: str
    created_s: float
    deleting_s: float | None
    grace_s: float
    draining_s: float | None
    is_booked: bool
    reclaim: str
    revision: str
    reason: str
    is_ready: bool
    running_s: float | None
    ended: Ended | None
    refused: str
    waiting: tuple[str, str]
    ip: str
    priority_class: str
    preempts: bool
    is_gated: bool
    wishes: Wishes

    @property
    def policy_flavor(self) -> str:
        """The policy's name of what it runs on, for our pods."""
        return names.policy_flavor(self.pool, self.flavor)

    @property
    def is_over(self) -> bool:
        """It holds nothing any more, though its object may still be there."""
        return self.phase in ("Succeeded", "Failed")

    @property
    def place(self) -> str:
        """The node that it is on or will be on; "" if that is open."""
        return self.node or self.nominated or self.target

    def gpus(self, resource: str) -> int:
        """How many it wants of one resource."""
        return next((count for name, count in self.devices if name == resource), 0)

    @property
    def any_gpus(self) -> int:
        """How many devices it wants in all; our pods want one kind."""
        return sum(count for _, count in self.devices)


def read_pod(obj: Object) -> Pod:
    """A pod from its JSON, whole or slimmed."""
    metadata, spec, status = obj["metadata"], obj.get("spec", {}), obj.get("status", {})
    labels, annotations = metadata.get("labels") or {}, metadata.get("annotations") or {}
    namespace, name = metadata.get("namespace", ""), metadata["name"]
    is_ours = labels.get(names.LABEL_MANAGED_BY) == names.MANAGED_BY
    kind = labels.get(names.LABEL_KIND, "") if is_ours else ""
    container = names.ENGINE_CONTAINER if kind == names.POD_INFERENCE else names.WORKER_CONTAINER
    state = _state(status, container)
    phase = status.get("phase", "Pending")
    ended = _ended(state.get("terminated"))
    waiting = state.get("waiting") or {}
    return Pod(
        uid=names.object_uid(namespace, name),
        namespace=namespace,
        name=name,
        k8s_uid=metadata.get("uid", ""),
        kind=kind,
        owner=names.object_uid(namespace, labels.get(names.LABEL_OWNER, "")) if kind else "",
        owner_uid=_controller(metadata) if kind else "",
        pool=labels.get(names.LABEL_POOL, "") if kind else "",
        flavor=labels.get(names.LABEL_FLAVOR, "") if kind else "",
        node=spec.get("nodeName", ""),
        nominated=status.get("nominatedNodeName", ""),
        target=_target(spec) if kind else "",
        devices=_devices(spec),
        phase=phase,
        created_s=_time(metadata.get("creationTimestamp")) or 0.0,
        deleting_s=_time(metadata.get("deletionTimestamp")),
        grace_s=float(metadata.get("deletionGracePeriodSeconds") or 0),
        draining_s=_time(annotations.get(names.ANNOTATION_DRAINING_SINCE)),
        is_booked=names.ANNOTATION_BOOKED in annotations,
        reclaim=annotations.get(names.ANNOTATION_RECLAIM, ""),
        revision=annotations.get(names.ANNOTATION_REVISION, ""),
        reason=annotations.get(names.ANNOTATION_REASON, ""),
        is_ready=any(
            one.get("type") == "Ready" and one.get("status") == "True" for one in status.get("conditions", ())
        ),
        running_s=_time((state.get("running") or {}).get("startedAt")),
        ended=ended,
        refused=f"{status['reason']}: {status.get('message', '')}".rstrip(": ")
        if phase == "Failed" and ended is None and status.get("reason")
        else "",
        waiting=(waiting.get("reason", ""), waiting.get("message", "")),
        ip=status.get("podIP", ""),
        priority_class=spec.get("priorityClassName", ""),
        preempts=spec.get("preemptionPolicy") != "Never",
        is_gated=bool(spec.get("schedulingGates")),
        wishes=read_wishes(spec),
    )


def _controller(metadata: Object) -> str:
    """The uid of the object that a pod is part of."""
    return next((str(one["uid"]) for one in metadata.get("ownerReferences") or () if one.get("controller")), "")


def _state(status: Object, container: str) -> Object:
    """The state of the container that matters, else of the first."""
    found = status.get("containerStatuses") or ()
    named = [one for one in found if one.get("name") == container]
    return next((one.get("state") or {} for one in (*named, *found)), {})


def _ended(terminated: Object | None) -> Ended | None:
    if not terminated:
        return None
    reason = terminated.get("reason") or ""
    return Ended(
        code=int(terminated.get("exitCode", 0)),
        words=str(terminated.get("message") or (reason if reason not in PLAIN else "")),
        started_s=_time(terminated.get("startedAt")),
        finished_s=_time(terminated.get("finishedAt")),
    )


def _devices(spec: Object) -> tuple[tuple[str, int], ...]:
    """What the scheduler counts: all containers and side-cars together, or the largest of those that run before."""
    wanted: dict[str, int] = {}
    for container in spec.get("containers", ()):
        for name, count in _wishes(container):
            wanted[name] = wanted.get(name, 0) + count
    for container in spec.get("initContainers", ()):
        for name, count in _wishes(container):
            is_sidecar = container.get("restartPolicy") == "Always"
            wanted[name] = wanted.get(name, 0) + count if is_sidecar else max(wanted.get(name, 0), count)
    return tuple(sorted((name, count) for name, count in wanted.items() if count))


def _wishes(container: Object) -> list[tuple[str, int]]:
    resources = container.get("resources") or {}
    both = {**(resources.get("requests") or {}), **(resources.get("limits") or {})}
    return [(name, int(value)) for name, value in both.items() if is_device(name) and str(value).isdigit()]


def _target(spec: Object) -> str:
    """The node named by a required affinity to one node's name."""
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    for term in required.get("nodeSelectorTerms", ()):
        for field in term.get("matchFields", ()):
            if field.get("key") == "metadata.name" and len(field.get("values", ())) == 1:
                return str(field["values"][0])
    return ""


def _time(text: str | None) -> float | None:
    """Wall seconds of an RFC 3339 time; None for none, and for one that cannot be read."""
    if not text:
        return None
    try:
        return _wall_s(text)
    except (ValueError, TypeError):
        return None


@lru_cache(maxsize=4096)  # thousands of pods are made, and begin, within the same seconds
def _wall_s(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()
