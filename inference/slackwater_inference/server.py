"""One engine process, from its start to its exit.

Owns the port, the events `ready` and `load`, and the order in which things start and end.  Does not own
signals (lifecycle), requests (api) or generation (engine).  Called by the cli.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import uvicorn
from fastapi import FastAPI

from slackwater_inference.api.app import create_app
from slackwater_inference.config import EngineConfig, tiny
from slackwater_inference.core import Stage
from slackwater_inference.engine import Engine
from slackwater_inference.events import ParentLink
from slackwater_inference.lifecycle import Lifecycle, listen

logger = logging.getLogger(__name__)

_POLL_S = 0.05
_LOAD_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class Options:
    """What `slackwater engine serve` was asked for."""

    host: str
    port: int
    slots: int
    max_queued: int
    pace_frames_per_s: float
    seed: int
    keys: tuple[str, ...]
    threads: int


def run(options: Options, lifecycle: Lifecycle, listener: socket.socket | None) -> int:
    """Serve until told to leave; returns the exit code.

    listener: None if we are to stand by first, and only then take the port, which raises
    PortUnavailable if it cannot be had.
    """
    torch.set_num_threads(options.threads)
    engine = Engine(
        EngineConfig(
            max_running_requests=options.slots,
            max_queued=options.max_queued,
            pace_frames_per_s=options.pace_frames_per_s,
            seed=options.seed,
        ),
        tiny(),
    )
    engine.warm_up()
    app = create_app(engine, options.keys)
    if listener is None:
        engine.stand_by()
        logger.info("standing by; SIGUSR1 wakes")
        lifecycle.stand_by()
        listener = listen(options.host, options.port)
    with listener:
        return asyncio.run(_serve(engine, app, listener, options, lifecycle))


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: what a signal means is decided here."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve(engine: Engine, app: FastAPI, listener: socket.socket, options: Options, lifecycle: Lifecycle) -> int:
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_keep_alive=75,
    )
    server = _Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.001)
    engine.start()
    lifecycle.begin_serving()
    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    lifecycle.link.say("ready", url=url, slots=options.slots)
    logger.info("serving url=%s slots=%d max_queued=%d", url, options.slots, options.max_queued)
    if not options.keys:
        logger.warning("no API key is set: everyone who can reach %s may speak", url)
    loading = asyncio.create_task(_say_load(engine, lifecycle.link))
    code = await _until_told_to_leave(engine, lifecycle, serving)
    loading.cancel()
    server.should_exit = True
    await serving
    engine.stop()
    return code


async def _until_told_to_leave(engine: Engine, lifecycle: Lifecycle, serving: asyncio.Task[None]) -> int:
    """Returns the exit code, once no request is unfinished; 1 if the engine failed."""
    while not serving.done():
        if lifecycle.is_leaving:
            engine.drain()
            if engine.is_idle:
                return 0
        if engine.status().stage is Stage.FAILED:
            return 1
        await asyncio.sleep(_POLL_S)
    return 1


async def _say_load(engine: Engine, link: ParentLink) -> None:
    said: dict[str, object] = {}
    while True:
        status = engine.status()
        load: dict[str, object] = {
            "running": status.running,
            "waiting": status.waiting,
            "slots": status.slots,
            "frames_total": status.frames_total,
            "step_s": status.step_s,
        }
        if load != said:
            link.say("load", **load)
            said = load
        await asyncio.sleep(_LOAD_EVERY_S)
