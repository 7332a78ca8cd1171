"""Where gateways and keepers are: the URLs of `signals` and `progress`, from specs and from the pods of ours.

Owns the index of those few pods, kept as the pod cache changes, since a look through thousands of pods for each of them
would cost more than all polls.
"""

from collections.abc import Iterable

from slackwater_operator.kube.cache import Cache
from slackwater_operator.kube.types import Key, Object, key_of
from slackwater_operator.operate.containers import kept_ledger
from slackwater_operator.operate.progress import Place
from slackwater_operator.resources import names
from slackwater_operator.resources.cleaning import CleaningJob
from slackwater_operator.resources.inference import InferenceDeployment

KINDS = (names.POD_GATEWAY, names.POD_KEEPER)


class Endpoints:
    """The pods of gateways and keepers, by kind and owner."""

    def __init__(self, pods: Cache) -> None:
        self._pods: dict[tuple[str, Key], dict[Key, Object]] = {}
        for pod in pods.values():
            self._see("ADDED", pod)
        pods.on_change(self._see)

    def gateways(self, services: Iterable[InferenceDeployment]) -> dict[str, list[tuple[str, bool]]]:
        """(url, whether it is required) of each service's gateways, by Service.name."""
        found: dict[str, list[tuple[str, bool]]] = {}
        for service in services:
            if (url := service.spec.gateway.control_url) is not None:
                found[service.key] = [(url.rstrip("/"), True)]
            else:
                found[service.key] = [*self._urls(names.POD_GATEWAY, service.metadata.namespace, service.metadata.name)]
        return found

    def keepers(self, jobs: Iterable[CleaningJob]) -> dict[str, Place]:
        """Where each job's keeper is, by CleaningJob.uid; those that have none are not there.

        One that still reads another ledger, of a job that had this name or as the spec was before, is not the job's.
        """
        found: dict[str, Place] = {}
        for job in jobs:
            ledger = kept_ledger(job)
            if (url := job.spec.keeper.url) is not None:
                found[job.key] = Place(url.rstrip("/"), ledger)
            elif urls := [*self._urls(names.POD_KEEPER, job.metadata.namespace, job.metadata.name, ledger)]:
                found[job.key] = Place(min(urls, key=lambda one: (not one[1], one[0]))[0], ledger)
        return found

    def _urls(self, kind: str, namespace: str, owner: str, keeps: str = "") -> Iterable[tuple[str, bool]]:
        for pod in self._pods.get((kind, (namespace, owner)), {}).values():
            if (pod["metadata"].get("annotations") or {}).get(names.ANNOTATION_KEEPS, "") != keeps:
                continue
            status = pod.get("status") or {}
            address = status.get("podIP")
            if address and status.get("phase") == "Running":
                host = f"[{address}]" if ":" in address else address
                yield f"http://{host}:{names.CONTROL_PORT}", "deletionTimestamp" not in pod["metadata"]

    def _see(self, change: str, pod: Object) -> None:
        labels = pod["metadata"].get("labels") or {}
        kind = labels.get(names.LABEL_KIND)
        if kind not in KINDS:
            return
        key = key_of(pod)
        there = self._pods.setdefault((kind, (key[0], labels.get(names.LABEL_OWNER, ""))), {})
        if change == "DELETED":
            there.pop(key, None)
        else:
            there[key] = pod
