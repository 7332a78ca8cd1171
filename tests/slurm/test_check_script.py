"""What is wrong with a cleaning job's batch script, found before Slurm accepts and ignores it."""

import pytest

from slackwater_slurm.check.facts import NodeRecord, Script, Site
from slackwater_slurm.check.finding import Severity
from slackwater_slurm.check.script import options, script_rules
from slackwater_slurm.core import GpuCount, Partition, SlurmVersion

HEAD = "#!/bin/bash\n#SBATCH -p cleaning --requeue\n#SBATCH --open-mode=append --gres=gpu:h200:1\n"
CONFIG = {"JobRequeue": "1", "MaxArraySize": "1001", "AccountingStorageType": "accounting_storage/none"}


def rules(text: str, **config: str) -> dict[str, Severity]:
    partition = Partition("cleaning", "UP", ("h1",), 1, "REQUEUE")
    site = Site(
        version=SlurmVersion(22, 5, 8),
        config=CONFIG | config,
        partitions={"cleaning": partition},
        train=("train",),
        cleaning="cleaning",
        save_s=10.0,
        nodes=(NodeRecord("h1", "IDLE", GpuCount.of({"h200": 4}), ("cleaning",)),),
        script=Script("clean.sh", text),
    )
    return {finding.rule: finding.severity for finding in script_rules(site)}


def test_a_good_script_gives_no_finding() -> None:
    assert (
        rules(HEAD + "#SBATCH -a 0-999%4\n#SBATCH -o clean-%A_%a.log\n\nmodule load x\nexec slackwater clean run\n")
        == {}
    )


@pytest.mark.parametrize(
    ("end", "is_right"),
    [
        pytest.param("exec slackwater clean run in -o out", True, id="exec"),
        pytest.param("srun slackwater clean run", True, id="srun"),
        pytest.param("exec \\\n  slackwater clean run", True, id="exec over two lines"),
        pytest.param("trap '' TERM\nslackwater clean run", True, id="the shell ignores the signal"),
        pytest.param(
            "trap 'kill -TERM $PID' TERM\nslackwater clean run & PID=$!\nwait", True, id="passed on and waited for"
        ),
        pytest.param("slackwater clean run", False, id="a child"),
        pytest.param("slackwater clean run &\nwait", False, id="waited for, not passed on"),
        pytest.param("exec slackwater clean run\necho done", False, id="not the last"),
        pytest.param("", False, id="nothing"),
    ],
)
def test_the_worker_must_hear_the_signal_itself(end: str, is_right: bool) -> None:
    found = rules(f"{HEAD}{end}\n")

    assert found == ({} if is_right else {"script-exec": Severity.ERROR})


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        pytest.param("#SBATCH --no-requeue", "script-requeue", id="no requeue"),
        pytest.param("#SBATCH --gres=gpu:0", "script-gpu", id="no GPUs, which Slurm accepts"),
        pytest.param("#SBATCH --gres=gpu:h200:8", "script-gpu", id="more than a node has"),
        pytest.param("#SBATCH --gres=gpu:b200:1", "script-gpu-type", id="a type that is not there"),
        pytest.param("#SBATCH --partition train", "script-partition", id="training's partition"),
        pytest.param("#SBATCH --array=0-5000", "script-array", id="beyond MaxArraySize"),
        pytest.param("#SBATCH -a 5-1", "script-array", id="backwards"),
        pytest.param("#SBATCH --array=0-9 --output=clean.log", "script-output", id="one file for all"),
        pytest.param("#SBATCH --qos=low", "script-qos", id="a QOS without accounting"),
        pytest.param("#SBATCH --exclusive", "script-exclusive", id="whole nodes"),
        pytest.param("#SBATCH -t 4:00:00", "script-time", id="a time limit"),
        pytest.param("#SBATCH --open-mode=truncate", "script-open-mode", id="output emptied"),
        pytest.param("sleep 1\n#SBATCH --requeue", "script-late-option", id="below the first command"),
    ],
)
def test_finds_an_option_that_is_wrong(line: str, rule: str) -> None:
    assert set(rules(f"{HEAD}{line}\nexec slackwater clean run\n")) == {rule}


def test_a_cluster_that_does_not_requeue_needs_the_script_to_say_so() -> None:
    without = HEAD.replace(" --requeue", "")

    assert "script-requeue" in rules(f"{without}exec w\n", JobRequeue="0")
    assert "script-requeue" not in rules(f"{HEAD}exec w\n", JobRequeue="0")
    assert "script-requeue" not in rules(f"{without}exec w\n")


def test_a_script_without_a_shebang_or_a_gpu_is_told_both() -> None:
    assert set(rules("#SBATCH -p cleaning --open-mode=append\nexec w\n")) == {"script-shebang", "script-gpu"}


def test_reads_options_as_sbatch_does() -> None:
    text = '#!/bin/sh\n#SBATCH -p a --time 5 # why\n##SBATCH --qos=x\n#SBATCH --comment="a b"\nw\n#SBATCH --exclusive\n'

    assert options(Script("s", text)) == {"partition": "a", "time": "5", "comment": "a b"}
