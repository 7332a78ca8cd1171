"""Requests as the pretended API server reads them, and the pieces of its answers.  Owns no state."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from aiohttp import web

from slackwater_operator.kube.selectors import matches
from slackwater_operator.kube.types import Object
from slackwater_operator.testing.kube_store import Change, Collection, Refused


@dataclass(frozen=True, slots=True)
class Seen:
    """A request as it came."""

    verb: str
    plural: str
    namespace: str
    name: str
    part: str  # the subresource, or ""
    params: Mapping[str, str]
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)


def parse(request: web.Request, body: bytes) -> tuple[Seen, Collection]:
    """What is asked, and of which collection."""
    parts = [unquote(part) for part in request.rel_url.raw_path.strip("/").split("/")]
    params = dict(request.query)
    headers = dict(request.headers)
    loaded = json.loads(body) if body else None
    if parts[0] == "api" and len(parts) > 2:
        group, rest = "", parts[2:]
    elif parts[0] == "apis" and len(parts) > 3:
        group, rest = parts[1], parts[3:]
    else:
        return Seen("raw", request.path, "", "", "", params, loaded, headers), ("", "")
    namespace = ""
    if rest[0] == "namespaces" and len(rest) > 2 and rest[2] not in ("status", "finalize"):
        namespace, rest = rest[1], rest[2:]
    plural, name, part = (*rest, "", "")[:3]
    verb = {"POST": "create", "PUT": "replace", "DELETE": "delete"}.get(request.method, "")
    if request.method == "GET":
        verb = "get" if name else "watch" if params.get("watch") in ("true", "1") else "list"
    elif request.method == "PATCH":
        verb = "apply" if "apply-patch" in request.content_type else "merge"
    if verb == "create" and not name:
        name_given = (loaded or {}).get("metadata", {}).get("name", "")
        return Seen(verb, plural, namespace, name_given, part, params, loaded, headers), (group, plural)
    return Seen(verb, plural, namespace, name, part, params, loaded, headers), (group, plural)


def told(change: Change, seen: Seen) -> tuple[str, Object] | None:
    """The event that a watch with these selectors gets: one that stops to match is DELETED for it."""
    if seen.namespace and change.obj["metadata"].get("namespace") != seen.namespace:
        return None
    labels, fields = seen.params.get("labelSelector", ""), seen.params.get("fieldSelector", "")
    now = change.kind != "DELETED" and matches(change.obj, labels, fields)
    before = change.before is not None and matches(change.before, labels, fields)
    if not now and not before:
        return None
    return ("MODIFIED" if before else "ADDED") if now else "DELETED", change.obj


def line(kind: str, obj: Object) -> bytes:
    """One event of a watch."""
    return json.dumps({"type": kind, "object": obj}, separators=(",", ":")).encode() + b"\n"


def status(refused: Refused) -> Object:
    """The `Status` that says why not."""
    said: Object = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
    said |= {"message": str(refused), "reason": refused.reason, "code": refused.code}
    if refused.causes:
        said["details"] = {"causes": [{"field": path, "message": said} for path, said in refused.causes]}
    return said


def success() -> Object:
    """The `Status` of what has no object to answer with."""
    return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}


def broken(request: web.Request) -> web.Response:
    """No answer: the connection is reset.  What is returned goes nowhere."""
    if isinstance(request.transport, asyncio.Transport):
        request.transport.abort()
    return web.Response()
