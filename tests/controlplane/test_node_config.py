"""A node's configuration: what depends on the machine."""

from pathlib import Path

import pytest

from slackwater_controlplane.node import config, pods

MOUNTS = """\
overlay / overlay rw 0 0
/dev/sda1 /data ext4 rw 0 0
tmpfs /data/scratch tmpfs rw 0 0
"""


@pytest.mark.parametrize(
    ("folder", "expected"),
    [
        pytest.param("/tmp/slkw-1/node", "native", id="overlay"),
        pytest.param("/data/slkw-1/node", "overlayfs", id="disk"),
        pytest.param("/data/scratch", "overlayfs", id="memory"),
        pytest.param("/database/node", "native", id="like-name"),
    ],
)
def test_layers_are_copied_where_the_machine_has_an_overlay(folder: str, expected: str) -> None:
    assert config.snapshotter(Path(folder), MOUNTS) == expected


def test_a_pod_gets_each_folder_of_the_checkout_once() -> None:
    body = pods.with_host_python(pods.pod("one"))

    paths = [volume["hostPath"]["path"] for volume in body["spec"]["volumes"]]
    mounted = [mount["mountPath"] for mount in body["spec"]["containers"][0]["volumeMounts"]]
    assert paths == mounted
    assert any(pods.CHECKOUT.is_relative_to(path) for path in paths)
    assert not [path for path in paths if any(Path(other) in Path(path).parents for other in paths)]
