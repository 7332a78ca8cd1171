"""Kubeconfigs: writing those of a test cluster, reading one, and the guard before a cluster that is somebody's.

Owns the file's form.  Reads no environment: the fixtures pass it in.
"""

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from slackwater_controlplane.errors import ControlPlaneError

if TYPE_CHECKING:
    from slackwater_controlplane.certs import Pair

FILE = "SLACKWATER_TEST_KUBECONFIG"
CONTEXT = "SLACKWATER_TEST_CONTEXT"


@dataclass(frozen=True, slots=True)
class Access:
    """What a client needs to talk to a cluster, as one context of a kubeconfig says it.

    ca, cert, key: PEM text.   user, groups: whom to impersonate; "" is nobody.
    """

    server: str
    ca: str = ""
    cert: str = ""
    key: str = ""
    token: str = ""
    user: str = ""
    groups: tuple[str, ...] = ()


def write(path: Path, server: str, ca: Path, pair: "Pair", *, context: str = "slackwater-test") -> Path:
    """A kubeconfig with everything in it, so that the file works wherever it is taken."""
    user = {"client-certificate-data": _encoded(pair.cert), "client-key-data": _encoded(pair.key)}
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": context, "cluster": {"server": server, "certificate-authority-data": _encoded(ca)}}],
        "users": [{"name": context, "user": user}],
        "contexts": [{"name": context, "context": {"cluster": context, "user": context}}],
        "current-context": context,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600)
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    return path


def read(path: Path) -> Access:
    """The current context of a kubeconfig.  Raises ControlPlaneError for a login that needs a program."""
    cluster, user = _current(yaml.safe_load(path.read_text()), path)
    if unsupported := {"exec", "auth-provider", "username"} & set(user):
        raise ControlPlaneError(f"{path} logs in by {', '.join(unsupported)}; tests know certificates and tokens only")
    return Access(
        server=cluster["server"],
        ca=_text(cluster, "certificate-authority", path),
        cert=_text(user, "client-certificate", path),
        key=_text(user, "client-key", path),
        token=user.get("token") or _text(user, "tokenFile", path).strip(),
        user=user.get("as", ""),
        groups=tuple(user.get("as-groups", ())),
    )


def given(environ: Mapping[str, str]) -> Path | None:
    """The kubeconfig of a cluster that tests may use; None when none is given.

    Raises ControlPlaneError unless its current context is also named: tests make and delete objects, and the current
    context of a file is easily another one than its owner thinks.
    """
    if not (file := environ.get(FILE)):
        return None
    path = Path(file)
    if not path.is_file():
        raise ControlPlaneError(f"{FILE}={file}: no such file")
    current = yaml.safe_load(path.read_text()).get("current-context")
    if environ.get(CONTEXT) != current:
        raise ControlPlaneError(
            f"tests make and delete objects in the cluster of {FILE}={file}, whose current context is {current!r}; "
            f"if that is meant, say {CONTEXT}={current}"
        )
    return path


def _current(document: Mapping[str, Any], path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    def named(kind: str, name: str) -> dict[str, Any]:
        for entry in document.get(f"{kind}s") or ():
            if entry["name"] == name:
                return dict(entry[kind])
        raise ControlPlaneError(f"{path} has no {kind} {name!r}")

    context = named("context", document.get("current-context", ""))
    return named("cluster", context["cluster"]), named("user", context["user"])


def _text(section: Mapping[str, Any], key: str, path: Path) -> str:
    """The value of `key`, given in the file itself or as another file's name."""
    if data := section.get(f"{key}-data"):
        return base64.b64decode(data).decode()
    return (path.parent / section[key]).read_text() if key in section else ""


def _encoded(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()
