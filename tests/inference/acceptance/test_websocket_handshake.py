"""What the server agrees to when a websocket is opened."""

import base64
import socket
from typing import Any
from urllib.parse import urlsplit


def test_messages_are_not_compressed_even_if_the_client_offers_it(url: str, service: Any) -> None:
    parts = urlsplit(url)
    request = [
        "GET /v1/tts/live HTTP/1.1",
        "Host: test",
        "Upgrade: websocket",
        "Connection: Upgrade",
        f"Sec-WebSocket-Key: {base64.b64encode(bytes(16)).decode()}",
        "Sec-WebSocket-Version: 13",
        "Sec-WebSocket-Extensions: permessage-deflate",
        f"Authorization: Bearer {service.owner}",
    ]

    with socket.create_connection((parts.hostname, parts.port), timeout=10) as connection:
        connection.sendall("\r\n".join([*request, "", ""]).encode())
        answer = connection.recv(4096).lower()

    assert answer.startswith(b"http/1.1 101 ")
    assert b"sec-websocket-extensions" not in answer
