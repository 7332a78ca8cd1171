"""What `kubectl apply -k` would send: names, labels, security, priorities, without a cluster."""

from pathlib import Path
from typing import Any

import pytest

from slackwater_manifests import kustomize
from slackwater_manifests.kustomize import Object
from slackwater_operator.resources import names

MANIFESTS = Path(__file__).parents[2] / "manifests"
DEFAULT = kustomize.render(MANIFESTS / "overlays/default")
ALL = [*DEFAULT, *kustomize.render(MANIFESTS / "monitoring")]
NAMESPACES = {"slackwater-system", "slackwater-inference", "slackwater-workers"}
CLUSTER_WIDE = {
    "ClusterRole",
    "ClusterRoleBinding",
    "CustomResourceDefinition",
    "Namespace",
    "PriorityClass",
    "ValidatingAdmissionPolicy",
    "ValidatingAdmissionPolicyBinding",
}


def of(kind: str, objects: list[Object] = DEFAULT) -> dict[str, Object]:
    return {thing["metadata"]["name"]: thing for thing in objects if thing["kind"] == kind}


def name_of(thing: Object) -> str:
    return f"{thing['kind']}/{thing['metadata'].get('namespace', '')}/{thing['metadata']['name']}"


def operator_pod() -> Object:
    pod: Object = of("Deployment")["slackwater-operator"]["spec"]["template"]["spec"]
    return pod


def test_no_object_is_there_twice() -> None:
    names_seen = [name_of(thing) for thing in ALL]

    assert len(names_seen) == len(set(names_seen))


@pytest.mark.parametrize("thing", ALL, ids=name_of)
def test_an_object_says_whose_it_is_and_where_it_stands(thing: Object) -> None:
    metadata = thing["metadata"]

    if thing["kind"] != "CustomResourceDefinition":
        assert metadata["labels"]["app.kubernetes.io/part-of"] == "slackwater"
    assert ("namespace" in metadata) == (thing["kind"] not in CLUSTER_WIDE)
    assert metadata.get("namespace", "slackwater-system") in NAMESPACES


@pytest.mark.parametrize("name", sorted(NAMESPACES))
def test_a_namespace_admits_restricted_pods_only(name: str) -> None:
    labels = of("Namespace")[name]["metadata"]["labels"]

    assert {labels[f"pod-security.kubernetes.io/{mode}"] for mode in ("enforce", "audit", "warn")} == {"restricted"}


def test_the_default_needs_no_kinds_but_kubernetes_own() -> None:
    foreign = {
        thing["apiVersion"] for thing in DEFAULT if "coreos" in thing["apiVersion"] or "gateway." in thing["apiVersion"]
    }

    assert not foreign


def test_the_operator_meets_the_restricted_profile() -> None:
    pod = operator_pod()
    [container] = pod["containers"]
    security = container["securityContext"]

    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert security["allowPrivilegeEscalation"] is False
    assert security["readOnlyRootFilesystem"] is True
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert {next(iter(volume.keys() - {"name"})) for volume in pod["volumes"]} == {"emptyDir"}


def test_two_operators_stand_apart_and_one_always_stays() -> None:
    deployment = of("Deployment")["slackwater-operator"]["spec"]
    budget = of("PodDisruptionBudget")["slackwater-operator"]["spec"]
    [term] = deployment["template"]["spec"]["affinity"]["podAntiAffinity"][
        "preferredDuringSchedulingIgnoredDuringExecution"
    ]

    assert deployment["replicas"] == 2
    assert budget["minAvailable"] == 1
    assert term["podAffinityTerm"]["topologyKey"] == "kubernetes.io/hostname"
    for selector in (budget["selector"], deployment["selector"], term["podAffinityTerm"]["labelSelector"]):
        assert selector["matchLabels"].items() <= deployment["template"]["metadata"]["labels"].items()


def test_probes_and_metrics_have_ports_of_their_own() -> None:
    [container] = operator_pod()["containers"]

    assert {port["name"]: port["containerPort"] for port in container["ports"]} == {"metrics": 8080, "probes": 8081}
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"]["port"] == "probes"
    [port] = of("Service")["slackwater-operator-metrics"]["spec"]["ports"]
    assert port["targetPort"] == "metrics"


def test_an_image_is_named_with_its_version() -> None:
    [container] = operator_pod()["containers"]

    assert container["image"].startswith("slackwater/operator:")
    assert not container["image"].endswith(":latest")


def test_priorities_stand_in_the_order_of_the_policy_and_only_training_preempts() -> None:
    classes = of("PriorityClass")

    assert {name: (thing["value"], thing.get("preemptionPolicy") != "Never") for name, thing in classes.items()} == {
        priority.name: (priority.value, priority.preempts) for priority in names.PRIORITIES
    }
    assert not any(thing.get("globalDefault") for thing in classes.values())


@pytest.mark.parametrize("namespace", sorted(NAMESPACES))
def test_a_namespace_denies_all_traffic_that_no_policy_allows(namespace: str) -> None:
    policies = [thing for thing in DEFAULT if name_of(thing) == f"NetworkPolicy/{namespace}/default-deny"]

    [policy] = policies
    assert policy["spec"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}


def ports_of(rules: list[Any]) -> set[tuple[str, int]]:
    return {(port["protocol"], port["port"]) for rule in rules for port in rule.get("ports", ())}


def test_the_operator_reaches_the_api_server_dns_gateways_and_keepers_and_nothing_else() -> None:
    policy = of("NetworkPolicy")["slackwater-operator"]["spec"]

    assert ports_of(policy["egress"]) == {("TCP", 443), ("TCP", 6443), ("UDP", 53), ("TCP", 53), ("TCP", 9090)}
    assert ports_of(policy["ingress"]) == {("TCP", 8080)}
    [control] = [rule for rule in policy["egress"] if ports_of([rule]) == {("TCP", 9090)}]
    [expression] = control["to"][0]["podSelector"]["matchExpressions"]
    assert expression == {"key": names.LABEL_KIND, "operator": "In", "values": ["gateway", "keeper"]}


@pytest.mark.parametrize("name", ["gateways", "keepers"])
def test_only_the_operator_and_a_scraper_reach_a_control_port(name: str) -> None:
    policy = of("NetworkPolicy")[name]["spec"]
    [rule] = [rule for rule in policy["ingress"] if ports_of([rule]) == {("TCP", 9090)}]

    operator, scraper = rule["from"]
    assert operator["podSelector"]["matchLabels"] == {"app.kubernetes.io/name": "slackwater-operator"}
    assert operator["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "slackwater-system"}
    assert scraper == {"namespaceSelector": {"matchLabels": {"slackwater.dev/metrics": "scraped"}}}


def test_an_eviction_never_goes_below_the_floor_of_a_service() -> None:
    budget = of("PodDisruptionBudget")["slackwater-replicas"]["spec"]

    assert budget["minAvailable"] == "100%"  # of the scale subresource, which is spec.minReplicas
    assert budget["selector"]["matchLabels"] == {
        names.LABEL_MANAGED_BY: names.MANAGED_BY,
        names.LABEL_KIND: "inference",
    }
    assert budget["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_no_budget_protects_cleaning_whose_protection_is_its_checkpoint() -> None:
    selectors = [thing["spec"]["selector"]["matchLabels"] for thing in of("PodDisruptionBudget").values()]

    assert "cleaning" not in {labels.get(names.LABEL_KIND) for labels in selectors}


def test_the_test_overlay_pulls_nothing() -> None:
    deployment = of("Deployment", kustomize.render(MANIFESTS / "overlays/test"))["slackwater-operator"]

    [container] = deployment["spec"]["template"]["spec"]["containers"]
    assert container["imagePullPolicy"] == "Never"


def test_the_admission_policy_can_stop_nothing_but_a_reclaim() -> None:
    policy = of("ValidatingAdmissionPolicy")["reclaims.slackwater.dev"]["spec"]
    [binding] = of("ValidatingAdmissionPolicyBinding").values()

    [rule] = policy["matchConstraints"]["resourceRules"]
    assert (rule["apiGroups"], rule["resources"]) == (["slackwater.dev"], ["reclaims"])
    assert binding["spec"] == {"policyName": "reclaims.slackwater.dev", "validationActions": ["Deny"]}


def test_a_kustomization_field_that_is_not_understood_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kustomization.yaml").write_text("resources: []\nnamePrefix: x-\n")

    with pytest.raises(ValueError, match="namePrefix is not understood here"):
        kustomize.render(tmp_path)


def test_a_quota_admits_the_operators_priority_where_a_cluster_asks_for_one() -> None:
    quota = of("ResourceQuota")["critical-pods"]["spec"]

    [expression] = quota["scopeSelector"]["matchExpressions"]
    assert expression["values"] == [operator_pod()["priorityClassName"]]
    assert int(quota["hard"]["pods"]) > 2 * of("Deployment")["slackwater-operator"]["spec"]["replicas"]  # while rolling
