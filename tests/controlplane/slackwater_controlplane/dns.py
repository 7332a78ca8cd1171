"""CoreDNS: the names of a test cluster's services, by a process beside the servers instead of a Deployment.

Pods ask the usual address, that of the Service `kube-dns`; having no pods, it gets its endpoint by hand.  Owns the
configuration and these objects; who runs the process is node/cluster.py.
"""

from pathlib import Path

from slackwater_controlplane.client import Object
from slackwater_controlplane.node.config import CLUSTER_DNS, CLUSTER_DOMAIN

NAME = "coredns"
USER = "system:coredns"
PORT = 53
READY_PORT = 8181
_NAMESPACE = "kube-system"
_PORTS = (("dns", "UDP"), ("dns-tcp", "TCP"))


def write_corefile(target: Path, kubeconfig: Path, address: str) -> Path:
    """CoreDNS' configuration; other names than the cluster's are refused, since nothing leads outside."""
    target.write_text(
        f"""\
.:{PORT} {{
    bind {address}
    errors
    ready {address}:{READY_PORT}
    kubernetes {CLUSTER_DOMAIN} in-addr.arpa ip6.arpa {{
        kubeconfig {kubeconfig}
        pods insecure
        ttl 1
    }}
}}
"""
    )
    return target


def command(program: Path, corefile: Path) -> list[str]:
    return [str(program), "-conf", str(corefile)]


def ready_url(address: str) -> str:
    return f"http://{address}:{READY_PORT}/ready"


def objects(address: str) -> list[Object]:
    """The right to read what DNS tells, and the Service that leads pods to the process at this address."""
    meta = {"name": "kube-dns", "namespace": _NAMESPACE}
    reads = {"verbs": ["list", "watch"]}
    return [
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRole",
            "metadata": {"name": USER},
            "rules": [
                {"apiGroups": [""], "resources": ["services", "pods", "namespaces"], **reads},
                {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], **reads},
            ],
        },
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": USER},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": USER},
            "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": USER}],
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": meta,
            "spec": {
                "clusterIP": CLUSTER_DNS,
                "ports": [{"name": name, "port": PORT, "protocol": protocol} for name, protocol in _PORTS],
            },
        },
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": meta | {"labels": {"kubernetes.io/service-name": "kube-dns"}},
            "addressType": "IPv4",
            "endpoints": [{"addresses": [address], "conditions": {"ready": True}}],
            "ports": [{"name": name, "port": PORT, "protocol": protocol} for name, protocol in _PORTS],
        },
    ]
