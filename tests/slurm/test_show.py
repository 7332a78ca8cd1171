"""What `scontrol show` prints, and the words of node states."""

import pytest

from slackwater_slurm.client import show
from slackwater_slurm.core import NodeState, OutputCut, SlurmVersion, UnknownShape

PARTITION = (
    "PartitionName=cleaning AllowGroups=ALL Default=NO QoS=N/A GraceTime=0 MaxNodes=UNLIMITED MaxTime=1-00:00:00 "
    "Nodes=h[1-2],r1 PriorityJobFactor=1 PriorityTier=1 OverSubscribe=NO PreemptMode=REQUEUE State=UP "
    "TRES=cpu=48,mem=187.50G,node=3,billing=48\n"
)
RESERVATION = (
    "ReservationName=mt StartTime=1796006964 EndTime=1796010564 Duration=01:00:00 Nodes=h2 NodeCnt=1 CoreCnt=16 "
    "PartitionName=(null) Flags=MAINT,IGNORE_JOBS,SPEC_NODES TRES=cpu=16 Users=root Accounts=(null) State=INACTIVE\n"
)


def test_a_partition_is_read_whole() -> None:
    (found,) = show.partitions(PARTITION)

    assert (found.name, found.priority_tier, found.preempt_mode, found.grace_time_s) == ("cleaning", 1, "REQUEUE", 0)
    assert found.nodes == ("h1", "h2", "r1")
    assert found.max_time_s == 86_400
    assert found.is_up
    assert not found.is_default


def test_a_maintenance_reservation_is_known_by_its_flag() -> None:
    (found,) = show.reservations(RESERVATION)

    assert found.is_maintenance
    assert not found.is_active
    assert (found.nodes, found.start_s, found.end_s) == (("h2",), 1796006964.0, 1796010564.0)
    assert (found.users, found.accounts, found.partition) == ("root", "", "")


def test_no_reservations_is_none_and_not_an_error() -> None:
    assert show.reservations("No reservations in the system\n") == ()


def test_a_reason_that_looks_like_a_setting_does_not_replace_it() -> None:
    (record,) = show.records("NodeName=h1 State=IDLE+DRAIN Reason=State=UP Gres=gpu:99 [root@now]\n", "NodeName")

    assert record["State"] == "IDLE+DRAIN"


def test_a_record_without_what_we_need_is_refused_by_name() -> None:
    with pytest.raises(UnknownShape, match="PartitionName=x has no PriorityTier, PreemptMode"):
        show.partitions("PartitionName=x State=UP\n")


def test_output_that_ends_inside_a_line_is_cut() -> None:
    with pytest.raises(OutputCut, match="ends inside a line"):
        show.partitions(PARTITION[:-30])


def test_another_commands_output_is_refused() -> None:
    with pytest.raises(UnknownShape, match="PartitionName= was expected"):
        show.partitions("JOBID PARTITION NAME\n")
    with pytest.raises(UnknownShape, match="no line SLURM_VERSION"):
        show.config("KillWait = 30 sec\n")


def test_the_configuration_keeps_the_first_of_equal_keys_and_empties_null() -> None:
    found = show.config(
        "Configuration data as of 1\nKillWait                = 30 sec\nSlurmctldHost[0]        = vm(127.0.0.1)\n"
        "Prolog                  = (null)\nSLURM_VERSION           = 22.05.8\n\nCgroup Support Configuration:\n"
        "ConstrainDevices        = yes\nKillWait                = 1 sec\n\nSlurmctld(primary) at vm is UP\n"
    )

    assert found["KillWait"] == "30 sec"
    assert found["Prolog"] == ""
    assert found["SlurmctldHost[0]"] == "vm(127.0.0.1)"
    assert found["ConstrainDevices"] == "yes"


@pytest.mark.parametrize(
    ("word", "base", "flags", "state", "responding"),
    [
        ("idle", "IDLE", [], NodeState.IDLE, True),
        ("mixed-", "MIXED", ["PLANNED"], NodeState.MIXED, True),
        ("planned", "IDLE", ["PLANNED"], NodeState.IDLE, True),
        ("allocated", "ALLOCATED", [], NodeState.ALLOCATED, True),
        ("completing", "MIXED", ["COMPLETING"], NodeState.COMPLETING, True),
        ("draining", "MIXED", ["DRAIN"], NodeState.DRAINING, True),
        ("draining@", "ALLOCATED", ["DRAIN", "REBOOT_REQUESTED"], NodeState.DRAINING, True),
        ("drained*", "DOWN", ["DRAIN", "NOT_RESPONDING"], NodeState.DRAINED, False),
        ("down*", "DOWN", ["NOT_RESPONDING"], NodeState.DOWN, False),
        ("idle*", "IDLE", ["NOT_RESPONDING"], NodeState.IDLE, False),
        ("maint", "IDLE", ["MAINTENANCE"], NodeState.MAINT, True),
        ("mixed$", "MIXED", ["MAINTENANCE", "RESERVED"], NodeState.MAINT, True),
        ("reserved", "IDLE", ["RESERVED"], NodeState.RESERVED, True),
        ("idle~", "IDLE", ["CLOUD", "POWERED_DOWN"], NodeState.OTHER, True),
        ("mixed#", "MIXED", ["POWERING_UP"], NodeState.OTHER, True),
        ("idle!", "IDLE", ["POWER_DOWN"], NodeState.OTHER, True),
        ("reboot^", "IDLE", ["DRAIN", "REBOOT_ISSUED"], NodeState.OTHER, True),
        ("inval", "IDLE", ["DRAIN", "INVALID_REG"], NodeState.OTHER, True),
        ("fail", "IDLE", ["FAIL"], NodeState.OTHER, True),
        ("unknown", "UNKNOWN", [], NodeState.OTHER, True),
    ],
)
def test_one_state_reads_the_same_as_a_word_and_as_flags(
    word: str, base: str, flags: list[str], state: NodeState, responding: bool
) -> None:
    assert show.node_state(word) == (state, responding)
    assert show.node_state_of_flags(base, flags) == (state, responding)


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("slurm-wlm 22.05.8", SlurmVersion(22, 5, 8)),
        ("slurm 25.11.0-0rc2", SlurmVersion(25, 11, 0)),
        ("22.5.3", SlurmVersion(22, 5, 3)),
        ("24.11", SlurmVersion(24, 11, 0)),
    ],
)
def test_reads_releases(text: str, version: SlurmVersion) -> None:
    assert SlurmVersion.parse(text) == version
    assert SlurmVersion(22, 5) < version <= SlurmVersion(25, 11)


def test_a_text_without_a_release_is_refused() -> None:
    with pytest.raises(UnknownShape, match="a Slurm release"):
        SlurmVersion.parse("command not found 127.0.0.1")
