"""From recordings to voices that the engine can be conditioned on.

Owns checking and encoding a recording, and the bounded memory of what was encoded.  Does not own how sound is
read (audio.recording), how it becomes codes (codec), or which voices there are (store).  Called by the API.
"""

import asyncio
import hashlib
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from slackwater_inference.audio.recording import Samples, check_reference, prepare_reference, read_recording
from slackwater_inference.core import BadRequest, Codes, EngineError, QueueFull, Reference, Voice
from slackwater_inference.store.errors import Forbidden, NotFound
from slackwater_inference.store.records import Sample, VoiceRecord
from slackwater_inference.store.voices import VoiceStore

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

MAX_REFERENCES = 20  # of one request, over all its speakers
_CACHE_ITEMS = 256  # 0.2 MiB each is common: a few hundred frames of ten codes
_CACHE_BYTES = 64 * 1024 * 1024
_MAX_ENCODING = 16  # each holds its recording in memory and takes seconds of one core
_CODES_FORMAT = "1"  # of what the object store keeps

# What CPython takes for a frame's tuple and for each code in it; codes above 256 are objects of their own.
_FRAME_BYTES, _CODE_BYTES = 56, 40

_Key = tuple[str, str]  # SHA-256 of the recording, SHA-256 of its text


class Encoder(Protocol):
    """The part of the codec that cloning needs.  revision: names the codes that it makes."""

    @property
    def revision(self) -> str: ...

    def encode(self, samples: Samples) -> "Tensor":
        """int64 [num_codebooks, n] of fp32 [T]."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """A recording as codes."""

    codes: Codes
    duration_s: float


class Cloner:
    """Checks and encodes recordings, one at a time, in a thread; remembers what it encoded.

    A recording is known by its content alone, so nobody can put his under the name of another's.  At most 256
    recordings and 64 MiB are remembered.   Use it from one event loop.
    """

    def __init__(
        self, codec: Encoder, sample_rate_hz: int, count: Callable[[Literal["hit", "miss", "evict"]], None]
    ) -> None:
        """count: told of every look-up in the cache and of every recording that the bounds push out."""
        self._codec = codec
        self._codec_revision = codec.revision  # now, since the first time it reads all of the codec's weights
        self._sample_rate_hz = sample_rate_hz
        self._cache: OrderedDict[_Key, Encoded] = OrderedDict()
        self._cache_bytes = 0
        self._encoding: dict[_Key, asyncio.Future[Encoded]] = {}
        # One thread: two encodings at once would take a second core from the engine.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="cloner")
        self._count = count

    @property
    def codec_revision(self) -> str:
        """Names the codes that this process makes."""
        return self._codec_revision

    @property
    def codes_name(self) -> str:
        """Under which codes are kept beside their recording: another codec never reads them."""
        return f"{self._codec_revision}-{_CODES_FORMAT}"

    def derived(self, encoded: Encoded) -> dict[str, bytes]:
        """What is to be kept beside the recording, so that nobody has to encode it again."""
        return {self.codes_name: _pack(encoded.codes)}

    async def reference(self, audio: bytes, text: str, speaker: int) -> Reference:
        """The recording, checked, as the model takes it.  Raises BadRequest, QueueFull."""
        return Reference(text, (await self.encode(audio, text)).codes, speaker)

    async def encode(self, audio: bytes, text: str, *, is_checked: bool = False) -> Encoded:
        """The recording's codes.  is_checked: it was found good before.

        Raises BadRequest that says what is wrong with the recording, QueueFull if too many wait.
        """
        key = await asyncio.to_thread(_key, audio, text)
        # Who knows that it was checked has looked in the cache himself; that is not to be counted twice.
        if (known := self._cache.get(key) if is_checked else self.known(*key)) is not None:
            return known
        running = self._encoding.get(key)
        if running is None:
            if len(self._encoding) >= _MAX_ENCODING:
                raise QueueFull(f"{len(self._encoding)} recordings wait to be encoded; try again soon")
            loop = asyncio.get_running_loop()
            running = loop.run_in_executor(self._thread, self._encode, audio, None if is_checked else text)
            self._encoding[key] = running
            running.add_done_callback(lambda done: self._finish(key, done))
        # One who leaves does not take the result from those who wait for the same.
        return await asyncio.shield(running)

    def known(self, digest: str, text_digest: str) -> Encoded | None:
        """What the cache holds of this recording and text; counted as a hit or a miss."""
        found = self._cache.get((digest, text_digest))
        if found is None:
            self._count("miss")
            return None
        self._cache.move_to_end((digest, text_digest))
        self._count("hit")
        return found

    def remember(self, digest: str, text_digest: str, encoded: Encoded) -> None:
        """Put codes that were read from the store into the cache."""
        self._drop((digest, text_digest))
        self._cache[digest, text_digest] = encoded
        self._cache_bytes += _size_bytes(encoded)
        while len(self._cache) > _CACHE_ITEMS or self._cache_bytes > _CACHE_BYTES:
            self._drop(next(iter(self._cache)))
            self._count("evict")

    def forget(self, digest: str) -> None:
        """Drop what the cache holds of this recording."""
        for key in [key for key in self._cache if key[0] == digest]:
            self._drop(key)

    def close(self) -> None:
        """Take no more recordings; the one that is being encoded ends."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _encode(self, audio: bytes, text: str | None) -> Encoded:
        samples = prepare_reference(read_recording(audio, self._sample_rate_hz), self._sample_rate_hz)
        if text is not None:
            check_reference(samples, self._sample_rate_hz, text)
        codes = self._codec.encode(samples)  # [num_codebooks, n]
        return Encoded(tuple(map(tuple, codes.T.tolist())), len(samples) / self._sample_rate_hz)

    def _finish(self, key: _Key, done: "asyncio.Future[Encoded]") -> None:
        self._encoding.pop(key)
        if not done.cancelled() and done.exception() is None:
            self.remember(*key, done.result())

    def _drop(self, key: _Key) -> None:
        dropped = self._cache.pop(key, None)
        if dropped is not None:
            self._cache_bytes -= _size_bytes(dropped)


class VoiceLibrary:
    """Voices for the engine: stored ones by their ids, and ones that come with a request."""

    def __init__(self, voices: VoiceStore, cloner: Cloner) -> None:
        self._voices = voices
        self._cloner = cloner
        self._uses: Counter[str] = Counter()  # of each voice, not yet in the database
        self._counting: asyncio.Task[None] | None = None

    async def voice(self, reference_ids: Sequence[str], user_id: str) -> Voice:
        """The stored voices with these ids, one speaker each, in order.

        A recording is encoded once: its codes are kept beside it, for other processes and for the next start.
        Raises BadRequest for a voice that does not exist or is another user's private one, which read alike.
        """
        if not 1 <= len(reference_ids) <= MAX_REFERENCES:
            raise BadRequest(f"reference_id must name 1 to {MAX_REFERENCES} voices, got {len(reference_ids)}")
        records = [await self._record(voice_id, user_id) for voice_id in reference_ids]
        if sum(len(record.recordings) for record in records) > MAX_REFERENCES:
            raise BadRequest(f"the voices have over {MAX_REFERENCES} recordings together; name fewer")
        references = []
        contents = []
        for speaker, record in enumerate(records):
            for sample in record.recordings:
                references.append(Reference(sample.text, (await self._encoded(sample)).codes, speaker))
                contents.append((speaker, sample.digest, _sha256(sample.text.encode())))
        self._uses.update(set(reference_ids))
        if self._counting is None or self._counting.done():
            self._counting = asyncio.create_task(self._count_uses())
        return Voice(self._revision(contents), tuple(references))

    async def settle(self) -> None:
        """Wait until every use is counted in the database; call it before the loop ends."""
        if self._counting is not None:
            await self._counting

    async def inline(self, speakers: Sequence[Sequence[tuple[bytes, str]]]) -> Voice:
        """Voices that came with the request: one list a speaker, of recordings, each with what is said in it.

        Raises BadRequest that names the recording and what is wrong with it, QueueFull.
        """
        if not 1 <= sum(map(len, speakers)) <= MAX_REFERENCES:
            raise BadRequest(f"references must be 1 to {MAX_REFERENCES} recordings, got {sum(map(len, speakers))}")
        references = []
        contents = []
        for speaker, recordings in enumerate(speakers):
            for index, (audio, text) in enumerate(recordings):
                place = f"references[{index}]" if len(speakers) == 1 else f"references[{speaker}][{index}]"
                if not text.strip():
                    raise BadRequest(f"{place}.text is empty; write what is said in the recording")
                try:
                    reference = await self._cloner.reference(audio, text, speaker)
                except BadRequest as error:
                    raise BadRequest(f"{place}: {error}") from error
                references.append(reference)
                contents.append((speaker, *await asyncio.to_thread(_key, audio, text)))
        return Voice(self._revision(contents), tuple(references))

    def forget(self, record: VoiceRecord) -> None:
        """Drop a deleted voice from memory."""
        for sample in record.samples:
            self._cloner.forget(sample.digest)

    async def _count_uses(self) -> None:
        """Beside the requests, so that no first audio waits for a write; under load, many uses in one write."""
        while self._uses:
            uses, self._uses = self._uses, Counter()
            try:
                await asyncio.to_thread(self._voices.count_tasks, uses)
            except EngineError as error:  # a count is not worth a request
                logger.warning("uses of %d voices were not counted: %s", len(uses), error)

    async def _record(self, voice_id: str, user_id: str) -> VoiceRecord:
        unknown = f"there is no voice with the id {voice_id[:64]!r} for this key; list yours with GET /model?self=true"
        try:
            return await asyncio.to_thread(self._voices.get, voice_id, user_id)
        except (NotFound, Forbidden) as error:
            raise BadRequest(unknown) from error

    async def _encoded(self, sample: Sample) -> Encoded:
        text_digest = _sha256(sample.text.encode())
        if (known := self._cloner.known(sample.digest, text_digest)) is not None:
            return known
        kept = await asyncio.to_thread(self._voices.derived, sample.digest, self._cloner.codes_name)
        if kept is not None:
            encoded = Encoded(_unpack(kept), sample.duration_s)
            self._cloner.remember(sample.digest, text_digest, encoded)
            return encoded
        audio = await asyncio.to_thread(self._voices.data, sample.digest)
        encoded = await self._cloner.encode(audio, sample.text, is_checked=True)
        for name, data in self._cloner.derived(encoded).items():
            await asyncio.to_thread(self._voices.keep_derived, sample.digest, name, data)
        return encoded

    def _revision(self, contents: Sequence[tuple[int, str, str]]) -> str:
        """Hash of everything that the references hold: the codec, and each one's speaker, recording and text."""
        lines = [f"{speaker} {digest} {text_digest}" for speaker, digest, text_digest in contents]
        return _sha256("\n".join([self._cloner.codec_revision, *lines]).encode())


def _pack(codes: Codes) -> bytes:
    """num_codebooks, then every frame's codes, all uint32 little-endian."""
    num_codebooks = len(codes[0]) if codes else 0
    return np.array([num_codebooks, *(code for frame in codes for code in frame)], dtype="<u4").tobytes()


def _unpack(data: bytes) -> Codes:
    num_codebooks, *codes = np.frombuffer(data, dtype="<u4").tolist()
    return tuple(tuple(codes[at : at + num_codebooks]) for at in range(0, len(codes), max(num_codebooks, 1)))


def _size_bytes(encoded: Encoded) -> int:
    num_codebooks = len(encoded.codes[0]) if encoded.codes else 0
    return len(encoded.codes) * (_FRAME_BYTES + num_codebooks * _CODE_BYTES)


def _key(audio: bytes, text: str) -> _Key:
    return _sha256(audio), _sha256(text.encode())


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
