"""The servers' command lines and the audit log's lines: pure text."""

import json
from pathlib import Path

import pytest

from slackwater_controlplane import audit, flags
from slackwater_controlplane.certs import Pair
from slackwater_controlplane.flags import API_SERVER, CONTROLLERS, SCHEDULER, Files, Ports, Settings

PORTS = Ports(etcd=1, etcd_peer=2, api=3, controllers=4, scheduler=5)
PAIR = Pair(Path("/pki/one.crt"), Path("/pki/one.key"))
FILES = Files(
    folder=Path("/cluster"),
    ca=Path("/pki/ca.crt"),
    serving=PAIR,
    components=PAIR,
    accounts=PAIR,
    kubelet_client=PAIR,
    front_proxy=PAIR,
    controllers=Path("/kubeconfig/controllers"),
    scheduler=Path("/kubeconfig/scheduler"),
    audit_policy=Path("/policy"),
    audit_log=Path("/log"),
)


def test_the_kubernetes_service_has_no_endpoint_on_loopback_alone() -> None:
    """The API server would refuse its own address there; pods of real nodes need it."""
    here = flags.api_server("127.0.0.1", PORTS, FILES, Settings())
    elsewhere = flags.api_server("198.18.0.1", PORTS, FILES, Settings())

    assert "--endpoint-reconciler-type=none" in here
    assert not any(flag.startswith("--endpoint-reconciler-type") for flag in elsewhere)
    assert "--advertise-address=198.18.0.1" in elsewhere


def test_everything_listens_on_the_one_address() -> None:
    settings = Settings()

    for make in (flags.api_server, flags.controller_manager, flags.scheduler):
        assert "--bind-address=198.18.0.1" in make("198.18.0.1", PORTS, FILES, settings)
    assert all("://127.0.0.1:" in flag for flag in flags.etcd(PORTS, FILES) if "-urls=" in flag)


def test_a_tests_own_flags_come_last_and_win() -> None:
    extra = {name: (f"--v=9 of {name}",) for name in (API_SERVER, CONTROLLERS, SCHEDULER)}
    settings = Settings(extra=extra)

    for name, make in (
        (API_SERVER, flags.api_server),
        (CONTROLLERS, flags.controller_manager),
        (SCHEDULER, flags.scheduler),
    ):
        assert make("127.0.0.1", PORTS, FILES, settings)[-1] == f"--v=9 of {name}"


def test_clients_may_ask_as_often_as_a_load_test_needs() -> None:
    line = flags.scheduler("127.0.0.1", PORTS, FILES, Settings(qps=2000))

    assert {"--kube-api-qps=2000", "--kube-api-burst=4000"} <= set(line)


@pytest.mark.parametrize(("service_range", "first"), [("10.96.0.0/16", "10.96.0.1"), ("192.168.4.0/24", "192.168.4.1")])
def test_pods_find_the_api_server_at_the_first_service_address(service_range: str, first: str) -> None:
    assert Settings(service_range=service_range).service_address == first


def line(name: str) -> bytes:
    event = {
        "stage": "ResponseComplete",
        "verb": "patch",
        "user": {"username": "system:serviceaccount:slackwater-system:slackwater-operator"},
        "userAgent": "slackwater/operator",
        "requestURI": "/api/v1/namespaces/a/pods/b/status",
        "objectRef": {"resource": "pods", "subresource": "status", "namespace": "a", "name": name, "apiVersion": "v1"},
        "responseStatus": {"code": 200},
        "requestReceivedTimestamp": "2026-11-30T08:00:00.250000Z",
        "stageTimestamp": "2026-11-30T08:00:00.750000Z",
    }
    return json.dumps(event).encode() + b"\n"


def test_an_audit_line_is_read(tmp_path: Path) -> None:
    log = tmp_path / "audit.log"
    log.write_bytes(line("b"))

    (event,) = audit.read(log)

    assert (event.verb, event.resource, event.subresource, event.namespace, event.name, event.code) == (
        *("patch", "pods", "status", "a", "b"),
        200,
    )
    assert event.duration_s == pytest.approx(0.5)
    assert event.received_s == pytest.approx(1796025600.25)


def test_a_line_that_is_being_written_is_left_for_the_next_time(tmp_path: Path) -> None:
    log = tmp_path / "audit.log"
    log.write_bytes(line("one") + line("two")[:40])

    first = [event.name for event in audit.read(log)]
    log.write_bytes(line("one") + line("two"))
    second = [event.name for event in audit.read(log, len(line("one")))]

    assert (first, second) == (["one"], ["two"])


def test_a_log_that_is_not_there_yet_has_no_events(tmp_path: Path) -> None:
    assert list(audit.read(tmp_path / "audit.log")) == []
