"""The Helm chart, made from what the kustomizations render.

Owns which of their fields become values.  Everything else is theirs word for word: to change the chart, change the
kustomization, or `values`.  The release's namespace is the operator's; the chart does not make it.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from slackwater_manifests import kustomize, values
from slackwater_manifests.kustomize import Object

HEAD = "# Written by `make manifests` from manifests/{source}.\n"
SYSTEM = "slackwater-system"
NOTES = """\
Next: tell the operator which GPUs there are, and what may run on them.

  kubectl label namespace {{ .Release.Namespace }} pod-security.kubernetes.io/enforce=restricted
  kubectl apply -f flavors.yaml -f pools.yaml     # manifests/samples/kubernetes has examples
  kubectl get gpu

Services in: {{ .Values.namespaces.inference | toJson }}   cleaning in: {{ .Values.namespaces.workers | toJson }}
"""
DEPLOYMENT = "slackwater-operator"
EXPRESSIONS = {
    " XX-RELEASE-NAMESPACE": " {{ $.Release.Namespace | quote }}",
    " XX-ROOM": " {{ . | quote }}",
    " XX-IMAGE": ' "{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}"',
    " XX-PULL-POLICY": " {{ .Values.image.pullPolicy }}",
    " XX-REPLICAS": " {{ .Values.replicas }}",
    " XX-RESOURCES": "{{- toYaml .Values.resources | nindent 12 }}",
    " XX-PULL-SECRETS": "{{- toYaml .Values.imagePullSecrets | nindent 8 }}",
    " XX-DASHBOARD": ' |-\n    {{- .Files.Get "files/dashboard.json" | nindent 4 }}',
    " XX-RULES": '{{- .Files.Get "files/rules.yaml" | nindent 2 }}',
}
"""What stands in an object's dump -> what stands in the template; nindent begins a line of its own."""


def files(manifests: Path, version: str) -> dict[str, str]:
    """Path below chart/ -> text."""
    operator = kustomize.render(manifests / "operator")
    monitoring = manifests / "monitoring"
    return {
        "Chart.yaml": _chart(version),
        "values.yaml": values.text(defaults(operator)),
        "values.schema.json": _schema(),
        "files/dashboard.json": (monitoring / "dashboard.json").read_text(),
        "files/rules.yaml": (monitoring / "rules.yaml").read_text(),
        "templates/NOTES.txt": NOTES,
        "templates/crds.yaml": _when(".Values.crds.install", "crd", _dump(_kept(kustomize.render(manifests / "crd")))),
        "templates/operator.yaml": HEAD.format(source="operator") + _operator(operator),
        "templates/inference.yaml": _rooms("inference", kustomize.render(manifests / "inference")),
        "templates/workers.yaml": _rooms("workers", kustomize.render(manifests / "workers")),
        "templates/monitoring.yaml": _when(
            ".Values.monitoring.enabled", "monitoring", _monitoring(kustomize.render(monitoring))
        ),
    }


def defaults(operator: list[Object]) -> values.Values:
    """The values that give what the kustomization gives."""
    [container] = _deployment(operator)["spec"]["template"]["spec"]["containers"]
    repository, _, _ = str(container["image"]).partition(":")
    return values.Values(
        image=values.Image(repository=repository),
        replicas=_deployment(operator)["spec"]["replicas"],
        resources=container["resources"],
    )


def _chart(version: str) -> str:
    return "# Written by `make manifests`.\n" + yaml.safe_dump(
        {
            "apiVersion": "v2",
            "name": "slackwater",
            "description": "Text-to-speech and training first on a GPU fleet, cleaning in every other GPU second",
            "type": "application",
            "version": version,
            "appVersion": version,
            "kubeVersion": ">=1.30.0-0",  # ValidatingAdmissionPolicy v1
        },
        sort_keys=False,
        width=1000,
    )


def _schema() -> str:
    schema = values.Values.model_json_schema(by_alias=True)
    return json.dumps({"$schema": "http://json-schema.org/draft-07/schema#"} | schema, indent=2) + "\n"


def _deployment(operator: list[Object]) -> Object:
    [found] = [one for one in operator if one["kind"] == "Deployment" and one["metadata"]["name"] == DEPLOYMENT]
    return found


def _operator(objects: list[Object]) -> str:
    deployment = _deployment(objects)["spec"]
    deployment["replicas"] = "XX-REPLICAS"
    pod = deployment["template"]["spec"]
    [container] = pod["containers"]
    container |= {"image": "XX-IMAGE", "imagePullPolicy": "XX-PULL-POLICY", "resources": "XX-RESOURCES"}
    pod["imagePullSecrets"] = "XX-PULL-SECRETS"
    return _dump([one for one in objects if one["kind"] != "Namespace"])


def _kept(objects: list[Object]) -> list[Object]:
    """They outlive the release: with them would go what people have made."""
    for one in objects:
        one["metadata"].setdefault("annotations", {})["helm.sh/resource-policy"] = "keep"
    return objects


def _monitoring(objects: list[Object]) -> str:
    for one in objects:
        if one["kind"] == "ConfigMap":
            one["data"] = {"dashboard.json": "XX-DASHBOARD"}
        if one["kind"] == "PrometheusRule":
            one["spec"] = "XX-RULES"
    return _dump(objects)


def _rooms(room: str, objects: list[Object]) -> str:
    namespaces = [one for one in objects if one["kind"] == "Namespace"]
    rest = [one for one in objects if one["kind"] != "Namespace"]
    name = f"slackwater-{room}"
    return (
        HEAD.format(source=room)
        + f"{{{{- range .Values.namespaces.{room} }}}}\n"
        + "{{- if $.Values.namespaces.create }}\n"
        + _dump(_kept(namespaces), room=name)
        + "{{- end }}\n"
        + _dump(rest, room=name)
        + "{{- end }}\n"
    )


def _when(value: str, source: str, body: str) -> str:
    return HEAD.format(source=source) + f"{{{{- if {value} }}}}\n{body}{{{{- end }}}}\n"


def _dump(objects: list[Object], room: str | None = None) -> str:
    tokens = {SYSTEM: "XX-RELEASE-NAMESPACE"} | ({room: "XX-ROOM"} if room else {})
    documents = []
    for one in objects:
        text = yaml.safe_dump(_replaced(one, tokens.get), sort_keys=False, width=1000, allow_unicode=True)
        text = text.replace("{{", '{{ "{{" }}')
        for token, expression in EXPRESSIONS.items():
            text = text.replace(token, expression)
        documents.append(f"---\n{text}")
    return "".join(documents)


def _replaced(node: Any, token: Callable[[str], str | None]) -> Any:
    if isinstance(node, dict):
        return {key: _replaced(value, token) for key, value in node.items()}
    if isinstance(node, list):
        return [_replaced(value, token) for value in node]
    return (token(node) or node) if isinstance(node, str) else node
