"""The official client library, unmodified, current generation: FishAudio and AsyncFishAudio."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, get_args

import fishaudio
import numpy as np
import pytest
from fishaudio import AsyncFishAudio, FishAudio
from fishaudio.types import FlushEvent, Prosody, ReferenceAudio, TextEvent, TTSConfig
from fishaudio.types.shared import AudioFormat

TEXT = "One two three four five six seven eight nine ten."
SHORT = "One two three four."
RATES_HZ = {
    "wav": [8_000, 16_000, 24_000, 32_000, 44_100, None],
    "pcm": [8_000, 16_000, 24_000, 32_000, 44_100, None],
    "mp3": [32_000, 44_100, None],
    "opus": [48_000, None],
}
CODECS = {"wav": "pcm_s16le", "mp3": "mp3", "opus": "opus", "pcm": "pcm"}


@pytest.fixture
def client(url: str, service: Any) -> Iterator[FishAudio]:
    with FishAudio(api_key=service.owner, base_url=url) as made:
        yield made


@pytest.fixture
def engine_client(service: Any) -> Iterator[FishAudio]:
    with FishAudio(api_key=service.owner, base_url=service.url) as made:
        yield made


@pytest.fixture
async def async_client(url: str, service: Any) -> AsyncIterator[AsyncFishAudio]:
    async with AsyncFishAudio(api_key=service.owner, base_url=url) as made:
        yield made


def test_the_library_is_the_release_that_we_promise() -> None:
    assert fishaudio.__version__ == "1.3.0"
    assert set(get_args(AudioFormat)) == set(RATES_HZ)


# Speech


def test_convert_speaks_the_whole_text(client: FishAudio, hear: Callable[..., Any], spoken_s: Any) -> None:
    sound = hear(client.tts.convert(text=TEXT))

    assert sound.codec == "mp3"
    assert sound.duration_s == pytest.approx(spoken_s(TEXT), rel=0.15)
    assert -40 < sound.level_dbfs < -3


@pytest.mark.parametrize(
    ("format", "rate_hz"), [(format, rate_hz) for format, rates in RATES_HZ.items() for rate_hz in rates]
)
def test_every_format_and_rate(
    engine_client: FishAudio, hear: Callable[..., Any], spoken_s: Any, format: Any, rate_hz: int | None
) -> None:
    wanted_hz = rate_hz or RATES_HZ[format][-2]

    audio = engine_client.tts.convert(text=SHORT, config=TTSConfig(format=format, sample_rate=rate_hz))

    sound = hear(audio, pcm_rate_hz=wanted_hz if format == "pcm" else None)
    assert (sound.codec, sound.rate_hz) == (CODECS[format], wanted_hz)
    assert sound.duration_s == pytest.approx(spoken_s(SHORT), rel=0.2)
    assert -40 < sound.level_dbfs < -3


@pytest.mark.parametrize(
    ("format", "field", "bitrates"),
    [("mp3", "mp3_bitrate", [64, 192]), ("opus", "opus_bitrate", [24, 64])],
)
def test_a_higher_bit_rate_is_more_bytes(
    engine_client: FishAudio, format: Any, field: str, bitrates: list[int]
) -> None:
    sizes = [
        len(engine_client.tts.convert(text=TEXT, config=TTSConfig(format=format, **{field: bitrate})))
        for bitrate in bitrates
    ]

    assert sizes[1] > 1.5 * sizes[0]


def test_stream_gives_pieces_that_are_the_whole(client: FishAudio, hear: Callable[..., Any], spoken_s: Any) -> None:
    pieces = list(client.tts.stream(text=TEXT, format="wav", latency="balanced"))

    assert hear(b"".join(pieces)).duration_s == pytest.approx(spoken_s(TEXT), rel=0.15)


def test_speed_and_volume(engine_client: FishAudio, hear: Callable[..., Any]) -> None:
    plain, fast, quiet = (
        hear(engine_client.tts.convert(text=TEXT, config=TTSConfig(format="wav", temperature=0.0, prosody=prosody)))
        for prosody in (Prosody(), Prosody(speed=1.6), Prosody(volume=-12.0))
    )

    assert fast.duration_s == pytest.approx(plain.duration_s / 1.6, rel=0.1)
    assert quiet.duration_s == pytest.approx(plain.duration_s, rel=0.02)
    assert quiet.level_dbfs - plain.level_dbfs == pytest.approx(-12.0, abs=1.0)


def test_a_reference_changes_the_voice(
    engine_client: FishAudio, hear: Callable[..., Any], recording: bytes, reference_text: str
) -> None:
    config = TTSConfig(format="wav", temperature=0.0)

    plain = hear(engine_client.tts.convert(text=TEXT, config=config))
    cloned = hear(
        engine_client.tts.convert(
            text=TEXT, config=config, references=[ReferenceAudio(audio=recording, text=reference_text)]
        )
    )

    size = min(len(plain.samples), len(cloned.samples))
    assert size > 44_100
    assert np.abs(plain.samples[:size] - cloned.samples[:size]).max() > 0.01


def test_many_at_once(url: str, service: Any, hear: Callable[..., Any], spoken_s: Any) -> None:
    async def speak() -> list[bytes]:
        async with AsyncFishAudio(api_key=service.owner, base_url=url) as client:
            return await asyncio.gather(*[client.tts.convert(text=TEXT) for _ in range(6)])

    sounds = [hear(audio) for audio in asyncio.run(speak())]

    assert len(sounds) == 6
    assert all(sound.duration_s == pytest.approx(spoken_s(TEXT), rel=0.15) for sound in sounds)


async def test_async_convert_and_stream(async_client: AsyncFishAudio, hear: Callable[..., Any], spoken_s: Any) -> None:
    whole = await async_client.tts.convert(text=TEXT, format="opus")
    pieces = [piece async for piece in await async_client.tts.stream(text=TEXT, format="mp3")]

    for audio in (whole, b"".join(pieces)):
        assert hear(audio).duration_s == pytest.approx(spoken_s(TEXT), rel=0.15)


# Websocket


@pytest.mark.parametrize("format", ["mp3", "wav", "opus", "pcm"])
def test_websocket_speaks_text_that_comes_in_pieces(
    client: FishAudio, hear: Callable[..., Any], spoken_s: Any, format: Any
) -> None:
    words = [word + " " for word in TEXT.split()]

    audio = b"".join(client.tts.stream_websocket(iter(words), format=format))

    sound = hear(audio, pcm_rate_hz=44_100 if format == "pcm" else None)
    assert sound.duration_s == pytest.approx(spoken_s(TEXT), rel=0.15)
    assert -40 < sound.level_dbfs < -3


def test_websocket_with_a_voice_flush_and_events(client: FishAudio, hear: Callable[..., Any], spoken_s: Any) -> None:
    def said() -> Iterator[str | TextEvent | FlushEvent]:
        yield TextEvent(text="Said at once, since it is flushed. ")
        yield FlushEvent()
        yield "And the rest of what there is to say."

    voice = client.voices.list(page_size=1).items[0]
    sound = hear(b"".join(client.tts.stream_websocket(said(), reference_id=voice.id, speed=1.0)))

    text = "Said at once, since it is flushed. And the rest of what there is to say."
    assert sound.duration_s == pytest.approx(spoken_s(text), rel=0.2)


def test_websocket_without_text_ends_in_order(client: FishAudio) -> None:
    assert b"".join(client.tts.stream_websocket(iter(()), format="pcm")) == b""


async def test_async_websocket(async_client: AsyncFishAudio, hear: Callable[..., Any], spoken_s: Any) -> None:
    async def said() -> AsyncIterator[str]:
        for word in TEXT.split():
            yield word + " "

    pieces = [piece async for piece in async_client.tts.stream_websocket(said(), format="wav")]

    assert hear(b"".join(pieces)).duration_s == pytest.approx(spoken_s(TEXT), rel=0.15)


# Voices and account


def test_a_voice_from_its_making_to_its_end(
    client: FishAudio, recording: bytes, reference_text: str, hear: Callable[..., Any], spoken_s: Any
) -> None:
    made = client.voices.create(
        title="Mine", voices=[recording], texts=[reference_text], tags=["calm", "low"], description="of a test"
    )
    assert (made.title, made.visibility, made.state, made.tags) == ("Mine", "private", "trained", ["calm", "low"])

    found = client.voices.list(self_only=True, title="Mine", tags=["calm"])
    assert [voice.id for voice in found.items] == [made.id]

    client.voices.update(made.id, title="Ours", visibility="unlist", tags=["low"])
    client.voices.update(made.id, description="with a cover", cover_image=PNG)
    changed = client.voices.get(made.id)
    assert (changed.title, changed.visibility, changed.tags) == ("Ours", "unlist", ["low"])
    assert (changed.description, bool(changed.cover_image)) == ("with a cover", True)

    sound = hear(client.tts.convert(text=TEXT, reference_id=made.id))
    assert sound.duration_s == pytest.approx(spoken_s(TEXT), rel=0.15)
    assert client.voices.get(made.id).task_count == 1

    client.voices.delete(made.id)
    with pytest.raises(fishaudio.NotFoundError):
        client.voices.get(made.id)


async def test_async_voices_and_account(async_client: AsyncFishAudio) -> None:
    first, second = [await async_client.voices.list(page_size=5, page_number=number) for number in (1, 2)]
    credits = await async_client.account.get_credits()

    assert (first.total, len(first.items), len(second.items)) == (7, 5, 2)
    assert not {voice.id for voice in first.items} & {voice.id for voice in second.items}
    assert credits.user_id == first.items[0].author.id


def test_credit_and_package(client: FishAudio) -> None:
    credits = client.account.get_credits(check_free_credit=True)
    package = client.account.get_package()

    assert credits.credit >= 0
    assert credits.user_id == package.user_id
    assert 0 <= package.balance <= package.total


# The smallest picture there is: one black pixel.
PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108000000003a7e9b550"
    "000000a49444154789c636000000002000148afa4710000000049454e44ae426082"
)
