"""Questions about ports and addresses, asked in this network namespace or in another one.

Owns `Place`.  The file is also a program of the standard library alone, which is what runs in the other namespace.
"""

import json
import random
import socket
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

# Below the range from which the kernel takes the ports of outgoing connections, which could be on one of ours.
_FIRST_PORT, _LAST_PORT = 20_000, 32_000


def busy(address: str, ports: list[int]) -> list[int]:
    """Those of `ports` on which somebody listens, or which cannot be had for another reason."""
    found = []
    for port in ports:
        with socket.socket() as one:
            # As the servers do: a port whose last connections are still ending is free.
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                one.bind((address, port))
            except OSError:
                found.append(port)
    return found


def free_ports(address: str, count: int) -> list[int]:
    """Ports that nobody uses now, chosen at random so that clusters that start at one time seldom meet."""
    found: list[int] = []
    while len(found) < count:
        port = random.randint(_FIRST_PORT, _LAST_PORT)
        if port not in found and not busy(address, [port]):
            found.append(port)
    return found


def get(
    url: str, ca: str | None = None, cert: str | None = None, key: str | None = None, timeout_s: float = 3.0
) -> tuple[int, str] | None:
    """Status and body of a GET; None when nobody answers."""
    context = None
    if ca is not None:
        context = ssl.create_default_context(cafile=ca)
        if cert is not None:
            context.load_cert_chain(cert, key)
    # No proxies: the address is of this machine.
    handlers: list[Any] = [urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)]
    opener = urllib.request.build_opener(*handlers)
    try:
        with opener.open(url, timeout=timeout_s) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
    except OSError:  # refused, reset, timed out, a certificate that is not ours
        return None


class Place:
    """Where servers live: an address, and a command that enters its network namespace; () is this one."""

    def __init__(self, address: str = "127.0.0.1", enter: Sequence[str] = ()) -> None:
        self.address = address
        self.enter = tuple(enter)

    def busy(self, ports: list[int]) -> list[int]:
        return self._ask("busy", address=self.address, ports=ports)  # type: ignore[no-any-return]  # JSON

    def free_ports(self, count: int) -> list[int]:
        return self._ask("free_ports", address=self.address, count=count)  # type: ignore[no-any-return]  # JSON

    def get(
        self, url: str, ca: str | None = None, cert: str | None = None, key: str | None = None
    ) -> tuple[int, str] | None:
        found = self._ask("get", url=url, ca=ca, cert=cert, key=key)
        return None if found is None else (found[0], found[1])

    def _ask(self, question: str, **arguments: Any) -> Any:
        if not self.enter:
            return _QUESTIONS[question](**arguments)
        command = [*self.enter, sys.executable, "-I", "-S", __file__, question, json.dumps(arguments)]
        return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


_QUESTIONS: dict[str, Any] = {"busy": busy, "free_ports": free_ports, "get": get}

if __name__ == "__main__":
    json.dump(_QUESTIONS[sys.argv[1]](**json.loads(sys.argv[2])), sys.stdout)
