"""Runs the demo: starts `slackwater up`, plays the traffic, records what happens, proves the ledgers.

Everything goes through the product's own doors: the command line, the HTTP API, the status document
and `slackwater clean verify`.
"""

import asyncio
import contextlib
import json
import os
import platform
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx

from slackwater_operator.cluster.child import LAUNCHER
from slackwater_operator.cluster.programs import SLACKWATER
from slackwater_operator.core import PermanentError
from slackwater_operator.demo import plan
from slackwater_operator.demo.player import Played, play, speak_mp3
from slackwater_operator.demo.result import DemoResult, Eviction, JobResult, Moment, Recording, RequestRow
from slackwater_operator.status import StateFolder
from slackwater_operator.traces import load_conversation, slice_trace

SAMPLE_S = 0.25
READY_S = 120.0  # the first start compiles and reads everything cold
QUIET_TAIL_S = 8.0  # after the traffic, so that the slots are seen going back to cleaning
TRACE_WORDS = (
    f"Azure LLM inference trace 2023, conversations, second {plan.SLICE_START_S:.0f} to "
    f"{plan.SLICE_START_S + plan.SLICE_LENGTH_S:.0f}, {plan.SLICE_SPEED:.0f} times faster, one request in "
    f"{plan.SLICE_KEEP_EVERY}; one generated token = one frame of speech (46 ms)"
)


@dataclass(frozen=True, slots=True)
class Progress:
    """What a watcher is told four times a second.

    t_s counts from the start of the traffic, before it from the start of the run.  document: of the
    supervisor; None before its first.
    """

    stage: str
    t_s: float
    document: dict[str, Any] | None
    moments: list[Moment]
    played: list[Played]
    requests: int


@dataclass(frozen=True, slots=True)
class Books:
    """Slot-seconds by state while the traffic was played, and those of cleaning that were committed."""

    seconds: dict[str, float]
    committed_s: float

    @classmethod
    def between(cls, first: dict[str, Any], last: dict[str, Any]) -> "Books":
        """From the supervisor's accounts at two moments."""
        spent = {state: round(total - first["seconds"][state], 3) for state, total in last["seconds"].items()}
        return cls(spent, last["committed_s"] - first["committed_s"])

    @property
    def useful_ratio(self) -> float:
        return self._ratio(self.seconds.get("serving", 0.0) + self.committed_s)

    @property
    def useful_ratio_without_filling(self) -> float:
        return self._ratio(self.seconds.get("serving", 0.0))

    def _ratio(self, useful_s: float) -> float:
        owned_s = sum(self.seconds.values())
        return useful_s / owned_s if owned_s else 0.0


Watcher = Callable[[Progress], None]


class Demo:
    """One run.  `run` returns what was measured; everything it started has ended by then."""

    def __init__(self, work: plan.Work, watch: Watcher, *, filling: bool = True) -> None:
        self._work = work
        self._watch = watch
        self._filling = filling
        self._folder = StateFolder(work.state_dir)
        self._recording = Recording()
        self._played: list[Played] = []
        self._stage = "starting: engines load and stand by, cleaning begins"
        self._began_s = time.monotonic()
        self._traffic_s: float | None = None  # when the traffic began
        self._newest: dict[str, Any] | None = None
        self._books: list[dict[str, Any]] = []  # the accounts when the traffic began, and when it ended
        self._speech = b""
        self._burst: list[float] = []  # moments at which more than one replica was needed
        self._supervisor: asyncio.subprocess.Process | None = None
        self._interrupted = False

    async def run(self) -> DemoResult:
        """Raises PermanentError when it cannot even start; later trouble stands in the verdict."""
        started_at = datetime.now(UTC)
        plan.write_configuration(self._work, filling=self._filling)
        requests = slice_trace(
            load_conversation(), plan.SLICE_START_S, plan.SLICE_LENGTH_S, plan.SLICE_SPEED, plan.SLICE_KEEP_EVERY
        )
        trouble = ""
        self._supervisor = await self._start_supervisor()
        sampler = asyncio.create_task(self._sample(len(requests)))
        try:
            await self._until_ready()
            await self._play(requests)
        except PermanentError as error:
            if self._traffic_s is None:  # nothing was measured that a report could be about
                raise
            trouble = str(error)
        except asyncio.CancelledError:  # Ctrl-C: end in order, and still say what happened
            self._interrupted = True
            trouble = "stopped by hand"
        finally:
            trouble = await self._stop_supervisor(trouble)
            sampler.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await sampler
        self._stage = "verifying the ledgers"
        self._tell(len(requests))
        jobs = [await self._verify(name) for name in self._job_names()]
        return self._result(tuple(job for job in jobs if job), trouble, started_at, time.monotonic() - self._began_s)

    # --- the supervisor ---------------------------------------------------------------------------

    async def _start_supervisor(self) -> asyncio.subprocess.Process:
        with (self._work.folder / "supervisor.log").open("wb") as log:
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-S", str(LAUNCHER), str(os.getpid()), "0"),
                *(*SLACKWATER, "up", "--config", str(self._work.config_file)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    async def _until_ready(self) -> None:
        """Until a replica serves, the other engines stand by and cleaning has begun on every other slot."""
        end_s = time.monotonic() + READY_S
        while time.monotonic() < end_s:
            self._check_supervisor()
            if self._newest and (failed := failed_jobs(self._newest)):
                raise PermanentError(failed)
            if self._newest and self._ready(self._newest):
                return
            await asyncio.sleep(SAMPLE_S)
        raise PermanentError(f"nothing was ready within {READY_S:.0f} s; see {self._work.folder}/supervisor.log")

    def _ready(self, document: dict[str, Any]) -> bool:
        serving = [slot for slot in document["slots"] if slot["holder"] == "inference" and slot["phase"] == "running"]
        filled = all(slot["holder"] != "free" and slot["phase"] != "starting" for slot in document["slots"])
        return bool(serving) and document["standby"] == plan.STANDBY and (filled or not self._filling)

    def _check_supervisor(self) -> None:
        assert self._supervisor is not None
        if (code := self._supervisor.returncode) is not None:
            raise PermanentError(f"the supervisor ended early with {ending(code)}{self._last_words(code)}")

    def _last_words(self, code: int) -> str:
        if code < 0:  # a killed process explains nothing
            return ""
        lines = (self._work.folder / "supervisor.log").read_text(errors="replace").strip().splitlines()
        return f": {lines[-1]}" if lines else ""

    async def _stop_supervisor(self, trouble: str) -> str:
        assert self._supervisor is not None
        self._stage = "stopping"
        if self._supervisor.returncode is None:
            self._supervisor.send_signal(signal.SIGTERM)
            if self._interrupted:  # the person does not want to wait for streams
                await asyncio.sleep(SAMPLE_S)
                if self._supervisor.returncode is None:
                    self._supervisor.send_signal(signal.SIGTERM)
        code = await self._supervisor.wait()
        if code and not trouble:
            return f"the supervisor ended with {ending(code)}{self._last_words(code)}"
        return trouble or failed_jobs(self._newest or {"jobs": []})

    # --- traffic and what is seen of it -------------------------------------------------------------

    async def _play(self, requests: tuple[Any, ...]) -> None:
        self._stage = "traffic"
        self._traffic_s = time.monotonic()
        self._close_books()
        player = asyncio.create_task(play(requests, self._work.url, on_done=self._played.append))
        try:
            while not player.done():
                self._check_supervisor()
                await asyncio.wait([player], timeout=SAMPLE_S)
            await player
            self._close_books()
            self._stage = "quiet again"
            end_s = time.monotonic() + QUIET_TAIL_S
            self._speech = await speak_mp3(self._work.url, plan.SAMPLE_TEXT)
            while time.monotonic() < end_s:
                self._check_supervisor()
                await asyncio.sleep(SAMPLE_S)
        finally:
            player.cancel()
            with contextlib.suppress(asyncio.CancelledError, httpx.HTTPError):
                await player

    def _close_books(self) -> None:
        with contextlib.suppress(PermanentError):
            self._books.append(self._folder.read()["accounts"])

    async def _sample(self, requests: int) -> None:
        while True:
            with contextlib.suppress(PermanentError):  # not written yet
                self._newest = self._folder.read()
                if self._traffic_s is not None:
                    t_s = time.monotonic() - self._traffic_s
                    self._recording.add(self._newest, t_s)
                    if any(replicas > 1 for replicas in self._newest["need_replicas"].values()):
                        self._burst.append(t_s)
            self._tell(requests)
            await asyncio.sleep(SAMPLE_S)

    def _tell(self, requests: int) -> None:
        t_s = time.monotonic() - (self._traffic_s or self._began_s)
        self._watch(Progress(self._stage, t_s, self._newest, self._recording.moments, self._played, requests))

    # --- afterwards ---------------------------------------------------------------------------------

    def _job_names(self) -> list[str]:
        ledgers = self._work.folder / "ledgers"
        return sorted(path.name for path in ledgers.iterdir()) if ledgers.is_dir() else []

    async def _verify(self, name: str) -> JobResult | None:
        """`slackwater clean verify --json`: reads every byte of the ledger again."""
        process = await asyncio.create_subprocess_exec(
            *(*SLACKWATER, "clean", "verify", str(self._work.ledger(name)), "--json"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, errors = await process.communicate()
        try:
            found = json.loads(out)
        except ValueError:
            raise PermanentError(f"verify of {name} gave no answer: {errors.decode().strip()}") from None
        fields = ("items_total", "items_done", "items_open", "items_lost", "items_doubled", "items_quarantined")
        return JobResult(name, *(int(found[field]) for field in fields))

    def _result(self, jobs: tuple[JobResult, ...], trouble: str, started_at: datetime, wall_s: float) -> DemoResult:
        events = self._events()
        origin_s = self._traffic_s or 0.0
        if len(self._books) == 1:  # ended before the traffic did
            self._close_books()
        accounts = Books.between(*self._books) if len(self._books) == 2 else Books({}, 0.0)
        return DemoResult(
            started_at=started_at.isoformat(timespec="seconds"),
            wall_s=round(wall_s, 1),
            machine=f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
            versions={"slackwater": version("slackwater"), "python": platform.python_version()},
            slots=plan.SLOTS,
            trace=TRACE_WORDS,
            verdict=trouble,
            useful_ratio=accounts.useful_ratio,
            useful_ratio_without_filling=accounts.useful_ratio_without_filling,
            gpu_seconds=accounts.seconds,
            jobs=jobs,
            moments=tuple(self._recording.moments),
            requests=tuple(self._row(played) for played in self._played),
            evictions=tuple(
                Eviction(
                    t_s=round(event["decided_s"] - origin_s, 3),
                    uid=event["uid"],
                    reason=event["reason"],
                    took_s=event["took_s"],
                    outcome=event["outcome"],
                    verified=event["verified"],
                    items=event["items"],
                )
                for event in events
                if event["event"] == "reclaim"
            ),
            speech=self._speech,
        )

    def _row(self, played: Played) -> RequestRow:
        in_burst = any(abs(moment - played.sent_s) <= SAMPLE_S for moment in self._burst)
        return RequestRow(
            t_s=round(played.sent_s, 3),
            frames=played.frames,
            outcome=str(played.outcome),
            first_audio_s=played.first_audio_s,
            total_s=played.total_s,
            retries=played.retries,
            burst=in_burst,
        )

    def _events(self) -> list[dict[str, Any]]:
        try:
            lines = (self._work.state_dir / "events.jsonl").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in lines]


def failed_jobs(document: dict[str, Any]) -> str:
    """Which cleaning jobs a person has to mend, and why; empty when none."""
    failed = [
        f"cleaning {job['name']} failed: {job['message']}" for job in document["jobs"] if job["state"] == "failed"
    ]
    return "; ".join(failed)


def ending(code: int) -> str:
    """An exit code in words."""
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def clear(folder: Path) -> None:
    """Remove a run's folder."""
    shutil.rmtree(folder, ignore_errors=True)
