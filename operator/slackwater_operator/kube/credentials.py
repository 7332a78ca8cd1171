"""Who we are to the API server, when that has to be looked up again and again.

A client certificate is no matter of this module: it is part of the TLS context of `connection`.
"""

import asyncio
import base64
import ssl
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from slackwater_operator.core import PermanentError
from slackwater_operator.kube.types import parse_stamp

TOKEN_FILE_S = 60.0  # a mounted token is renewed well before it ends; a minute late is early enough
EARLY_S = 30.0  # an exec credential is renewed this long before it expires


class Credentials(Protocol):
    """What goes into the Authorization header of the next request."""

    async def headers(self) -> Mapping[str, str]:
        """Raises PermanentError if there is no way to know."""
        ...

    def renew(self) -> bool:
        """The server said 401: look again before the next request.  False if that cannot help."""
        ...


@dataclass(frozen=True, slots=True)
class Fixed:
    """The same headers for ever: a token from a kubeconfig, a password, or nothing at all."""

    fixed: Mapping[str, str] = field(default_factory=dict)

    async def headers(self) -> Mapping[str, str]:
        return self.fixed

    def renew(self) -> bool:
        return False


def bearer(token: str) -> Fixed:
    """A token that does not change."""
    return Fixed({"Authorization": f"Bearer {token}"})


def basic(user: str, password: str) -> Fixed:
    """User name and password, as some proxies before API servers want them."""
    return Fixed({"Authorization": "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()})


class TokenFile:
    """A token in a file that somebody renews: a service account's in a pod."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = path
        self._clock = clock
        self._read_at: float | None = None
        self._headers: Mapping[str, str] = {}

    async def headers(self) -> Mapping[str, str]:
        now = self._clock()
        if self._read_at is None or now - self._read_at >= TOKEN_FILE_S:
            try:
                token = self.path.read_text().strip()
            except OSError as error:
                if not self._headers:
                    raise PermanentError(f"cannot read the token file {self.path}: {error.strerror}") from error
            else:
                # An empty file is one that is being replaced; the old token holds a while longer.
                self._headers = {"Authorization": f"Bearer {token}"} if token else self._headers
                self._read_at = now
        return self._headers

    def renew(self) -> bool:
        self._read_at = None
        return True


class Exec:
    """A program that prints an ExecCredential, as cloud providers' kubeconfigs name one.

    context: gets the client certificate, if the program prints one instead of a token.
    """

    def __init__(
        self,
        command: Mapping[str, Any],
        cluster: Mapping[str, Any],
        folder: Path,
        context: ssl.SSLContext | None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._command = command
        self._cluster = cluster
        self._folder = folder
        self._context = context
        self._wall = wall
        self._lock = asyncio.Lock()
        self._headers: Mapping[str, str] | None = None
        self._until_s: float | None = None  # None: for ever

    async def headers(self) -> Mapping[str, str]:
        async with self._lock:
            if self._headers is None or (self._until_s is not None and self._wall() >= self._until_s - EARLY_S):
                self._take(await asyncio.to_thread(self._run))
            assert self._headers is not None
            return self._headers

    def renew(self) -> bool:
        self._headers = None
        return True

    def _run(self) -> Mapping[str, Any]:
        # Imported here: the library takes a second and 60 MB, and only these kubeconfigs need it.  It has no types.
        from kubernetes.config import ConfigException
        from kubernetes.config.exec_provider import ExecProvider
        from kubernetes.config.kube_config import ConfigNode

        node: Any = ConfigNode
        provider: Any = ExecProvider
        try:
            status = provider(
                node("exec", dict(self._command)), str(self._folder), node("cluster", dict(self._cluster))
            ).run()
        except (ConfigException, OSError) as error:
            raise PermanentError(f"no credentials from {self._command.get('command')!r}: {error}") from error
        return status if isinstance(status, dict) else {}

    def _take(self, status: Mapping[str, Any]) -> None:
        token = status.get("token")
        certificate, key = status.get("clientCertificateData"), status.get("clientKeyData")
        if certificate and key and self._context is not None:
            load_certificate(self._context, certificate.encode(), key.encode())
        elif not token:
            raise PermanentError(f"{self._command.get('command')!r} printed neither a token nor a certificate")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        expires = status.get("expirationTimestamp")
        self._until_s = parse_stamp(expires) if expires else None


def load_certificate(context: ssl.SSLContext, certificate: bytes, key: bytes) -> None:
    """Show this client certificate on new connections."""
    # The ssl module takes files only, so it gets two for a moment.
    with tempfile.TemporaryDirectory(prefix="slackwater-") as folder:  # readable by its owner alone
        certificate_file, key_file = Path(folder, "tls.crt"), Path(folder, "tls.key")
        certificate_file.write_bytes(certificate)
        key_file.write_bytes(key)
        context.load_cert_chain(certificate_file, key_file)
