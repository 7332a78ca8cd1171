"""The verbs of the Kubernetes API on JSON dicts.

Owns which requests may be sent twice.  Reads, server-side apply, merge patches and deletes by uid are tried
again after a lost answer; a create is not repeated blindly: if its answer is lost it is tried once more, and
an object found in its place is taken for ours only if it says what we wrote.  All tries of one call end
within `Limits.retry_within_s` and one try's own time limit.
"""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from types import TracebackType
from typing import Any

from slackwater_operator.kube.connection import Connection
from slackwater_operator.kube.errors import (
    AlreadyExists,
    Call,
    NotFound,
    Unreachable,
    from_status,
)
from slackwater_operator.kube.transport import JSON, Limits, Retry, Transport, Tries
from slackwater_operator.kube.types import Object, Resource, name_of, namespace_of

Objects = list[Object]  # named here, since `Kube.list` hides the word from the annotations below it
BeforeWrite = Callable[[str, Resource, str], Awaitable[None]]  # (verb, resource, name)

_APPLY = "application/apply-patch+yaml"  # JSON is YAML
_MERGE = "application/merge-patch+json"
_WATCH_S = (240.0, 480.0)  # how long a watch lasts; at random, so that not all of them end together


class Kube:
    """A client of one API server.  `async with Kube(connection) as kube: …`

    counts: every request that was sent, tries again included, by (verb, plural); the verbs are get, list,
    watch, create, apply, merge, replace, delete and raw.
    before_write: awaited before each request that writes, tries again included, but not before dry runs; what it
    raises is raised by the write.  An elector's fence and the tests' fault points live there.
    """

    def __init__(
        self,
        connection: Connection,
        user_agent: str = "slackwater/operator",
        *,
        limits: Limits | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        rng: random.Random | None = None,
    ) -> None:
        self._rng = rng or random.Random()
        self._transport = Transport(connection, user_agent, limits or Limits(), clock, sleep, self._rng)
        self.before_write: BeforeWrite | None = None

    async def __aenter__(self) -> "Kube":
        await self._transport.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._transport.__aexit__(kind, error, trace)

    @property
    def connection(self) -> Connection:
        """Where this client's server is."""
        return self._transport.connection

    @property
    def counts(self) -> Counter[tuple[str, str]]:
        """Requests sent so far, by (verb, plural)."""
        return self._transport.counts

    def wall(self) -> float:
        """Unix time by the server's clock; by our own before its first answer."""
        return self._transport.server_time.wall()

    async def get(self, resource: Resource, name: str, namespace: str | None = None) -> Object:
        """One object.  Raises NotFound."""
        call = Call("get", resource.title(name, namespace))
        return _load(
            await self._transport.send(call, resource.plural, "GET", resource.path(namespace, name), retry=Retry.SAFE)
        )

    async def list(
        self, resource: Resource, namespace: str | None = None, *, labels: str = "", fields: str = "", limit: int = 500
    ) -> tuple[Objects, str]:
        """All objects that match, and the resourceVersion to watch from.  namespace None: all of them.

        Raises Gone if the list took so long that its later pages were forgotten.
        """
        found: Objects = []
        version = ""
        async for items, at in self.pages(resource, namespace, labels=labels, fields=fields, limit=limit):
            found += items
            version = at
        return found, version

    async def pages(
        self, resource: Resource, namespace: str | None = None, *, labels: str = "", fields: str = "", limit: int = 500
    ) -> AsyncGenerator[tuple[Objects, str], None]:
        """The pages of a list, as they come, each with the list's resourceVersion."""
        call = Call("list", resource.title(None, namespace))
        params = _selection(labels, fields) | {"limit": str(limit)}
        while True:
            answer = _load(
                await self._transport.send(
                    call, resource.plural, "GET", resource.path(namespace), params=params, retry=Retry.SAFE
                )
            )
            items: Objects = answer.get("items") or []
            for item in items:  # a list leaves these out of its items
                item.setdefault("apiVersion", resource.api_version)
                item.setdefault("kind", resource.kind)
            metadata = answer.get("metadata", {})
            yield items, str(metadata.get("resourceVersion", ""))
            if not metadata.get("continue"):
                return
            params["continue"] = metadata["continue"]

    async def watch(
        self,
        resource: Resource,
        namespace: str | None = None,
        *,
        labels: str = "",
        fields: str = "",
        resource_version: str,
        opened: Callable[[], None] | None = None,
    ) -> AsyncGenerator[tuple[str, Object], None]:
        """(ADDED | MODIFIED | DELETED | BOOKMARK, object) for each change after resource_version.

        Ends quietly when the server's time for it is over.  Raises Gone if that version is forgotten, and
        Unreachable if the connection breaks or says nothing for longer than bookmarks are apart.
        opened: called when the server has accepted the watch.
        """
        call = Call("watch", resource.title(None, namespace))
        params = _selection(labels, fields) | {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": resource_version,
            "timeoutSeconds": str(int(self._rng.uniform(*_WATCH_S))),
        }
        lines = self._transport.lines(call, resource.plural, resource.path(namespace), params, opened)
        async with aclosing(lines):  # else a caller who leaves early would leave the connection open
            async for line in lines:
                if not line:
                    continue
                try:
                    event = json.loads(line)
                    kind, obj = event["type"], event["object"]
                    known = kind == "ERROR" or obj["metadata"]["resourceVersion"]
                except (ValueError, LookupError, TypeError) as error:
                    raise Unreachable(f"{call}: a line that is no event: {line[:80]!r}", unknown=False) from error
                if kind == "ERROR" or not known:
                    raise from_status(call, int(obj.get("code") or 500), obj)
                yield kind, obj

    async def create(
        self, resource: Resource, body: Mapping[str, Any], *, manager: str, dry_run: bool = False
    ) -> Object:
        """The object as the server made it.  Raises AlreadyExists, Invalid and Forbidden among others.

        A field that the server does not know is a KubePermanent that names it, and not dropped in silence.
        """
        namespace, name = namespace_of(body) or None, name_of(body)
        call = Call("create", resource.title(name or f"{body.get('metadata', {}).get('generateName', '')}…", namespace))
        before = self._hook("create", resource, name, dry_run)

        async def once() -> Object:
            return _load(
                await self._transport.send(
                    call,
                    resource.plural,
                    "POST",
                    resource.path(namespace),
                    params=_writing(manager, dry_run) | {"fieldValidation": "Strict"},
                    body=_dump(resource, body),
                    before=before,
                )
            )

        try:
            return await once()
        except Unreachable as error:
            if dry_run or not name or not error.unknown:
                raise
        try:
            return await once()
        except AlreadyExists:
            found = await self.get(resource, name, namespace)
            if _wrote(found, body, manager):
                return found
            raise

    async def apply(
        self,
        resource: Resource,
        body: Mapping[str, Any],
        *,
        manager: str,
        subresource: str | None = None,
        force: bool = True,
        dry_run: bool = False,
    ) -> Object:
        """Server-side apply: the manager owns exactly the fields of the body from now on.

        A resourceVersion in it is a precondition.  Raises Conflict if the object has changed since, or, with the fields
        as its causes, if another manager owns one of them and force is False.
        """
        namespace, name = namespace_of(body) or None, name_of(body)
        params = _writing(manager, dry_run) | {"force": "true" if force else "false"}
        return await self._patch("apply", _APPLY, resource, name, body, namespace, subresource, params)

    async def merge(
        self,
        resource: Resource,
        name: str,
        patch: Mapping[str, Any],
        namespace: str | None = None,
        *,
        subresource: str | None = None,
        manager: str,
        dry_run: bool = False,
    ) -> Object:
        """JSON merge patch: what is named is set, null removes.  A resourceVersion in it is a precondition."""
        return await self._patch(
            "merge", _MERGE, resource, name, patch, namespace, subresource, _writing(manager, dry_run)
        )

    async def replace(
        self,
        resource: Resource,
        body: Mapping[str, Any],
        *,
        manager: str,
        subresource: str | None = None,
        dry_run: bool = False,
    ) -> Object:
        """PUT.  Raises Conflict if the body's resourceVersion is no longer the newest; never sent twice."""
        namespace, name = namespace_of(body) or None, name_of(body)
        return _load(
            await self._transport.send(
                Call("replace", resource.title(name, namespace)),
                resource.plural,
                "PUT",
                resource.path(namespace, name, subresource),
                params=_writing(manager, dry_run),
                body=_dump(resource, body),
                before=self._hook("replace", resource, name, dry_run),
            )
        )

    async def delete(
        self,
        resource: Resource,
        name: str,
        namespace: str | None = None,
        *,
        grace_s: float | None = None,
        uid: str | None = None,
        propagation: str | None = None,
        dry_run: bool = False,
    ) -> None:
        """Ask for the end of an object; a pod with a grace lives on until its kubelet has ended it.

        uid: delete this one and no other of that name.  grace_s: rounded up to whole seconds.
        propagation: Background, Foreground or Orphan.  Raises NotFound if it is gone already, also if another
        object bears its name by now.
        """
        call = Call("delete", resource.title(name, namespace), unique=uid is not None)
        options: Object = {"kind": "DeleteOptions", "apiVersion": "v1"}
        if grace_s is not None:
            options["gracePeriodSeconds"] = max(0, -int(-grace_s // 1))
        if uid is not None:
            options["preconditions"] = {"uid": uid}
        if propagation is not None:
            options["propagationPolicy"] = propagation
        if dry_run:
            options["dryRun"] = ["All"]
        tries = Tries()
        try:
            await self._transport.send(
                call,
                resource.plural,
                "DELETE",
                resource.path(namespace, name),
                body=json.dumps(options).encode(),
                retry=Retry.SAFE if uid is not None else Retry.REFUSED,
                tries=tries,
                before=self._hook("delete", resource, name, dry_run),
            )
        except NotFound:
            if not tries.lost:  # else it was we who deleted it, and the answer was lost
                raise

    async def raw(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: bytes | None = None,
        content_type: str = JSON,
    ) -> bytes:
        """Anything else: the version, a log, a request with a body of its own.  GETs may be sent twice."""
        return await self._transport.send(
            Call(method.lower(), path),
            "raw",
            method,
            path,
            params=params,
            body=body,
            content_type=content_type,
            retry=Retry.SAFE if method == "GET" else Retry.REFUSED,
        )

    async def _patch(
        self,
        verb: str,
        content_type: str,
        resource: Resource,
        name: str,
        body: Mapping[str, Any],
        namespace: str | None,
        subresource: str | None,
        params: Mapping[str, str],
    ) -> Object:
        # With a resourceVersion in it, the second sending of what went well would be a conflict.
        once = "resourceVersion" in (body.get("metadata") or {})
        return _load(
            await self._transport.send(
                Call(verb, resource.title(name, namespace)),
                resource.plural,
                "PATCH",
                resource.path(namespace, name, subresource),
                params=params,
                body=_dump(resource, body) if verb == "apply" else _compact(body),
                content_type=content_type,
                retry=Retry.REFUSED if once else Retry.SAFE,
                before=self._hook(verb, resource, name, "dryRun" in params),
            )
        )

    def _hook(self, verb: str, resource: Resource, name: str, dry_run: bool) -> Callable[[], Awaitable[None]] | None:
        hook = self.before_write
        return None if hook is None or dry_run else lambda: hook(verb, resource, name)


def _load(answer: bytes) -> Object:
    try:
        found = json.loads(answer)
    except ValueError as error:
        raise Unreachable(f"an answer that is no JSON; is a proxy in between? {answer[:80]!r}") from error
    if not isinstance(found, dict):
        raise Unreachable(f"an answer that is no object: {answer[:80]!r}")
    return found


def _compact(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()


def _dump(resource: Resource, body: Mapping[str, Any]) -> bytes:
    return _compact({"apiVersion": resource.api_version, "kind": resource.kind, **body})


def _selection(labels: str, fields: str) -> dict[str, str]:
    return {key: value for key, value in (("labelSelector", labels), ("fieldSelector", fields)) if value}


def _writing(manager: str, dry_run: bool) -> dict[str, str]:
    return {"fieldManager": manager} | ({"dryRun": "All"} if dry_run else {})


def _wrote(found: Mapping[str, Any], body: Mapping[str, Any], manager: str) -> bool:
    """Is this the object that our create, whose answer was lost, made?"""
    managers = {entry.get("manager") for entry in found.get("metadata", {}).get("managedFields") or ()}
    return manager in managers and _covers(found, body)


def _covers(found: Any, wanted: Any) -> bool:
    """Does found say all that wanted says?  Texts that start with a digit may be quantities, which the server
    writes its own way (`0.5` becomes `500m`), so they are not compared."""
    if isinstance(wanted, Mapping):
        return isinstance(found, Mapping) and all(
            _covers(found.get(key), value) for key, value in wanted.items() if value is not None and key != "status"
        )
    if isinstance(wanted, list):
        # Admission may append (volumes, tolerations), and does not reorder.
        return (
            isinstance(found, list)
            and len(found) >= len(wanted)
            and all(_covers(have, want) for have, want in zip(found, wanted, strict=False))
        )
    return found == wanted or (isinstance(wanted, str) and wanted[:1].isdigit())
