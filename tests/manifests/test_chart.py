"""The chart gives what the kustomizations give, and its values do what they say."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml

from slackwater_manifests import gotemplate, kustomize
from slackwater_manifests.kustomize import Object

MANIFESTS = Path(__file__).parents[2] / "manifests"
CHART = MANIFESTS / "chart"


def rendered(namespace: str = "slackwater-system", **values: Any) -> dict[tuple[str, str, str], Object]:
    return by_name(gotemplate.render(CHART, values, namespace=namespace))


def by_name(objects: list[Object]) -> dict[tuple[str, str, str], Object]:
    return {
        (thing["kind"], thing["metadata"].get("namespace", ""), thing["metadata"]["name"]): thing for thing in objects
    }


def test_the_default_values_give_what_kustomize_gives() -> None:
    ours = rendered(monitoring={"enabled": True})
    theirs = by_name([*kustomize.render(MANIFESTS / "overlays/default"), *kustomize.render(MANIFESTS / "monitoring")])

    del theirs["Namespace", "", "slackwater-system"]  # the release's namespace is not of the chart
    for thing in ours.values():  # what only Helm needs
        if thing["kind"] in ("CustomResourceDefinition", "Namespace"):
            assert thing["metadata"].get("annotations", {}).pop("helm.sh/resource-policy") == "keep"
            if not thing["metadata"]["annotations"]:
                del thing["metadata"]["annotations"]
        if thing["kind"] == "Deployment":
            pod = thing["spec"]["template"]["spec"]
            assert pod.pop("imagePullSecrets") == []
            assert pod["containers"][0].pop("imagePullPolicy") == "IfNotPresent"
        if thing["kind"] == "ConfigMap":
            thing["data"]["dashboard.json"] += "\n"
    assert ours == theirs


def test_values_reach_the_operator() -> None:
    objects = rendered(
        image={"repository": "registry.example/op", "tag": "7", "pullPolicy": "Always"},
        imagePullSecrets=[{"name": "mine"}],
        replicas=3,
        resources={"limits": {"memory": "2Gi"}},
    )

    deployment = objects["Deployment", "slackwater-system", "slackwater-operator"]["spec"]
    pod = deployment["template"]["spec"]
    [container] = pod["containers"]
    assert deployment["replicas"] == 3
    assert pod["imagePullSecrets"] == [{"name": "mine"}]
    assert (container["image"], container["imagePullPolicy"]) == ("registry.example/op:7", "Always")
    assert container["resources"]["limits"]["memory"] == "2Gi"


def test_the_release_may_stand_in_any_namespace_and_manage_any() -> None:
    objects = rendered("gpu", namespaces={"inference": ["tts-a", "tts-b"], "workers": ["data"]})

    namespaces = {namespace for _, namespace, _ in objects} - {""}
    assert namespaces == {"gpu", "tts-a", "tts-b", "data"}
    assert {name for kind, _, name in objects if kind == "Namespace"} == {"tts-a", "tts-b", "data"}
    [subject] = objects["RoleBinding", "tts-b", "slackwater-operator"]["subjects"]
    assert subject["namespace"] == "gpu"
    assert "slackwater-system" not in yaml.safe_dump(list(objects.values()))


def test_what_people_have_made_outlives_the_release() -> None:
    kept = {
        kind
        for (kind, _, _), thing in rendered().items()
        if thing["metadata"].get("annotations", {}).get("helm.sh/resource-policy") == "keep"
    }

    assert kept == {"CustomResourceDefinition", "Namespace"}


@pytest.mark.parametrize(
    ("values", "kinds"),
    [
        pytest.param({"crds": {"install": False}}, {"CustomResourceDefinition"}, id="no CRDs"),
        pytest.param({"namespaces": {"create": False}}, {"Namespace"}, id="no namespaces"),
        pytest.param({}, {"ServiceMonitor", "PodMonitor", "PrometheusRule", "ConfigMap"}, id="no monitoring"),
    ],
)
def test_what_is_switched_off_is_left_out(values: dict[str, Any], kinds: set[str]) -> None:
    objects = rendered(**values)

    assert not kinds & {kind for kind, _, _ in objects}
    assert ("Deployment", "slackwater-system", "slackwater-operator") in objects


def test_the_schema_accepts_the_values_and_refuses_unknown_ones() -> None:
    schema = jsonschema_rs.validator_for(json.loads((CHART / "values.schema.json").read_text()))
    values = yaml.safe_load((CHART / "values.yaml").read_text())

    assert schema.is_valid(values)
    assert not schema.is_valid(values | {"replica": 2})
    assert not schema.is_valid(values | {"replicas": 0})
    assert not schema.is_valid(values | {"image": {"pullPolicy": "Sometimes"}})


@pytest.mark.parametrize("template", ['{{ include "x" . }}', "{{ .Values.x | upper }}", "{{ end }}"])
def test_a_template_that_is_not_understood_is_refused(tmp_path: Path, template: str) -> None:
    (tmp_path / "templates").mkdir()
    (tmp_path / "templates/a.yaml").write_text(template)
    (tmp_path / "values.yaml").write_text("x: 1\n")
    (tmp_path / "Chart.yaml").write_text("appVersion: 1\n")

    with pytest.raises(ValueError, match=r"not understood|without its"):
        gotemplate.render(tmp_path, {}, namespace="n")


HELM = shutil.which("helm")


@pytest.mark.skipif(HELM is None, reason="no helm here")
@pytest.mark.parametrize(
    ("namespace", "values"),
    [
        pytest.param("slackwater-system", {"monitoring": {"enabled": True}}, id="everything"),
        pytest.param(
            "gpu",
            {
                "namespaces": {"create": False, "inference": ["a", "b"], "workers": []},
                "imagePullSecrets": [{"name": "mine"}],
                "image": {"tag": "7"},
                "crds": {"install": False},
            },
            id="other namespaces",
        ),
    ],
)
def test_helm_renders_what_our_own_reader_renders(tmp_path: Path, namespace: str, values: dict[str, Any]) -> None:
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(values))
    command = [str(HELM), "template", "slackwater", str(CHART), "--namespace", namespace, "--kube-version", "1.36.3"]

    done = subprocess.run(
        [*command, "--values", str(tmp_path / "values.yaml")], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
    theirs = [thing for thing in yaml.load_all(done.stdout, kustomize.LOADER) if thing]
    assert by_name(theirs) == rendered(namespace, **values)
