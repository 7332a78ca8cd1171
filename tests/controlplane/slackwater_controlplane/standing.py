"""The cluster that `make cluster-up` keeps for a person: one a cache, owned by a process in the background.

Owns that process, its state file and its end.  What it runs is what tests run.
"""

import contextlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slackwater_controlplane import leftovers
from slackwater_controlplane.build import Programs
from slackwater_controlplane.cluster import ControlPlane
from slackwater_controlplane.errors import ControlPlaneError, StartError
from slackwater_controlplane.kwok import PRODUCT, Kwok
from slackwater_controlplane.processes import ProcessName, await_end

logger = logging.getLogger(__name__)

PRODUCTS = (("h200", "NVIDIA-H200"), ("rtx5090", "NVIDIA-GeForce-RTX-5090"))
SITE = "topology.kubernetes.io/region"
_START_S = 300.0
_STOP_S = 60.0
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Wanted:
    """nodes: real ones, which need root.   fake_nodes: of kwok.   Both kinds are half H200, half RTX 5090."""

    nodes: int
    fake_nodes: int

    @property
    def groups(self) -> tuple[str, ...]:
        """The groups of programs that it takes."""
        asked = (("control-plane", True), ("kwok", self.fake_nodes > 0), ("nodes", self.nodes > 0))
        return tuple(group for group, is_asked in asked if is_asked)


@dataclass(frozen=True, slots=True)
class State:
    """What is known of the cluster that is up.   nodes: the real ones, each with the socket of its containerd."""

    owner: ProcessName
    url: str
    kubeconfig: Path
    log_folder: Path
    nodes: Mapping[str, Path]


class Standing:
    """The cluster of one cache, up or not."""

    def __init__(self, cache: Path) -> None:
        self.cache = cache
        self.folder = cache / "controlplane" / "up"
        self.log = self.folder / "log"
        self.ledgers = self.folder / "ledgers"
        self._state = self.folder / "state.json"

    def state(self) -> State | None:
        """What is up; None when nothing is."""
        if not self._state.exists():
            return None
        document = json.loads(self._state.read_text())
        owner = ProcessName(*document["owner"])
        if not owner.is_alive:
            return None
        nodes = {name: Path(socket) for name, socket in document["nodes"].items()}
        return State(owner, document["url"], Path(document["kubeconfig"]), Path(document["log_folder"]), nodes)

    def start(self, wanted: Wanted, say: Callable[[str], None]) -> State:
        """Start it in the background and return when it is up.  Raises StartError with what it said."""
        if self.state() is not None:
            raise ControlPlaneError("a cluster is up already")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._state.unlink(missing_ok=True)
        command = [sys.executable, "-m", "slackwater_controlplane", "serve", json.dumps(asdict(wanted))]
        with self.log.open("wb") as log:
            child = subprocess.Popen(
                command,
                env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "SLACKWATER_CACHE": str(self.cache)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # it outlives the terminal
            )
        begun_s = said_s = time.monotonic()
        while (state := self.state()) is None:
            if child.poll() is not None:
                raise StartError(f"the cluster did not come up:\n{self._last_words()}")
            if (now_s := time.monotonic()) - begun_s > _START_S:
                child.terminate()
                raise StartError(f"the cluster is not up after {_START_S:g} s:\n{self._last_words()}")
            if now_s - said_s > 5:
                say(f"{now_s - begun_s:4.0f}s starting")
                said_s = now_s
            time.sleep(_POLL_S)
        return state

    def stop(self) -> bool:
        """End it; says whether there was one.  What a killed one left is ended too."""
        state = self.state()
        if state is not None:
            state.owner.send(signal.SIGTERM)
            if not await_end([state.owner], _STOP_S):
                state.owner.send(signal.SIGKILL)
                await_end([state.owner], _STOP_S)
        was_left = leftovers.sweep(leftovers.runs_folder(self.cache))
        shutil.rmtree(self.folder, ignore_errors=True)
        return state is not None or bool(was_left)

    def serve(self, programs: Programs, wanted: Wanted) -> None:
        """Be the process in the background: run the cluster until SIGTERM."""
        signal.signal(signal.SIGTERM, _leave)
        signal.signal(signal.SIGINT, _leave)
        shutil.rmtree(self.ledgers, ignore_errors=True)  # of a cluster that was killed
        with _cluster(programs, self.cache, wanted, self.ledgers) as (cluster, nodes):
            self._write_state(cluster, nodes)
            logger.info("up url=%s", cluster.url)
            while True:
                signal.pause()

    def _write_state(self, cluster: ControlPlane, nodes: Mapping[str, Path]) -> None:
        owner = ProcessName.of(os.getpid())
        assert owner is not None, "this process is alive"
        # At a place that stays the same from one cluster to the next.
        kubeconfig = self.folder / "kubeconfig"
        kubeconfig.touch(mode=0o600)
        kubeconfig.write_bytes(cluster.kubeconfig().read_bytes())
        document = {
            "owner": [owner.pid, owner.start_ticks],
            "url": cluster.url,
            "kubeconfig": str(kubeconfig),
            "log_folder": str(cluster.folder / "log"),
            "nodes": {name: str(socket) for name, socket in nodes.items()},
        }
        temporary = self._state.with_suffix(".tmp")
        temporary.write_text(json.dumps(document))
        os.replace(temporary, self._state)

    def _last_words(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-10:])


@contextlib.contextmanager
def _cluster(
    programs: Programs, cache: Path, wanted: Wanted, ledgers: Path
) -> Iterator[tuple[ControlPlane, Mapping[str, Path]]]:
    """The cluster, and the sockets of its real nodes."""
    sockets: Mapping[str, Path] = {}
    with contextlib.ExitStack() as stack:
        if wanted.nodes:
            # Only here: the parts of real nodes need more of the machine and of Python than a control plane does.
            from slackwater_controlplane import play
            from slackwater_controlplane.node.cluster import NodeCluster
            from slackwater_controlplane.node.node import NodeSpec

            specs = [
                NodeSpec(f"{prefix}-{number}", number, {PRODUCT: product, SITE: "site-a"})
                for number in range(wanted.nodes)
                for prefix, product in [PRODUCTS[number % len(PRODUCTS)]]
            ]
            runs, folders = leftovers.runs_folder(cache), play.folders(cache, ledgers)
            started = stack.enter_context(NodeCluster(programs, runs, specs, folders=folders))
            cluster = started.plane
            sockets = {name: node.paths.containerd_socket for name, node in started.nodes.items()}
        else:
            record = stack.enter_context(leftovers.run_folder(cache, "up"))
            cluster = stack.enter_context(ControlPlane(record.folder, programs, record))
        if wanted.fake_nodes:
            kwok = stack.enter_context(Kwok(cluster))
            for index, (prefix, product) in enumerate(PRODUCTS):
                count = (wanted.fake_nodes + 1 - index) // len(PRODUCTS)
                name = f"fake-{prefix}"
                kwok.add_nodes(
                    count, prefix=name, product=product, labels={SITE: "site-b"}, is_tainted=wanted.nodes > 0
                )
        yield cluster, sockets


def _leave(number: int, _frame: Any) -> None:
    signal.signal(number, signal.SIG_IGN)  # the end is not to be interrupted
    raise SystemExit(0)
