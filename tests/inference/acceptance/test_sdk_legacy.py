"""The official client library's first generation, unmodified: Session, WebSocketSession and their asynchronous kin."""

import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from fish_audio_sdk import (
    AsyncWebSocketSession,
    HttpCodeErr,
    Prosody,
    ReferenceAudio,
    Session,
    TTSRequest,
    WebSocketErr,
    WebSocketSession,
)

TEXT = "One two three four five six seven eight nine ten."


@pytest.fixture
def session(url: str, service: Any) -> Iterator[Session]:
    with Session(service.owner, base_url=url) as made:
        yield made


@pytest.mark.parametrize("backend", ["speech-1.5", "s1", "s2-pro", "s2.1-pro-free"])
def test_every_model_name_speaks(session: Session, hear: Callable[..., Any], spoken_s: Any, backend: Any) -> None:
    sound = hear(b"".join(session.tts(TTSRequest(text=TEXT, format="wav"), backend=backend)))

    assert sound.duration_s == pytest.approx(spoken_s(TEXT), rel=0.15)


def test_the_first_audio_is_here_before_the_last_is_made(session: Session, service: Any) -> None:
    text = "A long text takes a while to be spoken, and nobody should wait for its end. " * 5
    # httpx gives pieces as the network brings them.
    began_s = time.monotonic()
    came_s = [time.monotonic() - began_s for _ in session.tts(TTSRequest(text=text, format="pcm"))]

    assert len(came_s) > 10
    assert came_s[0] < 0.5 * came_s[-1]


def test_references_and_prosody(
    session: Session, hear: Callable[..., Any], spoken_s: Any, recording: bytes, reference_text: str
) -> None:
    request = TTSRequest(
        text=TEXT,
        references=[ReferenceAudio(audio=recording, text=reference_text)],
        prosody=Prosody(speed=1.25, volume=-3),
    )

    assert hear(b"".join(session.tts(request))).duration_s == pytest.approx(spoken_s(TEXT) / 1.25, rel=0.15)


async def test_awaitable_calls(url: str, service: Any, hear: Callable[..., Any], spoken_s: Any) -> None:
    async with Session(service.owner, base_url=url) as session:
        audio = b"".join([piece async for piece in session.tts.awaitable(TTSRequest(text=TEXT))])
        credit = await session.get_api_credit.awaitable()

    assert hear(audio).duration_s == pytest.approx(spoken_s(TEXT), rel=0.15)
    assert credit.credit >= 0


def test_voices_and_account(session: Session, recording: bytes, reference_text: str) -> None:
    made = session.create_model(title="Old friend", voices=[recording], texts=[reference_text], tags=["old"])
    session.update_model(made.id, title="Old friend, renamed")
    found = session.list_models(self_only=True, tag="old", sort_by="created_at")
    assert [(model.id, model.title) for model in found.items] == [(made.id, "Old friend, renamed")]

    session.delete_model(made.id)
    with pytest.raises(HttpCodeErr) as refused:
        session.get_model(made.id)

    assert refused.value.status == 404
    assert session.get_package().finished_at
    assert session.get_api_credit().credit >= 0


def test_websocket(url: str, service: Any, hear: Callable[..., Any], spoken_s: Any) -> None:
    with WebSocketSession(service.owner, base_url=url) as session:
        audio = b"".join(session.tts(TTSRequest(text="", format="wav"), (word + " " for word in TEXT.split())))

    assert hear(audio).duration_s == pytest.approx(spoken_s(TEXT), rel=0.15)


async def test_async_websocket(url: str, service: Any, hear: Callable[..., Any], spoken_s: Any) -> None:
    async def said() -> AsyncIterator[str]:
        for word in TEXT.split():
            yield word + " "

    async with AsyncWebSocketSession(service.owner, base_url=url) as session:
        audio = b"".join([piece async for piece in session.tts(TTSRequest(text=""), said())])

    assert hear(audio).duration_s == pytest.approx(spoken_s(TEXT), rel=0.15)


def test_a_refused_start_is_the_clients_websocket_error(url: str, service: Any) -> None:
    request = TTSRequest(text="", reference_id="0" * 32)

    with WebSocketSession(service.owner, base_url=url) as session, pytest.raises(WebSocketErr):
        list(session.tts(request, iter([TEXT])))


@pytest.mark.parametrize(
    ("key", "request_", "status"),
    [
        pytest.param("nobody", TTSRequest(text=TEXT), 401, id="401 wrong key"),
        pytest.param("poor", TTSRequest(text=TEXT), 402, id="402 no credit"),
        pytest.param("owner", TTSRequest(text=TEXT, reference_id="0" * 32), 400, id="400 unknown voice"),
    ],
)
def test_refusals_are_the_clients_error(url: str, service: Any, key: str, request_: TTSRequest, status: int) -> None:
    with (
        Session(service.keys.get(key, "sw_nobody"), base_url=url) as session,
        pytest.raises(HttpCodeErr) as refused,
    ):
        list(session.tts(request_))

    assert refused.value.status == status
    assert refused.value.message
