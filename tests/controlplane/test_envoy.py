"""Speech through a real Envoy Gateway with our manifests: never held back, never cut, refused in the API's words."""

import json
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx
import pytest
import yaml

from slackwater_controlplane.build import Programs
from slackwater_controlplane.client import Admin, Object
from slackwater_controlplane.cluster import ControlPlane
from slackwater_controlplane.envoy import CONTROLLER, MANIFESTS, NAMESPACE, EnvoyGateway, definitions
from slackwater_controlplane.images import Images
from slackwater_controlplane.node.cluster import NodeCluster
from slackwater_controlplane.scripted_replica import LINE_BYTES
from slackwater_controlplane.speech import Speech

SYSTEM, INFERENCE = "slackwater-system", "slackwater-inference"
EVERY_S = 0.3
GATEWAYS = 2
NOTHING = {"chunks": 0, "every_s": 0}


def manifest(name: str) -> Object:
    return dict(yaml.safe_load((MANIFESTS / f"{name}.yaml").read_text()))


@dataclass(frozen=True, slots=True)
class Chunk:
    """When the replica sent a chunk, and when the client saw it."""

    number: int
    sent_s: float
    seen_s: float


class Lines:
    """Chunks out of the pieces in which their bytes come."""

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []
        self._left = b""

    def feed(self, piece: bytes) -> None:
        now_s = time.time()
        self._left += piece
        while len(self._left) >= LINE_BYTES:
            line, self._left = self._left[:LINE_BYTES], self._left[LINE_BYTES:]
            number, sent_s = line.split()
            self.chunks.append(Chunk(int(number), float(sent_s), now_s))


def none_was_held_back(chunks: list[Chunk]) -> bool:
    """Whether each was seen before the next but one was sent: a buffer would pass many at once."""
    return all(one.seen_s < later.sent_s for one, later in zip(chunks, chunks[2:], strict=False))


def play(url: str, chunks: int, lines: Lines | None = None) -> Lines:
    """One POST, to its end."""
    lines = lines or Lines()
    asked = {"chunks": chunks, "every_s": EVERY_S}
    with httpx.stream("POST", f"{url}/v1/tts", json=asked, timeout=30, trust_env=False) as answer:
        assert answer.status_code == 200, answer.read()
        for piece in answer.iter_raw():
            lines.feed(piece)
    return lines


def until(is_so: Callable[[], object], timeout_s: float = 30.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline_s, f"not so after {timeout_s:g} s"
        time.sleep(0.05)


def conditions(status: Object) -> dict[str, str]:
    """Type -> status of all conditions anywhere in an object's status."""
    found: dict[str, str] = {}
    for part in (status, *status.get("parents", []), *status.get("ancestors", [])):
        found |= {one["type"]: one["status"] for one in part.get("conditions", [])}
    return found


@pytest.fixture(scope="module")
def speech(node_cluster: NodeCluster, container_images: Images) -> Speech:
    image = container_images.ours("operator")
    node_cluster.load(image.archive)
    speech = Speech(node_cluster, image)
    speech.start(GATEWAYS)
    return speech


@pytest.fixture(scope="module")
def url(speech: Speech, envoy_gateway: EnvoyGateway) -> str:
    envoy_gateway.apply()
    url = envoy_gateway.url()
    until(lambda: httpx.get(f"{url}/docs", trust_env=False).status_code == 200)
    return url


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def test_the_route_is_the_api_and_nothing_else() -> None:
    [rule] = manifest("route")["spec"]["rules"]

    paths = {match["path"]["value"] for match in rule["matches"]}

    assert paths == {"/v1", "/model", "/wallet", "/", "/docs", "/openapi.json"}
    assert {match["path"]["type"] for match in rule["matches"] if match["path"]["value"] == "/"} == {"Exact"}
    assert [ref["port"] for ref in rule["backendRefs"]] == [8080]


def test_no_bound_of_time_is_on_a_stream() -> None:
    [rule] = manifest("route")["spec"]["rules"]
    http = manifest("backend-traffic-policy")["spec"]["timeout"]["http"]

    assert rule["timeouts"]["request"] == "0s"
    assert (http["requestTimeout"], http["maxStreamDuration"]) == ("0s", "0s")


def test_every_manifest_is_in_the_component() -> None:
    component = manifest("kustomization")

    assert {f"{path.name}" for path in MANIFESTS.glob("*.yaml")} == {*component["resources"], "kustomization.yaml"}


@pytest.mark.controlplane
def test_the_definitions_know_every_field_that_we_set(
    control_plane: ControlPlane, controlplane_programs: Programs
) -> None:
    if shutil.which("go") is None:
        pytest.skip("the definitions are in the source of a Go module")
    module = controlplane_programs.module_folder(CONTROLLER)
    kubectl = [controlplane_programs.path("kubectl"), f"--kubeconfig={control_plane.kubeconfig()}"]

    def run(*words: str, stdin: str) -> str:
        done = subprocess.run([*kubectl, *words], input=stdin, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("apply", "--server-side", "-f", "-", stdin=definitions(module))
    run("wait", "--for=condition=Established", "--timeout=60s", "crd", "--all", stdin="")
    for namespace in (SYSTEM, INFERENCE):
        control_plane.admin.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
    for file in sorted({*MANIFESTS.glob("*.yaml")} - {MANIFESTS / "kustomization.yaml"}):
        # Strict: a field that the definitions do not know is an error, not a warning.
        run("apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", "-", stdin=file.read_text())


@pytest.mark.controlplane
@pytest.mark.long
class TestThroughEnvoy:
    @pytest.mark.parametrize(
        ("resource", "name", "namespace", "expected"),
        [
            ("gatewayclasses.gateway.networking.k8s.io", "slackwater", None, {"Accepted"}),
            ("gateways.gateway.networking.k8s.io", "slackwater", SYSTEM, {"Accepted", "Programmed"}),
            ("httproutes.gateway.networking.k8s.io", "tts", INFERENCE, {"Accepted", "ResolvedRefs"}),
            ("clienttrafficpolicies.gateway.envoyproxy.io", "slackwater", SYSTEM, {"Accepted"}),
            ("backendtrafficpolicies.gateway.envoyproxy.io", "tts", INFERENCE, {"Accepted"}),
        ],
        ids=lambda value: value.partition(".")[0] if isinstance(value, str) else None,
    )
    def test_envoy_gateway_accepts(
        self, url: str, node_cluster: NodeCluster, resource: str, name: str, namespace: str | None, expected: set[str]
    ) -> None:
        def is_accepted(found: Object) -> bool:
            known = conditions(found.get("status", {}))
            return all(known.get(kind) == "True" for kind in expected) and known.get("Warning") != "True"

        assert node_cluster.admin.wait_for(resource, name, is_accepted, namespace)

    def test_each_chunk_arrives_before_the_next_but_one_is_sent(self, url: str) -> None:
        heard = play(url, 12).chunks

        assert [chunk.number for chunk in heard] == list(range(12))
        assert none_was_held_back(heard)

    def test_a_client_of_http_1_0_hears_it_as_it_is_made(self, url: str) -> None:
        address = urlsplit(url)
        body = json.dumps({"chunks": 8, "every_s": EVERY_S}).encode()
        head = f"POST /v1/tts HTTP/1.0\r\nHost: speech\r\nContent-Length: {len(body)}\r\n\r\n"
        lines = Lines()

        with socket.create_connection((address.hostname, address.port), timeout=30) as connection:
            connection.sendall(head.encode() + body)
            received = b""
            while b"\r\n\r\n" not in received:
                received += connection.recv(4096)
            status, _, rest = received.partition(b"\r\n\r\n")
            lines.feed(rest)
            while piece := connection.recv(65536):
                lines.feed(piece)

        assert b" 200 " in status.splitlines()[0]
        assert [chunk.number for chunk in lines.chunks] == list(range(8))
        assert none_was_held_back(lines.chunks)

    def test_a_websocket_passes_each_message_at_once(self, url: str) -> None:
        address = urlsplit(url)
        head = (
            f"GET /v1/tts/live?chunks=8&every_s={EVERY_S} HTTP/1.1\r\nHost: speech\r\nUpgrade: websocket\r\n"
            "Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        )
        lines = Lines()

        with socket.create_connection((address.hostname, address.port), timeout=30) as connection:
            connection.sendall(head.encode())
            file = connection.makefile("rb")
            status = file.readline()
            while file.readline().strip():
                pass
            while (frame := file.read(2)) != b"\x88\x02":
                lines.feed(file.read(int.from_bytes(file.read(2), "big")) if frame == b"\x82\x7e" else b"")

        assert b" 101 " in status
        assert len(lines.chunks) == 8
        assert none_was_held_back(lines.chunks)

    def test_a_stream_longer_than_envoys_own_15_seconds_is_whole(self, url: str) -> None:
        heard = play(url, 60).chunks

        assert len(heard) == 60
        assert heard[-1].sent_s - heard[0].sent_s > 17

    @pytest.mark.parametrize("path", ["/metrics", "/healthz", "/readyz", "/signals", "/v2"])
    def test_nothing_beside_the_api_is_reached(self, url: str, path: str) -> None:
        assert httpx.get(f"{url}{path}", trust_env=False).status_code == 404

    def test_nobody_outside_names_the_replicas(self, url: str) -> None:
        answer = httpx.put(f"{url}/replicas", json={"replicas": []}, trust_env=False)

        assert answer.status_code == 404

    def test_a_refusal_of_ours_passes_unchanged_and_is_asked_for_once(self, url: str, speech: Speech) -> None:
        for pod in speech.gateways():
            speech.tell(pod, [])
        begun_s = time.monotonic()

        answer = httpx.post(f"{url}/v1/tts", json=NOTHING, timeout=30, trust_env=False)
        took_s = time.monotonic() - begun_s
        speech.settle(GATEWAYS)

        assert answer.status_code == 503
        assert int(answer.headers["Retry-After"]) >= 1
        assert answer.json().keys() == {"status", "message"}
        assert "no gateway can be reached" not in answer.json()["message"]
        assert took_s < 3  # one wait in the gateway's queue, not one for each try of a retry

    def test_a_gateway_that_leaves_cuts_no_stream_and_refuses_nobody(
        self, url: str, speech: Speech, node_cluster: NodeCluster, threads: ThreadPoolExecutor
    ) -> None:
        lines = Lines()
        stream = threads.submit(play, url, 50, lines)
        until(lambda: len(lines.chunks) >= 3)
        [pod] = [pod for pod in speech.gateways() if speech.in_flight(pod)]
        name = pod["metadata"]["name"]

        node_cluster.admin.delete("pods", name, INFERENCE)
        answers = []
        while not stream.done():
            answers.append(httpx.get(f"{url}/docs", trust_env=False, timeout=10).status_code)
            time.sleep(0.1)
        stream.result()
        node_cluster.admin.wait_gone("pods", name, INFERENCE)
        speech.settle(GATEWAYS)

        assert [chunk.number for chunk in lines.chunks] == list(range(50))
        assert none_was_held_back(lines.chunks)
        assert set(answers) == {200}

    def test_an_envoy_that_leaves_cuts_no_stream(
        self,
        url: str,
        envoy_gateway: EnvoyGateway,
        node_cluster: NodeCluster,
        threads: ThreadPoolExecutor,
    ) -> None:
        admin: Admin = node_cluster.admin
        [pod] = envoy_gateway.proxies()
        lines = Lines()
        url = envoy_gateway.url()
        stream: Future[Lines] = threads.submit(play, url, 40, lines)
        until(lambda: len(lines.chunks) >= 3)

        admin.delete("pods", pod["metadata"]["name"], NAMESPACE)
        stream.result()
        admin.wait_gone("pods", pod["metadata"]["name"], NAMESPACE, timeout_s=60)

        assert [chunk.number for chunk in lines.chunks] == list(range(40))
        assert envoy_gateway.url() != url

    def test_without_any_gateway_the_answer_is_the_apis(self, envoy_gateway: EnvoyGateway, speech: Speech) -> None:
        url = envoy_gateway.url()
        speech.scale(0)
        until(lambda: not speech.gateways())

        until(lambda: httpx.post(f"{url}/v1/tts", json=NOTHING, trust_env=False).status_code == 503)
        answer = httpx.post(f"{url}/v1/tts", json=NOTHING, trust_env=False)
        speech.scale(GATEWAYS)
        speech.settle(GATEWAYS)

        assert answer.headers["Content-Type"] == "application/json"
        assert answer.headers["Retry-After"] == "1"
        assert answer.json() == {"status": 503, "message": "no gateway can be reached just now"}
