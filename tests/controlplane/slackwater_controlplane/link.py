"""A way to a server that can be cut without a word: what a partition of the network does, on loopback.

Owns the forwarding of bytes and nothing of what they say.  While it is cut, connections stay open and new ones are
taken, and nothing comes through; what was sent meanwhile arrives when it is mended, as retransmitted packets do, unless
its sender has reset the connection.
"""

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

_CHUNK_BYTES = 64 * 2**10


class Link:
    """Forwards a port of loopback to a server.  As a context manager it runs in a thread of its own.

    late_bytes: what clients had sent into the cut and the server got when it was mended.
    """

    def __init__(self, server: str) -> None:
        """server: its URL."""
        parts = urlsplit(server)
        assert parts.hostname is not None, f"{server} names no host"
        assert parts.port is not None, f"{server} names no port"
        self._target = (parts.hostname, parts.port)
        self._scheme = parts.scheme
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._open = asyncio.Event()
        self._open.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.late_bytes = 0
        self.url = ""

    def __enter__(self) -> Self:
        self._thread.start()
        self._call(self._listen())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._call(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()

    def cut(self) -> None:
        """From now on nothing comes through, in either direction."""
        self._call(self._set(is_open=False))

    def mend(self) -> None:
        """Everything comes through again, what was held back first."""
        self._call(self._set(is_open=True))

    # --- in its thread --------------------------------------------------------------------------

    def _call(self, act: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(act, self._loop).result(10)

    async def _set(self, *, is_open: bool) -> None:
        if is_open:
            self._open.set()
        else:
            self._open.clear()

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._accept, self._target[0], 0, limit=_CHUNK_BYTES)
        host, port = self._server.sockets[0].getsockname()[:2]
        self.url = f"{self._scheme}://{host}:{port}"

    async def _end(self) -> None:
        assert self._server is not None, "not started"
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = self._loop.create_task(self._carry(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._open.wait()
            with contextlib.suppress(OSError):
                far_reader, far_writer = await asyncio.open_connection(*self._target, limit=_CHUNK_BYTES)
                try:
                    await asyncio.gather(
                        self._forward(reader, far_writer, is_request=True), self._forward(far_reader, writer)
                    )
                finally:
                    far_writer.close()
        finally:
            writer.close()

    async def _forward(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_request: bool = False
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK_BYTES):
                if not self._open.is_set():
                    await self._open.wait()
                    if reader.exception() is not None:  # reset: nobody sends these bytes again
                        break
                    self.late_bytes += len(data) if is_request else 0
                writer.write(data)
                await writer.drain()
            await self._open.wait()
        writer.close()
