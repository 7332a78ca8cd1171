"""Training takes GPUs from cleaning on a real Slurm, is never beside it on one, and nothing is lost or doubled."""

import getpass
import sys
import time
from pathlib import Path

import pytest

from slackwater_slurm.client.command import Commands
from slackwater_slurm.client.text import TextClient
from slackwater_slurm.cluster import SlurmCluster
from slackwater_slurm.config import CleaningJob
from slackwater_slurm.fleet import Action, Release, Resume
from slackwater_slurm.lab import Lab
from slackwater_slurm.observation import mark
from slackwater_slurm.rounds import Stage
from slackwater_slurm.templates.scripts import worker_command
from slackwater_workers.ledger.store import PosixStore
from slackwater_workers.ledger.verify import verify
from slackwater_workers.testing import make_input

pytestmark = [pytest.mark.slurm, pytest.mark.e2e]

COPY = ("--cleaner", "slackwater_workers.testing:CopyCleaner", "--set", "shard_items=8", "--ttl", "2")
BACK_S = 40.0  # about 6 s on a quiet machine


@pytest.fixture
def stage(lab: Lab, tmp_path: Path) -> Stage:
    return Stage(lab, tmp_path / "stage")


def assert_alone_on_its_gpus(stage: Stage, job: int) -> None:
    """Training began after each worker had left the GPUs that it got, and no GPU was ever shared."""
    start = stage.of("train", "start", job)[0]
    left = [event for event in stage.of("clean", "end") if event.node == start.node and event.at_s <= start.at_s]
    assert frozenset().union(*(event.gpus for event in left)) >= start.gpus
    assert [event for event in stage.events() if event.what == "shared"] == []


def test_training_takes_just_the_gpus_it_asked_for_and_cleaning_comes_back_to_them(stage: Stage) -> None:
    stage.start_cleaning(stage.stand_in(leave_s=1.0))

    whole_node = stage.submit_training("h200", 4)
    one_gpu = stage.submit_training("rtx5090", 1)
    starts = [stage.wait_for("train", "start", job, 20.0) for job in (whole_node, one_gpu)]
    asked = stage.of("clean", "term")
    stage.wait(lambda: len(stage.of("clean", "start")) == 12 + 5, BACK_S, "cleaning did not come back")

    assert [len(start.gpus) for start in starts] == [4, 1]
    for start in starts:
        last_left_s = max(event.at_s for event in stage.of("clean", "end") if event.node == start.node)
        assert start.at_s > last_left_s  # how soon is what the bench measures
    assert sorted(event.node[0] for event in asked) == ["h", "h", "h", "h", "r"]
    assert_alone_on_its_gpus(stage, whole_node)
    assert_alone_on_its_gpus(stage, one_gpu)
    back = [event for event in stage.of("clean", "start") if event.restarts == 1]
    assert sorted(event.task for event in back) == sorted(event.task for event in asked)
    assert len(stage.running_tasks()) == 12


def test_a_gpu_that_is_shared_is_seen(stage: Stage) -> None:
    # A worker that is not exec'd but left behind: what clean.sh warns of.  Shows that the other tests could fail.
    behind = "trap '' TERM; sleep 8 & trap - TERM; wait"
    stage.start_cleaning(("bash", "-c", behind))

    job = stage.submit_training("rtx5090", 1)
    stage.wait_for("train", "start", job, 20.0)

    [shared] = stage.of("train", "shared", job)
    assert len(shared.gpus) == 1


def test_real_workers_lose_and_double_nothing_when_preempted_and_when_killed_on_the_way_out(
    stage: Stage, tmp_path: Path
) -> None:
    recordings = make_input(tmp_path / "in", {f"{n:03d}.wav": f"SLOW 0.2 {n}".encode() for n in range(400)})
    ledger = tmp_path / "ledger"
    program = str(Path(sys.executable).parent / "slackwater")
    array = stage.start_cleaning(worker_command(program, str(recordings), str(ledger), *COPY))
    stage.wait(lambda: any((ledger / "done").glob("s*")), 60.0, "no shard was finished")

    job = stage.submit_training("h200", 4)
    victims = stage.of("clean", "start")
    stage.lab.run("scancel", "--signal=KILL", "--batch", *[f"{array}_{event.task}" for event in victims[:2]])
    stage.wait_for("train", "end", job, 30.0)
    stage.wait(lambda: not stage.lab.run("squeue", "-h").strip(), 120.0, "cleaning did not finish")

    found = verify(PosixStore(ledger))
    assert (found.items_done, found.items_lost, found.items_doubled, found.items_open) == (400, 0, 0, 0)
    assert [event for event in stage.events() if event.what == "shared"] == []


def test_a_controller_killed_while_workers_leave_loses_neither_training_nor_workers(stage: Stage) -> None:
    stage.start_cleaning(stage.stand_in(leave_s=2.0))
    # Slurm writes its jobs to disk at most every 5 s; what it has not written is gone with it, a submission too.
    stage.wait(lambda: time.time() - stage.lab.saved_s() > 5.5, 30.0, "the controller has not come to rest")
    submitted_s = time.time()
    job = stage.submit_training("rtx5090", 2)
    stage.wait(lambda: stage.lab.saved_s() > submitted_s, 5.0, "training was not written to disk")
    stage.wait(lambda: len(stage.of("clean", "term")) == 2, 20.0, "workers were not asked to leave")

    stage.lab.kill("slurmctld")
    still_leaving = stage.of("clean", "end")
    stage.lab.start_controller()
    stage.wait_for("train", "end", job, 40.0)
    stage.wait_refilled(BACK_S)

    assert still_leaving == []
    assert_alone_on_its_gpus(stage, job)
    # Until the nodes have answered the new controller may ask further workers to leave; they come back as well.
    asked = [event.task for event in stage.of("clean", "term")]
    back = [event.task for event in stage.of("clean", "start") if event.restarts]
    assert len(asked) >= 2
    assert sorted(back) == sorted(asked)


def test_a_node_daemon_killed_while_workers_leave_loses_neither_training_nor_workers(stage: Stage) -> None:
    array = stage.start_cleaning(stage.stand_in(leave_s=1.0))
    stage.lab.run("scontrol", "update", f"JobId={array}", f"Comment={mark('pod', '')}")
    controller = controller_of(stage.lab)
    job = stage.submit_training("rtx5090", 2)
    stage.wait(lambda: len(stage.of("clean", "term")) == 2, 20.0, "workers were not asked to leave")
    node = stage.of("clean", "term")[0].node

    stage.lab.kill(node)
    stage.lab.start_node(node)
    stage.wait_for("train", "end", job, 40.0)
    # The new slurmd of 22.05 refuses the very tasks whose end its predecessor was watching; Slurm then drains the node
    # ("Duplicate jobid") and holds the tasks ("launch failed requeued held").
    done: list[Action] = []

    def is_mended() -> bool:
        done.extend(controller.tick(time.time(), {"pod": True}).actions)
        return len(stage.running_tasks()) == stage.lab.settings.num_gpus

    stage.wait(lambda: is_mended() and len(stage.of("clean", "start")) == 12 + 2, BACK_S, "no worker came back")

    assert_alone_on_its_gpus(stage, job)
    assert {type(action) for action in done} in ({Resume, Release}, set())  # newer releases of Slurm need no mending


def controller_of(lab: Lab) -> SlurmCluster:
    """A controller of the stage's array that wants as many workers as there are GPUs."""
    most = lab.settings.num_gpus
    job = CleaningJob(name="pod", input=lab.folder, output=lab.folder, min_workers=most, max_workers=most)
    client = TextClient(Commands(lab.environment()))
    cluster = SlurmCluster(client, user=getpass.getuser(), partition="cleaning", jobs=[job], maintenance_lead_s=60)
    cluster.connect()
    return cluster
