"""`slackwater slurm check`: a clean site gives nothing, each planted mistake gives its finding and the line to set."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from slackwater_slurm.check import report
from slackwater_slurm.check.commands import check
from slackwater_slurm.check.facts import Script, Site, parameters, read_site, with_parameters
from slackwater_slurm.check.finding import Finding, Severity
from slackwater_slurm.core import SlurmVersion
from slackwater_slurm.lab import Lab
from slackwater_slurm.templates.scripts import CleanScript, clean_script
from slackwater_slurm.templates.settings import cluster_settings, process_settings

FAST = "batch_sched_delay=0,sched_interval=2,sched_min_interval=0,bf_interval=1"
OLD = {
    "AccountingStorageType": "accounting_storage/none",
    "AuthInfo": "socket=/run/munge/munge.socket.2,cred_expire=5",
    "ClusterName": "lab",
    "DefMemPerCPU": "100",
    "GresTypes": "gpu",
    "JobFileAppend": "0",
    "JobRequeue": "1",
    "KillWait": "30 sec",
    "MaxArraySize": "1001",
    "MaxJobCount": "10000",
    "PreemptExemptTime": "00:00:00",
    "PreemptMode": "REQUEUE",
    "PreemptType": "preempt/partition_prio",
    "ProctrackType": "proctrack/cgroup",
    "SchedulerParameters": FAST,
    "SchedulerType": "sched/backfill",
    "SelectType": "select/cons_tres",
    "SelectTypeParameters": "CR_CPU_MEMORY",
    "SlurmdTimeout": "60 sec",
    "SLURM_VERSION": "22.05.8",
    "TaskPlugin": "task/cgroup,task/affinity",
}
NEW = OLD | {
    "AuthInfo": "(null)",
    "SchedulerParameters": f"{FAST},requeue_delay=0",
    "SLURM_VERSION": "25.11.7",
}
TRAIN = {"Default": "YES", "GraceTime": "0", "MaxTime": "UNLIMITED", "Nodes": "h[1-2],r1", "PriorityTier": "100"} | {
    "OverSubscribe": "NO",
    "PreemptMode": "OFF",
    "State": "UP",
}
CLEANING = TRAIN | {"Default": "NO", "PriorityTier": "1", "PreemptMode": "REQUEUE"}
NODES = (
    "NodeName=h1 Gres=gpu:h200:4(S:0-1) State=IDLE Partitions=train,cleaning\n"
    "NodeName=h2 Gres=gpu:h200:4 State=MIXED+PLANNED Partitions=train,cleaning\n"
    "NodeName=r1 Gres=gpu:rtx5090:2 State=IDLE+DRAIN Partitions=train,cleaning Reason=swap\n"
)
GRES = "AutoDetect=off\nNodeName=h[1-2] Name=gpu Type=h200 File=/dev/nvidia[0-3] Flags=nvidia_gpu_env\n"
SCRIPT = clean_script(CleanScript(command=("slackwater", "clean", "run", "/in", "--output", "/out"), max_workers=8))


def config_text(config: dict[str, str]) -> str:
    return "".join(f"{key:<24}= {value}\n" for key, value in config.items())


def partitions_text(train: dict[str, str], cleaning: dict[str, str]) -> str:
    records = (("train", train), ("cleaning", cleaning))
    return "".join(
        f"PartitionName={name} " + " ".join(f"{key}={value}" for key, value in record.items()) + "\n"
        for name, record in records
    )


def make_site(
    config: dict[str, str] | None = None,
    *,
    train: dict[str, str] | None = None,
    cleaning: dict[str, str] | None = None,
    base: dict[str, str] = OLD,
    nodes: str | None = NODES,
    gres_conf: str | None = GRES,
    script: str | None = SCRIPT,
    save_s: float = 10.0,
    names: tuple[str, str] = ("train", "cleaning"),
) -> Site:
    return read_site(
        config_text(base | (config or {})),
        partitions_text(TRAIN | (train or {}), CLEANING | (cleaning or {})),
        train=(names[0],),
        cleaning=names[1],
        save_s=save_s,
        nodes=nodes,
        gres_conf=gres_conf,
        script=None if script is None else Script("clean.sh", script),
    )


def by_rule(site: Site) -> dict[str, Finding]:
    return {finding.rule: finding for finding in report.findings(site)}


@pytest.mark.parametrize("base", [pytest.param(OLD, id="22.05"), pytest.param(NEW, id="25.11")])
def test_a_clean_site_gives_no_finding(base: dict[str, str]) -> None:
    assert report.findings(make_site(base=base)) == ()


@pytest.mark.parametrize("version", ["22.05.8", "24.11.5", "25.11.7"])
def test_the_settings_that_we_render_are_clean(version: str) -> None:
    rendered = {
        setting.key: setting.value
        for setting in (*cluster_settings(SlurmVersion.parse(version), num_gpus=10), *process_settings())
    }

    found = report.findings(make_site(rendered | {"SLURM_VERSION": version}))

    assert found == ()


PLANTED = [
    # (what is wrong, the rule that finds it, how bad, a part of the line to set)
    (
        {"PreemptType": "preempt/none", "PreemptMode": "OFF"},
        "preempt-type",
        "error",
        "PreemptType=preempt/partition_prio",
    ),
    ({"PreemptType": "preempt/qos"}, "preempt-type", "error", "PreemptType=preempt/partition_prio"),
    ({"PreemptMode": "OFF"}, "preempt-mode", "error", "PreemptMode=REQUEUE"),
    ({"PreemptMode": "GANG,SUSPEND"}, "preempt-mode", "note", "PreemptMode=REQUEUE"),
    ({"JobRequeue": "0"}, "job-requeue", "error", "JobRequeue=1"),
    ({"KillWait": "5 sec"}, "kill-wait", "error", "KillWait=30"),
    ({"KillWait": "3600 sec"}, "kill-wait", "warning", "KillWait=30"),
    ({"PreemptExemptTime": "01:00:00"}, "exempt-time", "error", "PreemptExemptTime=00:00:00"),
    ({"ProctrackType": "proctrack/linuxproc"}, "proctrack", "warning", "ProctrackType=proctrack/cgroup"),
    ({"TaskPlugin": "task/affinity"}, "task-plugin", "warning", "TaskPlugin=task/cgroup,task/affinity"),
    ({"ConstrainDevices": "no"}, "constrain-devices", "warning", "ConstrainDevices=yes"),
    ({"SelectType": "select/linear"}, "select-type", "error", "SelectType=select/cons_tres"),
    ({"GresTypes": "(null)"}, "gres-types", "error", "GresTypes=gpu"),
    ({"GresTypes": "mps"}, "gres-types", "error", "GresTypes=mps,gpu"),
    ({"AuthInfo": "(null)"}, "requeue-delay", "warning", "AuthInfo=cred_expire=5"),
    ({"AuthInfo": "socket=/s,cred_expire=300"}, "requeue-delay", "warning", "AuthInfo=socket=/s,cred_expire=5"),
    ({"AuthInfo": "cred_expire=2"}, "requeue-delay", "warning", "AuthInfo=cred_expire=5"),
    ({"SchedulerParameters": "(null)"}, "sched-interval", "warning", "SchedulerParameters=sched_interval=2"),
    ({"SchedulerParameters": FAST.replace("l=2", "l=-1")}, "sched-interval", "error", f"SchedulerParameters={FAST}"),
    (
        {"SchedulerParameters": "sched_interval=2"},
        "batch-sched-delay",
        "warning",
        "sched_interval=2,batch_sched_delay=0",
    ),
    ({"SchedulerParameters": "sched_interval=2"}, "bf-interval", "note", "sched_interval=2,bf_interval=1"),
    ({"SchedulerParameters": f"{FAST},defer"}, "defer", "note", f"SchedulerParameters={FAST}"),
    (
        {"SchedulerParameters": FAST.replace("min_interval=0", "min_interval=2000000")},
        "sched-min-interval",
        "warning",
        "sched_min_interval=0",
    ),
    (
        {"SchedulerParameters": f"{FAST},requeue_delay=0"},
        "requeue-delay-unknown",
        "note",
        f"SchedulerParameters={FAST}",
    ),
    ({"SlurmdTimeout": "1800 sec"}, "slurmd-timeout", "note", "SlurmdTimeout=60"),
    ({"SlurmdTimeout": "0 sec"}, "slurmd-timeout", "note", "SlurmdTimeout=60"),
    ({"MaxArraySize": "10"}, "max-array-size", "warning", "MaxArraySize=20"),
    ({"MaxJobCount": "20"}, "max-job-count", "warning", "MaxJobCount=10000"),
    ({"SchedulerParameters": f"{FAST},default_queue_depth=5"}, "queue-depth", "warning", "default_queue_depth=20"),
    ({"SLURM_VERSION": "26.05.1"}, "release", "note", "measure before"),
]


@pytest.mark.parametrize(
    ("config", "rule", "severity", "fix"), [pytest.param(*case, id=f"{case[1]} {case[0]}") for case in PLANTED]
)
def test_finds_a_planted_setting_and_gives_the_line_to_set(
    config: dict[str, str], rule: str, severity: str, fix: str
) -> None:
    found = by_rule(make_site(config))

    assert rule in found
    assert found[rule].severity == severity
    assert fix in found[rule].fix
    assert found[rule].cost


PARTITIONS = [
    ({}, {"PreemptMode": "OFF"}, "cleaning-mode", "error", "PartitionName=cleaning … PreemptMode=REQUEUE"),
    ({}, {"PreemptMode": "CANCEL"}, "cleaning-mode", "error", "PartitionName=cleaning … PreemptMode=REQUEUE"),
    ({}, {"PreemptMode": "GANG,SUSPEND"}, "cleaning-mode", "error", "PartitionName=cleaning … PreemptMode=REQUEUE"),
    ({"PreemptMode": "REQUEUE"}, {}, "train-mode", "warning", "PartitionName=train … PreemptMode=OFF"),
    ({"PriorityTier": "1"}, {}, "tiers", "error", "PartitionName=train … PriorityTier=100"),
    ({}, {"GraceTime": "10"}, "grace-time", "error", "PartitionName=cleaning … GraceTime=0"),
    ({}, {"State": "DOWN"}, "partition-down", "error", "scontrol update PartitionName=cleaning State=UP"),
    ({}, {"MaxTime": "04:00:00"}, "max-time", "warning", "PartitionName=cleaning … MaxTime=UNLIMITED"),
    ({"OverSubscribe": "FORCE:4"}, {}, "oversubscribe", "warning", "PartitionName=train … OverSubscribe=NO"),
    ({}, {"Nodes": "h1"}, "nodes-without-cleaning", "warning", "PartitionName=cleaning Nodes=h1,h2,r1"),
    ({"Nodes": "h1"}, {}, "nodes-without-training", "note", "PartitionName=train Nodes=h1,h2,r1"),
]


@pytest.mark.parametrize(
    ("train", "cleaning", "rule", "severity", "fix"),
    [pytest.param(*case, id=f"{case[2]} {case[0] or case[1]}") for case in PARTITIONS],
)
def test_finds_a_planted_partition_and_gives_the_line_to_set(
    train: dict[str, str], cleaning: dict[str, str], rule: str, severity: str, fix: str
) -> None:
    found = by_rule(make_site(train=train, cleaning=cleaning))

    assert set(found) == {rule}
    assert found[rule].severity == severity
    assert fix in found[rule].fix


def test_the_advice_fits_the_release() -> None:
    slow = {"AuthInfo": "(null)", "SchedulerParameters": FAST}

    old, new = by_rule(make_site(slow)), by_rule(make_site(slow, base=NEW))

    assert old["requeue-delay"].fix == "AuthInfo=cred_expire=5"
    assert new["requeue-delay"].fix == f"SchedulerParameters={FAST},requeue_delay=0"


def test_grace_loses_work_only_before_24_05() -> None:
    grace = {"GraceTime": "10"}

    old = by_rule(make_site(cleaning=grace))["grace-time"]
    new = by_rule(make_site(base=NEW, cleaning=grace))["grace-time"]

    assert (old.severity, new.severity) == (Severity.ERROR, Severity.WARNING)
    assert "never comes back" in old.cost
    assert "never comes back" not in new.cost


def test_kill_wait_is_judged_by_how_long_a_worker_saves() -> None:
    assert "kill-wait" in by_rule(make_site(save_s=29.5))
    assert by_rule(make_site(save_s=29.5))["kill-wait"].fix == "KillWait=59"
    assert "kill-wait" not in by_rule(make_site(save_s=29))


def test_an_unknown_partition_is_named_with_those_that_there_are() -> None:
    found = by_rule(make_site(names=("gpu", "cleaning"), script=None))

    assert found["partition-missing"].found == "no partition gpu (there are: cleaning, train)"


def test_one_partition_for_both_is_an_error() -> None:
    assert "share one partition" in by_rule(make_site(names=("cleaning", "cleaning")))["tiers"].found


def test_qos_preemption_with_slurmdbd_is_left_to_the_site() -> None:
    found = by_rule(make_site({"PreemptType": "preempt/qos", "AccountingStorageType": "accounting_storage/slurmdbd"}))

    assert found["preempt-type"].severity == Severity.NOTE


@pytest.mark.parametrize(
    ("nodes", "rule", "severity"),
    [
        pytest.param(NODES.replace("Gres=gpu:h200:4 ", ""), "nodes-without-gpus", "note", id="one without GPUs"),
        pytest.param(
            "NodeName=c1 State=IDLE Partitions=cleaning\n", "nodes-without-gpus", "error", id="none with GPUs"
        ),
        pytest.param("NodeName=c1 State=IDLE Partitions=train\n", "nodes-without-gpus", "error", id="no nodes"),
        pytest.param(NODES.replace("gpu:rtx5090:2", "gpu:2"), "gpu-types", "note", id="no type"),
        pytest.param(NODES.replace("State=IDLE ", "State=IDLE+INVALID_REG "), "nodes-invalid", "error", id="invalid"),
    ],
)
def test_finds_nodes_that_cannot_take_workers(nodes: str, rule: str, severity: str) -> None:
    found = by_rule(make_site(nodes=nodes, script=None))

    assert found[rule].severity == severity


def test_says_nothing_about_what_it_was_not_given() -> None:
    site = make_site({"MaxArraySize": "2", "MaxJobCount": "2"}, nodes=None, gres_conf=None, script=None)

    assert report.findings(site) == ()


@pytest.mark.parametrize(
    ("gres_conf", "rules"),
    [
        pytest.param("NodeName=h1 Name=gpu Type=h200 Count=4\n", {"gres-file"}, id="only counted"),
        pytest.param("NodeName=h1 Name=gpu Type=h200 File=/opt/gpu[0-3]\n", {"gres-file"}, id="no device"),
        pytest.param("Name=gpu File=/dev/nvidia0\n", {"gres-type"}, id="no type"),
        pytest.param("AutoDetect=nvml\nName=gpu Count=4\n", set(), id="detected"),
        pytest.param("# Name=gpu Count=4\nName=mps Count=100\n", set(), id="a comment, another resource"),
    ],
)
def test_reads_gres_conf(gres_conf: str, rules: set[str]) -> None:
    assert set(by_rule(make_site(gres_conf=gres_conf))) == rules


def test_lists_of_parameters_keep_their_order_and_bare_words() -> None:
    assert parameters("a=1,defer, b=2") == {"a": "1", "defer": "", "b": "2"}
    assert with_parameters("a=1,defer", a="3", c="4") == "a=3,defer,c=4"


def test_the_report_has_the_worst_first_and_fails_only_by_more_than_notes() -> None:
    noted = report.findings(make_site({"SlurmdTimeout": "0 sec"}))
    site = make_site({"SlurmdTimeout": "0 sec", "JobRequeue": "0", "ProctrackType": "proctrack/pgid"}, script=None)
    found = report.findings(site)

    assert [finding.severity.value for finding in found] == ["error", "warning", "note"]
    assert report.is_failed(found)
    assert not report.is_failed(noted)
    assert report.lines(site, found)[:3] == [
        "ERROR   slurm.conf: JobRequeue=0",
        "        costs  a job without --requeue ends as PREEMPTED and never comes back",
        "        set    JobRequeue=1",
    ]
    assert "1 error, 1 warning, 1 note" in report.lines(site, found)[-1]


@pytest.fixture
def app() -> typer.Typer:
    found = typer.Typer()
    found.command()(check)
    return found


def write(folder: Path, config: dict[str, str], cleaning: dict[str, str] | None = None) -> list[str]:
    texts = {
        "config": config_text(config),
        "partitions": partitions_text(TRAIN, CLEANING | (cleaning or {})),
        "nodes": NODES,
        "script": SCRIPT,
        "gres": GRES,
    }
    arguments = []
    for name, text in texts.items():
        (folder / name).write_text(text)
        arguments += [f"--{name}", str(folder / name)]
    return arguments


def test_the_command_ends_0_1_or_2(app: typer.Typer, tmp_path: Path) -> None:
    clean = CliRunner().invoke(app, write(tmp_path, OLD))
    planted = CliRunner().invoke(app, [*write(tmp_path, OLD, {"GraceTime": "10"}), "--json"])
    cut = tmp_path / "config"
    cut.write_text(cut.read_text()[:-5])
    broken = CliRunner().invoke(app, ["--config", str(cut), "--partitions", str(tmp_path / "partitions")])
    alone = CliRunner().invoke(app, ["--config", str(cut)])
    missing = CliRunner().invoke(app, ["--config", str(tmp_path / "no"), "--partitions", str(cut)])

    assert (clean.exit_code, planted.exit_code) == (0, 1)
    assert "nothing found" in clean.stdout
    document = json.loads(planted.stdout)
    assert document["counts"] == {"error": 1, "warning": 0, "note": 0}
    assert document["findings"][0]["rule"] == "grace-time"
    assert [result.exit_code for result in (broken, alone, missing)] == [2, 2, 2]


@pytest.mark.slurm
@pytest.mark.e2e
def test_our_own_cluster_has_only_what_a_test_machine_must_do(app: typer.Typer, lab: Lab) -> None:
    result = CliRunner().invoke(app, ["--conf", str(lab.conf), "--json"], env=lab.environment())

    # No cgroups of its own: lab_config says why.
    assert {finding["rule"] for finding in json.loads(result.stdout)["findings"]} == {"proctrack", "task-plugin"}
    assert result.exit_code == 1


@pytest.mark.slurm
@pytest.mark.e2e
def test_changes_to_a_running_cluster_are_found(app: typer.Typer, lab: Lab) -> None:
    changes = (
        "PartitionName=cleaning",
        "GraceTime=10",
        "PriorityTier=200",
        "PreemptMode=CANCEL",
        "MaxTime=60",
        "State=DRAIN",
    )
    lab.run("scontrol", "update", *changes)
    try:
        result = CliRunner().invoke(app, ["--conf", str(lab.conf), "--json"], env=lab.environment())
    finally:
        undo = ("GraceTime=0", "PriorityTier=1", "PreemptMode=REQUEUE", "MaxTime=UNLIMITED", "State=UP")
        lab.run("scontrol", "update", "PartitionName=cleaning", *undo)

    found = {finding["rule"] for finding in json.loads(result.stdout)["findings"]}
    assert {"grace-time", "tiers", "cleaning-mode", "max-time", "partition-down"} <= found


@pytest.mark.slurm
@pytest.mark.e2e
def test_a_cluster_that_is_not_there_ends_with_2_and_one_line(app: typer.Typer, tmp_path: Path, lab: Lab) -> None:
    result = CliRunner().invoke(app, ["--conf", str(tmp_path / "none.conf")], env=lab.environment())

    assert result.exit_code == 2
    assert "slurm.conf" in result.stderr
