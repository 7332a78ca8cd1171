"""Reads what `scontrol show` prints: the configuration, one-line records, the words of node states.

Pure: text in, values out.  Called by the adapters and by `check`, which may get the same texts as files.
"""

import re
from collections.abc import Iterable, Mapping

from slackwater_slurm.client.command import whole_lines
from slackwater_slurm.client.gres import NOTHING, hosts, moment_s, span_s
from slackwater_slurm.core import SCHEDULABLE, NodeState, Partition, Reservation, UnknownShape

_SUFFIXES = "*~#!%$@^-+"
_WORDS = {
    "idle": NodeState.IDLE,
    "planned": NodeState.IDLE,  # idle, and backfill has a later job in mind for it
    "mixed": NodeState.MIXED,
    "allocated": NodeState.ALLOCATED,
    "completing": NodeState.COMPLETING,
    "reserved": NodeState.RESERVED,
    "maint": NodeState.MAINT,
    "draining": NodeState.DRAINING,
    "drained": NodeState.DRAINED,
    "down": NodeState.DOWN,
}
# Flags beside a base state of a node that is powered down, going or coming, or about to reboot.
_OUT = {
    "POWERED_DOWN",
    "POWERING_DOWN",
    "POWER_DOWN",
    "POWERING_UP",
    "POWER_UP",
    "REBOOT_ISSUED",
    "REBOOT_REQUESTED",
    "BLOCKED",
}


def config(output: str) -> Mapping[str, str]:
    """`scontrol show config` as key to value; `(null)` becomes ""."""
    found: dict[str, str] = {}
    for line in whole_lines("scontrol show config", output):
        key, is_setting, value = line.partition("=")
        if is_setting and re.fullmatch(r"[\w\[\]]+", key.strip()):
            found.setdefault(key.strip(), "" if value.strip() in ("(null)", "(null type)") else value.strip())
    if "SLURM_VERSION" not in found:
        raise UnknownShape(
            "scontrol show config: no line SLURM_VERSION; was it cut, or is this another command's output?"
        )
    return found


def records(output: str, first: str) -> tuple[Mapping[str, str], ...]:
    """One-line records (`-o`) as key to value; each must begin with the key `first`.

    A key is a word before `=` that follows a blank, so `TRES=cpu=1,mem=2` is one.  The first of equal keys
    counts: free text (a reason, a comment) comes last and may look like one.
    """
    found = []
    for line in whole_lines("scontrol show", output):
        if not line.strip() or line.startswith("No "):  # "No reservations in the system"
            continue
        if not line.startswith(f"{first}="):
            raise UnknownShape(f"scontrol show: a record beginning with {first}= was expected, got {line[:80]!r}")
        keys = list(re.finditer(r"(?:^|(?<=\s))([A-Za-z][\w:/]*)=", line))
        record: dict[str, str] = {}
        for key, after in zip(keys, [*keys[1:], None], strict=True):
            value = line[key.end() : after.start() if after is not None else None].strip()
            record.setdefault(key[1], "" if value == "(null)" else value)
        found.append(record)
    return tuple(found)


def partitions(output: str) -> tuple[Partition, ...]:
    """`scontrol show partition -o`."""
    found = []
    for record in records(output, "PartitionName"):
        with_keys(record, "PartitionName", "State", "PriorityTier", "PreemptMode")
        found.append(
            Partition(
                name=record["PartitionName"],
                state=record["State"],
                nodes=hosts(record.get("Nodes", "")),
                priority_tier=int(record["PriorityTier"]),
                preempt_mode=record["PreemptMode"],
                grace_time_s=int(record.get("GraceTime", "0")),
                over_subscribe=record.get("OverSubscribe", "NO"),
                max_time_s=span_s(record.get("MaxTime", "UNLIMITED")),
                is_default=record.get("Default") == "YES",
            )
        )
    return tuple(sorted(found, key=lambda partition: partition.name))


def reservations(output: str) -> tuple[Reservation, ...]:
    """`scontrol show reservation -o`."""
    found = []
    for record in records(output, "ReservationName"):
        with_keys(record, "StartTime", "EndTime", "State")
        found.append(
            Reservation(
                name=record["ReservationName"],
                nodes=hosts(record.get("Nodes", "")),
                start_s=moment_s(record["StartTime"]) or 0.0,
                end_s=moment_s(record["EndTime"]) or float("inf"),
                flags=frozenset(flag for flag in record.get("Flags", "").split(",") if flag not in NOTHING),
                is_active=record["State"] == "ACTIVE",
                users=record.get("Users", ""),
                accounts=record.get("Accounts", ""),
                partition=record.get("PartitionName", ""),
            )
        )
    return tuple(sorted(found, key=lambda reservation: reservation.name))


def with_keys(record: Mapping[str, str], *keys: str) -> None:
    """Raises UnknownShape when the record lacks one of these."""
    if missing := [key for key in keys if key not in record]:
        what = next(iter(record.items()), ("", ""))
        raise UnknownShape(f"the record {what[0]}={what[1]} has no {', '.join(missing)}; is this Slurm 22.05 to 25.11?")


def node_state(text: str) -> tuple[NodeState, bool]:
    """(state, responding) of `sinfo`'s long word, such as `mixed-` or `down*`."""
    word = text.rstrip(_SUFFIXES).lower()
    signs = set(text[len(word) :])
    state = _WORDS.get(word, NodeState.OTHER)
    if state in SCHEDULABLE:
        if "$" in signs:  # in a maintenance reservation
            state = NodeState.MAINT
        elif signs & set("~#!%@^"):  # powered down, going or coming, or about to reboot
            state = NodeState.OTHER
    return state, "*" not in signs


def node_state_of_flags(base: str, flags: Iterable[str]) -> tuple[NodeState, bool]:
    """(state, responding) of a base state and its flags, as JSON gives them.

    In the order in which `sinfo` picks its one word (slurm_protocol_defs.c, node_state_string).
    """
    base, given = base.upper(), {flag.upper() for flag in flags}
    return _of_flags(base, given), not given & {"NOT_RESPONDING", "NO_RESPOND"}


def _of_flags(base: str, given: set[str]) -> NodeState:
    is_busy = base in ("ALLOCATED", "MIXED")
    is_maint = bool(given & {"MAINTENANCE", "MAINT"})
    if "INVALID_REG" in given:
        return NodeState.OTHER
    if is_maint and not is_busy and base != "DOWN" and "DRAIN" not in given:
        return NodeState.MAINT
    if given & {"REBOOT_REQUESTED", "REBOOT_ISSUED"} and not is_busy:
        return NodeState.OTHER
    if "DRAIN" in given:
        return NodeState.DRAINING if is_busy or "COMPLETING" in given else NodeState.DRAINED
    if "FAIL" in given:
        return NodeState.OTHER
    if base == "DOWN":
        return NodeState.DOWN
    if is_maint:
        return NodeState.MAINT
    if given & _OUT:
        return NodeState.OTHER
    if "COMPLETING" in given:
        return NodeState.COMPLETING
    if base == "IDLE" and "RESERVED" in given:
        return NodeState.RESERVED
    return _WORDS.get(base.lower(), NodeState.OTHER)
