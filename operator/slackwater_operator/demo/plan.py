"""What the demo runs: the slice of the trace, the cleaning jobs, the configuration it gives to `slackwater up`."""

import socket
from dataclasses import dataclass
from pathlib import Path

import yaml

from slackwater_operator.config import Config

# Three minutes of the trace: calm, a rise to eight streams at once, a lull, and more rises.
SLICE_START_S = 1670.0
SLICE_LENGTH_S = 195.0
SLICE_SPEED = 3.0
SLICE_KEEP_EVERY = 16  # two cores cannot serve what GPUs served

FETCHED = Path("~/.cache/slackwater/recordings")  # where `make demo` puts what it fetches

SLOTS = 4
STANDBY = SLOTS - 1  # so that every replica wakes and none starts cold
DECODE_SLOTS = 3
SAMPLE_TEXT = "Slack water is the still moment between two tides."  # spoken last, for a listener
PACE_FRAMES_PER_S = 43.0  # twice playback: a stream is a fixed share of a CPU, whatever the CPU


@dataclass(frozen=True, slots=True)
class Work:
    """Where a run keeps its things."""

    folder: Path
    recordings: Path
    port: int

    @property
    def config_file(self) -> Path:
        return self.folder / "demo.yaml"

    @property
    def state_dir(self) -> Path:
        return self.folder / "state"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ledger(self, job: str) -> Path:
        return self.folder / "ledgers" / job


def configuration(work: Work, *, filling: bool) -> dict[str, object]:
    """The YAML document of the run; without filling there is no cleaning job."""
    # Three data sets of the same recordings, so that a fast machine does not run out of work.
    jobs = (("speech-16k", 16000), ("speech-24k", 24000), ("speech-48k", 48000)) if filling else ()
    document: dict[str, object] = {
        "state_dir": str(work.state_dir),
        "slots": {"kind": "cpu", "count": SLOTS},
        "inference": {
            "port": work.port,
            "min_replicas": 1,
            "max_replicas": SLOTS,
            "slots_per_replica": DECODE_SLOTS,
            "standby_replicas": STANDBY,
            "pace_frames_per_s": PACE_FRAMES_PER_S,
            "deadband_replicas": 0,
            "max_queued": 64,
            "drain_grace_s": 30,
        },
        "cleaning": [
            {
                "name": name,
                "input": str(work.recordings),
                "output": str(work.ledger(name)),
                "lease_ttl_s": 6,
                "settings": {"sample_rate_hz": rate_hz},
            }
            for name, rate_hz in jobs
        ],
        # Four replicas are few: headroom for a rare rise would be a quarter of the machine, and waking takes a second.
        "policy": {
            "tick_s": 0.25,
            "panic_s": 2,
            "stable_s": 2,
            "down_s": 3,
            "rise_quantile": 0.5,
            "lend_after_s": 0.25,
        },
    }
    Config.model_validate(document)
    return document


def write_configuration(work: Work, *, filling: bool) -> None:
    """Write the YAML file that `slackwater up` reads."""
    work.folder.mkdir(parents=True, exist_ok=True)
    work.config_file.write_text(yaml.safe_dump(configuration(work, filling=filling), sort_keys=False))


def free_port() -> int:
    """A loopback port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
