"""The small pods that the operator runs beside engines and workers, as JSON: gateway, keeper and gate.

Pure.  Owns their shape: arguments, ports, probes, and what the `restricted` pod security standard asks for.  When they
are made and mended is `children`'s part.
"""

import copy
from typing import Any

from slackwater_operator.kube.types import Object
from slackwater_operator.operate.revisions import CONTROLLER_REVISIONS, gate_job_name, record_name
from slackwater_operator.resources import names
from slackwater_operator.resources.base import Resource as Ours
from slackwater_operator.resources.cleaning import CleaningJob
from slackwater_operator.resources.inference import InferenceDeployment
from slackwater_operator.resources.template import PodTemplate

SETTLE_S = 10  # before a gateway is told to go: routes still point at it for so long
API_PORT = 8080
GATE_RETRIES = 2  # a node may fail under it; a gate that says no three times means it
LOST_NODE_S = 10  # before a pod on a node that Kubernetes calls lost is made elsewhere; by itself it waits for 300 s
MAX_UNIT = {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}}

_SAFE = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
}
_SAFE_POD = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
_LOST = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")


def labels(kind: str, owner: str) -> dict[str, str]:
    """What everything that we make carries."""
    return {names.LABEL_MANAGED_BY: names.MANAGED_BY, names.LABEL_KIND: kind, names.LABEL_OWNER: owner}


def owner_reference(owner: Ours) -> Object:
    """The owner's end is the end of what it owns."""
    return {
        "apiVersion": names.API_VERSION,
        "kind": owner.names.kind,
        "name": owner.metadata.name,
        "uid": owner.metadata.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def gateway(service: InferenceDeployment, image: str) -> list[Object]:
    """The gateway of a service: Deployment, the Service that clients reach, and the control Service."""
    name = f"{service.metadata.name}-gateway"
    grace_s = round(service.spec.drain.grace_s)
    template = service.spec.template.pod_spec
    engine = _container(template, names.ENGINE_CONTAINER)
    marks = labels(names.POD_GATEWAY, service.metadata.name)
    container = {
        "name": "gateway",
        "image": image or engine["image"],
        "args": [
            *("gateway", "--host", "0.0.0.0", "--port", str(API_PORT), "--control-port", str(names.CONTROL_PORT)),
            *("--max-queued", str(service.spec.gateway.max_queued), "--grace", str(max(1, grace_s))),
        ],
        "ports": [
            {"name": "http", "containerPort": API_PORT},
            {"name": "control", "containerPort": names.CONTROL_PORT},
        ],
        "readinessProbe": _probe("/ready", "control", period_s=2),
        "livenessProbe": _probe("/healthz", "http", period_s=10),
        "lifecycle": {"preStop": {"sleep": {"seconds": SETTLE_S}}},
        **_rest(engine),
    }
    spec = {
        **_shared(template),
        "terminationGracePeriodSeconds": grace_s + SETTLE_S + 5,
        "containers": [container],
        "volumes": [{"name": "tmp", "emptyDir": {}}],
    }
    return [
        _deployment(service, name, marks, service.spec.gateway.replicas, spec),
        _service(service, name, marks, [{"name": "http", "port": API_PORT, "targetPort": "http"}]),
        _service(service, f"{name}-control", marks, [_CONTROL], headless=True),
    ]


def kept_ledger(job: CleaningJob) -> str:
    """Which ledger its keeper reads, and for which job of its name: another one is another answer."""
    ledger = job.spec.ledger
    return f"{job.metadata.uid}:{ledger.claim_name}:{ledger.path}" if ledger is not None else job.metadata.uid


def keeper(job: CleaningJob, image: str) -> list[Object]:
    """The keeper of a job: it reads the ledger for us, which we cannot mount.  Deployment and Service."""
    assert job.spec.ledger is not None, "a job without a ledger has no keeper"
    name = f"{job.metadata.name}-keeper"
    template = job.spec.template.pod_spec
    worker = _container(template, names.WORKER_CONTAINER)
    marks = labels(names.POD_KEEPER, job.metadata.name)
    path = job.spec.ledger.path
    container = {
        "name": "keeper",
        "image": image or worker["image"],
        "args": ["clean", "keep", path, "--host", "0.0.0.0", "--port", str(names.CONTROL_PORT)],
        "ports": [{"name": "control", "containerPort": names.CONTROL_PORT}],
        "readinessProbe": _probe("/ready", "control", period_s=5),
        **_rest(worker),
    }
    container["volumeMounts"] = [
        *container["volumeMounts"],
        {"name": "ledger", "mountPath": path, "readOnly": True},
    ]
    spec = {
        **_shared(template),
        "terminationGracePeriodSeconds": 5,
        "containers": [container],
        "volumes": [
            {"name": "tmp", "emptyDir": {}},
            {"name": "ledger", "persistentVolumeClaim": {"claimName": job.spec.ledger.claim_name, "readOnly": True}},
        ],
    }
    deployment = _deployment(job, name, marks, 1, spec)
    deployment["spec"]["template"]["metadata"]["annotations"] = {names.ANNOTATION_KEEPS: kept_ledger(job)}
    return [deployment, _service(job, name, marks, [_CONTROL], headless=True)]


def gate(service: InferenceDeployment, template: PodTemplate, revision: str) -> Object:
    """The Job that a revision must pass before it serves."""
    marks = labels(names.POD_GATE, service.metadata.name)
    spec = template.pod_spec
    for container in spec["containers"]:
        environment = container.setdefault("env", [])
        environment.append({"name": "SLACKWATER_REVISION", "value": revision})
    # A gate may ask for a GPU: cleaning makes room for it, as it does for training.
    spec |= {"restartPolicy": "Never", "priorityClassName": names.PRIORITY_TRAINING.name}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(service, gate_job_name(service.metadata.name, revision), marks, revision),
        "spec": {
            "backoffLimit": GATE_RETRIES,
            "template": {
                "metadata": {
                    "labels": {**template.metadata.labels, **marks},
                    "annotations": {**template.metadata.annotations, names.ANNOTATION_REVISION: revision},
                },
                "spec": spec,
            },
        },
    }


def record(service: InferenceDeployment, revision: str, template: Object) -> Object:
    """A revision's template, kept for as long as it may be started."""
    marks = labels(names.POD_INFERENCE, service.metadata.name)
    return {
        "apiVersion": CONTROLLER_REVISIONS.api_version,
        "kind": CONTROLLER_REVISIONS.kind,
        "metadata": _metadata(service, record_name(service.metadata.name, revision), marks, revision),
        "revision": max(1, service.metadata.generation),
        "data": {"template": copy.deepcopy(template)},
    }


_CONTROL: Object = {"name": "control", "port": names.CONTROL_PORT, "targetPort": "control"}


def _metadata(owner: Ours, name: str, marks: dict[str, str], revision: str = "") -> Object:
    return {
        "name": name,
        "namespace": owner.metadata.namespace,
        "labels": marks,
        "ownerReferences": [owner_reference(owner)],
        **({"annotations": {names.ANNOTATION_REVISION: revision}} if revision else {}),
    }


def _deployment(owner: Ours, name: str, marks: dict[str, str], replicas: int, spec: Object) -> Object:
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _metadata(owner, name, marks),
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": marks},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
            "template": {"metadata": {"labels": marks}, "spec": spec},
        },
    }


def _service(owner: Ours, name: str, marks: dict[str, str], ports: list[Object], *, headless: bool = False) -> Object:
    # Headless ones are for us: a gateway is ready only once we told it its replicas.
    how = {"clusterIP": "None", "publishNotReadyAddresses": True} if headless else {}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(owner, name, marks),
        "spec": {"selector": marks, "ports": ports, **how},
    }


def _probe(path: str, port: str, period_s: int) -> Object:
    return {"httpGet": {"path": path, "port": port}, "periodSeconds": period_s, "timeoutSeconds": 2}


def _container(spec: Object, name: str) -> Object:
    found: Object = next(container for container in spec["containers"] if container["name"] == name)
    return found


def _rest(model: Object) -> dict[str, Any]:
    """What a container of ours takes over from the template's, so that it may run where that one may."""
    pulled = {"imagePullPolicy": model["imagePullPolicy"]} if "imagePullPolicy" in model else {}
    return {
        **pulled,
        "resources": MAX_UNIT,
        "securityContext": {**(model.get("securityContext") or {}), **_SAFE},
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
    }


def _shared(spec: Object) -> dict[str, Any]:
    """What a pod of ours takes over from the template's."""
    kept: Object = {key: spec[key] for key in ("imagePullSecrets", "dnsPolicy", "dnsConfig") if key in spec}
    return {
        **kept,
        "automountServiceAccountToken": False,
        "tolerations": [
            {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": LOST_NODE_S} for key in _LOST
        ],
        "securityContext": {**_SAFE_POD, **(spec.get("securityContext") or {})},
    }
