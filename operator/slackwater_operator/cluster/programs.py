"""The command lines of the children: the only place that knows the other rooms' options."""

import sys
from dataclasses import dataclass

from slackwater_operator.config import Cleaning, Inference

GATEWAY_GRACE_S = 2.0  # it is stopped after the engines, so nothing runs through it any more

SLACKWATER = [sys.executable, "-m", "slackwater_operator"]


@dataclass(frozen=True, slots=True)
class Programs:
    """Builds the argument vectors; `executable` is replaced in tests."""

    inference: Inference | None
    executable: tuple[str, ...] = tuple(SLACKWATER)

    def gateway(self) -> list[str]:
        """The one address that clients use."""
        settings = self._inference()
        return [
            *self.executable,
            "gateway",
            "--supervised",
            f"--host={settings.host}",
            f"--port={settings.port}",
            f"--max-queued={settings.max_queued}",
            f"--queue-timeout={settings.queue_timeout_s}",
            f"--grace={GATEWAY_GRACE_S}",
        ]

    def engine(self, *, standby: bool) -> list[str]:
        """One replica on a port that it chooses itself.

        Its own queue is one round of its slots: the gateway sends no more than it has slots, but
        counts a slot free a moment before the engine does.
        """
        settings = self._inference()
        return [
            *self.executable,
            "engine",
            "serve",
            "--supervised",
            "--port=0",
            f"--slots={settings.slots_per_replica}",
            f"--max-queued={settings.slots_per_replica}",
            f"--pace={settings.pace_frames_per_s}",
            f"--model={settings.model}",
            *([f"--store={settings.store}"] if settings.store else []),
            *([f"--database={settings.database}"] if settings.database else []),
            *([] if settings.is_local else ["--require-key"]),
            *([f"--key-file={settings.keys_file}"] if settings.keys_file else []),
            *(["--standby"] if standby else []),
        ]

    def worker(self, job: Cleaning, uid: str) -> list[str]:
        """One worker of a job."""
        return [
            *self.executable,
            "clean",
            "run",
            str(job.input),
            f"--output={job.output}",
            f"--job={job.name}",
            "--supervised",
            f"--worker={uid}",
            f"--ttl={job.lease_ttl_s}",
            *(f"--set={key}={value}" for key, value in job.settings.items()),
        ]

    def _inference(self) -> Inference:
        assert self.inference is not None
        return self.inference
