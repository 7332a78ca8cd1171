"""The YAML file of `slackwater up`: what one machine's supervisor runs and by which policy.

Parsed once, at the start; everything inside works on the models' values.  Unknown keys are errors,
and an error names its key.  `manifests/samples/workstation.yaml` shows every key.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from slackwater_operator.settings import Name, Port, Seconds, Section, StepSettings, read


class Slots(Section):
    """What the machine lends out, one holder a slot."""

    kind: Literal["auto", "cpu", "gpu"] = "auto"
    """auto: the GPUs that NVML shows, else `count` CPU slots."""

    count: Annotated[int, Field(ge=1, le=1024)] | None = None
    """CPU slots.  There is no honest default: a CPU slot is whatever share of the machine you say it is."""


EMBEDDED_VOICE = "tiny"  # the one model that is a name and not a folder


class Inference(Section):
    """The speech service behind one address."""

    name: Name = "tts"
    host: str = "127.0.0.1"
    port: Port = 8080
    min_replicas: Annotated[int, Field(ge=0)] = 1
    max_replicas: Annotated[int, Field(ge=1)] = 4
    slots_per_replica: Annotated[int, Field(ge=1, le=1024)] = 4
    """Requests that one replica decodes at once."""

    standby_replicas: Annotated[int, Field(ge=0)] = 1
    """Engines kept loaded without a slot.  Waking one takes a fraction of a second, a cold start several."""

    pace_frames_per_s: Annotated[float, Field(ge=0)] = 0
    """Upper bound of one stream's decode rate; 0 = none.  On shared CPUs it makes a slot a fixed share
    (playback needs 21.5)."""

    burst_slots: Annotated[int, Field(ge=0)] = 0
    """Decode slots kept free beside the measured rise, never lent."""

    deadband_replicas: Annotated[int, Field(ge=0)] = 1
    """Surplus replicas tolerated before any is given up; 0 for machines with few slots."""

    max_queued: Annotated[int, Field(ge=0)] = 64
    """Requests that may wait for a decode slot; the next is refused with 429 and Retry-After."""

    queue_timeout_s: Annotated[float, Field(ge=0.1)] = 30
    drain_grace_s: Seconds = 120
    """How long a leaving replica may finish its live streams; the longest stream is 95 s of audio."""

    model: str = EMBEDDED_VOICE
    """The embedded voice, or the folder of an S2-Pro checkpoint."""

    store: str | None = None
    """Where recordings of voices are kept: a folder or s3://bucket.  None: voices end with the engine that has them."""

    database: str | None = None
    """Voices and keys, with `store`: sqlite:///FILE or postgresql://…, the same for every engine."""

    keys_file: Path | None = None
    """Bearer keys, one a line.  None: those of the database; without any, the API is open on a loopback address and
    closed on any other."""

    @model_validator(mode="after")
    def bounds_agree(self) -> "Inference":
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas ({self.min_replicas}) is above max_replicas ({self.max_replicas})")
        if (self.store is None) != (self.database is None):
            raise ValueError("store and database belong together: one has the recordings, one their names")
        if self.keys_file is None and self.database is None and not self.is_local:
            raise ValueError(f"host {self.host} can be reached from outside, so keys_file or database must be given")
        return self

    @property
    def is_local(self) -> bool:
        """True if only this machine can reach the API."""
        return self.host in ("127.0.0.1", "::1", "localhost")


class Cleaning(Section):
    """One cleaning job; workers of all jobs share what inference leaves."""

    name: Name
    input: Path
    """A folder of recordings, read through all its sub-folders."""

    output: Path
    """The job's ledger: made at the first run, continued by every later one."""

    min_workers: Annotated[int, Field(ge=0)] = 0
    """Workers that traffic never takes back."""

    max_workers: Annotated[int, Field(ge=1)] = 64
    weight: Annotated[float, Field(gt=0)] = 1
    grace_s: Seconds = 5
    """From SIGTERM to SIGKILL.  A worker needs about half a second."""

    lease_ttl_s: Annotated[float, Field(gt=0)] = 15
    """A worker silent for so long has its shard taken over."""

    nice: Annotated[int, Field(ge=0, le=19)] = 10
    """Cleaning gives way to inference on shared CPUs, too."""

    settings: StepSettings = Field(default_factory=dict)
    """Settings of the steps, as `slackwater clean run --set` takes them."""


class Policy(Section):
    """How fast to follow the traffic.  The defaults suit a machine whose replicas wake within seconds."""

    tick_s: Annotated[float, Field(ge=0.1, le=10)] = 0.5
    panic_s: Annotated[float, Field(gt=0)] = 6
    stable_s: Annotated[float, Field(gt=0)] = 60
    down_s: Annotated[float, Field(gt=0)] = 120
    """A replica is given up only if the survivors could have carried the whole window."""

    stale_after_s: Annotated[float, Field(gt=0)] = 5
    """Without a sample for so long nothing shrinks and nothing is evicted for traffic."""

    rise_quantile: Annotated[float, Field(gt=0, le=1)] = 0.99
    """How much of the rises of the last day the kept headroom covers; what is above waits for a reclaim."""

    lend_after_s: Seconds = 2
    retarget_after_s: Annotated[float, Field(gt=0)] = 8
    max_parallel: Annotated[int, Field(ge=1)] = 64


class Config(Section):
    """The whole file."""

    state_dir: Path = Path("~/.local/state/slackwater")
    """Status, events and the children's logs; one supervisor at a time."""

    metrics_port: Port | None = None
    """Prometheus metrics of the supervisor on 127.0.0.1; none by default."""

    slots: Slots = Slots()
    inference: Inference | None = None
    cleaning: tuple[Cleaning, ...] = ()
    policy: Policy = Policy()

    @model_validator(mode="after")
    def something_to_run(self) -> "Config":
        if self.inference is None and not self.cleaning:
            raise ValueError("there is nothing to run: give `inference`, `cleaning` or both")
        names = [job.name for job in self.cleaning] + ([self.inference.name] if self.inference else [])
        if double := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"cleaning: the name {min(double)!r} is used twice")
        return self


def load(path: Path) -> Config:
    """Read and check a file; relative paths in it are taken from its folder.

    Raises PermanentError with one line that names the file and the key.
    """
    return anchored(read(path, Config, "manifests/samples/workstation.yaml"), path.resolve().parent)


def anchored(config: Config, folder: Path) -> Config:
    """The same configuration with absolute paths."""

    def place(path: Path) -> Path:
        return folder / path.expanduser()

    changes: dict[str, Any] = {
        "state_dir": place(config.state_dir),
        "cleaning": tuple(
            job.model_copy(update={"input": place(job.input), "output": place(job.output)}) for job in config.cleaning
        ),
    }
    if inference := config.inference:
        placed: dict[str, Any] = {}
        if inference.keys_file:
            placed["keys_file"] = place(inference.keys_file)
        if inference.model != EMBEDDED_VOICE:
            placed["model"] = str(place(Path(inference.model)))
        if inference.store and "://" not in inference.store:
            placed["store"] = str(place(Path(inference.store)))
        changes["inference"] = inference.model_copy(update=placed)
    return config.model_copy(update=changes)
