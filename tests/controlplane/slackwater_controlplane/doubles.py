"""GPUs that are held twice, looked for all the time while something breaks.

Owns the looking, in a thread and with a client of its own; a look that fails is made again.  Owns no expectation.
"""

import contextlib
import threading
from collections import Counter
from types import TracebackType
from typing import Self

import httpx

from slackwater_controlplane.client import Admin, Object
from slackwater_controlplane.cluster import ControlPlane
from slackwater_controlplane.errors import ControlPlaneError
from slackwater_controlplane.kwok import GPU

_EVERY_S = 0.1


class Doubles:
    """Nodes on which living pods want more GPUs than there are.  A context manager.

    found: what was seen, a sentence each.   looks: how often it was looked.
    """

    def __init__(self, plane: ControlPlane) -> None:
        self.found: set[str] = set()
        self.looks = 0
        self._admin = Admin(plane.kubeconfig(), user_agent="doubles")
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join(35)
        self._admin.close()

    def _run(self) -> None:
        while not self._over.wait(_EVERY_S):
            with contextlib.suppress(ControlPlaneError, httpx.HTTPError):  # the server is one of what breaks
                self.found |= over_allocated(self._admin)
                self.looks += 1


def over_allocated(admin: Admin) -> set[str]:
    """Nodes whose living pods want more GPUs than there are."""
    held: Counter[str] = Counter()
    who: dict[str, list[str]] = {}
    for pod in admin.list("pods"):
        node = pod["spec"].get("nodeName")
        if node and pod["status"].get("phase") not in ("Succeeded", "Failed") and (count := _gpus(pod)):
            held[node] += count
            who.setdefault(node, []).append(pod["metadata"]["name"])
    there = {one["metadata"]["name"]: int(one["status"]["allocatable"].get(GPU, 0)) for one in admin.list("nodes")}
    return {
        f"{node} has {there[node]} GPUs and {', '.join(sorted(who[node]))}"
        for node, count in held.items()
        if node in there and count > there[node]
    }


def _gpus(pod: Object) -> int:
    return sum(int((one.get("resources") or {}).get("limits", {}).get(GPU, 0)) for one in pod["spec"]["containers"])
