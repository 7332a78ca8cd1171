"""Where the API server is, how its certificate is judged and who we are to it.

Owns the reading of kubeconfig files and of a pod's service account.  Reads no environment: callers pass it.
"""

import base64
import binascii
import ssl
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from slackwater_operator.core import PermanentError
from slackwater_operator.kube.credentials import (
    Credentials,
    Exec,
    Fixed,
    TokenFile,
    basic,
    bearer,
    load_certificate,
)

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass(frozen=True, slots=True)
class Connection:
    """All that is needed to send a request.  namespace: the one that commands mean if none is named."""

    server: str  # "https://10.96.0.1:443"
    tls: ssl.SSLContext | None = None  # None: plain HTTP
    credentials: Credentials = Fixed()  # noqa: RUF009 - frozen, so sharing it is harmless
    namespace: str = "default"
    server_name: str | None = None  # checked against the certificate in place of the host
    proxy: str | None = None

    @classmethod
    def from_kubeconfig(
        cls, path: Path | None = None, context: str | None = None, *, more: Sequence[Path] = ()
    ) -> "Connection":
        """From a kubeconfig file; `~/.kube/config` if path is None.

        context: None means the file's current one.  more: further files; the first that defines a name wins.
        Raises PermanentError that names the file and what it lacks.
        """
        paths = (path or Path.home() / ".kube" / "config", *more)
        return _from_files(paths, context)

    @classmethod
    def in_cluster(cls, environ: Mapping[str, str], folder: Path = SERVICE_ACCOUNT) -> "Connection":
        """From a pod's service account.  Raises PermanentError if this is no pod."""
        host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT", "443")
        if not host or not (folder / "token").is_file():
            raise PermanentError(f"not in a pod: no KUBERNETES_SERVICE_HOST, or no token in {folder}")
        namespace = folder / "namespace"
        return cls(
            server=f"https://{f'[{host}]' if ':' in host else host}:{port}",
            tls=_tls(authority=(folder / "ca.crt").read_bytes()),
            credentials=TokenFile(folder / "token"),
            namespace=namespace.read_text().strip() if namespace.is_file() else "default",
        )

    @classmethod
    def default(
        cls, kubeconfig: Path | None, context: str | None, environ: Mapping[str, str], folder: Path = SERVICE_ACCOUNT
    ) -> "Connection":
        """As kubectl looks for it: the named file, `$KUBECONFIG`, the pod's service account, `~/.kube/config`."""
        if kubeconfig is not None:
            return cls.from_kubeconfig(kubeconfig, context)
        named = [Path(part) for part in environ.get("KUBECONFIG", "").split(":") if part]
        if named:
            return _from_files([path for path in named if path.exists()] or named, context)
        if environ.get("KUBERNETES_SERVICE_HOST") and (folder / "token").is_file():
            return cls.in_cluster(environ, folder)
        return cls.from_kubeconfig(None, context)


def _from_files(paths: Iterable[Path], context: str | None) -> Connection:
    files = [(path, _read(path)) for path in paths]
    title = ":".join(str(path) for path, _ in files)
    wanted = context or next((str(file["current-context"]) for _, file in files if file.get("current-context")), "")
    if not wanted:
        raise PermanentError(f"kubeconfig {title} has no current context; name one")
    chosen, _ = _entry(files, "contexts", "context", wanted, title)
    cluster, cluster_folder = _entry(files, "clusters", "cluster", str(chosen.get("cluster", "")), title)
    user, user_folder = (
        _entry(files, "users", "user", str(chosen["user"]), title) if chosen.get("user") else ({}, cluster_folder)
    )
    server = str(cluster.get("server") or "").rstrip("/")
    if not server:
        raise PermanentError(f"kubeconfig {title}: cluster {chosen.get('cluster')!r} has no server")
    tls = None
    if server.startswith("https"):
        tls = _tls(
            authority=_bytes(cluster, "certificate-authority", cluster_folder),
            verify=not cluster.get("insecure-skip-tls-verify"),
        )
        certificate = _bytes(user, "client-certificate", user_folder)
        key = _bytes(user, "client-key", user_folder)
        if certificate and key:
            load_certificate(tls, certificate, key)
    return Connection(
        server=server,
        tls=tls,
        credentials=_credentials(user, cluster, user_folder, tls, title),
        namespace=str(chosen.get("namespace") or "default"),
        server_name=cluster.get("tls-server-name"),
        proxy=cluster.get("proxy-url"),
    )


def _credentials(
    user: Mapping[str, Any], cluster: Mapping[str, Any], folder: Path, tls: ssl.SSLContext | None, title: str
) -> Credentials:
    if user.get("token"):
        return bearer(str(user["token"]))
    if user.get("tokenFile"):
        return TokenFile(folder / user["tokenFile"])
    if user.get("exec"):
        return Exec(user["exec"], cluster, folder, tls)
    if user.get("auth-provider"):
        raise PermanentError(f"kubeconfig {title}: auth-provider is gone from Kubernetes; use exec or a token")
    if user.get("username"):
        return basic(str(user["username"]), str(user.get("password", "")))
    return Fixed()


def _tls(authority: bytes | None, verify: bool = True) -> ssl.SSLContext:
    """authority: PEM certificates to trust; None means the machine's own."""
    try:
        context = ssl.create_default_context(cadata=authority.decode() if authority else None)
    except (ssl.SSLError, ValueError) as error:
        raise PermanentError(f"the cluster's certificate authority is no PEM certificate: {error}") from error
    # Python 3.13 turns this on, and many clusters' own authorities lack the extensions that it demands.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _read(path: Path) -> Mapping[str, Any]:
    try:
        found = yaml.safe_load(path.read_text())
    except OSError as error:
        raise PermanentError(f"cannot read kubeconfig {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise PermanentError(f"kubeconfig {path} is no YAML: {error}") from error
    if not isinstance(found, dict):
        raise PermanentError(f"kubeconfig {path} is empty")
    return found


def _entry(
    files: Sequence[tuple[Path, Mapping[str, Any]]], section: str, kind: str, name: str, title: str
) -> tuple[Mapping[str, Any], Path]:
    """The named entry of a section, and the folder that its relative paths start from."""
    for path, file in files:
        for entry in file.get(section) or ():
            if entry.get("name") == name:
                return entry.get(kind) or {}, path.parent
    known = sorted(str(entry.get("name")) for _, file in files for entry in file.get(section) or ())
    raise PermanentError(f"kubeconfig {title} has no {kind} {name!r}, only {', '.join(known) or 'none'}")


def _bytes(entry: Mapping[str, Any], field: str, folder: Path) -> bytes | None:
    """The content of `field-data` or of the file that `field` names."""
    try:
        if data := entry.get(f"{field}-data"):
            return base64.b64decode(data, validate=True)
        return (folder / entry[field]).read_bytes() if entry.get(field) else None
    except (OSError, binascii.Error) as error:
        raise PermanentError(f"kubeconfig: {field} cannot be read: {error}") from error
