"""Rules about the cleaning job's batch script.

Pure.  Reads #SBATCH lines as sbatch does: only above the first command.  Says nothing without a script.
"""

import re
import shlex
from collections.abc import Iterator

from slackwater_slurm.check.facts import Script, Site
from slackwater_slurm.check.finding import Finding, Rule, Severity
from slackwater_slurm.client import gres
from slackwater_slurm.core import UnknownShape

_SHORT = {"-p": "partition", "-a": "array", "-q": "qos", "-o": "output", "-t": "time", "-G": "gpus", "-N": "nodes"}
_GPU_OPTIONS = ("gres", "gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket")
# Measured with a worker that needs 1 s to save, as a child of the batch shell.
_NOT_EXEC = (
    "SIGTERM ends the shell, not the worker: it is killed before it saves (pgid), "
    "or holds the GPU 0.9 s into training (linuxproc)"
)


def options(script: Script) -> dict[str, str]:
    """The #SBATCH options that count, long name to value; "" for one without a value."""
    found: dict[str, str] = {}
    for line in _lines(script):
        if not line.startswith("#SBATCH"):
            if line and not line.startswith("#"):
                break  # sbatch stops reading options at the first command
            continue
        words = shlex.split(line.removeprefix("#SBATCH"), comments=True)
        while words:
            word = words.pop(0)
            if word.startswith("--"):
                name, _, value = word[2:].partition("=")
                takes_next = not value and words and not words[0].startswith("-")
                found[name] = words.pop(0) if takes_next else value
            elif word[:2] in _SHORT:
                value = word[2:] or (words.pop(0) if words else "")
                found[_SHORT[word[:2]]] = value.removeprefix("=")
    return found


def shebang(_site: Site, script: Script) -> Iterator[Finding]:
    if not script.text.startswith("#!"):
        yield _finding(
            script, "script-shebang", Severity.ERROR, "first line", "sbatch refuses a script without it", "#!/bin/bash"
        )


def late_options(_site: Site, script: Script) -> Iterator[Finding]:
    is_late = False
    for number, line in enumerate(_lines(script), 1):
        if line and not line.startswith("#"):
            is_late = True
        if is_late and line.startswith("#SBATCH"):
            yield _finding(
                script,
                "script-late-option",
                Severity.ERROR,
                f"line {number}: {line}",
                "below the first command: sbatch ignores it without a word",
                f"{line}   (directly below the first line)",
            )


def last_command(_site: Site, script: Script) -> Iterator[Finding]:
    commands = _commands(script)
    if not commands:
        yield _finding(
            script, "script-exec", Severity.ERROR, "no command", "the job ends at once", "exec slackwater clean run …"
        )
        return
    last = commands[-1]
    waits = last.split()[0] in ("wait", "done", "fi", "exit") and any(line.startswith("trap ") for line in commands)
    if (
        last.split()[0] in ("exec", "srun")
        or waits
        or any(re.match(r"trap ''\s+(SIG)?TERM", line) for line in commands)
    ):
        return
    yield _finding(script, "script-exec", Severity.ERROR, f"last command: {last}", _NOT_EXEC, f"exec {last}")


def requeue(site: Site, script: Script) -> Iterator[Finding]:
    given = options(script)
    if "no-requeue" in given or ("requeue" not in given and site.text("JobRequeue") == "0"):
        found = "--no-requeue" if "no-requeue" in given else "no --requeue, and the cluster has JobRequeue=0"
        cost = "a preempted worker ends as PREEMPTED and never comes back"
        yield _finding(script, "script-requeue", Severity.ERROR, found, cost, "#SBATCH --requeue")


def open_mode(site: Site, script: Script) -> Iterator[Finding]:
    if options(script).get("open-mode") != "append" and site.text("JobFileAppend") != "1":
        cost = "each restart empties the job's output, and with it why the last run ended"
        yield _finding(
            script, "script-open-mode", Severity.NOTE, "no --open-mode=append", cost, "#SBATCH --open-mode=append"
        )


def asks_gpu(site: Site, script: Script) -> Iterator[Finding]:
    given = options(script)
    texts = {name: given[name] for name in _GPU_OPTIONS if name in given}
    asked = gres.gpus(",".join(text if name == "gres" else f"gpu:{text}" for name, text in texts.items()))
    if not asked:
        found = ", ".join(f"--{name}={text}" for name, text in texts.items()) or "no --gres"
        cost = "Slurm accepts it: the worker runs without a GPU, CUDA_VISIBLE_DEVICES unset"
        yield _finding(script, "script-gpu", Severity.ERROR, found, cost, "#SBATCH --gres=gpu:1")
        return
    if site.nodes is None:
        return
    there = site.cleaning_gpus
    for kind, count in asked.by_type:
        most = max((node.gpus.get(kind) if kind else node.gpus.total for node in site.cleaning_nodes), default=0)
        if kind and not there.get(kind):
            cost = 'refused: "Requested node configuration is not available", which does not name the cause'
            types = ", ".join(filter(None, there.types)) or "none"
            yield _finding(
                script,
                "script-gpu-type",
                Severity.ERROR,
                f"GPU type {kind} (partition {site.cleaning} has: {types})",
                cost,
                f"#SBATCH --gres=gpu:{next(iter(filter(None, there.types)), 'TYPE')}:{count}",
            )
        elif count > most and "gpus" not in texts:
            cost = 'refused: "Requested node configuration is not available", which does not name the cause'
            yield _finding(
                script,
                "script-gpu",
                Severity.ERROR,
                f"{count} GPUs on a node, {most} at most",
                cost,
                "#SBATCH --gres=gpu:1",
            )


def partition(site: Site, script: Script) -> Iterator[Finding]:
    given = options(script).get("partition")
    if given != site.cleaning:
        default = next((name for name, one in site.partitions.items() if one.is_default), "none")
        found = f"--partition={given}" if given else f"no --partition (the default is {default})"
        cost = f"the job is not preempted as one of {site.cleaning} would be"
        yield _finding(script, "script-partition", Severity.ERROR, found, cost, f"#SBATCH --partition={site.cleaning}")


def array(site: Site, script: Script) -> Iterator[Finding]:
    given = options(script)
    if "array" not in given:
        return
    limit = site.number("MaxArraySize")
    try:
        tasks = gres.numbers(given["array"].partition("%")[0])
    except UnknownShape:
        tasks = ()
    if not tasks:
        cost = 'refused: "Invalid job array specification"'
        yield _finding(
            script, "script-array", Severity.ERROR, f"--array={given['array']}", cost, "#SBATCH --array=0-99"
        )
    elif limit is not None and max(tasks) >= limit:
        cost = f'refused: "Invalid job array specification", which names no limit; MaxArraySize is {limit}'
        yield _finding(
            script, "script-array", Severity.ERROR, f"--array={given['array']}", cost, f"#SBATCH --array=0-{limit - 1}"
        )
    output = given.get("output")
    if output and not re.search(r"%\d*[aAjJ]", output) and not output.startswith("/dev/"):
        cost = "all workers write one file over each other"
        yield _finding(
            script, "script-output", Severity.WARNING, f"--output={output}", cost, "#SBATCH --output=clean-%A_%a.log"
        )


def qos(site: Site, script: Script) -> Iterator[Finding]:
    given = options(script).get("qos")
    if given and site.text("AccountingStorageType") != "accounting_storage/slurmdbd":
        cost = "without slurmdbd it is accepted and ignored"
        yield _finding(
            script,
            "script-qos",
            Severity.WARNING,
            f"--qos={given}",
            cost,
            f"#SBATCH --partition={site.cleaning}   (no --qos)",
        )


def exclusive(_site: Site, script: Script) -> Iterator[Finding]:
    if "exclusive" in options(script):
        cost = "one worker takes a whole node, its other GPUs idle"
        yield _finding(script, "script-exclusive", Severity.WARNING, "--exclusive", cost, "#SBATCH --cpus-per-task=1")


def time_limit(_site: Site, script: Script) -> Iterator[Finding]:
    given = options(script).get("time")
    if given and gres.span_s(given) is not None:
        cost = "at its end the worker is TIMEOUT and not requeued; cleaning needs none, it leaves when told"
        yield _finding(script, "script-time", Severity.WARNING, f"--time={given}", cost, "#SBATCH --time=0")


_RULES = (
    shebang,
    late_options,
    last_command,
    requeue,
    open_mode,
    asks_gpu,
    partition,
    array,
    qos,
    exclusive,
    time_limit,
)


def script_rules(site: Site) -> Iterator[Finding]:
    """All of the above for the site's script; nothing without one."""
    if site.script is not None:
        for rule in _RULES:
            yield from rule(site, site.script)


RULES: tuple[Rule, ...] = (script_rules,)


def _finding(script: Script, rule: str, severity: Severity, found: str, cost: str, fix: str) -> Finding:
    return Finding(rule, severity, script.name, found, cost, fix)


def _lines(script: Script) -> list[str]:
    return [line.strip() for line in script.text.splitlines()]


def _commands(script: Script) -> list[str]:
    """Commands, one a line; lines that end in a backslash joined."""
    joined = re.sub(r"\\\n\s*", " ", script.text)
    return [line.strip() for line in joined.splitlines() if line.strip() and not line.strip().startswith("#")]
