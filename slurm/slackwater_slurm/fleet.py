"""How many cleaning workers there should be: an observation and wishes in, actions out.

Owns the sizing of our arrays and nothing else: Slurm itself preempts, requeues and refills, so that
training never waits for us and nothing breaks when we are not there.  Pure and without a memory: what it
must know (arrays, throttles, restarts) is read back from Slurm, so a restarted controller goes on where
the last one stopped.  Called by `cluster`.

    room of a lane   = workers that hold GPUs + max(idle GPUs of its share, displaced workers)
    throttle         = that, between one and the job's bounds; raised at once, lowered past a dead band
    a new array      when fewer tasks are left than the throttle allows

Displaced workers keep their room: when training leaves, Slurm puts them back without being told.
A lane is one (job, GPU type); type "" asks for any.  Slurm reads a throttle of 0 as "no limit", so the
least is 1, which starts nothing while no GPU is idle.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slackwater_slurm.observation import Array, Observation, Task

DEAD_BAND = 8  # a throttle is lowered when it is more than an eighth, at least one, too high


@dataclass(frozen=True, slots=True)
class Wish:
    """What a cleaning job wants of the cluster.

    gpu_types: one array each; () = one array that takes any GPU.   is_open: has work that nobody did yet.
    """

    job: str
    min_workers: int = 1
    max_workers: int = 1000
    gpu_types: tuple[str, ...] = ()
    array_tasks: int = 1000
    is_open: bool = True

    @property
    def lanes(self) -> tuple[str, ...]:
        return self.gpu_types or ("",)

    def __post_init__(self) -> None:
        least = max(1, len(self.gpu_types))
        if self.max_workers < least or not 0 <= self.min_workers <= self.max_workers or self.array_tasks < 1:
            raise ValueError(
                f"job {self.job}: 0 <= min_workers <= max_workers, max_workers >= {least} (one for each GPU type)"
                f" and array_tasks >= 1 are wanted, got {self.min_workers}, {self.max_workers}, {self.array_tasks}"
            )


@dataclass(frozen=True, slots=True)
class SetThrottle:
    """Let at most `max_running` tasks of one of our arrays run."""

    array_id: int
    max_running: int


@dataclass(frozen=True, slots=True)
class Hold:
    """Start nothing more of one of our arrays; what runs goes on."""

    array_id: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """End one of our arrays of which nothing runs."""

    array_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class Requeue:
    """Send running tasks of ours back to the queue: SIGTERM, durable, gone."""

    refs: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Release:
    """Let tasks of ours start again that Slurm holds, since a node refused to launch them."""

    refs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Resume:
    """Let a node take jobs again that Slurm drained for no fault of its own."""

    node: str


@dataclass(frozen=True, slots=True)
class Submit:
    """A new array for a lane."""

    job: str
    gpu_type: str
    num_tasks: int
    max_running: int


Action = SetThrottle | Hold | Cancel | Requeue | Release | Resume | Submit


def plan(seen: Observation, wishes: Sequence[Wish]) -> tuple[Action, ...]:
    """What to do now, in this order.  Equal observations give equal actions; none when all is as wished."""
    shares = _share(seen, wishes)
    actions: list[Action] = [Resume(node) for node in seen.misjudged]
    for wish in wishes:
        arrays = [array for array in seen.arrays if array.job == wish.job]
        unwanted = [array for array in arrays if not wish.is_open or array.gpu_type not in wish.lanes]
        actions += _close(unwanted)
        targets: dict[str, int] = {}
        if wish.is_open:
            wanted = [array for array in arrays if array not in unwanted]
            actions += [Release(array.stuck) for array in wanted if array.stuck]
            targets = _targets(wish, wanted, shares[wish.job], held_elsewhere=sum(a.held_workers for a in unwanted))
            actions += _size(wish, wanted, targets)
        actions += _leave(arrays, seen, wish, targets)
    return tuple(actions)


def _close(arrays: Sequence[Array]) -> list[Action]:
    """Let what runs finish, then remove the rest."""
    actions: list[Action] = []
    for array in arrays:
        if array.held_workers == 0:
            actions.append(Cancel(array.array_id, "no longer wanted"))
        elif array.displaced + array.waiting > array.paused:
            actions.append(Hold(array.array_id))
    return actions


def _size(wish: Wish, arrays: Sequence[Array], targets: Mapping[str, int]) -> list[Action]:
    actions: list[Action] = []
    submits: list[Action] = []
    for gpu_type in wish.lanes:
        lane = [array for array in arrays if array.gpu_type == gpu_type]
        kept, surplus = _without_surplus(lane, wish)
        actions += [Cancel(array.array_id, "an older array suffices") for array in surplus]
        left = targets[gpu_type]
        for position, array in enumerate(kept):
            is_newest = position == len(kept) - 1
            part = max(1, left if is_newest else min(left, array.live))
            left -= min(part, array.live)
            if _must_set(array, part, wish.max_workers):
                actions.append(SetThrottle(array.array_id, part))
        if left > 0:  # more may run than there are tasks
            submits.append(Submit(wish.job, gpu_type, wish.array_tasks, left))
    return actions + submits


def _targets(wish: Wish, arrays: Sequence[Array], share: dict[str, int], held_elsewhere: int) -> dict[str, int]:
    """Workers that each lane may have running, at least one; together no more than the job's maximum.

    Over the maximum, what is only wished gives way before what runs.
    """
    held = dict.fromkeys(wish.lanes, 0)
    displaced = dict.fromkeys(wish.lanes, 0)
    for array in arrays:
        held[array.gpu_type] += array.held_workers
        displaced[array.gpu_type] += array.displaced
    room = max(0, wish.max_workers - held_elsewhere - sum(held.values()))
    left = wish.max_workers
    targets = {}
    for position, gpu_type in enumerate(wish.lanes):
        grow = min(room, max(share[gpu_type], displaced[gpu_type]))
        room -= grow
        later_lanes = len(wish.lanes) - position - 1
        targets[gpu_type] = max(1, min(held[gpu_type] + grow, left - later_lanes))
        left -= targets[gpu_type]
    missing = wish.min_workers - sum(targets.values())
    targets[wish.lanes[0]] += max(0, missing)
    return targets


def _without_surplus(lane: Sequence[Array], wish: Wish) -> tuple[list[Array], list[Array]]:
    """Arrays to keep, and younger ones that wait for nothing: the older have tasks enough for any target.

    A lane gets a second array when a controller was killed while it submitted, or when the first is used up.
    """
    kept: list[Array] = []
    surplus: list[Array] = []
    for array in lane:
        enough = sum(older.live for older in kept) >= wish.max_workers
        (surplus if enough and array.held_workers == 0 else kept).append(array)
    return kept, surplus


def _must_set(array: Array, part: int, max_workers: int) -> bool:
    """Is the throttle wrong, and does it matter?  One above the tasks that are left limits nothing.

    Slurm tells the throttle with the tasks that never ran.  Without any it is not known and need not be: they all
    ran below it.
    """
    if array.throttle is None or array.displaced + array.waiting == 0:
        return False
    acts_as = min(array.throttle or array.live, array.live)
    wanted = min(part, array.live)
    too_high = acts_as - wanted
    # What holds more than its part is sent back, and would be started again at once.
    must_fall = too_high > 0 and (acts_as > max_workers or array.held_workers > part)
    return acts_as < wanted or too_high > max(1, part // DEAD_BAND) or must_fall


def _leave(arrays: Sequence[Array], seen: Observation, wish: Wish, targets: Mapping[str, int]) -> list[Action]:
    """Leave drained and reserved nodes, and give back what is above a maximum that was lowered."""
    tasks = [task for array in arrays for task in array.tasks]
    reasons = dict(seen.yielding)
    leaving: dict[str, list[Task]] = {}
    for task in tasks:
        if task.node in reasons:
            leaving.setdefault(reasons[task.node], []).append(task)
    gone = {task.ref for group in leaving.values() for task in group}
    staying = sorted((task for task in tasks if task.ref not in gone), key=lambda t: (t.start_s, t.array_id, t.task_id))
    if above := _above(staying, arrays, targets, len(staying) - wish.max_workers):
        leaving["maximum"] = above
    actions: list[Action] = []
    for reason, group in sorted(leaving.items()):
        if refs := tuple(task.ref for task in group if task.is_running):
            actions.append(Requeue(refs, reason))
    return actions


def _above(staying: Sequence[Task], arrays: Sequence[Array], targets: Mapping[str, int], count: int) -> list[Task]:
    """So many of the newest, which lose least; of a lane only what is above its target, as more would start again."""
    lanes = {array.array_id: array.gpu_type for array in arrays}
    over = Counter(lanes[task.array_id] for task in staying)
    over.subtract(targets)
    found: list[Task] = []
    for task in reversed(staying):
        if len(found) < count and over[lanes[task.array_id]] > 0:
            over[lanes[task.array_id]] -= 1
            found.append(task)
    return found[::-1]


def _share(seen: Observation, wishes: Sequence[Wish]) -> dict[str, dict[str, int]]:
    """Idle GPUs handed out one by one, each to the open job with the fewest workers: job -> lane -> GPUs.

    Types that a job names come before a lane that takes any, in the job's order.
    """
    idle = dict(seen.idle.by_type)
    shares = {wish.job: dict.fromkeys(wish.lanes, 0) for wish in wishes}
    workers = {wish.job: sum(a.held_workers for a in seen.arrays if a.job == wish.job) for wish in wishes}
    hungry = [wish for wish in wishes if wish.is_open]
    while hungry:
        wish = min(hungry, key=lambda one: workers[one.job])
        lane = _lane_with_idle(wish, idle)
        if lane is None or workers[wish.job] >= wish.max_workers:
            hungry.remove(wish)
            continue
        gpu_type = lane or max(idle, key=lambda kind: idle[kind])
        idle[gpu_type] -= 1
        shares[wish.job][lane] += 1
        workers[wish.job] += 1
    return shares


def _lane_with_idle(wish: Wish, idle: dict[str, int]) -> str | None:
    for lane in wish.lanes:
        if idle.get(lane, 0) > 0 if lane else any(count > 0 for count in idle.values()):
            return lane
    return None
