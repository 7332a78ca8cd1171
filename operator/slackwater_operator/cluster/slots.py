"""What one machine can lend: its GPUs as NVML shows them, or a stated number of CPU slots."""

import contextlib
import os
import re
from dataclasses import dataclass

from slackwater_operator.config import Slots
from slackwater_operator.core import PermanentError


@dataclass(frozen=True, slots=True)
class Slot:
    """One holder at a time.  environment: what ties a child process to this accelerator."""

    index: int
    flavor: str
    environment: tuple[tuple[str, str], ...] = ()


def find_slots(settings: Slots) -> tuple[Slot, ...]:
    """The machine's slots.  Raises PermanentError when there are none, saying what to set."""
    if settings.kind != "cpu":
        gpus = nvml_slots()
        if gpus:
            return gpus
        if settings.kind == "gpu":
            raise PermanentError("slots.kind is gpu, but NVML shows no NVIDIA GPU on this machine")
    if settings.count is None:
        raise PermanentError(
            f"slots.count must be given on a machine without GPUs; this one has {os.cpu_count()} CPUs, 2 to 4 suit most"
        )
    return tuple(Slot(index, "cpu") for index in range(settings.count))


def nvml_slots() -> tuple[Slot, ...]:
    """One slot a GPU; empty without the NVIDIA driver.  MIG devices are not split."""
    import pynvml  # loads the driver's library, which most machines lack

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        slots = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            name = pynvml.nvmlDeviceGetName(handle)
            flavor = re.sub(r"[^a-z0-9]+", "-", str(name).lower()).strip("-")
            slots.append(Slot(index, flavor, (("CUDA_VISIBLE_DEVICES", str(pynvml.nvmlDeviceGetUUID(handle))),)))
        return tuple(slots)
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()
