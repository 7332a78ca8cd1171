"""pytest plug-in: a real control plane for every test that asks for one, in whichever folder the test lies.

Owns the fixtures `control_plane`, `fresh_control_plane`, `kube_admin`, `namespace`, `kwok` and when they are skipped.
The one place of the package, besides the command line, that reads the environment.
"""

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from slackwater_controlplane import kubeconfig, leftovers
from slackwater_controlplane.build import Programs, cache_folder
from slackwater_controlplane.errors import ControlPlaneError
from slackwater_controlplane.fixtures_gateway import container_images, envoy_gateway
from slackwater_controlplane.fixtures_nodes import node_cluster, node_namespace

if TYPE_CHECKING:  # the plug-in is loaded for every run of every test, and these take most of a second
    from slackwater_controlplane.client import Admin
    from slackwater_controlplane.cluster import ControlPlane
    from slackwater_controlplane.flags import Settings
    from slackwater_controlplane.kwok import Kwok

__all__ = [
    "container_images",
    "control_plane",
    "controlplane_programs",
    "envoy_gateway",
    "fresh_control_plane",
    "kube_admin",
    "kwok",
    "namespace",
    "node_cluster",
    "node_namespace",
]
_CLUSTERS = {"control_plane", "fresh_control_plane", "kube_admin", "node_cluster"}


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _CLUSTERS & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.controlplane)


@contextlib.contextmanager
def new_control_plane(programs: Programs, cache: Path, settings: "Settings | None" = None) -> "Iterator[ControlPlane]":
    """A control plane in a folder of its own, for a fixture or a bench."""
    from slackwater_controlplane.cluster import ControlPlane

    with (
        leftovers.run_folder(cache) as record,
        ControlPlane(record.folder, programs, record, settings=settings) as cluster,
    ):
        yield cluster


@pytest.fixture(scope="session")
def controlplane_programs() -> Programs:
    """What is built in this machine's cache."""
    return Programs(cache_folder(os.environ), os.environ)


@pytest.fixture(scope="session")
def _given_kubeconfig() -> Path | None:
    return kubeconfig.given(os.environ)


@pytest.fixture(scope="session")
def control_plane(controlplane_programs: Programs, _given_kubeconfig: Path | None) -> "Iterator[ControlPlane]":
    """One control plane for the whole run.  Tests leave its servers running and take a `namespace` each."""
    if _given_kubeconfig is not None:
        pytest.skip(f"needs a control plane of its own, and {kubeconfig.FILE} names another cluster")
    _skip_unless_built(controlplane_programs, "control-plane")
    with new_control_plane(controlplane_programs, cache_folder(os.environ)) as cluster:
        yield cluster


@pytest.fixture
def fresh_control_plane(controlplane_programs: Programs) -> "Iterator[ControlPlane]":
    """A control plane for one test alone, which may kill and pause its servers.  Takes some five seconds."""
    _skip_unless_built(controlplane_programs, "control-plane")
    with new_control_plane(controlplane_programs, cache_folder(os.environ)) as cluster:
        yield cluster


@pytest.fixture
def kube_admin(request: pytest.FixtureRequest, _given_kubeconfig: Path | None) -> "Iterator[Admin]":
    """An administrator of the shared control plane, or of the cluster that the person who runs the tests has given."""
    if _given_kubeconfig is None:
        cluster: ControlPlane = request.getfixturevalue("control_plane")
        yield cluster.admin
    else:
        from slackwater_controlplane.client import Admin

        with Admin(_given_kubeconfig) as admin:
            yield admin


@pytest.fixture
def namespace(kube_admin: "Admin") -> Iterator[str]:
    """The name of a namespace that is this test's alone."""
    name = f"test-{secrets.token_hex(4)}"
    kube_admin.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    kube_admin.wait_for("serviceaccounts", "default", namespace=name)
    yield name
    with contextlib.suppress(ControlPlaneError):  # a kind that went meanwhile hinders nothing
        kube_admin.delete_all("pods", name)
    kube_admin.delete("namespaces", name)


@pytest.fixture(scope="session")
def _running_kwok(controlplane_programs: Programs, control_plane: "ControlPlane") -> "Iterator[Kwok]":
    from slackwater_controlplane.kwok import Kwok

    _skip_unless_built(controlplane_programs, "kwok")
    with Kwok(control_plane) as kwok:
        yield kwok


@pytest.fixture
def kwok(_running_kwok: "Kwok") -> "Iterator[Kwok]":
    """kwok on the shared control plane; the nodes that a test adds go with it."""
    yield _running_kwok
    _running_kwok.remove_nodes()


def _skip_unless_built(programs: Programs, *groups: str) -> None:
    if (reason := programs.why_not(*groups)) is not None:
        pytest.skip(reason)
