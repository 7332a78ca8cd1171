"""Every error class of the official client library, brought about by what a user can do wrong."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import fishaudio
import httpx
import httpx_ws
import pytest
from fishaudio import FishAudio

TEXT = "One two three four five six seven eight nine ten."
UNKNOWN = "0" * 32


def unknown_voice(client: FishAudio) -> None:
    client.tts.convert(text=TEXT, reference_id=UNKNOWN)


def speak(client: FishAudio) -> None:
    client.tts.convert(text=TEXT)


def read_unknown(client: FishAudio) -> None:
    client.voices.get(UNKNOWN)


def rename_anothers(client: FishAudio) -> None:
    client.voices.update(client.voices.list(page_size=1).items[0].id, title="mine now")


def delete_anothers(client: FishAudio) -> None:
    client.voices.delete(client.voices.list(page_size=1).items[0].id)


def transcribe(client: FishAudio) -> None:
    client.asr.transcribe(audio=b"x" * 1000)


@pytest.mark.parametrize(
    ("key", "act", "error", "status"),
    [
        pytest.param("owner", unknown_voice, fishaudio.APIError, 400, id="unknown voice"),
        pytest.param("nobody", speak, fishaudio.AuthenticationError, 401, id="wrong key"),
        pytest.param("revoked", speak, fishaudio.AuthenticationError, 401, id="revoked key"),
        pytest.param("poor", speak, fishaudio.APIError, 402, id="no credit"),
        pytest.param("other", rename_anothers, fishaudio.PermissionError, 403, id="another's voice renamed"),
        pytest.param("other", delete_anothers, fishaudio.PermissionError, 403, id="another's voice deleted"),
        pytest.param("owner", read_unknown, fishaudio.NotFoundError, 404, id="no such voice"),
        pytest.param("owner", transcribe, fishaudio.ServerError, 503, id="no transcriber is set up"),
    ],
)
def test_a_refusal_is_the_librarys_own_error(
    url: str, service: Any, key: str, act: Callable[[FishAudio], None], error: type[fishaudio.APIError], status: int
) -> None:
    with (
        FishAudio(api_key=service.keys.get(key, "sw_nobody"), base_url=url) as client,
        pytest.raises(error) as refused,
    ):
        act(client)

    assert type(refused.value) is error
    assert refused.value.status == status
    assert refused.value.message


def test_no_credit_does_not_keep_from_the_free_model(url: str, service: Any) -> None:
    with FishAudio(api_key=service.keys["poor"], base_url=url) as client:
        assert len(client.tts.convert(text=TEXT, model="s2.1-pro-free")) > 1000  # type: ignore[arg-type]


@contextlib.contextmanager
def speaking(url: str, key: str) -> Iterator[None]:
    """A request that goes on for the block."""
    body = {"text": TEXT * 40, "format": "wav"}
    headers = {"authorization": f"Bearer {key}"}
    with httpx.stream("POST", f"{url}/v1/tts", json=body, headers=headers, timeout=60) as answer:
        assert answer.status_code == 200
        pieces = answer.iter_raw()  # kept: httpx hangs up when it is dropped
        next(pieces)
        yield


def test_one_request_more_than_the_key_may_have_is_a_rate_limit_error(url: str, service: Any) -> None:
    key = service.keys["single"]
    with speaking(url, key), FishAudio(api_key=key, base_url=url) as client:
        with pytest.raises(fishaudio.RateLimitError) as refused:
            client.tts.convert(text=TEXT)

        assert refused.value.status == 429


def test_more_requests_than_the_key_may_send_in_a_minute_say_when_to_come_back(service: Any) -> None:
    headers = {"authorization": f"Bearer {service.keys['hourly']}"}
    answers = [
        httpx.post(f"{service.url}/v1/tts", json={"text": "One."}, headers=headers, timeout=60) for _ in range(2)
    ]

    assert [answer.status_code for answer in answers] == [200, 429]
    assert 1 <= int(answers[1].headers["retry-after"]) <= 60


def test_a_denied_websocket_is_an_upgrade_error_with_the_reason(url: str, service: Any) -> None:
    with (
        FishAudio(api_key="sw_nobody", base_url=url) as client,
        pytest.raises(httpx_ws.WebSocketUpgradeError) as refused,
    ):
        list(client.tts.stream_websocket(iter([TEXT])))

    assert refused.value.response.status_code == 401


def test_a_bad_start_is_a_websocket_error(url: str, service: Any) -> None:
    with FishAudio(api_key=service.owner, base_url=url) as client, pytest.raises(fishaudio.WebSocketError):
        list(client.tts.stream_websocket(iter([TEXT]), reference_id=UNKNOWN))
