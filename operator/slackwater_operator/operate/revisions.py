"""Which revision of its template a service serves with, and which one waits for its gate: `Revisions` for the cluster.

Owns the name of a revision, what a gate's Job says, and the choice.  A revision's template is kept in a
ControllerRevision, so that the old one can still be started while the new one waits.  `children` makes those objects.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from slackwater_operator.cluster.kube.ports import Revision
from slackwater_operator.kube.types import Key, Object, Resource, key_of
from slackwater_operator.resources import names
from slackwater_operator.resources.inference import InferenceDeployment

CONTROLLER_REVISIONS = Resource("apps", "v1", "controllerrevisions", "ControllerRevision", True)
DIGEST_CHARS = 10


class Gate(StrEnum):
    """How far the gate of a revision is."""

    NONE = "none"  # the service has no gate
    WAITING = "waiting"  # its Job has not ended
    PASSED = "passed"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Choice:
    """What a service serves with.  current: the spec's own revision.   serving: None = nothing may serve yet."""

    current: Revision
    serving: Revision | None
    gate: Gate
    said: str = ""  # the gate's own words, if it failed


def revision_of(service: InferenceDeployment) -> Revision:
    """The revision that the spec describes now; equal templates and models have equal names."""
    template = service.spec.template.dump()
    said = json.dumps([service.spec.model, template], sort_keys=True, separators=(",", ":"))
    return Revision(hashlib.sha256(said.encode()).hexdigest()[:DIGEST_CHARS], template)


def gate_job_name(service: str, revision: str) -> str:
    """The Job that a revision of a service must pass."""
    return f"{service}-gate-{revision}"


def record_name(service: str, revision: str) -> str:
    """The ControllerRevision that keeps a revision's template."""
    return f"{service}-{revision}"


def gate_of(job: Object | None) -> tuple[Gate, str]:
    """What a gate's Job says, with its words if it failed; None: it is not made yet."""
    for condition in (job or {}).get("status", {}).get("conditions") or ():
        if condition.get("status") == "True" and condition.get("type") in ("Complete", "SuccessCriteriaMet"):
            return Gate.PASSED, ""
        if condition.get("status") == "True" and condition.get("type") == "Failed":
            return Gate.FAILED, str(condition.get("message") or condition.get("reason") or "its Job failed")
    return Gate.WAITING, ""


class Ledger:
    """The choices of all services, as of the newest `look`.

    jobs, records: find a Job or a ControllerRevision by (namespace, name).   status_of: the status of a service.
    """

    def __init__(
        self,
        jobs: Callable[[str, str], Object | None],
        records: Callable[[str, str], Object | None],
        status_of: Callable[[Key], Mapping[str, Any]],
    ) -> None:
        self._jobs = jobs
        self._records = records
        self._status_of = status_of
        self._read: dict[Key, tuple[InferenceDeployment, Revision]] = {}
        self._served: dict[str, str] = {}  # by uid, what was chosen last: our own status write may not be back yet
        self.choices: dict[str, Choice] = {}

    def look(self, services: Iterable[InferenceDeployment]) -> None:
        """Choose again."""
        choices = {}
        served, self._served = self._served, {}
        read, self._read = self._read, {}
        for service in services:
            key = (service.metadata.namespace, service.metadata.name)
            known = read.get(key)  # a spec is read once: hundreds of templates in each tick would be half of it
            is_same = known is not None and known[0] is service
            self._read[key] = known if known is not None and is_same else (service, revision_of(service))
            uid = service.metadata.uid
            choices[service.key] = choice = self._choose(service, key, served.get(uid, ""))
            if choice.serving is not None:
                self._served[uid] = choice.serving.name
        self.choices = choices

    def serving(self, service: str) -> Revision | None:
        """What new replicas are made from; None = nothing may serve yet."""
        choice = self.choices.get(service)
        return choice.serving if choice else None

    def _choose(self, service: InferenceDeployment, key: Key, served: str) -> Choice:
        current = self._read[key][1]
        if service.spec.revision_gate is None:
            return Choice(current, current, Gate.NONE)
        served = served or self._status_of(key).get("servingRevision") or ""
        # What a service of this name left behind is on its way out, and no word of this one.
        job = _of(service, self._jobs(key[0], gate_job_name(key[1], current.name)))
        gate, said = gate_of(job)
        if gate is Gate.PASSED or served == current.name:
            return Choice(current, current, Gate.PASSED)
        record = _of(service, self._records(key[0], record_name(key[1], served))) if served else None
        old = Revision(served, record["data"]["template"]) if served and record and record.get("data") else None
        return Choice(current, old, gate, said)


def _of(service: InferenceDeployment, child: Object | None) -> Object | None:
    """That child, if it is this very service's."""
    owners = (child or {}).get("metadata", {}).get("ownerReferences") or ()
    return child if any(one.get("uid") == service.metadata.uid for one in owners) else None


def owned_records(records: Iterable[Object]) -> dict[Key, list[Object]]:
    """ControllerRevisions by the service that they are of."""
    owned: dict[Key, list[Object]] = {}
    for record in records:
        owner = (record["metadata"].get("labels") or {}).get(names.LABEL_OWNER, "")
        owned.setdefault((key_of(record)[0], owner), []).append(record)
    return owned
