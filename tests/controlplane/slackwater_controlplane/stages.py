"""What fake nodes and pods do under kwok: our own Stages, steered by annotations of the pod.

Owns the annotations' names and the stages' text.  kwok's general set is slow and random, its fast set honours no grace.
A delay starts with the last change of the pod, so a pod that is patched while it waits begins to wait anew.
"""

from typing import Any

import yaml

_PREFIX = "test.slackwater.dev"
# Annotations of a pod; each is a string, seconds with a fraction.
START_S = f"{_PREFIX}/start-s"  # bound to running
READY_S = f"{_PREFIX}/ready-s"  # running to ready, as an engine that loads its model; without it ready at once
FLUSH_S = f"{_PREFIX}/flush-s"  # asked to leave to gone; longer than the grace = killed at its end with 137
END_S = f"{_PREFIX}/end-s"  # ready to ended by itself; without it it runs for ever
# Annotations with other values.
EXIT_CODE = f"{_PREFIX}/exit-code"  # of one asked to leave; 75, a preempted worker's, when there is a message, else 0
MESSAGE = f"{_PREFIX}/message"  # termination message of one asked to leave: a worker's receipt
END_CODE = f"{_PREFIX}/end-code"  # exit code of one that ends by itself; 0
END_MESSAGE = f"{_PREFIX}/end-message"
REFUSE = f"{_PREFIX}/refuse"  # the kubelet takes no such pod: the reason, as OutOfnvidia.com/gpu
# Labels, so that a test can set them on many at once.
STUCK = f"{_PREFIX}/stuck"  # of a pod: it never leaves, whatever it is asked; only a forced deletion ends it
DOWN = f"{_PREFIX}/down"  # of a node: it stays as its status is set by hand

KILLED = 137

_ENDED = """\
{{ $now := Now }}
{{ $root := . }}
{{ $notes := or .metadata.annotations dict }}
%s
conditions:
- lastTransitionTime: {{ $now | Quote }}
  status: "False"
  type: Ready
  reason: {{ if $code }}PodFailed{{ else }}PodCompleted{{ end }}
- lastTransitionTime: {{ $now | Quote }}
  status: "False"
  type: ContainersReady
containerStatuses:
{{ range $index, $item := .spec.containers }}
{{ $before := index $root.status.containerStatuses $index }}
- image: {{ $item.image | Quote }}
  imageID: ""
  name: {{ $item.name | Quote }}
  ready: false
  restartCount: 0
  started: false
  state:
    terminated:
      exitCode: {{ $code }}
      reason: {{ if $code }}Error{{ else }}Completed{{ end }}
      message: {{ $message | Quote }}
      startedAt: {{ $before.state.running.startedAt | Quote }}
      finishedAt: {{ $now | Quote }}
{{ end }}
phase: {{ if $code }}Failed{{ else }}Succeeded{{ end }}
"""

_LEFT = (
    _ENDED
    % f"""\
{{{{ $message := or (index $notes "{MESSAGE}") "" }}}}
{{{{ $usual := "0" }}}}{{{{ if $message }}}}{{{{ $usual = "75" }}}}{{{{ end }}}}
{{{{ $code := int (or (index $notes "{EXIT_CODE}") $usual) }}}}
{{{{ if gt (float64 (or (index $notes "{FLUSH_S}") "0")) (float64 .metadata.deletionGracePeriodSeconds) }}}}
{{{{ $code = {KILLED} }}}}{{{{ $message = "" }}}}
{{{{ end }}}}"""
)

_ENDED_ITSELF = (
    _ENDED
    % f"""\
{{{{ $message := or (index $notes "{END_MESSAGE}") "" }}}}
{{{{ $code := int (or (index $notes "{END_CODE}") "0") }}}}"""
)

_REFUSED = f"""\
{{{{ $reason := index .metadata.annotations "{REFUSE}" }}}}
phase: Failed
reason: {{{{ $reason | Quote }}}}
message: {{{{ printf "Pod was rejected: %s" $reason | Quote }}}}
startTime: {{{{ Now | Quote }}}}
"""

_RUNNING = f"""\
{{{{ $now := Now }}}}
{{{{ $root := . }}}}
{{{{ $isReady := not (hasKey (or .metadata.annotations dict) "{READY_S}") }}}}
conditions:
- lastTransitionTime: {{{{ $now | Quote }}}}
  status: "True"
  type: Initialized
- lastTransitionTime: {{{{ $now | Quote }}}}
  status: {{{{ if $isReady }}}}"True"{{{{ else }}}}"False"{{{{ end }}}}
  type: Ready
- lastTransitionTime: {{{{ $now | Quote }}}}
  status: {{{{ if $isReady }}}}"True"{{{{ else }}}}"False"{{{{ end }}}}
  type: ContainersReady
containerStatuses:
{{{{ range .spec.containers }}}}
- image: {{{{ .image | Quote }}}}
  imageID: ""
  name: {{{{ .name | Quote }}}}
  ready: {{{{ $isReady }}}}
  restartCount: 0
  started: true
  state:
    running:
      startedAt: {{{{ $now | Quote }}}}
{{{{ end }}}}
hostIP: {{{{ NodeIPWith .spec.nodeName | Quote }}}}
{{{{ $onHost := or .spec.hostNetwork false }}}}
podIP: {{{{ PodIPWith .spec.nodeName $onHost .metadata.uid .metadata.name .metadata.namespace | Quote }}}}
phase: Running
startTime: {{{{ $now | Quote }}}}
"""

_READY = """\
{{ $now := Now }}
{{ $root := . }}
conditions:
- lastTransitionTime: {{ $now | Quote }}
  status: "True"
  type: Ready
- lastTransitionTime: {{ $now | Quote }}
  status: "True"
  type: ContainersReady
containerStatuses:
{{ range $index, $item := .spec.containers }}
{{ $before := index $root.status.containerStatuses $index }}
- image: {{ $item.image | Quote }}
  imageID: ""
  name: {{ $item.name | Quote }}
  ready: true
  restartCount: 0
  started: true
  state:
    running:
      startedAt: {{ $before.state.running.startedAt | Quote }}
{{ end }}
"""

_NODE = """\
{{ $now := Now }}
conditions:
{{ range NodeConditions }}
- lastHeartbeatTime: {{ $now | Quote }}
  lastTransitionTime: {{ $now | Quote }}
  message: {{ .message | Quote }}
  reason: {{ .reason | Quote }}
  status: {{ .status | Quote }}
  type: {{ .type | Quote }}
{{ end }}
addresses:
- address: {{ NodeIP | Quote }}
  type: InternalIP
- address: {{ .metadata.name | Quote }}
  type: Hostname
nodeInfo:
  architecture: amd64
  bootID: ""
  containerRuntimeVersion: {{ printf "kwok-%s" Version }}
  kernelVersion: {{ printf "kwok-%s" Version }}
  kubeProxyVersion: ""
  kubeletVersion: {{ printf "kwok-%s" Version }}
  machineID: ""
  operatingSystem: linux
  osImage: ""
  systemUUID: ""
phase: Running
"""

_READY_STATUS = '.status.conditions.[] | select(.type == "Ready") | .status'


def stages_file(parallel: int = 8) -> str:
    """The file for kwok's --config.  parallel: pods whose status is written at one time."""
    deleted, alive = _exists(".metadata.deletionTimestamp"), _absent(".metadata.deletionTimestamp")
    started, not_started = _exists(".status.podIP"), _absent(".status.podIP")
    unfinished = _none_of(".status.phase", "Succeeded", "Failed")
    free = _absent(_label(STUCK))
    grace = ".metadata.deletionGracePeriodSeconds"
    documents = [
        {
            "apiVersion": "config.kwok.x-k8s.io/v1alpha1",
            "kind": "KwokConfiguration",
            "metadata": {"name": "kwok"},
            "options": {
                "podPlayStageParallelism": parallel,
                "nodePlayStageParallelism": parallel,
                "nodeLeaseParallelism": parallel,
            },
        },
        _stage(
            "node-ready",
            "Node",
            [_none_of(_READY_STATUS, "True"), _absent(_label(DOWN))],
            {"statusTemplate": _NODE},
        ),
        _stage("pod-refused", "Pod", [alive, not_started, unfinished, _exists(_note(REFUSE))], _status(_REFUSED)),
        _stage(
            "pod-running",
            "Pod",
            [alive, not_started, unfinished, _absent(_note(REFUSE))],
            _status(_RUNNING),
            delay=_seconds(_note(START_S)),
        ),
        _stage(
            "pod-ready",
            "Pod",
            [alive, started, unfinished, _exists(_note(READY_S)), _none_of(_READY_STATUS, "True")],
            _status(_READY),
            delay=_seconds(_note(READY_S)),
        ),
        _stage(
            "pod-ended",
            "Pod",
            [alive, unfinished, _exists(_note(END_S)), _one_of(_READY_STATUS, "True")],
            _status(_ENDED_ITSELF),
            delay=_seconds(_note(END_S)),
        ),
        _stage(
            "pod-left",
            "Pod",
            [deleted, started, unfinished, free],
            _status(_LEFT),
            # The grace counts from here rather than to deletionTimestamp, which is cut to whole seconds.
            delay=_milliseconds(f'[({_note(FLUSH_S)} // "0" | tonumber), ({grace} // 0)] | min'),
            immediate=True,
        ),
        _stage("pod-gone", "Pod", [deleted, free, _one_of(".status.phase", "Succeeded", "Failed")], {"delete": True}),
        _stage("pod-never-started", "Pod", [deleted, free, not_started, unfinished], {"delete": True}),
    ]
    return yaml.safe_dump_all(documents, sort_keys=False)


def _stage(
    name: str,
    kind: str,
    expressions: list[dict[str, Any]],
    next_: dict[str, Any],
    *,
    delay: dict[str, Any] | None = None,
    immediate: bool = False,
) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "resourceRef": {"apiGroup": "v1", "kind": kind},
        "selector": {"matchExpressions": expressions},
        "next": next_,
    }
    if delay is not None:
        spec["delay"] = delay
    if immediate:
        spec["immediateNextStage"] = True
    return {"apiVersion": "kwok.x-k8s.io/v1alpha1", "kind": "Stage", "metadata": {"name": name}, "spec": spec}


def _status(template: str) -> dict[str, Any]:
    return {"statusTemplate": template}


def _note(annotation: str) -> str:
    return f'.metadata.annotations["{annotation}"]'


def _label(label: str) -> str:
    return f'.metadata.labels["{label}"]'


def _exists(key: str) -> dict[str, Any]:
    return {"key": key, "operator": "Exists"}


def _absent(key: str) -> dict[str, Any]:
    return {"key": key, "operator": "DoesNotExist"}


def _one_of(key: str, *values: str) -> dict[str, Any]:
    return {"key": key, "operator": "In", "values": list(values)}


def _none_of(key: str, *values: str) -> dict[str, Any]:
    return {"key": key, "operator": "NotIn", "values": list(values)}


def _seconds(key: str) -> dict[str, Any]:
    return _milliseconds(f'{key} // "0" | tonumber')


def _milliseconds(seconds: str) -> dict[str, Any]:
    # As whole milliseconds, since Go reads no duration with an exponent.
    return {"durationMilliseconds": 0, "durationFrom": {"expressionFrom": f'{seconds} | . * 1000 | floor | "\\(.)ms"'}}
