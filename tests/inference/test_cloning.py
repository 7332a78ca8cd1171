"""Recordings become voices: checked, encoded once, remembered by content."""

import asyncio
import io
import threading
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from slackwater_inference import cloning
from slackwater_inference.checkpoint import embedded
from slackwater_inference.cloning import MAX_REFERENCES, Cloner, VoiceLibrary
from slackwater_inference.codec.codec import Codec
from slackwater_inference.core import BadRequest, QueueFull, Reference
from slackwater_inference.store.database import MEMORY_URL, Database
from slackwater_inference.store.objects import MEMORY_URL as OBJECTS_IN_MEMORY
from slackwater_inference.store.objects import ObjectStore
from slackwater_inference.store.records import NewSample, NewVoice, Visibility
from slackwater_inference.store.voices import VoiceStore

RATE_HZ = 44_100
FRAME = 2048
TEXT = "hello, this is my voice"


class FakeCodec:
    """Two codebooks: the first code is a frame's loudness, the second its number.  Counts what it encodes."""

    def __init__(self, revision="codec-a"):
        self.revision = revision
        self.num_encoded = 0
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def encode(self, samples):
        assert samples.dtype == np.float32
        assert self.may_go_on.wait(10)
        self.num_encoded += 1
        frames = samples[: len(samples) // FRAME * FRAME].reshape(-1, FRAME)
        loudness = (np.abs(frames).max(axis=1) * 1000).astype(np.int64)
        return torch.stack([torch.from_numpy(loudness), torch.arange(len(frames))])


def wav(frequency_hz=220.0, duration_s=1.5, level=0.3):
    """A tone that swells and falls like syllables, as a file."""
    import soundfile

    at_s = np.arange(int(duration_s * RATE_HZ)) / RATE_HZ
    samples = level * np.sin(2 * np.pi * frequency_hz * at_s) * (0.6 + 0.4 * np.sin(2 * np.pi * 4 * at_s))
    file = io.BytesIO()
    soundfile.write(file, samples, RATE_HZ, format="WAV")
    return file.getvalue()


@pytest.fixture
def codec():
    return FakeCodec()


@pytest.fixture
def counted():
    return Counter()


@pytest.fixture
def cloner(codec, counted):
    cloner = Cloner(codec, RATE_HZ, lambda result: counted.update([result]))
    yield cloner
    codec.may_go_on.set()
    cloner.close()


@pytest.fixture
def voices():
    return VoiceStore(Database(MEMORY_URL), ObjectStore(OBJECTS_IN_MEMORY))


@pytest.fixture
def library(voices, cloner):
    return VoiceLibrary(voices, cloner)


def stored(voices, *recordings, owner="ann", visibility=Visibility.PUBLIC):
    samples = [NewSample(audio, text, "audio/wav", 1.5) for audio, text in recordings]
    return voices.create(NewVoice(owner, owner, "Voice", samples, visibility=visibility)).voice_id


async def test_a_recording_becomes_one_tuple_of_codes_a_frame(cloner):
    reference = await cloner.reference(wav(), TEXT, 2)

    assert (reference.text, reference.speaker) == (TEXT, 2)
    assert [frame[1] for frame in reference.codes] == list(range(len(reference.codes)))
    assert len(reference.codes) == pytest.approx(1.5 * RATE_HZ / FRAME, abs=1)
    assert all(type(code) is int for frame in reference.codes for code in frame)


async def test_the_real_codec_encodes_what_it_can_decode_again():
    loaded = embedded(0)
    model = loaded.config
    codec = Codec(model.codec, model.num_codebooks, model.num_semantic, loaded.codec_weights)
    cloner = Cloner(codec, model.codec.sample_rate_hz, lambda _: None)

    encoded = await cloner.encode(wav(duration_s=1.2), TEXT)

    assert {len(frame) for frame in encoded.codes} == {model.num_codebooks}
    assert encoded.duration_s == pytest.approx(1.2)
    samples, _ = codec.decode(torch.tensor(encoded.codes).T[None], [codec.new_state()])
    assert samples.shape[1] == len(encoded.codes) * model.codec.frame_samples
    cloner.close()


@pytest.mark.parametrize(
    ("audio", "text", "words"),
    [
        pytest.param(b"not audio", TEXT, "cannot be read as audio", id="no audio"),
        pytest.param(wav(duration_s=0.3), TEXT, "at least 1 s", id="short"),
        pytest.param(wav(level=0.001), TEXT, "dBFS", id="quiet"),
        pytest.param(wav(), "long " * 200, "transcript", id="a transcript of something else"),
    ],
)
async def test_a_bad_recording_is_refused_and_not_encoded(cloner, codec, audio, text, words):
    with pytest.raises(BadRequest, match=words):
        await cloner.reference(audio, text, 0)

    assert codec.num_encoded == 0


async def test_the_same_recording_is_encoded_once(cloner, codec, counted):
    first = await cloner.reference(wav(), TEXT, 0)
    second = await cloner.reference(wav(), TEXT, 1)

    assert second == replace(first, speaker=1)
    assert codec.num_encoded == 1
    assert counted == {"miss": 1, "hit": 1}


async def test_those_who_ask_for_the_same_at_once_wait_for_one_encoding(cloner, codec):
    found = await asyncio.gather(*(cloner.reference(wav(), TEXT, 0) for _ in range(5)))

    assert codec.num_encoded == 1
    assert len(set(found)) == 1


async def test_one_who_leaves_does_not_take_the_result_from_the_others(cloner, codec):
    codec.may_go_on.clear()
    leaving = asyncio.create_task(cloner.reference(wav(), TEXT, 0))
    staying = asyncio.create_task(cloner.reference(wav(), TEXT, 0))
    while not cloner._encoding:
        await asyncio.sleep(0.001)

    leaving.cancel()
    await asyncio.wait([leaving])
    codec.may_go_on.set()

    assert (await staying).text == TEXT
    assert codec.num_encoded == 1


async def test_another_text_for_the_same_recording_is_checked_again(cloner):
    await cloner.reference(wav(), TEXT, 0)

    with pytest.raises(BadRequest, match="transcript"):
        await cloner.reference(wav(), "long " * 200, 0)


async def test_more_recordings_than_may_wait_are_put_off(cloner, codec, monkeypatch):
    monkeypatch.setattr(cloning, "_MAX_ENCODING", 2)
    codec.may_go_on.clear()
    waiting = [asyncio.create_task(cloner.reference(wav(hz), TEXT, 0)) for hz in (100, 200)]
    while len(cloner._encoding) < 2:
        await asyncio.sleep(0.001)

    with pytest.raises(QueueFull):
        await cloner.reference(wav(300), TEXT, 0)

    codec.may_go_on.set()
    await asyncio.gather(*waiting)
    assert (await cloner.reference(wav(300), TEXT, 0)).codes


async def test_the_cache_drops_what_was_not_asked_for_the_longest(cloner, codec, counted, monkeypatch):
    monkeypatch.setattr(cloning, "_CACHE_ITEMS", 2)
    for frequency_hz in (100, 200, 100, 300):  # 200 is the one to go
        await cloner.reference(wav(frequency_hz), TEXT, 0)

    await cloner.reference(wav(100), TEXT, 0)
    await cloner.reference(wav(300), TEXT, 0)
    assert codec.num_encoded == 3
    await cloner.reference(wav(200), TEXT, 0)
    assert codec.num_encoded == 4
    assert counted["evict"] == 2


async def test_the_cache_is_bounded_in_bytes(cloner, counted, monkeypatch):
    one = cloning._size_bytes(await cloner.encode(wav(100), TEXT))
    monkeypatch.setattr(cloning, "_CACHE_BYTES", int(2.5 * one))

    for frequency_hz in (200, 300, 400):
        await cloner.reference(wav(frequency_hz), TEXT, 0)

    assert counted["evict"] == 2
    assert cloner._cache_bytes == 2 * one


async def test_a_stored_voice_is_one_speaker_with_its_recordings_in_order(voices, library):
    first = stored(voices, (wav(100), "one one one one"), (wav(200), "two two two two"))
    second = stored(voices, (wav(300), "three three three"))

    voice = await library.voice([second, first], "bob")

    assert [(reference.text, reference.speaker) for reference in voice.references] == [
        ("three three three", 0),
        ("one one one one", 1),
        ("two two two two", 1),
    ]


async def test_a_restart_reads_the_codes_instead_of_encoding_again(voices, library, codec):
    voice_id = stored(voices, (wav(), TEXT))
    before = await library.voice([voice_id], "ann")

    cloner = Cloner(codec, RATE_HZ, lambda _: None)
    after = await VoiceLibrary(voices, cloner).voice([voice_id], "ann")

    assert after == before
    assert codec.num_encoded == 1
    cloner.close()


async def test_a_voice_that_is_used_twice_is_one_miss_and_one_hit(voices, library, counted):
    voice_id = stored(voices, (wav(), TEXT))

    await library.voice([voice_id], "ann")
    await library.voice([voice_id], "ann")

    assert counted == {"miss": 1, "hit": 1}


async def test_another_codec_never_reads_the_codes_of_the_first(voices, library):
    voice_id = stored(voices, (wav(), TEXT))
    before = await library.voice([voice_id], "ann")
    other = FakeCodec("codec-b")

    cloner = Cloner(other, RATE_HZ, lambda _: None)
    after = await VoiceLibrary(voices, cloner).voice([voice_id], "ann")

    assert other.num_encoded == 1
    assert after.revision != before.revision
    cloner.close()


async def test_a_revision_tells_contents_apart_and_nothing_else(voices, library):
    base = [[(wav(100), TEXT)], [(wav(200), TEXT)]]
    same = stored(voices, (wav(100), TEXT)), stored(voices, (wav(200), TEXT))

    revisions = [
        (await library.inline(speakers)).revision
        for speakers in (
            base,
            [[(wav(200), TEXT)], [(wav(100), TEXT)]],
            [[(wav(100), TEXT), (wav(200), TEXT)]],
            [[(wav(100), TEXT + "s")], [(wav(200), TEXT)]],
            [[(wav(100), TEXT)], [(wav(201), TEXT)]],
        )
    ]

    assert len(set(revisions)) == 5
    assert (await library.voice(same, "ann")).revision == revisions[0]


async def test_a_voice_that_the_caller_may_not_use_reads_as_one_that_does_not_exist(voices, library):
    private = stored(voices, (wav(), TEXT), visibility=Visibility.PRIVATE)
    assert (await library.voice([private], "ann")).references
    faults = []

    for voice_id in (private, "0" * 32, "../../etc/passwd", "a\0b"):
        with pytest.raises(BadRequest) as caught:
            await library.voice([voice_id], "bob")
        faults.append(str(caught.value).replace(repr(voice_id), "X"))

    assert len(set(faults)) == 1


async def test_a_deleted_voice_cannot_be_used_any_more_and_is_not_in_memory(voices, library, cloner):
    voice_id = stored(voices, (wav(), TEXT))
    await library.voice([voice_id], "ann")

    library.forget(voices.delete(voice_id, "ann"))

    with pytest.raises(BadRequest, match="there is no voice"):
        await library.voice([voice_id], "ann")
    assert cloner._cache == {}
    assert cloner._cache_bytes == 0


async def test_every_use_of_a_voice_is_counted(voices, library):
    voice_id = stored(voices, (wav(), TEXT))

    await asyncio.gather(*(library.voice([voice_id], "bob") for _ in range(10)))
    await library.voice([voice_id, voice_id], "bob")  # one request, one use
    await library.settle()

    assert voices.get(voice_id, "ann").task_count == 11


@pytest.mark.parametrize(
    ("speakers", "words"),
    [
        pytest.param([], "1 to 20", id="none"),
        pytest.param([[]], "1 to 20", id="an empty list"),
        pytest.param([[(wav(), TEXT)] * (MAX_REFERENCES + 1)], "got 21", id="too many"),
        pytest.param([[(wav(), TEXT), (wav(), " ")]], r"references\[1\]\.text is empty", id="no text"),
        pytest.param([[(wav(), TEXT)], [(b"x", TEXT)]], r"references\[1\]\[0\]: ", id="not audio"),
    ],
)
async def test_a_bad_inline_reference_is_named(library, speakers, words):
    with pytest.raises(BadRequest, match=words):
        await library.inline(speakers)


@pytest.mark.parametrize("codes", [(), ((1, 2, 3),), ((0, 4095), (1, 1023), (70_000, 2))])
def test_codes_survive_being_kept(codes):
    assert cloning._unpack(cloning._pack(codes)) == codes


async def test_inline_references_take_one_list_a_speaker(library):
    voice = await library.inline([[(wav(100), TEXT)], [(wav(200), TEXT), (wav(300), TEXT)]])

    assert [reference.speaker for reference in voice.references] == [0, 1, 1]
    assert all(isinstance(reference, Reference) and reference.codes for reference in voice.references)
