"""One stream of speech, as its caller holds it.

Owns the way of its audio from the engine's thread to the caller's event loop.  Owns nothing of what the stream
says (jobs).  Made by the engine, held by the API.
"""

import asyncio
from typing import Protocol

from slackwater_inference.core import Chunk, EngineError


class Speaker(Protocol):
    """What a handle asks of the engine."""

    def say_part(self, stream: "SpeechStream", text: str) -> int: ...
    def end_parts(self, stream: "SpeechStream") -> None: ...
    def close_stream(self, stream: "SpeechStream") -> None: ...
    def note_read(self, stream: "SpeechStream", num_frames: int) -> None: ...


class SpeechStream:
    """One stream's audio, as an async iterator of `Chunk`; its text is given part by part.

    Iteration ends cleanly after the last part of an ended stream, or raises an EngineError; it is for one
    reader, on the event loop that opened the stream.  Whoever holds a stream must `close` it, also when it was
    not read to its end: that frees its slot and pages.
    """

    def __init__(self, request_id: str, speaker: Speaker) -> None:
        self.request_id = request_id
        self._speaker = speaker
        self._loop = asyncio.get_running_loop()
        # Unbounded here; the engine begins no further part while too much is unread.
        self._items: asyncio.Queue[Chunk | EngineError | None] = asyncio.Queue()
        self.error: EngineError | None = None
        """What broke the stream, if anything did."""

    def say(self, text: str) -> int:
        """Add a part, spoken after those before it; returns its index, 0 for the first.

        Raises BadRequest (blank, or too long for one part), QueueFull (a first part that finds no place), the
        error that broke the stream if one did, and ValueError after `end` or `close`.
        """
        return self._speaker.say_part(self, text)

    def end(self) -> None:
        """No further part follows.  May be called twice, and on a stream that is over."""
        self._speaker.end_parts(self)

    def close(self) -> None:
        """Stop the stream if it still runs; its slot and pages are free at once.  May be called twice."""
        self._speaker.close_stream(self)

    def __aiter__(self) -> "SpeechStream":
        return self

    async def __anext__(self) -> Chunk:
        item = await self._items.get()
        if isinstance(item, Chunk):
            self._speaker.note_read(self, item.num_frames)
            return item
        self._items.put_nowait(item)  # the end stays the end, however often it is asked for
        if item is None:
            raise StopAsyncIteration
        raise item

    def put(self, item: Chunk | EngineError | None) -> None:
        """Hand over an item, from any thread; None is the clean end."""
        if isinstance(item, EngineError):
            self.error = item
        # A loop that is closed has no reader left.
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._items.put_nowait, item)
