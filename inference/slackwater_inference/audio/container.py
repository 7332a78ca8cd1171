"""Samples into the bytes of a format, as a stream.

Owns the WAV header and the settings of the encoders (libmp3lame and libopus, through PyAV).  Owns neither rates nor
loudness: what comes in has the right rate already.  Called by output.py.  PyAV is loaded only by the formats that
need it: an engine that makes wav alone shall not carry its memory.
"""

import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from slackwater_inference.audio.ogg import OggWriter

if TYPE_CHECKING:
    from av import AudioCodecContext, AudioFrame, Packet

Samples = npt.NDArray[np.float32]

# A stream's length is not known when its header goes out; these are the hosted API's placeholders.
_RIFF_SIZE = 4_294_967_076
_DATA_SIZE = 4_294_967_040


class Container(Protocol):
    """Turns fp32 mono samples into bytes; `finish` gives the rest and is called once."""

    def feed(self, samples: Samples) -> bytes:
        """The bytes that `samples` complete."""

    def finish(self) -> bytes:
        """The bytes that were still held back."""


class Pcm:
    """16-bit little-endian samples, nothing else."""

    def feed(self, samples: Samples) -> bytes:
        """Two bytes a sample."""
        return pcm16(samples).tobytes()

    def finish(self) -> bytes:
        """Nothing: no sample is held back."""
        return b""


class Wav:
    """A RIFF header of unknown length, then 16-bit samples.  A stream without a sample is a bare header."""

    def __init__(self, sample_rate_hz: int) -> None:
        self._header = wav_header(sample_rate_hz)

    def feed(self, samples: Samples) -> bytes:
        """Two bytes a sample, with the header before the first."""
        return self.finish() + pcm16(samples).tobytes()

    def finish(self) -> bytes:
        """The header, if it is not out yet."""
        header, self._header = self._header, b""
        return header


class Mp3:
    """MPEG layer 3 frames, one after the other, without ID3 or Xing: both would need the end first."""

    def __init__(self, sample_rate_hz: int, bit_rate: int) -> None:
        # The bit reservoir would hold frames back, and speech at 64 kbit/s and more does without.
        self._encoder = _Encoder("libmp3lame", "s16p", sample_rate_hz, bit_rate, {"reservoir": "0"})

    def feed(self, samples: Samples) -> bytes:
        """The frames that `samples` complete."""
        return b"".join(map(bytes, self._encoder.feed(samples)))

    def finish(self) -> bytes:
        """The last frames, padded with silence by the encoder; nothing for a stream without a sample."""
        return b"".join(map(bytes, self._encoder.finish()))


class OggOpus:
    """Opus packets of 20 ms in Ogg, one page for each feed: nothing waits for a page to fill."""

    def __init__(self, bit_rate: int) -> None:
        self._encoder = _Encoder("libopus", "s16", 48_000, bit_rate, {})
        self._ogg = OggWriter(self._encoder.extradata)

    def feed(self, samples: Samples) -> bytes:
        """A page with the packets that `samples` complete, the two header pages before the first."""
        return self._ogg.page([bytes(packet) for packet in self._encoder.feed(samples)])

    def finish(self) -> bytes:
        """The last page; it says where the sound ends within its last packet."""
        packets = [bytes(packet) for packet in self._encoder.finish()]
        return self._ogg.last_page(packets, num_samples=self._encoder.num_samples)


class _Encoder:
    """One of PyAV's encoders, fed with any number of samples."""

    def __init__(
        self, name: str, sample_format: str, sample_rate_hz: int, bit_rate: int, options: dict[str, str]
    ) -> None:
        import av

        encoder = cast("AudioCodecContext", av.CodecContext.create(name, "w"))
        encoder.sample_rate = sample_rate_hz
        encoder.layout = "mono"
        encoder.format = sample_format
        encoder.bit_rate = bit_rate
        encoder.options = options
        encoder.open()
        self._encoder = encoder
        self._new_frame = av.AudioFrame.from_ndarray
        self._sample_format = sample_format
        self._sample_rate_hz = sample_rate_hz
        self._held = np.empty(0, np.int16)
        self.num_samples = 0

    @property
    def extradata(self) -> bytes:
        """The codec's own header."""
        return bytes(self._encoder.extradata or b"")

    def feed(self, samples: Samples) -> Iterator["Packet[Any]"]:
        self._held = np.concatenate([self._held, pcm16(samples)])
        size = self._encoder.frame_size
        whole = len(self._held) // size * size
        for start in range(0, whole, size):
            yield from self._encoder.encode(self._frame(self._held[start : start + size]))
        self._held = self._held[whole:]

    def finish(self) -> Iterator["Packet[Any]"]:
        if len(self._held):
            yield from self._encoder.encode(self._frame(self._held))
            self._held = self._held[:0]
        if self.num_samples:  # an encoder that got nothing has nothing to give
            yield from self._encoder.encode(None)

    def _frame(self, samples: npt.NDArray[np.int16]) -> "AudioFrame":
        frame = self._new_frame(samples[np.newaxis], format=self._sample_format, layout="mono")  # [1, n]
        frame.sample_rate = self._sample_rate_hz
        frame.pts = self.num_samples
        self.num_samples += len(samples)
        return frame


def pcm16(samples: Samples) -> npt.NDArray[np.int16]:
    """fp32 in [-1, 1] as int16, little-endian; what lies outside is clipped, so that nothing wraps."""
    scaled = np.clip(samples, -1.0, 1.0) * np.float32(32_767)
    rounded: npt.NDArray[np.int16] = np.rint(scaled).astype("<i2")
    return rounded


def wav_header(sample_rate_hz: int) -> bytes:
    """44 bytes: RIFF, 16-bit PCM, mono, of unknown length."""
    byte_rate, block_align, bits = sample_rate_hz * 2, 2, 16
    fmt = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, sample_rate_hz, byte_rate, block_align, bits)
    return struct.pack("<4sI4s", b"RIFF", _RIFF_SIZE, b"WAVE") + fmt + struct.pack("<4sI", b"data", _DATA_SIZE)
