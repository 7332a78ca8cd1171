"""The objects of a pretended API server: versions, history, merge rules.  No HTTP.

Owns what `FakeKube` keeps.  There is no schema, no defaulting beyond pods, no garbage collection and no access
control: those are tested on a real API server.
"""

import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from slackwater_operator.kube.types import Key, Object, key_of, stamp
from slackwater_operator.testing.kube_merge import apply_patch, conflicts, merge_patch

Collection = tuple[str, str]  # (group, plural)
PODS: Collection = ("", "pods")


class Refused(Exception):
    """What the API server would answer instead."""

    def __init__(self, code: int, reason: str, message: str, causes: tuple[tuple[str, str], ...] = ()) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.causes = causes


@dataclass(frozen=True, slots=True)
class Change:
    """One write.  before: the object until then, None if it was made by it."""

    version: int
    collection: Collection
    kind: str  # ADDED | MODIFIED | DELETED
    obj: Object
    before: Object | None


class Store:
    """All objects, and all changes since the last `compact`.  `changed` is called after each write."""

    def __init__(self, wall: Callable[[], float] = time.time) -> None:
        self.version = 1000
        self.compacted = 0
        self.history: list[Change] = []
        self.changed: Callable[[], None] = lambda: None
        self._wall = wall
        self._objects: dict[Collection, dict[Key, Object]] = {}
        self._applied: dict[tuple[Collection, Key], dict[tuple[str, str], Object]] = {}

    def read(self, collection: Collection, key: Key) -> Object:
        """The object itself, not a copy.  Raises Refused with 404."""
        found = self._objects.get(collection, {}).get(key)
        if found is None:
            raise Refused(404, "NotFound", f'{collection[1]} "{key[1]}" not found')
        return found

    def find(self, collection: Collection, key: Key) -> Object | None:
        """The object, or None."""
        return self._objects.get(collection, {}).get(key)

    def all(self, collection: Collection, namespace: str | None = None) -> list[Object]:
        """The objects of a collection in the order of their keys."""
        objects = self._objects.get(collection, {})
        return [objects[key] for key in sorted(objects) if namespace in (None, key[0])]

    def since(self, collection: Collection, version: int) -> Iterator[Change]:
        """The changes of a collection after a version."""
        for at in range(max(0, len(self.history) - (self.version - version)), len(self.history)):
            change = self.history[at]
            if change.version > version and change.collection == collection:
                yield change

    def compact(self) -> None:
        """Forget the history: whoever goes on from an earlier version gets 410."""
        self.compacted = self.version
        self.history.clear()

    def create(self, collection: Collection, body: Object, manager: str, dry: bool = False) -> Object:
        """POST."""
        obj = deepcopy(body)
        metadata = obj.setdefault("metadata", {})
        if not metadata.get("name") and metadata.get("generateName"):
            metadata["name"] = metadata["generateName"] + uuid.uuid4().hex[:5]
        if not metadata.get("name"):
            raise Refused(422, "Invalid", "name or generateName is required", (("metadata.name", "Required value"),))
        if self.find(collection, key_of(obj)) is not None:
            raise Refused(409, "AlreadyExists", f'{collection[1]} "{metadata["name"]}" already exists')
        obj.pop("status", None)
        if collection == PODS:
            obj["status"] = {"phase": "Pending"}
        self._made(obj, manager, "Update")
        return self._write(collection, obj, dry)

    def replace(self, collection: Collection, key: Key, body: Object, part: str, manager: str, dry: bool) -> Object:
        """PUT of an object or its status."""
        old = self.read(collection, key)
        self._check_version(collection, old, body)
        new = deepcopy(old) if part else deepcopy(body)
        self._keep_parts(old, new, body, part)
        self._managed(new, manager, "Update", part)
        return self._write(collection, new, dry)

    def merge(self, collection: Collection, key: Key, patch: Object, part: str, manager: str, dry: bool) -> Object:
        """PATCH by a JSON merge patch."""
        old = self.read(collection, key)
        self._check_version(collection, old, patch)
        wanted = merge_patch(old, patch)
        new = deepcopy(old) if part else wanted
        self._keep_parts(old, new, wanted, part)
        self._managed(new, manager, "Update", part)
        return self._write(collection, new, dry)

    def apply(
        self, collection: Collection, key: Key, body: Object, part: str, manager: str, force: bool, dry: bool
    ) -> Object:
        """PATCH by server-side apply.  Fields that this manager applied before and leaves out now are removed."""
        old = self.find(collection, key)
        if old is None and part:
            raise Refused(404, "NotFound", f'{collection[1]} "{key[1]}" not found')
        mine = deepcopy(body)
        sets = dict(self._applied.get((collection, key), {}))
        before = sets.pop((manager, part), {})
        clash = conflicts(mine, sets)
        if clash and not force:
            causes = tuple((path, f'conflict with "{other}"') for path, other in clash)
            raise Refused(409, "Conflict", f"Apply failed with {len(clash)} conflicts: {clash}", causes)
        if old is None:
            new = deepcopy(mine)
            new.pop("status", None)
            if collection == PODS:
                new["status"] = {"phase": "Pending"}
            self._made(new, manager, "Apply")
        else:
            self._check_version(collection, old, body)
            wanted = apply_patch(old, before, mine, list(sets.values()))
            new = deepcopy(old) if part else wanted
            self._keep_parts(old, new, wanted, part)
            self._managed(new, manager, "Apply", part)
        if not dry:
            self._applied.setdefault((collection, key), {})[manager, part] = mine
        return self._write(collection, new, dry)

    def delete(self, collection: Collection, key: Key, options: Mapping[str, Any]) -> Object:
        """DELETE: at once, or once finalizers and a pod's grace are over."""
        old = self.read(collection, key)
        metadata = old["metadata"]
        wanted = (options.get("preconditions") or {}).get("uid")
        if wanted is not None and wanted != metadata["uid"]:
            said = f"Precondition failed: UID in precondition: {wanted}, UID in object meta: {metadata['uid']}"
            raise Refused(409, "Conflict", f'Operation cannot be fulfilled on {collection[1]} "{key[1]}": {said}')
        if "All" in (options.get("dryRun") or ()):
            return old
        grace_s = self._grace_s(collection, old, options)
        if grace_s == 0 and not metadata.get("finalizers"):
            return self.remove(collection, key)
        new = deepcopy(old)
        ends_s = self._wall() + grace_s
        if "deletionTimestamp" not in metadata or grace_s < metadata.get("deletionGracePeriodSeconds", 0):
            new["metadata"]["deletionTimestamp"] = stamp(ends_s)
            new["metadata"]["deletionGracePeriodSeconds"] = grace_s
        return self._write(collection, new, False)

    def remove(self, collection: Collection, key: Key) -> Object:
        """Take the object away, whatever holds it."""
        old = self.read(collection, key)
        gone = deepcopy(old)
        self.version += 1
        gone["metadata"]["resourceVersion"] = str(self.version)
        del self._objects[collection][key]
        self._applied.pop((collection, key), None)
        self.history.append(Change(self.version, collection, "DELETED", gone, old))
        self.changed()
        return gone

    def put(self, collection: Collection, obj: Object) -> Object:
        """Write all of an object, its status too, as no client can."""
        new = deepcopy(obj)
        old = self.find(collection, key_of(new))
        if old is None:
            self._made(new, "fake", "Update")
        else:
            kept = ("uid", "creationTimestamp", "resourceVersion", "generation")
            known = {name: old["metadata"][name] for name in kept if name in old["metadata"]}
            new["metadata"] = {**new.get("metadata", {}), **known}
        return self._write(collection, new, False)

    def _made(self, obj: Object, manager: str, operation: str) -> None:
        metadata = obj["metadata"]
        metadata.pop("resourceVersion", None)
        metadata["uid"] = str(uuid.uuid4())
        metadata["creationTimestamp"] = stamp(self._wall())
        metadata["generation"] = 1
        self._managed(obj, manager, operation, "")

    def _managed(self, obj: Object, manager: str, operation: str, part: str) -> None:
        entry = {"manager": manager, "operation": operation, "fieldsType": "FieldsV1"}
        if part:
            entry["subresource"] = part
        entries = obj["metadata"].setdefault("managedFields", [])
        if entry not in entries:
            entries.append(entry)

    def _check_version(self, collection: Collection, old: Object, body: Object) -> None:
        wanted = body.get("metadata", {}).get("resourceVersion")
        if wanted and wanted != old["metadata"]["resourceVersion"]:
            name = old["metadata"]["name"]
            said = "the object has been modified; please apply your changes to the latest version and try again"
            raise Refused(409, "Conflict", f'Operation cannot be fulfilled on {collection[1]} "{name}": {said}')

    def _keep_parts(self, old: Object, new: Object, wanted: Object, part: str) -> None:
        """A write to the object leaves its status, one to /status leaves all but the status."""
        if part:
            if "status" in wanted:
                new["status"] = deepcopy(wanted["status"])
            return
        new.pop("status", None)
        if "status" in old:
            new["status"] = deepcopy(old["status"])
        fixed = ("name", "namespace", "uid", "creationTimestamp", "resourceVersion", "generation", "managedFields")
        metadata = new.setdefault("metadata", {})
        for name in (*fixed, "deletionTimestamp", "deletionGracePeriodSeconds"):
            metadata.pop(name, None)
            if name in old["metadata"]:
                metadata[name] = deepcopy(old["metadata"][name])

    def _grace_s(self, collection: Collection, old: Object, options: Mapping[str, Any]) -> int:
        if collection != PODS:
            return 0
        bound = bool(old.get("spec", {}).get("nodeName"))
        if not bound or old.get("status", {}).get("phase") in ("Succeeded", "Failed"):
            return 0
        asked = options.get("gracePeriodSeconds")
        return int(old["spec"].get("terminationGracePeriodSeconds", 30) if asked is None else asked)

    def _write(self, collection: Collection, new: Object, dry: bool) -> Object:
        old = self.find(collection, key_of(new))
        if old is not None and old == new:
            return old  # as on the real server, a write that changes nothing makes no version
        if old is not None and old.get("spec") != new.get("spec"):
            new["metadata"]["generation"] = old["metadata"].get("generation", 1) + 1
        if dry:
            return new
        metadata = new["metadata"]
        if (
            old is not None
            and "deletionTimestamp" in metadata
            and collection != PODS
            and not metadata.get("finalizers")
        ):
            return self.remove(collection, key_of(new))  # the last finalizer is gone
        self.version += 1
        metadata["resourceVersion"] = str(self.version)
        self._objects.setdefault(collection, {})[key_of(new)] = new
        self.history.append(Change(self.version, collection, "ADDED" if old is None else "MODIFIED", new, old))
        self.changed()
        return new
