"""What the ends of pods taught about starting the next one, by owner.

Owns back-off, what is broken and what is finished; an edited object starts with a clean sheet, and one that was made
again under its name is another owner.  Kept in memory: a new leader learns it again from what is there.
"""

from dataclasses import dataclass, field

STEADY_S = 30.0  # a pod that ran for so long clears its owner's back-off
MOST_DELAY_S = 60.0
AVOID_S = 20.0  # a node whose kubelet did not take an owner's pod is tried again after that
SMOOTHING = 0.3  # weight of the newest duration


@dataclass(slots=True)
class Owner:
    """A service or a job.

    k8s_uid: of its object.   lost, unverified: workers whose newest durable record its keeper did not find, or was not
    asked for.   broken: why it is not started again before somebody edits it, in words.   refusal: why the newest start
    was not possible.   avoided: nodes that did not take its pods, until when.
    """

    k8s_uid: str = ""
    generation: int = 0
    failures: int = 0  # in a row
    rests: int = 0  # in a row: its workers found nothing left to do, and no keeper has said so
    not_before_s: float = 0.0
    broken: str = ""
    is_done: bool = False
    is_stopped: bool = False  # its running workers leave too
    refusal: str = ""
    refused: str = ""  # the API server's words on a pod of it that it will never take
    avoided: dict[str, float] = field(default_factory=dict)
    start_s: float | None = None  # creation to running, smoothed
    lost: int = 0
    unverified: int = 0
    gpu_seconds: float = 0.0
    durable_wall_s: float | None = None

    def edited(self, generation: int) -> None:
        """Forget what an older spec did wrong."""
        if generation != self.generation:
            self.generation = generation
            self.failures, self.rests, self.not_before_s, self.broken, self.refusal = 0, 0, 0.0, "", ""
            self.refused = ""
            self.is_done = self.is_stopped = False
            self.avoided.clear()

    def may_start(self, now_s: float) -> bool:
        """Whether a pod may be started now."""
        return not self.broken and not self.is_done and now_s >= self.not_before_s

    def why_not(self, now_s: float) -> str:
        """Why none may be started now, as one clause."""
        if self.broken:
            return f"it is not started again before it is edited: {self.broken}"
        if self.is_done:
            return "it is done"
        left = f"for {max(0.0, self.not_before_s - now_s):.0f} s more"
        if self.rests and not self.failures:
            return f"its workers found nothing left to do and its keeper has not said so yet; it waits {left}"
        said = f": {self.refusal}" if self.refusal else ""
        return f"it is backing off after a failure {left}{said}"

    def failed(self, now_s: float, words: str) -> float:
        """Book a failure; returns the back-off in seconds: 1, 2, 4 … 60."""
        self.failures += 1
        delay_s = _delay_s(self.failures)
        self.not_before_s = now_s + delay_s
        self.refusal = words
        return delay_s

    def found_nothing(self, now_s: float) -> None:
        """Book a worker that ended by itself with nothing left to do, before its keeper has confirmed that.

        The next one looks again after 1, 2, 4 … 60 s; those that ended together count once.
        """
        self.succeeded()
        if now_s >= self.not_before_s:
            self.rests += 1
            self.not_before_s = now_s + _delay_s(self.rests)

    def succeeded(self) -> None:
        """A pod runs, or left as it was asked to."""
        self.failures, self.refusal = 0, ""

    def avoid(self, node: str, now_s: float) -> None:
        """That node's kubelet did not take a pod; others may."""
        self.avoided = {name: until_s for name, until_s in self.avoided.items() if until_s > now_s}
        self.avoided[node] = now_s + AVOID_S

    def avoids(self, node: str, now_s: float) -> bool:
        return self.avoided.get(node, 0.0) > now_s

    def started_in(self, took_s: float) -> None:
        """Learn how long a start takes."""
        self.start_s = smoothed(self.start_s, took_s)


def _delay_s(times: int) -> float:
    return min(MOST_DELAY_S, 2.0 ** min(times - 1, 10))


def smoothed(old: float | None, new: float) -> float:
    """An exponentially weighted mean."""
    return new if old is None else old + SMOOTHING * (new - old)
