"""What a person may set about one cleaning job, and the fingerprint that stands for it.

Owns the settings' names, units, defaults and checks.  Parsed once, in the command line, then passed.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from slackwater_workers.core import PermanentError


class JobConfig(BaseModel):
    """Settings of one cleaning job.  Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    sample_rate_hz: int = Field(24_000, ge=8_000, le=192_000)
    """Rate of the cleaned audio.  24 kHz keeps what a speech codec of today uses."""
    loudness_lufs: float = Field(-23.0, ge=-60.0, le=-5.0)
    """Integrated loudness aimed at (BS.1770).  -23 LUFS is the broadcast value (EBU R 128)."""
    peak_dbfs: float = Field(-1.0, ge=-20.0, le=0.0)
    """No sample goes above this; it wins over the loudness, since clipping cannot be undone."""
    max_gain_db: float = Field(30.0, ge=0.0, le=80.0)
    """Most that a quiet recording is raised, so that a noise floor is not made into speech."""
    vad_threshold: float = Field(0.4, gt=0.0, lt=1.0)
    """Speech probability above which a frame counts as speech; the model's own default."""
    min_silence_s: float = Field(0.2, ge=0.01, le=5.0)
    """A pause must be this long to end a segment."""
    min_segment_s: float = Field(0.2, ge=0.0, le=10.0)
    """Shorter speech segments are dropped: clicks, breaths."""
    max_segment_s: float = Field(30.0, ge=1.0, le=3600.0)
    """Longer segments are cut into equal parts; 30 s is what speech models read at once."""
    window_s: float = Field(30.0, ge=1.0, le=120.0)
    """Audio worked on between two looks at the stop flag; bounds memory and the time to leave."""
    shard_items: int = Field(50, ge=1, le=10_000)
    """Items under one lease: few enough that claims stay cheap and many workers find one."""
    ttl_s: float = Field(10.0, ge=0.5, le=3600.0)
    """A lease whose owner's heartbeat is older than this may be taken over."""
    stall_s: float = Field(300.0, ge=1.0)
    """A worker that works on one window for longer ends itself, so that its lease can expire."""
    max_deaths: int = Field(3, ge=1, le=100)
    """After so many workers died on one item, the item is tried once more in a process of its own."""

    @model_validator(mode="after")
    def _segments_make_sense(self) -> "JobConfig":
        if self.min_segment_s >= self.max_segment_s:
            raise ValueError(f"min_segment_s ({self.min_segment_s}) must be below max_segment_s ({self.max_segment_s})")
        return self


# These say how a job is run; two workers may differ in them and still make the same bytes.
_RUN_ONLY = frozenset({"ttl_s", "stall_s", "max_deaths"})


def load_config(file: Path | None, assignments: list[str]) -> JobConfig:
    """Settings from a YAML file, then `key=value` assignments over it.

    Raises PermanentError with one line that names the key, the value and what was wanted.
    """
    values: dict[str, Any] = {}
    if file is not None:
        try:
            loaded = yaml.safe_load(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise PermanentError(f"cannot read the settings file {file}: {error}") from error
        except yaml.YAMLError as error:
            raise PermanentError(f"{file} is not YAML: {' '.join(str(error).split())}") from error
        if loaded is not None and not isinstance(loaded, dict):
            raise PermanentError(f"{file} must hold `key: value` lines, got a {type(loaded).__name__}")
        values.update(loaded or {})
    for assignment in assignments:
        key, sign, text = assignment.partition("=")
        if not sign or not key:
            raise PermanentError(f"--set wants key=value, got {assignment!r}")
        try:
            values[key.strip()] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise PermanentError(f"--set {key}: {' '.join(str(error).split())}") from error
    try:
        return JobConfig.model_validate(values)
    except ValidationError as error:
        raise PermanentError("; ".join(_sentence(fault) for fault in error.errors())) from error


def _sentence(fault: Any) -> str:
    key = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "extra_forbidden":
        return f"unknown setting {key!r}; known are {', '.join(JobConfig.model_fields)}"
    return f"setting {key!r}: {fault['msg']}, got {fault['input']!r}" if key else str(fault["msg"])


def identity(config: JobConfig, versions: Mapping[str, str]) -> dict[str, Any]:
    """All that decides the bytes a job makes: settings, step versions and model hashes."""
    settings = {key: value for key, value in config.model_dump().items() if key not in _RUN_ONLY}
    return {"settings": settings, "steps": dict(versions)}


def fingerprint(job_identity: Mapping[str, Any]) -> str:
    """Digest of an `identity`: equal exactly when two workers would make the same bytes."""
    return hashlib.sha256(json.dumps(job_identity, sort_keys=True).encode()).hexdigest()[:32]


def work_key(item_id: str, job_fingerprint: str) -> str:
    """Name of one item under one job's settings; a changed model or setting gives another key."""
    return hashlib.sha256(f"{item_id}/{job_fingerprint}".encode()).hexdigest()[:32]
