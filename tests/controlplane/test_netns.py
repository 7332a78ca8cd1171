"""The network namespace of a test cluster: reachable from here, side by side with others, and gone afterwards."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from slackwater_controlplane import netns
from slackwater_controlplane.netns import NetworkNamespace

WHY_NOT = netns.why_not()
pytestmark = [pytest.mark.controlplane, pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or "")]
GREET = """
import socket, sys
server = socket.create_server((sys.argv[1], 4000))
print("listening", flush=True)
while True:
    client, _ = server.accept()
    client.sendall(sys.argv[1].encode())
    client.close()
"""


def greeter(network: NetworkNamespace) -> subprocess.Popen[str]:
    address = network.addresses.api
    process = subprocess.Popen(
        [*network.enter, sys.executable, "-c", GREET, address], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "listening\n"
    return process


def test_two_clusters_use_one_port_and_are_reached_from_the_machine() -> None:
    with NetworkNamespace() as one, NetworkNamespace() as other:
        servers = [greeter(one), greeter(other)]
        answers = []
        for network in (one, other):
            with socket.create_connection((network.addresses.api, 4000), timeout=5) as client:
                answers.append(client.recv(100).decode())

        assert answers == [one.addresses.api, other.addresses.api]
        assert one.addresses.api != other.addresses.api

    # What still runs in a namespace ends with it.
    for server in servers:
        assert server.wait(5) != 0
        assert server.stdout is not None
        server.stdout.close()
    assert not {one.name, other.name} & {path.name for path in netns.NAMESPACES.iterdir()}


def test_removes_the_network_of_a_maker_that_is_gone() -> None:
    script = (
        "import os\n"
        "from slackwater_controlplane.netns import NetworkNamespace\n"
        "network = NetworkNamespace().__enter__()\n"
        "print(network.name, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    answer = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        check=False,
    )
    name = answer.stdout.strip()
    assert (netns.NAMESPACES / name).exists()

    gone = netns.remove_stale()

    assert name in gone
    assert not (netns.NAMESPACES / name).exists()
    assert f"slkwtr{name.split('-')[1]}" not in os.listdir("/sys/class/net")


def test_leaves_the_network_of_a_living_maker_alone() -> None:
    with NetworkNamespace() as network:
        assert network.name not in netns.remove_stale()
        assert (netns.NAMESPACES / network.name).exists()
