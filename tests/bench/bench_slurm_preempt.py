"""Training over a cluster full of cleaning, on a real Slurm of this machine: our settings against Slurm's own.

`make bench NAME=slurm_preempt` needs root and Slurm's packages (`make slurm-up` brings them) and takes half an hour.
Delays are measured with stand-ins that leave 0.1 s after SIGTERM; losses with the real `slackwater clean run` over one
ledger, whose items only take time.
SLURM_PREEMPT_ROUNDS=3 plays fewer rounds, for a try.
"""

import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from run import Row

from slackwater_slurm.lab import Lab
from slackwater_slurm.lab_config import LabSettings
from slackwater_slurm.rounds import Round, Stage, play_round
from slackwater_slurm.templates.scripts import worker_command
from slackwater_workers.core import VerifyReport
from slackwater_workers.ledger.store import PosixStore
from slackwater_workers.ledger.verify import verify
from slackwater_workers.testing import make_input

ROUNDS = int(os.environ.get("SLURM_PREEMPT_ROUNDS", "50"))
# Slurm's defaults make a worker wait 2 minutes, so a round takes that long.  Nearly all of it is waiting, so the rounds
# of stand-ins are played in several labs side by side; real workers need the CPU and get a few rounds.
PEER_LABS = min(ROUNDS, 10)
REAL_PEER_ROUNDS = min(ROUNDS, 3)
ITEM_S = 2.0
LEAVE_S = 0.1
PEER = "Slurm's defaults"


@dataclass(frozen=True, slots=True)
class Played:
    """What one lab's rounds gave.  report: of the ledger, None for stand-ins, which have none."""

    rounds: list[Round]
    version: str
    evictions: int
    shared: int  # GPUs seen in use by two jobs
    report: VerifyReport | None


def play_side_by_side(settings: LabSettings, num_rounds: int, round_s: float) -> Played:
    """The rounds of stand-ins shared out to `PEER_LABS` labs at once."""
    shares = [len(range(lab, num_rounds, PEER_LABS)) for lab in range(PEER_LABS)]
    with ThreadPoolExecutor(PEER_LABS) as pool:
        tasks = [
            pool.submit(play, settings, share, round_s, is_real=False, seed=lab) for lab, share in enumerate(shares)
        ]
        played = [task.result() for task in tasks]
    return Played(
        [one for each in played for one in each.rounds],
        played[0].version,
        sum(each.evictions for each in played),
        sum(each.shared for each in played),
        None,
    )


def play(settings: LabSettings, num_rounds: int, round_s: float, *, is_real: bool, seed: int = 6) -> Played:
    """Rounds of random shape and moment.  round_s: about what one takes; bounds the recordings made."""
    dice = random.Random(seed)
    # A short name: the path of munge's socket has little room.
    with tempfile.TemporaryDirectory(prefix="slurm-") as name, Lab(Path(name) / "lab", settings) as lab:
        folder = Path(name)
        ledger = folder / "ledger"
        stage = Stage(lab, folder / "stage")
        if is_real:
            items = int(settings.num_gpus * num_rounds * round_s * 2 / ITEM_S)
            recordings = make_input(folder / "in", {f"{n}.wav": f"SLOW {ITEM_S} {n}".encode() for n in range(items)})
            program = str(Path(sys.executable).parent / "slackwater")
            cleaner = ("--cleaner", "slackwater_workers.testing:CopyCleaner", "--set", "shard_items=8")
            stage.start_cleaning(worker_command(program, str(recordings), str(ledger), *cleaner))
            stage.wait(lambda: any((ledger / "done").glob("s*")), 300.0, "no shard was finished")  # the input is hashed
        else:
            stage.start_cleaning(stage.stand_in(leave_s=LEAVE_S))
        rounds = []
        for number in range(num_rounds):
            # Somewhere in the scheduler's period of a second, not always at the moment at which the last round ended.
            time.sleep(dice.uniform(0.5, 1.5))
            gpu_type, most = dice.choice([("h200", 4), ("rtx5090", 2)])
            rounds.append(play_round(stage, gpu_type, dice.randint(1, most), back_timeout_s=10 * round_s))
            sys.stderr.write(f"round {number + 1} of {num_rounds}: {rounds[-1]}\n")
        events = stage.events()
        version = lab.run("sinfo", "-V").split()[-1]
        lab.cancel_all()
        return Played(
            rounds,
            version,
            sum(event.what == "start" and event.restarts > 0 for event in events),
            sum(event.what == "shared" for event in events),
            verify(PosixStore(ledger)) if is_real else None,
        )


def measure() -> list[Row]:
    tuned, defaults = LabSettings(), LabSettings(tuned=False)
    timed = [play(tuned, ROUNDS, 12.0, is_real=False), play_side_by_side(defaults, ROUNDS, 135.0)]
    real = [play(tuned, ROUNDS, 12.0, is_real=True), play(defaults, REAL_PEER_ROUNDS, 135.0, is_real=True)]
    reports = [one.report for one in real if one.report is not None]
    about = f"Slurm {timed[0].version}, {ROUNDS} rounds each; the defaults in {PEER_LABS} labs at once"

    def seconds(what: str, played: list[Played], of: str, share: float, note: str) -> Row:
        ours, peer = (percentile([getattr(one, of) for one in each.rounds], share) for each in played)
        return Row(what, ours, "s", PEER, peer, note)

    def counts(what: str, values: Sequence[int], note: str = "") -> Row:
        return Row(what, values[0], "count", PEER, values[1], note)

    leaving = f"sbatch to the job's first line; workers leave {LEAVE_S} s after SIGTERM"
    back = "from the end of training, which lasts 1 s, to the last task's start"
    working = f"the same with real workers, which release a lease first; the defaults {REAL_PEER_ROUNDS} rounds"
    return [
        seconds("train_start_p50_s", timed, "train_start_s", 0.5, f"{leaving}; {about}"),
        seconds("train_start_p99_s", timed, "train_start_s", 0.99, "of so few rounds the slowest"),
        seconds("worker_back_p50_s", timed, "worker_back_s", 0.5, back),
        seconds("real_train_start_p50_s", real, "train_start_s", 0.5, working),
        seconds("real_train_start_p99_s", real, "train_start_s", 0.99, working),
        counts("evictions", [a.evictions + b.evictions for a, b in zip(timed, real, strict=True)]),
        counts(
            "gpus_shared", [a.shared + b.shared for a, b in zip(timed, real, strict=True)], "as the kernel's locks saw"
        ),
        counts("items_lost", [one.items_lost for one in reports], "every byte of the ledger read"),
        counts("items_doubled", [one.items_doubled for one in reports]),
        counts("items_done", [one.items_done for one in reports], "during the rounds; the rest stayed open"),
    ]


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all do not exceed; the median between two for 0.5."""
    if share == 0.5:
        return statistics.median(values)
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
