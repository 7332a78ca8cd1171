"""Questions about ports and addresses, in this namespace and through a command."""

import http.server
import socket
import threading
from collections.abc import Iterator

import pytest

from slackwater_controlplane.probe import Place

# Any command that becomes another will do in place of nsenter, which needs root.
PLACES = [pytest.param(Place(), id="here"), pytest.param(Place(enter=("env",)), id="through a command")]


class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/ready" else 500)
        self.end_headers()
        self.wfile.write(b"said")

    def log_message(self, *words: object) -> None:
        return


@pytest.fixture
def url() -> Iterator[str]:
    with http.server.HTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("place", PLACES)
def test_a_port_on_which_somebody_listens_is_busy(place: Place) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        assert place.busy([port]) == [port]

    assert place.busy([port]) == []


def test_a_port_that_is_taken_on_every_address_is_busy() -> None:
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]

        assert Place().busy([port]) == [port]


def test_a_port_whose_last_connection_is_still_ending_is_free() -> None:
    """Or no server could be started again at once."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        connection, _ = server.accept()
        connection.close()  # this side closes first, so the port waits here
        client.close()

    assert Place().busy([port]) == []


@pytest.mark.parametrize("place", PLACES)
def test_free_ports_are_different_and_free(place: Place) -> None:
    ports = place.free_ports(5)

    assert len(set(ports)) == 5
    assert place.busy(ports) == []
    assert all(port < 32_768 for port in ports)  # where the kernel takes the ports of outgoing connections


@pytest.mark.parametrize("place", PLACES)
def test_an_answer_is_given_whatever_its_status(place: Place, url: str) -> None:
    assert place.get(f"{url}/ready") == (200, "said")
    assert place.get(f"{url}/other") == (500, "said")


@pytest.mark.parametrize("place", PLACES)
def test_nobody_there_is_no_answer(place: Place) -> None:
    port = place.free_ports(1)[0]

    assert place.get(f"http://127.0.0.1:{port}/ready") is None
