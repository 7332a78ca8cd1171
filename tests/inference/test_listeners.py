"""The ports of the engine and of the gateway."""

import socket

import pytest

from slackwater_inference import lifecycle
from slackwater_inference.gateway import server


@pytest.mark.parametrize(
    "listen", [pytest.param(lifecycle.listen, id="engine"), pytest.param(server.listen, id="gateway")]
)
def test_a_small_chunk_does_not_wait_until_the_one_before_it_is_confirmed(listen):
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        listener.setblocking(True)

        connection, _ = listener.accept()

        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
