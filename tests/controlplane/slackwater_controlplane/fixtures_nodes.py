"""Fixtures for tests that need real nodes; part of the plug-in `slackwater_controlplane.fixtures`.

Owns no cluster logic: it builds NodeCluster once a session, and says why when it cannot.  What NodeCluster needs is
imported when a test asks for it: the plug-in is loaded in every run, and gRPC alone takes half a second.
"""

import os
import secrets
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from slackwater_controlplane.build import Programs, cache_folder

if TYPE_CHECKING:
    from slackwater_controlplane.node.cluster import NodeCluster

__all__ = ["node_cluster", "node_namespace"]


@pytest.fixture(scope="session")
def node_cluster(controlplane_programs: Programs) -> "Iterator[NodeCluster]":
    """A Kubernetes with two real nodes of eight GPUs each, of two flavours, with service addresses and DNS."""
    from slackwater_controlplane.node.cluster import NodeCluster, why_not

    if (reason := why_not(controlplane_programs)) is not None:
        pytest.skip(reason)
    with NodeCluster(controlplane_programs, cache_folder(os.environ) / "controlplane/runs") as cluster:
        yield cluster


@pytest.fixture
def node_namespace(node_cluster: "NodeCluster") -> Iterator[str]:
    """A namespace of the node cluster that is ready for pods; afterwards its pods are gone and their GPUs free."""
    name = f"test-{secrets.token_hex(4)}"
    admin = node_cluster.admin
    admin.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    admin.wait_for("serviceaccounts", "default", namespace=name)
    # Mounted into every pod; a pod that comes before it waits a second or more for its mount to be tried again.
    admin.wait_for("configmaps", "kube-root-ca.crt", namespace=name)
    yield name
    admin.delete_all("pods", name)
    for left in admin.list("pods", name):
        if left["metadata"].get("finalizers"):  # a test that failed could not remove its own
            admin.patch("pods", left["metadata"]["name"], {"metadata": {"finalizers": None}}, name)
        admin.wait_gone("pods", left["metadata"]["name"], name)
    admin.delete("namespaces", name)
