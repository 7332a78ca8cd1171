"""The certificates of one test cluster: an authority, a server's certificate, users' certificates, a signing key.

Owns how they are made (the `cryptography` package; no openssl) and where they lie.  They are good for a month.
"""

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_VALID = timedelta(days=30)
_EARLY = timedelta(hours=1)  # for clocks that are set back


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and its private key, both PEM files."""

    cert: Path
    key: Path


class Authority:
    """One certificate authority in one folder; what it issued once under a name is there for good."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "slackwater-test-ca")])
        builder = _builder(self._name, self._name, self._key.public_key())
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        usage = x509.KeyUsage(
            digital_signature=True,
            key_cert_sign=True,
            crl_sign=True,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            encipher_only=False,
            decipher_only=False,
        )
        builder = builder.add_extension(usage, critical=True)
        identifier = x509.SubjectKeyIdentifier.from_public_key(self._key.public_key())
        self._certificate = builder.add_extension(identifier, critical=False).sign(self._key, hashes.SHA256())
        self.file = folder / "ca.crt"
        self.file.write_bytes(self._certificate.public_bytes(serialization.Encoding.PEM))

    def server(self, name: str, hosts: Iterable[str]) -> Pair:
        """A server's certificate.  hosts: names and addresses under which clients know it."""
        return self._issue(name, name, (), ExtendedKeyUsageOID.SERVER_AUTH, tuple(hosts))

    def client(self, user: str, groups: Iterable[str] = ()) -> Pair:
        """A user's certificate, as the API server reads it: the common name is the user, organisations are groups."""
        groups = tuple(groups)
        name = "user-" + "".join(c if c.isalnum() or c in "-." else "_" for c in "+".join((user, *groups)))
        return self._issue(name, user, groups, ExtendedKeyUsageOID.CLIENT_AUTH, ())

    def signing_key(self, name: str) -> Pair:
        """A key pair without a certificate; `cert` holds the public key."""
        key = ec.generate_private_key(ec.SECP256R1())
        pair = Pair(self.folder / f"{name}.pub", self.folder / f"{name}.key")
        encoding, public = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        pair.cert.write_bytes(key.public_key().public_bytes(encoding, public))
        _write_key(pair.key, key)
        return pair

    def _issue(
        self, name: str, common: str, groups: tuple[str, ...], purpose: x509.ObjectIdentifier, hosts: tuple[str, ...]
    ) -> Pair:
        pair = Pair(self.folder / f"{name}.crt", self.folder / f"{name}.key")
        if pair.cert.exists():
            return pair
        key = ec.generate_private_key(ec.SECP256R1())
        subject = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in groups]
        subject.append(x509.NameAttribute(NameOID.COMMON_NAME, common))
        builder = _builder(x509.Name(subject), self._name, key.public_key())
        builder = builder.add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        parent = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        builder = builder.add_extension(parent, critical=False)
        if hosts:
            builder = builder.add_extension(
                x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False
            )
        _write_key(pair.key, key)
        pair.cert.write_bytes(builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
        return pair


def _builder(subject: x509.Name, issuer: x509.Name, public: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(public)
    builder = builder.serial_number(x509.random_serial_number())
    return builder.not_valid_before(now - _EARLY).not_valid_after(now + _VALID)


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    path.touch(mode=0o600)
    path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
