"""The bytes of an answer: container header and the streaming response.

Owns the WAV header and the rule that a response always lets go of its engine slot.  Called by the app.
"""

import struct
from collections.abc import AsyncIterator

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from slackwater_inference.core import Chunk
from slackwater_inference.engine import AudioStream

# A stream's length is not known when its header goes out; these are the hosted API's placeholders.
_RIFF_SIZE = 4_294_967_076
_DATA_SIZE = 4_294_967_040
MEDIA_TYPES = {"wav": "audio/wav", "pcm": "audio/pcm"}


def wav_header(sample_rate_hz: int) -> bytes:
    """44 bytes: RIFF, 16-bit PCM, mono, of unknown length."""
    byte_rate, block_align, bits = sample_rate_hz * 2, 2, 16
    fmt = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, sample_rate_hz, byte_rate, block_align, bits)
    return struct.pack("<4sI4s", b"RIFF", _RIFF_SIZE, b"WAVE") + fmt + struct.pack("<4sI", b"data", _DATA_SIZE)


class AudioResponse(StreamingResponse):
    """Streams `first` and the rest of `stream`; closes the stream however the response ends.

    An error of the stream after the first byte propagates, so the server cuts the connection: a listener
    must be able to tell a broken answer from a short one.
    """

    def __init__(self, stream: AudioStream, first: Chunk, audio_format: str, sample_rate_hz: int) -> None:
        header = wav_header(sample_rate_hz) if audio_format == "wav" else b""
        super().__init__(
            _parts(header, first, stream),
            media_type=MEDIA_TYPES[audio_format],
            # A proxy that collects the answer before passing it on would undo the streaming.
            headers={"X-Accel-Buffering": "no", "Cache-Control": "no-store"},
        )
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._stream.close()


async def _parts(header: bytes, first: Chunk, stream: AudioStream) -> AsyncIterator[bytes]:
    yield header + first.pcm
    async for chunk in stream:
        yield chunk.pcm
