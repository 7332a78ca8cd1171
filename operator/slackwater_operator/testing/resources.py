"""Small good objects of the five kinds, and many bad ones: what a test of the models, of the
CustomResourceDefinitions or of a real API server starts from.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from slackwater_operator.resources import names

Object = dict[str, Any]

REMOVED: Final = object()
"""In a case: this field is left out."""


def _object(kind: names.KindNames, name: str, spec: Object, namespace: str) -> Object:
    metadata = {"name": name, "namespace": namespace} if kind.namespaced else {"name": name}
    return {"apiVersion": names.API_VERSION, "kind": kind.kind, "metadata": metadata, "spec": spec}


def a_flavor(name: str = "h200", **spec: Any) -> Object:
    """A GPUFlavor with nothing but what is required."""
    given = {"nodeSelector": {"nvidia.com/gpu.product": name}} | spec
    return _object(names.GPU_FLAVOR, name, given, "")


def a_pool(name: str = "east", **spec: Any) -> Object:
    """A CapacityPool with nothing but what is required."""
    return _object(names.CAPACITY_POOL, name, {"flavors": [{"name": "h200"}]} | spec, "")


def a_service(name: str = "tts", namespace: str = "default", **spec: Any) -> Object:
    """An InferenceDeployment with nothing but what is required."""
    given = {
        "model": "tiny",
        "pools": ["east"],
        "maxReplicas": 4,
        "variants": [{"flavor": "h200", "slotsPerReplica": 64}],
        "template": {"spec": {"containers": [{"name": names.ENGINE_CONTAINER, "image": "engine:1"}]}},
    }
    return _object(names.INFERENCE_DEPLOYMENT, name, given | spec, namespace)


def a_job(name: str = "podcasts", namespace: str = "default", **spec: Any) -> Object:
    """A CleaningJob with nothing but what is required."""
    given = {
        "pools": ["east"],
        "flavors": ["h200"],
        "maxWorkers": 8,
        "ledger": {"claimName": "ledger"},
        "template": {"spec": {"containers": [{"name": names.WORKER_CONTAINER, "image": "worker:1"}]}},
    }
    return _object(names.CLEANING_JOB, name, given | spec, namespace)


def a_reclaim(name: str = "tts-1", namespace: str = "default", **spec: Any) -> Object:
    """A Reclaim as the operator writes it."""
    given = {
        "forRef": {"kind": "InferenceDeployment", "name": "tts"},
        "pool": "east",
        "flavor": "h200",
        "gpus": 1,
        "reason": "traffic",
        "deadline": "15s",
        "victims": [{"pod": "default/w-1", "job": "default/podcasts", "node": "n1", "uid": "1-2-3", "gpus": 1}],
    }
    return _object(names.RECLAIM, name, given | spec, namespace)


def a_question(name: str = "three-times", namespace: str = "default", **spec: Any) -> Object:
    """A Reclaim as a person writes it."""
    given = {"forRef": {"kind": "InferenceDeployment", "name": "tts"}, "dryRun": True, "multiplier": "3"}
    return _object(names.RECLAIM, name, given | spec, namespace)


def edited(obj: Object, edits: Mapping[str, Any]) -> Object:
    """A copy with fields set or REMOVED; a place is written `spec/variants/0/gpus`."""
    changed = copy.deepcopy(obj)
    for place, value in edits.items():
        *parents, last = (int(part) if part.isdigit() else part for part in place.split("/"))
        at: Any = changed
        for part in parents:
            at = at.setdefault(part, {}) if isinstance(at, dict) else at[part]
        if value is REMOVED:
            del at[last]
        else:
            at[last] = value
    return changed


@dataclass(frozen=True)
class Case:
    """An object, and the field that a refusal of it must name."""

    id: str
    obj: Object = field(repr=False)
    names: str = ""


def _bad(id_: str, obj: Object, place: str, value: Any, named: str = "") -> Case:
    return Case(id_, edited(obj, {place: value}), named or place.rpartition("/")[2])


_WORKER = "spec/template/spec"
_TWICE = [{"flavor": "h200", "slotsPerReplica": 8}, {"flavor": "h200", "slotsPerReplica": 64}]
_MANY = {f"label-{number}": "x" for number in range(17)}
_VICTIM = a_reclaim()["spec"]["victims"][0]

BAD: Final = (
    _bad("no node selector", a_flavor(), "spec/nodeSelector", REMOVED),
    _bad("node selector that selects all", a_flavor(), "spec/nodeSelector", {}),
    _bad("node selector without end", a_flavor(), "spec/nodeSelector", _MANY),
    _bad("label that no node can have", a_flavor(), "spec/nodeSelector", {"gpu": "NVIDIA H200"}, "nodeSelector"),
    _bad("node selector of numbers", a_flavor(), "spec/nodeSelector", {"gpus": 8}, "nodeSelector"),
    _bad("GPU resource without a domain", a_flavor(), "spec/resourceName", "gpu"),
    _bad("memory in words", a_flavor(), "spec/memory", "141 GB"),
    _bad("cost as a number", a_flavor(), "spec/hourlyCost", 3.2),
    _bad("negative cost", a_flavor(), "spec/hourlyCost", "-1"),
    _bad("gres of no GPU", a_flavor(), "spec/slurmGres", "cpu:8"),
    _bad("unknown toleration effect", a_flavor(), "spec/tolerations", [{"key": "a", "effect": "Never"}], "effect"),
    _bad(
        "toleration of any value with a value",
        a_flavor(),
        "spec/tolerations",
        [{"key": "a", "operator": "Exists", "value": "x"}],
        "value must be empty",
    ),
    _bad("misspelt field of a flavor", a_flavor(), "spec/hourlycost", "3.2"),
    _bad("name too long for a label", a_flavor(), "metadata/name", "h" * 41),
    _bad("name with dots", a_pool(), "metadata/name", "dc.east"),
    _bad("pool without flavors", a_pool(), "spec/flavors", []),
    _bad("pool with one flavor twice", a_pool(), "spec/flavors", [{"name": "h200"}, {"name": "h200"}]),
    _bad("negative count", a_pool(), "spec/flavors/0/count", -1),
    _bad("count as a string", a_pool(), "spec/flavors/0/count", "8"),
    _bad(
        "more reserved than there are",
        a_pool(flavors=[{"name": "h200", "count": 8}]),
        "spec/inference/reservedGPUs",
        9,
    ),
    _bad("duration without a unit", a_pool(), "spec/lending/lendAfter", "20"),
    _bad("duration as a number", a_pool(), "spec/lending/lendAfter", 20),
    _bad("duration in days", a_pool(), "spec/lending/lendAfter", "1d"),
    _bad("fraction above one", a_pool(), "spec/lending/maxLentFraction", "1.5"),
    _bad("no time to leave", a_pool(), "spec/reclaim/deadline", "0s"),
    _bad("retarget after the deadline", a_pool(), "spec/reclaim/retargetAfter", "16s"),
    _bad("nobody may leave", a_pool(), "spec/reclaim/maxParallel", 0),
    _bad("queue of no weight", a_pool(), "spec/queues", [{"name": "a", "weight": 0}], "weight"),
    _bad("queue twice", a_pool(), "spec/queues", [{"name": "a"}, {"name": "a"}]),
    _bad("slurm without a name", a_pool(), "spec/slurm", {"partition": "cleaning"}, "cluster"),
    _bad("no model", a_service(), "spec/model", REMOVED),
    _bad("no pool", a_service(), "spec/pools", []),
    _bad("pool twice", a_service(), "spec/pools", ["east", "east"]),
    _bad("no maximum of replicas", a_service(), "spec/maxReplicas", REMOVED),
    _bad("minimum above maximum", a_service(), "spec/minReplicas", 5, "maxReplicas"),
    _bad("maximum of zero", a_service(minReplicas=0), "spec/maxReplicas", 0),
    _bad("no variants", a_service(), "spec/variants", []),
    _bad("two variants of a flavor", a_service(), "spec/variants", _TWICE),
    _bad("variant without slots", a_service(), "spec/variants/0/slotsPerReplica", REMOVED),
    _bad("variant without GPUs", a_service(), "spec/variants/0/gpus", 0),
    _bad("half a GPU", a_service(), "spec/variants/0/gpus", 0.5),
    _bad("objective of nothing", a_service(), "spec/autoscaling/objective/ttfaP95", "0ms"),
    _bad("panic window above the stable one", a_service(), "spec/autoscaling/panicWindow", "2m"),
    _bad("negative dead band", a_service(), "spec/autoscaling/scaleDown/deadband", -1),
    _bad("gateway address without http", a_service(), "spec/gateway/controlURL", "tts.example:9090"),
    _bad("no gateway at all", a_service(), "spec/gateway/replicas", 0),
    _bad("gate without containers", a_service(), "spec/revisionGate/template/spec/containers", []),
    _bad("no template", a_service(), "spec/template", REMOVED),
    _bad("no engine among the containers", a_service(), f"{_WORKER}/containers/0/name", "server", "engine"),
    _bad("engine without an image", a_service(), f"{_WORKER}/containers/0/image", REMOVED),
    _bad(
        "init container named as the engine",
        a_service(),
        f"{_WORKER}/initContainers",
        [{"name": "engine", "image": "a"}],
    ),
    _bad("node chosen by hand", a_service(), f"{_WORKER}/nodeName", "n1"),
    _bad("priority chosen by hand", a_service(), f"{_WORKER}/priorityClassName", "system-node-critical"),
    _bad(
        "GPUs taken by hand",
        a_service(),
        f"{_WORKER}/containers/0/resources/limits",
        {"nvidia.com/gpu": 1},
        "limits",
    ),
    _bad("our own label", a_service(), "spec/template/metadata/labels", {"slackwater.dev/owner": "me"}, "labels"),
    _bad("misspelt field of a service", a_service(), "spec/autoscaling/burstSlot", 8),
    _bad("no flavors", a_job(), "spec/flavors", []),
    _bad("more workers at least than at most", a_job(), "spec/minWorkers", 9, "maxWorkers"),
    _bad("negative workers", a_job(), "spec/maxWorkers", -1),
    _bad("unknown placement", a_job(), "spec/placement", ["Nomad"]),
    _bad("on Slurm without its paths", a_job(), "spec/placement", ["Kubernetes", "Slurm"]),
    _bad("Slurm side without its ledger", a_job(), "spec/slurm", {"inputPath": "/in"}, "ledgerPath"),
    _bad("nowhere to run", a_job(), "spec/placement", []),
    _bad("ledger without a claim", a_job(), "spec/ledger", {"path": "/ledger"}, "claimName"),
    _bad("ledger at a relative path", a_job(), "spec/ledger/path", "ledger"),
    _bad("unknown verification", a_job(), "spec/checkpoint/verify", "Maybe"),
    _bad("verification of nothing", a_job(), "spec/ledger", REMOVED, "checkpoint.verify"),
    _bad(
        "grace shorter than the flush",
        a_job(),
        f"{_WORKER}/terminationGracePeriodSeconds",
        8,
    ),
    _bad("unknown restart policy", a_job(), "spec/restartPolicy", "Always"),
    _bad("suspend in words", a_job(), "spec/suspend", "yes"),
    _bad("no worker among the containers", a_job(), f"{_WORKER}/containers/0/name", "main", "worker"),
    _bad("restart policy of the pods", a_job(), f"{_WORKER}/restartPolicy", "OnFailure"),
    _bad("misspelt field of a job", a_job(), "spec/maxworkers", 8),
    _bad("reclaim for nobody", a_reclaim(), "spec/forRef", REMOVED),
    _bad("reclaim for a Deployment", a_reclaim(), "spec/forRef/kind", "Deployment"),
    _bad("reclaim without victims", a_reclaim(), "spec/victims", REMOVED),
    _bad("reclaim without a deadline", a_reclaim(), "spec/deadline", REMOVED),
    _bad("reclaim for no reason of ours", a_reclaim(), "spec/reason", "because"),
    _bad("victim twice", a_reclaim(), "spec/victims", [_VICTIM, _VICTIM]),
    _bad("victim without a uid", a_reclaim(), "spec/victims/0/uid", REMOVED),
    _bad("multiplier without a dry run", a_reclaim(), "spec/multiplier", "3"),
    _bad("question with victims", a_question(), "spec/victims", [_VICTIM]),
    _bad("question about nothing", a_question(), "spec/multiplier", REMOVED, "multiplier"),
    _bad("question about two things", a_question(), "spec/gpus", 4),
    _bad("question for a job", a_question(), "spec/forRef/kind", "CleaningJob"),
    _bad("multiplier in words", a_question(), "spec/multiplier", "thrice"),
)

GOOD: Final = (
    Case("least flavor", a_flavor()),
    Case("GPUs of another maker", a_flavor("mi300", resourceName="amd.com/gpu")),
    Case("any toleration", a_flavor(tolerations=[{"operator": "Exists"}, {"key": "a", "value": "x"}])),
    Case("least pool", a_pool()),
    Case("all GPUs reserved", a_pool(flavors=[{"name": "h200", "count": 8}], inference={"reservedGPUs": 8})),
    Case("reserved of a number not known", a_pool(inference={"reservedGPUs": 8})),
    Case("lend at once", a_pool(lending={"lendAfter": "0s"})),
    Case("retarget at the deadline", a_pool(reclaim={"deadline": "1m30s", "retargetAfter": "90s"})),
    Case("pool with its Slurm", a_pool(slurm={"cluster": "east"})),
    Case("least service", a_service()),
    Case("scaled to zero", a_service(minReplicas=0)),
    Case("as many at least as at most", a_service(minReplicas=4)),
    Case("a gateway elsewhere", a_service(gateway={"controlURL": "http://gateway.example:9090"})),
    Case("eight GPUs a replica", a_service(variants=[{"flavor": "h200", "slotsPerReplica": 64, "gpus": 8}])),
    Case(
        "CPUs and memory of the engine",
        edited(
            a_service(),
            {
                f"{_WORKER}/containers/0/resources": {"limits": {"cpu": 4, "memory": "8Gi"}, "requests": {"cpu": "1"}},
                f"{_WORKER}/volumes": [{"name": "tmp", "emptyDir": {}}],
            },
        ),
    ),
    Case("least job", a_job()),
    Case("no workers just now", a_job(maxWorkers=0, suspend=True)),
    Case(
        "on both sides",
        a_job(placement=["Kubernetes", "Slurm"], slurm={"inputPath": "/shared/in", "ledgerPath": "/shared/ledger"}),
    ),
    Case(
        "settings of the steps on Slurm",
        a_job(slurm={"inputPath": "/in", "ledgerPath": "/out", "settings": {"vad.threshold": "0.5"}}),
    ),
    Case("nothing to verify", edited(a_job(checkpoint={"verify": "None"}), {"spec/ledger": REMOVED})),
    Case("a keeper elsewhere", edited(a_job(keeper={"url": "http://keeper:9090"}), {"spec/ledger": REMOVED})),
    Case("a grace just longer than the flush", edited(a_job(), {f"{_WORKER}/terminationGracePeriodSeconds": 9})),
    Case("reclaim", a_reclaim()),
    Case("reclaim for training", edited(a_reclaim(reason="training"), {"spec/forRef/kind": "Pod"})),
    Case("question of traffic", a_question()),
    Case("question of GPUs", edited(a_question(gpus=8), {"spec/multiplier": REMOVED})),
)
