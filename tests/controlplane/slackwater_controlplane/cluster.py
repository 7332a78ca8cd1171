"""`ControlPlane`: etcd, API server, controller-manager and scheduler of a real Kubernetes, on one address.

Owns their order, their readiness and their end.  Does not own their command lines (`flags`), their processes
(`servers`), nor nodes, which are `kwok`'s or the `node` package's.
"""

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType

from slackwater_controlplane import audit, flags, kubeconfig
from slackwater_controlplane.build import Programs
from slackwater_controlplane.certs import Authority
from slackwater_controlplane.client import Admin
from slackwater_controlplane.errors import ControlPlaneError, PortInUse, StartError
from slackwater_controlplane.flags import API_SERVER, CONTROLLERS, ETCD, SCHEDULER, SERVERS, Files, Ports, Settings
from slackwater_controlplane.leftovers import Record
from slackwater_controlplane.probe import Place
from slackwater_controlplane.servers import Server

logger = logging.getLogger(__name__)

ADMIN = ("slackwater-admin", ("system:masters",))
_NAMES = ("kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local")
_START_S = 90.0  # a machine that builds something beside it is slow
# An API server waits a minute for clients that watch, and a store ten seconds for an API server that does.
_STOP_S = 3.0


class ControlPlane:
    """One cluster without nodes, in one folder.  As a context manager it starts, and ends with the block.

    address: what everything listens on.   enter: a command into another network namespace; the address must be
    reachable from here too.
    """

    def __init__(
        self,
        folder: Path,
        programs: Programs,
        record: Record,
        *,
        address: str = "127.0.0.1",
        enter: Sequence[str] = (),
        settings: Settings | None = None,
    ) -> None:
        self.folder = folder
        self.settings = settings or Settings()
        self.started_in_s: dict[str, float] = {}
        self.programs = programs
        self.record = record
        self.place = Place(address, enter)
        self._servers: dict[str, Server] = {}
        self._authority: Authority | None = None

    # ---- life

    def start(self) -> None:
        """Start all four and return when the cluster takes pods: its `default` service account is there.

        Raises PortInUse when a port is taken meanwhile, StartError with the log's last lines when a server ends.
        """
        if (reason := self.programs.why_not(*SERVERS)) is not None:
            raise StartError(reason)
        self._ports = Ports(*self.place.free_ports(5))
        self.url = f"https://{self.place.address}:{self._ports.api}"
        files = self._write_files()
        self._servers = {name: self._server(name, files) for name in SERVERS}
        begun_s = time.monotonic()
        try:
            for name in SERVERS:
                self.start_server(name)
            self._wait_for_account()
        except BaseException:
            self.stop()
            raise
        self.started_in_s["all"] = time.monotonic() - begun_s
        logger.info("control plane ready url=%s took_s=%.1f", self.url, self.started_in_s["all"])

    def stop(self) -> None:
        """End all of them, the store last: an API server without it hangs for a minute and keeps its port."""
        if "admin" in self.__dict__:
            self.admin.close()
            del self.__dict__["admin"]
        for name in reversed(SERVERS):
            if name in self._servers:
                self._servers[name].stop(_STOP_S)

    def __enter__(self) -> "ControlPlane":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # ---- one server

    def start_server(self, name: str) -> None:
        """Start one that does not run, on its old port, and return when it is ready."""
        server = self._named(name)
        self._refuse_busy_ports(name)
        begun_s = time.monotonic()
        server.start()
        try:
            server.wait(lambda: self.is_ready(name), _START_S)
        except StartError as error:
            # etcd has been seen to end at its start on a machine under load; its data are none yet, or whole.
            if name != ETCD or server.is_alive:
                raise
            logger.warning("etcd ended at its start and is started once more: %s", error)
            server.start()
            server.wait(lambda: self.is_ready(name), _START_S)
        self.started_in_s[name] = time.monotonic() - begun_s

    def stop_server(self, name: str) -> None:
        self._named(name).stop(_STOP_S)

    def restart(self, name: str) -> None:
        """Stop one and start it again; returns when it is ready."""
        self.stop_server(name)
        self.start_server(name)

    def kill(self, name: str) -> None:
        """SIGKILL one; `start_server` brings it back."""
        self._named(name).kill()

    def pause(self, name: str) -> None:
        """SIGSTOP one: connections stay open and nothing answers."""
        self._named(name).pause()

    def resume(self, name: str) -> None:
        self._named(name).resume()

    def pid(self, name: str) -> int | None:
        return self._named(name).pid

    def log(self, name: str) -> Path:
        return self._named(name).log

    def is_ready(self, name: str) -> bool:
        """Whether a server says so itself."""
        address, ca = self.place.address, str(self.ca_file)
        asked = {
            ETCD: f"http://127.0.0.1:{self._ports.etcd}/health",
            API_SERVER: f"{self.url}/readyz",
            CONTROLLERS: f"https://{address}:{self._ports.controllers}/healthz",
            SCHEDULER: f"https://{address}:{self._ports.scheduler}/readyz",
        }
        answer = self.place.get(asked[name], None if name == ETCD else ca)
        return answer is not None and answer[0] == 200

    # ---- what a user does

    @property
    def authority(self) -> Authority:
        """Who issues certificates that this cluster believes, a kubelet's too."""
        if self._authority is None:
            raise ControlPlaneError("the cluster is not started")
        return self._authority

    @property
    def ca_file(self) -> Path:
        return self.authority.file

    @cached_property
    def admin(self) -> Admin:
        """A client that may do everything."""
        return Admin(self.kubeconfig())

    def kubeconfig(self, user: str | None = None, groups: Iterable[str] = ()) -> Path:
        """A kubeconfig of a user, the administrator's unless one is named; others have what RBAC gives them."""
        pair = self.authority.client(*(ADMIN if user is None else (user, tuple(groups))))
        return kubeconfig.write(self.folder / "kubeconfig" / f"{pair.cert.stem}.yaml", self.url, self.ca_file, pair)

    def audit_position(self) -> int:
        """Where the audit log ends now, for `audit`."""
        return self._audit_log.stat().st_size if self._audit_log.exists() else 0

    def audit(self, since: int = 0) -> Iterator[audit.AuditEvent]:
        """What the API server was asked, from a position on."""
        return audit.read(self._audit_log, since)

    # ---- how

    @property
    def _audit_log(self) -> Path:
        return self.folder / "log/audit.log"

    def _named(self, name: str) -> Server:
        if name not in self._servers:
            raise ControlPlaneError(f"no server {name!r} is started; there are {', '.join(SERVERS)}")
        return self._servers[name]

    def _server(self, name: str, files: Files) -> Server:
        address, ports, settings = self.place.address, self._ports, self.settings
        arguments = {
            ETCD: lambda: flags.etcd(ports, files),
            API_SERVER: lambda: flags.api_server(address, ports, files, settings),
            CONTROLLERS: lambda: flags.controller_manager(address, ports, files, settings),
            SCHEDULER: lambda: flags.scheduler(address, ports, files, settings),
        }[name]()
        command = [str(self.programs.path(name)), *arguments]
        return Server(name, command, folder=self.folder, record=self.record, enter=self.place.enter)

    def _refuse_busy_ports(self, name: str) -> None:
        ports = {
            ETCD: [self._ports.etcd, self._ports.etcd_peer],
            API_SERVER: [self._ports.api],
            CONTROLLERS: [self._ports.controllers],
            SCHEDULER: [self._ports.scheduler],
        }[name]
        if taken := self.place.busy(ports):
            raise PortInUse(f"{name} needs port {taken[0]} of {self.place.address}, and somebody listens there")

    def _wait_for_account(self) -> None:
        """Pods are refused before the controllers have made the account that they run as."""
        deadline_s = time.monotonic() + _START_S
        pair = self.authority.client(*ADMIN)
        url = f"{self.url}/api/v1/namespaces/default/serviceaccounts/default"
        while (answer := self.place.get(url, str(self.ca_file), str(pair.cert), str(pair.key))) is None or (
            answer[0] != 200
        ):
            if time.monotonic() > deadline_s or not self._servers[CONTROLLERS].is_alive:
                words = self._servers[CONTROLLERS].last_words()
                raise StartError(f"no default service account ({answer}); {CONTROLLERS} said:\n  {words}")
            time.sleep(0.05)

    def _write_files(self) -> Files:
        for name in ("log", "etcd", "kubeconfig"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        (self.folder / "etcd").chmod(0o700)
        self._authority = ca = Authority(self.folder / "pki")
        policy = self.folder / "audit-policy.yaml"
        policy.write_text(audit.POLICY)
        hosts = (*_NAMES, "localhost", "127.0.0.1", self.place.address, self.settings.service_address)
        return Files(
            folder=self.folder,
            ca=ca.file,
            serving=ca.server("kube-apiserver", dict.fromkeys(hosts)),
            components=ca.server("components", dict.fromkeys(("localhost", "127.0.0.1", self.place.address))),
            accounts=ca.signing_key("service-accounts"),
            kubelet_client=ca.client("kube-apiserver-kubelet-client", ("system:masters",)),
            front_proxy=ca.client("front-proxy-client"),
            controllers=self.kubeconfig("system:kube-controller-manager"),
            scheduler=self.kubeconfig("system:kube-scheduler"),
            audit_policy=policy,
            audit_log=self._audit_log,
        )
