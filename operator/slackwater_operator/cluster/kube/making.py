"""The bodies of the pods that we create.

Owns what is added to a person's template: node, GPUs, priority, labels, owner, probes, mounts and what the
`restricted` pod security standard asks for.  What the template says itself is kept, where both cannot hold.
Pure: names and nodes come in as arguments.
"""

import copy
import math
from dataclasses import dataclass
from typing import Any

from slackwater_operator.kube.types import Object
from slackwater_operator.resources import names
from slackwater_operator.resources.base import Resource
from slackwater_operator.resources.cleaning import CleaningJob
from slackwater_operator.resources.flavor import GPUFlavor
from slackwater_operator.resources.inference import InferenceDeployment

USER = 65532  # nobody's, as in our images
TMP = "slackwater-tmp"
LEDGER = "slackwater-ledger"
INPUT = "slackwater-input"
GATE = f"{names.GROUP}/gpu"  # keeps a replica from the scheduler until its GPU is seen free
FIRST_LOAD_S = 1200  # an engine that is not ready by then is started again elsewhere

Spec = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a pod goes.  is_bound: put there when it is made; else it waits for a GPU of that node."""

    node: str
    pool: str
    flavor: GPUFlavor
    is_bound: bool = True


def replica(
    service: InferenceDeployment,
    template: Object,
    revision: str,
    place: Place,
    gpus: int,
    name: str,
    reason: str,
    reclaim: str = "",
) -> Object:
    """A pod of a service.   reclaim: the Reclaim that made or makes room for it, "" if there was room."""
    body = _pod(service, template, place, name, names.POD_INFERENCE, reason)
    body["metadata"]["annotations"][names.ANNOTATION_REVISION] = revision
    if reclaim:
        body["metadata"]["annotations"][names.ANNOTATION_RECLAIM] = reclaim
    spec: Spec = body["spec"]
    spec["priorityClassName"] = names.PRIORITY_INFERENCE.name
    # Whoever else ends the pod, as `kubectl drain` does, goes by this alone.
    grace_s = math.ceil(service.spec.drain.grace_s)
    spec["terminationGracePeriodSeconds"] = max(spec.get("terminationGracePeriodSeconds", 1), grace_s)
    engine = _container(spec, names.ENGINE_CONTAINER)
    if "args" not in engine and "command" not in engine:
        engine["args"] = ["engine", "serve", "--host", "0.0.0.0", "--port", str(names.ENGINE_PORT)]
    if all(port.get("containerPort") != names.ENGINE_PORT for port in engine.setdefault("ports", [])):
        engine["ports"].append({"name": "http", "containerPort": names.ENGINE_PORT})
    ready = {"httpGet": {"path": "/readyz", "port": names.ENGINE_PORT}}
    engine.setdefault("startupProbe", {**ready, "periodSeconds": 1, "failureThreshold": FIRST_LOAD_S})
    engine.setdefault("readinessProbe", {**ready, "periodSeconds": 2, "failureThreshold": 2})
    _finish(spec, engine, place, gpus)
    return body


def worker(job: CleaningJob, place: Place, name: str, reason: str) -> Object:
    """A pod of a cleaning job."""
    template = {
        "metadata": job.spec.template.metadata.dump(),
        "spec": job.spec.template.pod_spec,
    }
    body = _pod(job, template, place, name, names.POD_CLEANING, reason)
    spec: Spec = body["spec"]
    spec["priorityClassName"] = names.PRIORITY_CLEANING.name
    container = _container(spec, names.WORKER_CONTAINER)
    env = container.setdefault("env", [])
    if all(one.get("name") != "POD_NAME" for one in env):
        env.insert(0, {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}})
    if "args" not in container and "command" not in container and job.spec.input and job.spec.ledger:
        container["args"] = [
            *("clean", "run", job.spec.input.path, "--output", job.spec.ledger.path, "--job", job.metadata.name),
            *("--worker", "$(POD_NAME)", "--receipt-file", names.RECEIPT_PATH),
        ]
    if job.spec.ledger:
        _mount_claim(spec, container, LEDGER, job.spec.ledger.claim_name, job.spec.ledger.path, read_only=False)
    if job.spec.input:
        _mount_claim(spec, container, INPUT, job.spec.input.claim_name, job.spec.input.path, read_only=True)
    _finish(spec, container, place, job.spec.gpus_per_worker)
    return body


def _pod(owner: Resource, template: Object, place: Place, name: str, kind: str, reason: str) -> Object:
    """The template with what all our pods have."""
    made = copy.deepcopy(template)
    metadata, spec = made.get("metadata") or {}, made["spec"]
    labels = {
        names.LABEL_MANAGED_BY: names.MANAGED_BY,
        names.LABEL_KIND: kind,
        names.LABEL_OWNER: owner.metadata.name,
        names.LABEL_POOL: place.pool,
        names.LABEL_FLAVOR: place.flavor.metadata.name,
    }
    spec["restartPolicy"] = "Never"  # one pod is one life: its exit code is the worker's, back-off is ours
    spec.setdefault("automountServiceAccountToken", False)
    spec.setdefault("enableServiceLinks", False)
    spec["tolerations"] = [*spec.get("tolerations", []), *(one.dump() for one in place.flavor.spec.tolerations)]
    if place.is_bound:
        spec["nodeName"] = place.node
    else:
        _require_node(spec, place.node)
        spec["schedulingGates"] = [*spec.get("schedulingGates", []), {"name": GATE}]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": owner.metadata.namespace,
            "labels": {**(metadata.get("labels") or {}), **labels},
            "annotations": {**(metadata.get("annotations") or {}), names.ANNOTATION_REASON: reason},
            "ownerReferences": [
                {
                    "apiVersion": names.API_VERSION,
                    "kind": owner.names.kind,
                    "name": owner.metadata.name,
                    "uid": owner.metadata.uid,
                    "controller": True,
                    "blockOwnerDeletion": True,
                }
            ],
        },
        "spec": spec,
    }


def _finish(spec: Spec, main: Spec, place: Place, gpus: int) -> None:
    """GPUs of the main container, a place to write, and what pod security asks for."""
    resources = main.setdefault("resources", {})
    for field in ("limits", "requests"):
        resources[field] = {**resources.get(field, {}), place.flavor.spec.resource_name: str(gpus)}
    main.setdefault("terminationMessagePath", names.RECEIPT_PATH)
    main.setdefault("terminationMessagePolicy", "FallbackToLogsOnError")  # why it failed, in its own words
    spec["securityContext"] = {
        "runAsNonRoot": True,
        "runAsUser": USER,
        "runAsGroup": USER,
        "fsGroup": USER,
        "fsGroupChangePolicy": "OnRootMismatch",  # else a large ledger is walked at every start
        "seccompProfile": {"type": "RuntimeDefault"},
        **spec.get("securityContext", {}),
    }
    volumes = spec.setdefault("volumes", [])
    if all(one.get("name") != TMP for one in volumes):
        volumes.append({"name": TMP, "emptyDir": {}})
    for container in (*spec["containers"], *spec.get("initContainers", [])):
        container["securityContext"] = {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
            **container.get("securityContext", {}),
        }
        mounts = container.setdefault("volumeMounts", [])
        if all(one.get("mountPath") != "/tmp" for one in mounts):
            mounts.append({"name": TMP, "mountPath": "/tmp"})


def _container(spec: Spec, name: str) -> Spec:
    found: Spec = next(one for one in spec["containers"] if one["name"] == name)
    return found


def _mount_claim(spec: Spec, container: Spec, name: str, claim: str, path: str, *, read_only: bool) -> None:
    volume: Spec = {"name": name, "persistentVolumeClaim": {"claimName": claim}}
    if read_only:
        volume["persistentVolumeClaim"]["readOnly"] = True
    spec.setdefault("volumes", []).append(volume)
    mounts = container.setdefault("volumeMounts", [])
    if all(one.get("mountPath") != path for one in mounts):
        mounts.append({"name": name, "mountPath": path, **({"readOnly": True} if read_only else {})})


def _require_node(spec: Spec, node: str) -> None:
    """That one node, beside whatever the template asks of nodes: its terms are alternatives, so each gets it."""
    affinity = spec.setdefault("affinity", {}).setdefault("nodeAffinity", {})
    required = affinity.setdefault("requiredDuringSchedulingIgnoredDuringExecution", {})
    terms = required.get("nodeSelectorTerms") or [{}]
    only = {"key": "metadata.name", "operator": "In", "values": [node]}
    required["nodeSelectorTerms"] = [{**term, "matchFields": [*term.get("matchFields", []), only]} for term in terms]
