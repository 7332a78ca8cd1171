"""kopf on a real API server: it hears of our resources, answers probes, and leaves no trace."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from slackwater_controlplane.client import Admin
from slackwater_controlplane.cluster import ControlPlane
from slackwater_operator.kube.connection import Connection
from slackwater_operator.operate.intake import Intake
from slackwater_operator.resources import names
from slackwater_operator.testing.processes import free_port, wait_until
from slackwater_operator.testing.resources import a_service

pytestmark = pytest.mark.controlplane

CRDS = Path(__file__).parents[2] / "manifests" / "crd"


class Probe:
    """An intake of the test's own, and what it heard."""

    def __init__(self, plane: ControlPlane) -> None:
        self.heard: list[tuple[str, str, str]] = []
        self.sick = ""
        self.port = free_port()
        connection = Connection.from_kubeconfig(plane.kubeconfig())
        self.intake = Intake(connection, "127.0.0.1", self.port, self._hear, lambda: self.sick)

    def _hear(self, kind: str, change: str, obj: object) -> None:
        assert isinstance(obj, dict)
        self.heard.append((kind, change, obj["metadata"]["name"]))

    def health(self) -> tuple[int, str]:
        try:
            answer = httpx.get(f"http://127.0.0.1:{self.port}/healthz", trust_env=False, timeout=15)
        except httpx.HTTPError:
            return 0, ""
        return answer.status_code, answer.text


@pytest.fixture
def probe(control_plane: ControlPlane) -> Iterator[Probe]:
    control_plane.admin.apply_file(*sorted(CRDS.glob("*s.yaml")))
    control_plane.admin.wait_established(*(kind.crd for kind in names.KINDS))
    made = Probe(control_plane)
    made.intake.start()
    yield made
    made.intake.stop()


def test_hears_of_our_kinds_at_once(probe: Probe, kube_admin: Admin, namespace: str) -> None:
    wait_until(lambda: probe.health()[0] == 200)
    time.sleep(1.0)  # its watches are open

    kube_admin.create(a_service("heard", namespace))

    took_s = wait_until(lambda: (names.INFERENCE_DEPLOYMENT.kind, "ADDED", "heard") in probe.heard)
    assert took_s < 2.0
    found = kube_admin.get("inferencedeployments.slackwater.dev", "heard", namespace)
    assert not found["metadata"].get("finalizers")
    assert not found["metadata"].get("annotations")


def test_the_probe_fails_while_the_process_is_not_well(probe: Probe) -> None:
    wait_until(lambda: probe.health()[0] == 200)

    probe.sick = "no event or bookmark of pods for 95 s"

    wait_until(lambda: probe.health()[0] == 500, timeout_s=20)


def test_ends_within_a_second_or_two(probe: Probe) -> None:
    wait_until(lambda: probe.health()[0] == 200)
    before_s = time.monotonic()

    probe.intake.stop()

    assert time.monotonic() - before_s < 4.0
    assert not [thread for thread in threading.enumerate() if thread.name == "intake"]
