"""What a machine can lend: stated CPU slots, or the GPUs that NVML shows."""

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slackwater_operator.cluster.local import LocalCluster
from slackwater_operator.cluster.programs import Programs
from slackwater_operator.cluster.slots import find_slots, nvml_slots
from slackwater_operator.config import Config, Slots
from slackwater_operator.core import Action, PermanentError, Reason, Verb
from slackwater_operator.testing.children import write_control


def test_cpu_slots_are_as_many_as_stated_even_beside_gpus() -> None:
    assert [(slot.index, slot.flavor) for slot in find_slots(Slots(kind="cpu", count=3))] == [
        (0, "cpu"),
        (1, "cpu"),
        (2, "cpu"),
    ]


def test_cpu_slots_must_be_stated() -> None:
    with pytest.raises(PermanentError, match=r"slots\.count must be given"):
        find_slots(Slots(kind="cpu"))


@pytest.mark.skipif(bool(nvml_slots()), reason="this machine has GPUs")
def test_without_gpus_auto_takes_the_stated_cpu_slots_and_gpu_refuses() -> None:
    assert len(find_slots(Slots(count=2))) == 2
    with pytest.raises(PermanentError, match="NVML shows no NVIDIA GPU"):
        find_slots(Slots(kind="gpu", count=2))


@pytest.mark.gpu
def test_every_gpu_is_one_slot_of_its_own_flavor() -> None:
    listed = subprocess.run(
        ["nvidia-smi", "--query-gpu=uuid,name", "--format=csv,noheader"], capture_output=True, text=True, check=True
    )
    uuids, names = zip(*(line.split(", ") for line in listed.stdout.splitlines()), strict=True)

    slots = find_slots(Slots())

    assert [dict(slot.environment)["CUDA_VISIBLE_DEVICES"] for slot in slots] == list(uuids)
    assert [slot.flavor for slot in slots] == [name.lower().replace(" ", "-") for name in names]


@pytest.mark.gpu
async def test_a_child_sees_the_gpu_of_its_slot_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    control = tmp_path / "control.json"
    write_control(control, signals={})
    config = Config.model_validate(
        {
            "state_dir": tmp_path / "state",
            "cleaning": [{"name": "job", "input": tmp_path / "in", "output": tmp_path / "o"}],
        }
    )
    stand_ins = (sys.executable, "-m", "slackwater_operator.testing.children", str(control))
    slots = find_slots(Slots(kind="gpu"))
    cluster = LocalCluster(config, slots, Programs(None, stand_ins))
    try:
        await cluster.start()
        await cluster.apply((Action(Verb.START, "job", len(slots), Reason.IDLE),), time.monotonic())
        while not all(member.receipt for member in cluster.members.values()):
            await asyncio.sleep(0.02)

        seen = {}
        for member in cluster.members.values():
            assert member.child is not None
            entries = Path(f"/proc/{member.child.pid}/environ").read_text().split("\0")
            seen[member.slot] = next(entry for entry in entries if entry.startswith("CUDA_VISIBLE_DEVICES="))
        assert seen == {
            slot.index: f"CUDA_VISIBLE_DEVICES={dict(slot.environment)['CUDA_VISIBLE_DEVICES']}" for slot in slots
        }
    finally:
        cluster.kill()
        await cluster.stop(5)
