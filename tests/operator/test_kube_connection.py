"""Where the API server is and who we are: kubeconfigs, pods, tokens that change."""

import base64
import datetime
import ssl
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from slackwater_operator.core import PermanentError
from slackwater_operator.kube.client import Kube
from slackwater_operator.kube.connection import Connection
from slackwater_operator.kube.credentials import TokenFile
from slackwater_operator.kube.errors import Unauthorized
from slackwater_operator.kube.selectors import equals, matches
from slackwater_operator.kube.types import NODES, PODS, custom, micro_stamp, parse_stamp, stamp
from slackwater_operator.testing.kube import FakeKube


def certificate() -> tuple[bytes, bytes]:
    """A certificate that signs itself, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now)
        .not_valid_after(now + datetime.timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return made.public_bytes(serialization.Encoding.PEM), private


def kubeconfig(path: Path, user: dict[str, Any], **cluster: Any) -> Path:
    path.write_text(
        yaml.safe_dump(
            {
                "current-context": "one",
                "contexts": [
                    {"name": "one", "context": {"cluster": "c", "user": "u", "namespace": "serving"}},
                    {"name": "two", "context": {"cluster": "missing", "user": "u"}},
                ],
                "clusters": [{"name": "c", "cluster": {"server": "https://10.0.0.1:6443/", **cluster}}],
                "users": [{"name": "u", "user": user}],
            }
        )
    )
    return path


async def test_a_kubeconfig_with_certificates_inside_and_beside_it(tmp_path: Path) -> None:
    made, key = certificate()
    (tmp_path / "ca.crt").write_bytes(made)
    user = {
        "client-certificate-data": base64.b64encode(made).decode(),
        "client-key-data": base64.b64encode(key).decode(),
    }

    found = Connection.from_kubeconfig(kubeconfig(tmp_path / "config", user, **{"certificate-authority": "ca.crt"}))

    assert found.server == "https://10.0.0.1:6443"
    assert found.namespace == "serving"
    assert found.tls is not None
    assert found.tls.verify_mode is ssl.CERT_REQUIRED
    assert await found.credentials.headers() == {}


async def test_who_we_are_by_token_password_or_program(tmp_path: Path) -> None:
    program = tmp_path / "login.py"
    program.write_text(
        "import json\n"
        "print(json.dumps({'apiVersion': 'client.authentication.k8s.io/v1', 'kind': 'ExecCredential',"
        " 'status': {'token': 'made', 'expirationTimestamp': '2200-01-01T00:00:00Z'}}))\n"
    )
    run = {"apiVersion": "client.authentication.k8s.io/v1", "command": sys.executable, "args": [str(program)]}

    headers = [
        await Connection.from_kubeconfig(kubeconfig(tmp_path / "config", user)).credentials.headers()
        for user in ({"token": "t"}, {"username": "a", "password": "b"}, {"exec": run})
    ]

    assert [one["Authorization"] for one in headers] == ["Bearer t", "Basic YTpi", "Bearer made"]


async def test_a_program_that_fails_is_named(tmp_path: Path) -> None:
    run = {"apiVersion": "client.authentication.k8s.io/v1", "command": "no-such-program"}
    found = Connection.from_kubeconfig(kubeconfig(tmp_path / "config", {"exec": run}))

    with pytest.raises(PermanentError, match="no credentials from 'no-such-program'"):
        await found.credentials.headers()


@pytest.mark.parametrize(
    ("context", "content", "said"),
    [
        pytest.param("three", None, "has no context 'three', only one, two", id="context"),
        pytest.param("two", None, "has no cluster 'missing', only c", id="cluster"),
        pytest.param(None, "[", "is no YAML", id="yaml"),
        pytest.param(None, "", "is empty", id="empty"),
        pytest.param(None, "a: b", "has no current context", id="current"),
    ],
)
def test_a_broken_kubeconfig_says_what_it_lacks(
    tmp_path: Path, context: str | None, content: str | None, said: str
) -> None:
    path = kubeconfig(tmp_path / "config", {})
    if content is not None:
        path.write_text(content)

    with pytest.raises(PermanentError, match=said):
        Connection.from_kubeconfig(path, context)


def test_the_environment_decides_if_no_file_is_named(tmp_path: Path) -> None:
    made, _ = certificate()
    pod = tmp_path / "pod"
    pod.mkdir()
    (pod / "token").write_text("t")
    (pod / "ca.crt").write_bytes(made)
    (pod / "namespace").write_text("slackwater-system")
    in_pod = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}
    file = kubeconfig(tmp_path / "config", {"token": "t"})
    other = tmp_path / "other"
    other.write_text(yaml.safe_dump({"clusters": [{"name": "c", "cluster": {"server": "https://x"}}]}))

    named = Connection.default(file, None, in_pod, pod)
    listed = Connection.default(None, None, {"KUBECONFIG": f"{other}:{file}:{tmp_path / 'absent'}"}, pod)
    mounted = Connection.default(None, None, in_pod, pod)

    assert named.server == "https://10.0.0.1:6443"
    assert listed.server == "https://x"  # the first file that defines a name wins
    assert (mounted.server, mounted.namespace) == ("https://10.96.0.1:443", "slackwater-system")
    with pytest.raises(PermanentError, match="not in a pod"):
        Connection.in_cluster({}, pod)


async def test_a_token_file_is_read_again_each_minute_and_when_it_is_refused(tmp_path: Path) -> None:
    now = [0.0]
    path = tmp_path / "token"
    path.write_text("one\n")
    credentials = TokenFile(path, lambda: now[0])
    first = await credentials.headers()
    path.write_text("two")
    now[0] = 59.0
    second = await credentials.headers()
    now[0] = 61.0
    third = await credentials.headers()
    path.unlink()
    now[0] = 200.0
    fourth = await credentials.headers()

    said = [one["Authorization"] for one in (first, second, third, fourth)]
    assert said == ["Bearer one", "Bearer one", "Bearer two", "Bearer two"]


async def test_a_token_that_was_replaced_is_taken_up_within_the_same_call(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("old")
    async with FakeKube() as fake:
        fake.add_node("n1")
        async with Kube(Connection(fake.url, credentials=TokenFile(path))) as kube:
            fake.token = "old"
            await kube.get(NODES, "n1")
            fake.token = "new"
            path.write_text("new")

            await kube.get(NODES, "n1")
            fake.token = "none"
            with pytest.raises(Unauthorized):
                await kube.get(NODES, "n1")

            assert kube.counts["get", "nodes"] == 5


def test_paths_of_collections_objects_and_parts() -> None:
    clean = custom("cleaningjobs", "CleaningJob", True)

    assert PODS.path() == "/api/v1/pods"
    assert PODS.path("a", "b", "status") == "/api/v1/namespaces/a/pods/b/status"
    assert NODES.path(None, "n/1") == "/api/v1/nodes/n%2F1"
    assert clean.path("data") == "/apis/slackwater.dev/v1alpha1/namespaces/data/cleaningjobs"
    with pytest.raises(ValueError, match="Pod 'b' needs a namespace"):
        PODS.path(None, "b")


def test_times_as_kubernetes_writes_them() -> None:
    assert stamp(1796032802.0) == "2026-11-30T10:00:02Z"
    assert micro_stamp(1796032802.00025) == "2026-11-30T10:00:02.000250Z"
    assert parse_stamp("2026-11-30T10:00:02.000250Z") == pytest.approx(1796032802.00025, abs=1e-6)
    assert parse_stamp("2026-11-30T12:00:02+02:00") == 1796032802.0


@pytest.mark.parametrize(
    ("selector", "fits"),
    [
        pytest.param("app=tts", True, id="equal"),
        pytest.param("app==tts,gpu", True, id="and-present"),
        pytest.param("app!=tts", False, id="unequal"),
        pytest.param("missing!=x", True, id="unequal-absent"),
        pytest.param("app in (clean, tts),gpu notin (h200)", True, id="sets"),
        pytest.param("app notin (tts)", False, id="notin"),
        pytest.param("!missing", True, id="absent"),
        pytest.param("!app", False, id="not-absent"),
        pytest.param("empty=", True, id="empty-value"),
    ],
)
def test_label_selectors(selector: str, fits: bool) -> None:
    obj = {"metadata": {"labels": {"app": "tts", "gpu": "5090", "empty": ""}}}

    assert matches(obj, selector) is fits


def test_field_selectors() -> None:
    obj = {"metadata": {"name": "a"}, "spec": {"nodeName": "n1", "unschedulable": True}}

    assert matches(obj, fields="metadata.name=a,spec.nodeName!=n2,spec.unschedulable=true,status.phase=")
    assert not matches(obj, fields="spec.nodeName=")
    assert equals({"b": "2", "a": "1"}) == "a=1,b=2"
    with pytest.raises(ValueError, match="no selector term"):
        matches(obj, "a b")
