"""The command lines of the four servers.

Owns the text; pure.  Everything listens on one address, which is a loopback one or an address in a namespace.
"""

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from slackwater_controlplane.certs import Pair

ETCD, API_SERVER, CONTROLLERS, SCHEDULER = "etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler"
# In the order of starting; stopping goes the other way round.
SERVERS = (ETCD, API_SERVER, CONTROLLERS, SCHEDULER)


@dataclass(frozen=True, slots=True)
class Settings:
    """What a test may want otherwise.

    qps: requests a second that controllers and scheduler allow themselves; Kubernetes' default, 20 to 50, would be
        what every measurement of ours measures.
    controllers: what the controller-manager runs; `-NAME` leaves one out.
    extra: more flags of a server, which win over ours.
    """

    service_range: str = "10.96.0.0/16"
    qps: int = 2000
    controllers: str = "*"
    extra: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def service_address(self) -> str:
        """Where pods find the API server: the first address of the range, as Kubernetes has it."""
        return str(ipaddress.ip_network(self.service_range)[1])


@dataclass(frozen=True, slots=True)
class Ports:
    """One port a listener."""

    etcd: int
    etcd_peer: int
    api: int
    controllers: int
    scheduler: int


@dataclass(frozen=True, slots=True)
class Files:
    """What the servers read, all in the cluster's folder."""

    folder: Path
    ca: Path
    serving: Pair
    components: Pair
    accounts: Pair
    kubelet_client: Pair
    front_proxy: Pair
    controllers: Path
    scheduler: Path
    audit_policy: Path
    audit_log: Path


def etcd(ports: Ports, files: Files) -> list[str]:
    client, peer = f"http://127.0.0.1:{ports.etcd}", f"http://127.0.0.1:{ports.etcd_peer}"
    return [
        "--name=test",
        f"--data-dir={files.folder / 'etcd'}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=test={peer}",
        "--auto-compaction-retention=1",
        f"--quota-backend-bytes={4 << 30}",
        "--unsafe-no-fsync",  # a test's data need not outlive the machine
        "--log-level=warn",
    ]


def api_server(address: str, ports: Ports, files: Files, settings: Settings) -> list[str]:
    flags = {
        "etcd-servers": f"http://127.0.0.1:{ports.etcd}",
        "bind-address": address,
        "advertise-address": address,
        "secure-port": ports.api,
        "service-cluster-ip-range": settings.service_range,
        "tls-cert-file": files.serving.cert,
        "tls-private-key-file": files.serving.key,
        "client-ca-file": files.ca,
        "kubelet-certificate-authority": files.ca,
        "kubelet-client-certificate": files.kubelet_client.cert,
        "kubelet-client-key": files.kubelet_client.key,
        "kubelet-preferred-address-types": "InternalIP",  # names of nodes do not resolve here
        "service-account-issuer": "https://kubernetes.default.svc.cluster.local",
        "service-account-key-file": files.accounts.cert,
        "service-account-signing-key-file": files.accounts.key,
        "authorization-mode": "Node,RBAC",
        "enable-admission-plugins": "NodeRestriction",
        "allow-privileged": "true",
        "requestheader-client-ca-file": files.ca,
        "requestheader-allowed-names": "front-proxy-client",
        "requestheader-username-headers": "X-Remote-User",
        "requestheader-group-headers": "X-Remote-Group",
        "requestheader-extra-headers-prefix": "X-Remote-Extra-",
        "proxy-client-cert-file": files.front_proxy.cert,
        "proxy-client-key-file": files.front_proxy.key,
        "audit-policy-file": files.audit_policy,
        "audit-log-path": files.audit_log,
        "audit-log-maxsize": 4000,  # MB; a log that is cut into files would be read in part
        "max-requests-inflight": 2000,
        "max-mutating-requests-inflight": 1000,
    }
    if ipaddress.ip_address(address).is_loopback:
        flags["endpoint-reconciler-type"] = "none"  # a Service's endpoint may not be a loopback address
    return [*_lines(flags), *settings.extra.get(API_SERVER, ())]


def controller_manager(address: str, ports: Ports, files: Files, settings: Settings) -> list[str]:
    flags = {
        "service-account-private-key-file": files.accounts.key,
        "root-ca-file": files.ca,
        "use-service-account-credentials": "true",
        "controllers": settings.controllers,
    }
    flags |= _component(address, ports.controllers, files.controllers, files, settings)
    return [*_lines(flags), *settings.extra.get(CONTROLLERS, ())]


def scheduler(address: str, ports: Ports, files: Files, settings: Settings) -> list[str]:
    return [
        *_lines(_component(address, ports.scheduler, files.scheduler, files, settings)),
        *settings.extra.get(SCHEDULER, ()),
    ]


def _component(address: str, port: int, kubeconfig: Path, files: Files, settings: Settings) -> dict[str, object]:
    return {
        "kubeconfig": kubeconfig,
        "authentication-kubeconfig": kubeconfig,
        "authorization-kubeconfig": kubeconfig,
        "authorization-always-allow-paths": "/healthz,/readyz,/livez,/metrics",
        "bind-address": address,
        "secure-port": port,
        "tls-cert-file": files.components.cert,
        "tls-private-key-file": files.components.key,
        "leader-elect": "false",
        "kube-api-qps": settings.qps,
        "kube-api-burst": settings.qps * 2,
    }


def _lines(flags: Mapping[str, object]) -> list[str]:
    return [f"--{name}={value}" for name, value in flags.items()]
