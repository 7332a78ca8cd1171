"""The certificates of a test cluster, judged by Python's TLS and by what they say."""

import socket
import ssl
import threading
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import NameOID

from slackwater_controlplane.certs import Authority, Pair


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "pki")


def handshake(authority: Authority, server: Pair, client: Pair | None, host: str) -> dict[str, object]:
    """Connect a client to a server that wants a certificate; returns the one that the server saw."""
    serving = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(authority.file))
    serving.load_cert_chain(server.cert, server.key)
    serving.verify_mode = ssl.CERT_REQUIRED
    calling = ssl.create_default_context(cafile=str(authority.file))
    if client is not None:
        calling.load_cert_chain(client.cert, client.key)
    seen: dict[str, object] = {}
    near, far = socket.socketpair()

    def serve() -> None:
        try:
            with serving.wrap_socket(far, server_side=True) as connection:
                seen.update(connection.getpeercert() or {})
                connection.sendall(b"!")
        except ssl.SSLError:
            far.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with calling.wrap_socket(near, server_hostname=host) as connection:
            if connection.recv(1) != b"!":
                raise ssl.SSLError("the server hung up")
    finally:
        near.close()
        thread.join()
    return seen


def test_a_user_is_known_to_the_server_by_name_and_groups(authority: Authority) -> None:
    server = authority.server("api", ["127.0.0.1", "kubernetes.default.svc"])
    user = authority.client("jane", ("readers", "writers"))

    seen = handshake(authority, server, user, "kubernetes.default.svc")

    subject = x509.load_pem_x509_certificate(user.cert.read_bytes()).subject
    assert [one.value for one in subject.get_attributes_for_oid(NameOID.ORGANIZATION_NAME)] == ["readers", "writers"]
    assert ("commonName", "jane") in [pair for group in seen["subject"] for pair in group]  # type: ignore[attr-defined]


@pytest.mark.parametrize("host", ["127.0.0.1", "kubernetes.default.svc"])
def test_a_server_is_taken_for_its_own_addresses_and_names(authority: Authority, host: str) -> None:
    server = authority.server("api", ["127.0.0.1", "kubernetes.default.svc"])

    assert handshake(authority, server, authority.client("jane"), host)


def test_a_server_is_not_taken_for_another(authority: Authority) -> None:
    server = authority.server("api", ["127.0.0.1"])

    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(authority, server, authority.client("jane"), "127.0.0.2")


def test_another_authoritys_user_is_refused(authority: Authority, tmp_path: Path) -> None:
    server = authority.server("api", ["127.0.0.1"])
    stranger = Authority(tmp_path / "other").client("jane")

    with pytest.raises(OSError):  # noqa: PT011  # TLS error or reset, as the race between the two ends goes
        handshake(authority, server, stranger, "127.0.0.1")


def test_a_users_certificate_serves_nobody(authority: Authority) -> None:
    with pytest.raises(ssl.SSLError):
        handshake(authority, authority.client("localhost"), authority.client("jane"), "localhost")


def test_a_user_asked_for_twice_has_one_certificate(authority: Authority) -> None:
    first = authority.client("jane", ("readers",)).cert.read_bytes()

    again = authority.client("jane", ("readers",)).cert.read_bytes()
    other = authority.client("jane").cert.read_bytes()

    assert first == again
    assert first != other


def test_private_keys_are_for_their_owner_alone(authority: Authority) -> None:
    keys = [authority.client("system:node:a", ("system:nodes",)).key, authority.signing_key("accounts").key]

    assert [key.stat().st_mode & 0o777 for key in keys] == [0o600, 0o600]
