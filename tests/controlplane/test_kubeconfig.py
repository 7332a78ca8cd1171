"""Kubeconfigs: what is written is read, and nobody's cluster is used by mistake."""

from pathlib import Path

import pytest
import yaml

from slackwater_controlplane import kubeconfig
from slackwater_controlplane.certs import Authority
from slackwater_controlplane.errors import ControlPlaneError


@pytest.fixture
def written(tmp_path: Path) -> Path:
    authority = Authority(tmp_path / "pki")
    pair = authority.client("jane")
    return kubeconfig.write(tmp_path / "jane.yaml", "https://127.0.0.1:1", authority.file, pair, context="mine")


def test_what_is_written_is_read(written: Path) -> None:
    access = kubeconfig.read(written)

    assert access.server == "https://127.0.0.1:1"
    assert access.ca == (written.parent / "pki/ca.crt").read_text()
    assert access.cert == (written.parent / "pki/user-jane.crt").read_text()
    assert access.key == (written.parent / "pki/user-jane.key").read_text()
    assert written.stat().st_mode & 0o777 == 0o600


def test_files_named_in_a_kubeconfig_are_looked_for_beside_it(written: Path) -> None:
    document = yaml.safe_load(written.read_text())
    document["users"][0]["user"] = {"client-certificate": "pki/user-jane.crt", "client-key": "pki/user-jane.key"}
    written.write_text(yaml.safe_dump(document))

    access = kubeconfig.read(written)

    assert access.cert == (written.parent / "pki/user-jane.crt").read_text()


def test_acts_as_whom_the_kubeconfig_says(written: Path) -> None:
    document = yaml.safe_load(written.read_text())
    document["users"][0]["user"] |= {"as": "joe", "as-groups": ["readers"]}
    written.write_text(yaml.safe_dump(document))

    access = kubeconfig.read(written)

    assert (access.user, access.groups) == ("joe", ("readers",))


def test_a_login_by_a_program_is_refused_by_name(written: Path) -> None:
    document = yaml.safe_load(written.read_text())
    document["users"][0]["user"] = {"exec": {"command": "login"}}
    written.write_text(yaml.safe_dump(document))

    with pytest.raises(ControlPlaneError, match="logs in by exec"):
        kubeconfig.read(written)


def test_no_cluster_is_given_by_default() -> None:
    assert kubeconfig.given({"KUBECONFIG": "/etc/passwd", "HOME": "/root"}) is None


def test_a_given_cluster_is_used_when_its_context_is_named_too(written: Path) -> None:
    environ = {"SLACKWATER_TEST_KUBECONFIG": str(written), "SLACKWATER_TEST_CONTEXT": "mine"}

    assert kubeconfig.given(environ) == written


@pytest.mark.parametrize("named", [{}, {"SLACKWATER_TEST_CONTEXT": "production"}], ids=["no context", "another"])
def test_a_given_cluster_is_refused_unless_its_context_is_named(written: Path, named: dict[str, str]) -> None:
    environ = {"SLACKWATER_TEST_KUBECONFIG": str(written), **named}

    with pytest.raises(ControlPlaneError, match="if that is meant, say SLACKWATER_TEST_CONTEXT=mine"):
        kubeconfig.given(environ)


def test_a_file_that_is_not_there_is_no_reason_to_start_another_cluster() -> None:
    with pytest.raises(ControlPlaneError, match="no such file"):
        kubeconfig.given({"SLACKWATER_TEST_KUBECONFIG": "/nonexistent"})
