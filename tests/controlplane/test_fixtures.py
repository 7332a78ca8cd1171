"""The plug-in from outside: whether tests run, are skipped or refused, on which machine and whose cluster."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slackwater_controlplane import kubeconfig
from slackwater_controlplane.cluster import ControlPlane

TESTS = """
def test_own(control_plane):
    control_plane.admin.get("namespaces", "default")

def test_any(kube_admin, namespace):
    assert kube_admin.get("namespaces", namespace)

def test_none():
    pass
"""
PACKAGE = Path(kubeconfig.__file__).parents[1]


def run(tmp_path: Path, *arguments: str, **environ: str) -> str:
    """Run the three tests above in a pytest of their own; returns what it said of each, and why."""
    (tmp_path / "test_inner.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = controlplane: needs a Kubernetes\n")
    kept = {key: value for key, value in os.environ.items() if not key.startswith("SLACKWATER_")}
    command = [sys.executable, "-m", "pytest", "-p", "slackwater_controlplane.fixtures", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "-rA", "-q", "--tb=line", *arguments, str(tmp_path)],
        env={**kept, "PYTHONPATH": str(PACKAGE), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **environ},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    return done.stdout + done.stderr


def test_skips_with_what_to_type_where_nothing_is_built(tmp_path: Path) -> None:
    said = run(tmp_path, SLACKWATER_CACHE=str(tmp_path / "cache"))

    assert "1 passed, 2 skipped" in said
    assert "etcd, kube-apiserver, kube-controller-manager, kube-scheduler, kubectl not built" in said
    assert "`.setup/controlplane control-plane` builds what is missing" in said


def test_tests_that_want_a_cluster_are_marked(tmp_path: Path) -> None:
    said = run(tmp_path, "-m", "not controlplane", SLACKWATER_CACHE=str(tmp_path / "cache"))

    assert "1 passed, 2 deselected" in said


def test_uses_the_cluster_that_is_given_and_named(control_plane: ControlPlane, tmp_path: Path) -> None:
    said = run(
        tmp_path,
        SLACKWATER_CACHE=str(tmp_path / "cache"),
        SLACKWATER_TEST_KUBECONFIG=str(control_plane.kubeconfig()),
        SLACKWATER_TEST_CONTEXT="slackwater-test",
    )

    assert "2 passed, 1 skipped" in said
    assert "needs a control plane of its own, and SLACKWATER_TEST_KUBECONFIG names another cluster" in said


@pytest.mark.parametrize("named", [{}, {"SLACKWATER_TEST_CONTEXT": "another"}], ids=["unnamed", "another named"])
def test_touches_no_cluster_whose_context_is_not_named(
    control_plane: ControlPlane, tmp_path: Path, named: dict[str, str]
) -> None:
    since = control_plane.audit_position()
    file = control_plane.kubeconfig("stranger", ("system:masters",))

    said = run(tmp_path, SLACKWATER_CACHE=str(tmp_path / "cache"), SLACKWATER_TEST_KUBECONFIG=str(file), **named)

    assert "1 passed, 2 errors" in said
    assert "if that is meant, say SLACKWATER_TEST_CONTEXT=slackwater-test" in said
    assert [event for event in control_plane.audit(since) if event.user == "stranger"] == []
