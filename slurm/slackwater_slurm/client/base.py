"""What the room needs of a Slurm controller, whichever way it is reached.

Owns the protocol that every adapter satisfies.  Adapters: `text` (default, every release), `documents` (JSON),
`pyslurm`.  All calls block, for at most the adapter's own timeout a command; a caller with an event
loop runs them in a thread.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from slackwater_slurm.core import Job, Node, Partition, Reservation, SlurmVersion, Submission


class SlurmClient(Protocol):
    """Reads a cluster and changes our own jobs.

    Every method raises SlurmUnavailable (try again), OutputCut (try again), SlurmRefused, SlurmMissing
    or UnknownShape; nothing else.  Job references are `12` or `12_3` (`Job.ref`).
    """

    def ping(self) -> None:
        """Return when the controller answers; raises SlurmUnavailable when it does not."""

    def version(self) -> SlurmVersion:
        """The release of the commands or the library that we speak through."""

    def config(self) -> Mapping[str, str]:
        """The running configuration, key to value, as `scontrol show config` prints it."""

    def partitions(self) -> tuple[Partition, ...]:
        """All partitions, by name."""

    def nodes(self) -> tuple[Node, ...]:
        """All nodes, each once, by name."""

    def reservations(self) -> tuple[Reservation, ...]:
        """All reservations, also those still to come, by name."""

    def jobs(self, *, detail: bool = False) -> tuple[Job, ...]:
        """Jobs that wait, run or are completing, by (array id or job id, task id).

        detail: also the GPUs that running jobs hold, exact in type and index; may cost one more command.
        """

    def submit(self, submission: Submission) -> int:
        """Submit; the job id (of an array: the array id)."""

    def set_throttle(self, array_id: int, max_running: int) -> None:
        """Let at most so many tasks of the array run from now on; ends none that runs.

        max_running: 1 or more, else ValueError: Slurm takes 0 for "no limit".  To start none, hold.
        """

    def hold(self, refs: Sequence[str]) -> None:
        """Keep what waits from starting; what runs goes on."""

    def release(self, refs: Sequence[str]) -> None:
        """Undo `hold`."""

    def resume(self, nodes: Sequence[str]) -> None:
        """Let drained nodes take jobs again.  Raises SlurmRefused when the user may not."""

    def requeue(self, refs: Sequence[str]) -> None:
        """Signal what runs (SIGTERM, KillWait, SIGKILL) and put it back in the queue.

        Those that wait or are gone already are passed over.
        """

    def cancel(self, refs: Sequence[str]) -> None:
        """End these for good, waiting or running.  Those that are gone already are passed over."""
