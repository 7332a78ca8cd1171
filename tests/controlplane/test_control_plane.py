"""The control plane as a whole: it starts, obeys its access rules, logs who asks, and stands its servers' crashes."""

import ipaddress
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slackwater_controlplane import fixtures, leftovers
from slackwater_controlplane.build import Programs, cache_folder
from slackwater_controlplane.client import Admin, ApiError
from slackwater_controlplane.cluster import ControlPlane
from slackwater_controlplane.errors import ControlPlaneError, PortInUse, StartError
from slackwater_controlplane.flags import API_SERVER, CONTROLLERS, ETCD, SCHEDULER, SERVERS, Settings
from slackwater_controlplane.leftovers import Record


@pytest.fixture(scope="module")
def crashing(controlplane_programs: Programs, control_plane: ControlPlane) -> Iterator[ControlPlane]:
    """A control plane whose servers the tests of this file may kill; the shared one has told whether it can be had."""
    with fixtures.new_control_plane(controlplane_programs, cache_folder(os.environ)) as cluster:
        yield cluster


def config_map(name: str, namespace: str, **data: str) -> dict[str, object]:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "namespace": namespace}, "data": data}


def test_starts_and_says_how_long_it_took(control_plane: ControlPlane, capsys: pytest.CaptureFixture[str]) -> None:
    took = control_plane.started_in_s

    with capsys.disabled():
        parts = ", ".join(f"{name} {took[name]:.1f}" for name in SERVERS)
        sys.stdout.write(f"\ncontrol plane ready in {took['all']:.1f} s: {parts}\n")

    assert all(control_plane.is_ready(name) for name in SERVERS)


def test_is_the_version_that_was_built(kube_admin: Admin) -> None:
    version = kube_admin.raw("GET", "/version").json()

    assert version["gitVersion"] == "v1.36.3"


def test_listens_on_loopback_alone(control_plane: ControlPlane) -> None:
    listening = subprocess.run(["ss", "-Hltnp"], capture_output=True, text=True, check=True).stdout.splitlines()

    ours = [line.split()[3] for line in listening if any(f"pid={control_plane.pid(one)}," in line for one in SERVERS)]

    assert len(ours) == 5
    assert all(ipaddress.ip_address(address.rpartition(":")[0].strip("[]")).is_loopback for address in ours)


def test_kubectl_works_with_the_kubeconfig(control_plane: ControlPlane) -> None:
    kubectl = [control_plane.programs.path("kubectl"), "--kubeconfig", control_plane.kubeconfig()]

    names = subprocess.check_output([*kubectl, "get", "namespaces", "-o", "name"], text=True).split()

    assert "namespace/kube-system" in names


def test_controllers_and_scheduler_work(kube_admin: Admin, namespace: str) -> None:
    pod = {"metadata": {"labels": {"app": "web"}}, "spec": {"containers": [{"name": "web", "image": "none"}]}}
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "web", "namespace": namespace},
        "spec": {"replicas": 2, "selector": {"matchLabels": {"app": "web"}}, "template": pod},
    }

    kube_admin.create(deployment)
    kube_admin.wait_for("deployments.apps", "web", lambda it: it["status"].get("replicas") == 2, namespace)

    for pod in kube_admin.list("pods", namespace):
        name = pod["metadata"]["name"]
        unbound = kube_admin.wait_for("pods", name, lambda it: bool(it["status"].get("conditions")), namespace)
        assert unbound["status"]["conditions"][0]["reason"] == "Unschedulable"


def test_a_user_may_nothing_until_a_role_says_so(control_plane: ControlPlane, namespace: str) -> None:
    admin = control_plane.admin
    with Admin(control_plane.kubeconfig("jane", ["readers"])) as jane:
        with pytest.raises(ApiError, match=rf'403 Forbidden: pods is forbidden: User "jane" .* "{namespace}"'):
            jane.list("pods", namespace)

        meta = {"name": "read-pods", "namespace": namespace}
        rule = {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}
        role = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": meta, "rules": [rule]}
        group = {"kind": "Group", "name": "readers", "apiGroup": "rbac.authorization.k8s.io"}
        reference = {"kind": "Role", "name": "read-pods", "apiGroup": "rbac.authorization.k8s.io"}
        admin.create(role)
        admin.create(role | {"kind": "RoleBinding", "rules": None, "subjects": [group], "roleRef": reference})

        wait_until(lambda: allowed(jane, namespace))
        with pytest.raises(ApiError, match="403 Forbidden"):
            jane.list("pods", "default")


def test_a_node_may_write_its_own_status_alone(control_plane: ControlPlane, namespace: str) -> None:
    admin = control_plane.admin
    for name in ("own", "other"):
        admin.create({"apiVersion": "v1", "kind": "Node", "metadata": {"name": f"{namespace}-{name}"}})
    status = {"status": {"allocatable": {"nvidia.com/gpu": "1"}, "capacity": {"nvidia.com/gpu": "1"}}}

    with Admin(control_plane.kubeconfig(f"system:node:{namespace}-own", ["system:nodes"])) as kubelet:
        wait_until(lambda: kubelet.find("nodes", f"{namespace}-own") is not None)
        kubelet.patch("nodes", f"{namespace}-own", status, subresource="status")
        with pytest.raises(ApiError, match="403 Forbidden"):
            kubelet.patch("nodes", f"{namespace}-other", status, subresource="status")

    for name in ("own", "other"):
        admin.delete("nodes", f"{namespace}-{name}")


def test_a_stranger_is_unauthorized(control_plane: ControlPlane) -> None:
    answer = control_plane.place.get(f"{control_plane.url}/api/v1/pods", str(control_plane.ca_file))

    assert answer is not None
    assert answer[0] in (401, 403)


def test_pods_get_a_service_account(control_plane: ControlPlane, namespace: str) -> None:
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one", "namespace": namespace}}

    made = control_plane.admin.create(pod | {"spec": {"containers": [{"name": "one", "image": "none"}]}})

    assert made["spec"]["serviceAccountName"] == "default"
    assert any("projected" in volume for volume in made["spec"]["volumes"])


def test_the_audit_log_tells_who_asked_for_what(control_plane: ControlPlane, namespace: str) -> None:
    since, begun_s = control_plane.audit_position(), time.time()
    with Admin(control_plane.kubeconfig("counted", ["system:masters"])) as user:
        user.create(config_map("one", namespace))
        user.apply(config_map("two", namespace, key="value"))
        user.delete("configmaps", "one", namespace)
        with pytest.raises(ApiError):
            user.get("configmaps", "three", namespace)

        wait_until(lambda: len([one for one in control_plane.audit(since) if one.name == "three"]) == 1)

    events = [one for one in control_plane.audit(since) if one.user == "counted" and one.resource]
    assert [(one.verb, one.resource, one.name, one.code) for one in events] == [
        ("create", "configmaps", "one", 201),
        ("patch", "configmaps", "two", 201),
        ("delete", "configmaps", "one", 200),
        ("get", "configmaps", "three", 404),
    ]
    assert all(one.namespace == namespace and one.user_agent == "slackwater-tests" for one in events)
    assert all(begun_s - 1 <= one.received_s <= one.answered_s <= time.time() + 1 for one in events)


def test_the_client_reads_and_writes_as_kubectl_does(kube_admin: Admin, namespace: str) -> None:
    kube_admin.apply(config_map("one", namespace, a="1"))
    kube_admin.patch("configmaps", "one", {"data": {"b": "2"}}, namespace)
    found = kube_admin.get("configmaps", "one", namespace)
    with pytest.raises(ApiError) as conflict:
        kube_admin.replace(found | {"metadata": found["metadata"] | {"resourceVersion": "1"}})

    assert found["data"] == {"a": "1", "b": "2"}
    assert conflict.value.reason == "Conflict"
    assert kube_admin.find("configmaps", "none", namespace) is None
    assert kube_admin.list("configmaps", namespace, fields="metadata.name=one")[0]["kind"] == "ConfigMap"
    with pytest.raises(ControlPlaneError, match="no resource 'reclaims'"):
        kube_admin.list("reclaims")
    with pytest.raises(ControlPlaneError, match=r"not as expected after 0\.1 s"):
        kube_admin.wait_for("configmaps", "one", lambda it: "c" in it["data"], namespace, timeout_s=0.1)


def test_stands_the_crash_of_every_server(crashing: ControlPlane) -> None:
    crashing.admin.create(config_map("kept", "default", key="value"))

    for name in (SCHEDULER, CONTROLLERS, API_SERVER, ETCD):
        before = crashing.pid(name)
        crashing.kill(name)
        assert not crashing.is_ready(name)
        crashing.start_server(name)
        assert crashing.pid(name) not in (None, before)
    wait_until(lambda: crashing.is_ready(API_SERVER))

    assert crashing.admin.get("configmaps", "kept")["data"] == {"key": "value"}


def test_etcd_is_started_once_more_when_it_ends_at_its_start(
    crashing: ControlPlane, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real, killed = crashing.is_ready, []

    def is_ready(name: str) -> bool:
        if name == ETCD and not killed and (pid := crashing.pid(ETCD)) is not None:
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)
            return False
        return real(name)

    crashing.kill(ETCD)
    monkeypatch.setattr(crashing, "is_ready", is_ready)  # the moment of the crash
    crashing.start_server(ETCD)

    assert crashing.pid(ETCD) not in (None, *killed)
    assert "etcd ended at its start and is started once more" in caplog.text


def test_a_paused_server_answers_nothing_until_it_is_resumed(crashing: ControlPlane) -> None:
    crashing.pause(SCHEDULER)
    paused = crashing.is_ready(SCHEDULER)
    crashing.resume(SCHEDULER)

    assert not paused
    wait_until(lambda: crashing.is_ready(SCHEDULER))


def test_refuses_a_port_on_which_somebody_listens(
    control_plane: ControlPlane, controlplane_programs: Programs, tmp_path: Path
) -> None:
    """An older cluster there would answer in the new one's place."""
    record = Record.create(tmp_path / "runs", tmp_path / "cluster")
    other = ControlPlane(tmp_path / "cluster", controlplane_programs, record)
    with socket.create_server((control_plane.place.address, 0)) as taken:
        port = taken.getsockname()[1]
        free = other.place.free_ports
        other.place.free_ports = lambda count: [port, *free(count - 1)]  # type: ignore[method-assign]  # a race, forced

        with pytest.raises(PortInUse, match=rf"etcd needs port {port} of 127\.0\.0\.1, and somebody listens there"):
            other.start()

    assert record.processes == []


def test_a_server_that_ends_at_its_start_is_said_with_its_last_words(
    controlplane_programs: Programs, control_plane: ControlPlane, tmp_path: Path
) -> None:
    settings = Settings(extra={API_SERVER: ("--no-such-flag",)})
    with leftovers.run_folder(tmp_path) as record:
        broken = ControlPlane(record.folder, controlplane_programs, record, settings=settings)

        with pytest.raises(StartError, match=r"kube-apiserver ended with 1 .*\n.*unknown flag: --no-such-flag"):
            broken.start()

        assert [process for _, process in record.processes if process.is_alive] == []


def test_audit_lines_count_by_verb(control_plane: ControlPlane) -> None:
    verbs = Counter(one.verb for one in control_plane.audit())

    assert {"create", "list", "watch"} <= set(verbs)


def allowed(user: Admin, namespace: str) -> bool:
    try:
        user.list("pods", namespace)
    except ApiError as error:
        if error.code != 403:
            raise
        return False
    return True


def wait_until(is_so: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline_s, "not so in time"
        time.sleep(0.02)
