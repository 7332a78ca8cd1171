"""kube-proxy: the service addresses of a test cluster, as nftables rules inside its network namespace.

One serves all nodes, since they share the namespace.  Owns its command line; who runs it is node/cluster.py.
"""

from pathlib import Path

NAME = "kube-proxy"
USER = "system:kube-proxy"
HEALTH_PORT = 10256


def command(program: Path, kubeconfig: Path, *, node: str, address: str) -> list[str]:
    """The command line.  node: any node that exists; its address stands for the machine's."""
    return [
        str(program),
        f"--kubeconfig={kubeconfig}",
        "--proxy-mode=nftables",
        f"--hostname-override={node}",
        f"--healthz-bind-address={address}:{HEALTH_PORT}",
        "--metrics-bind-address=127.0.0.1:10249",
        # The limits are the whole machine's, and may not be set from a namespace.
        "--conntrack-max-per-core=0",
        "--conntrack-min=0",
        "--conntrack-tcp-timeout-established=0s",
        "--conntrack-tcp-timeout-close-wait=0s",
    ]


def health_url(address: str) -> str:
    return f"http://{address}:{HEALTH_PORT}/healthz"
