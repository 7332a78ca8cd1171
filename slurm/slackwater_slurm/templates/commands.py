"""`slackwater slurm render`: configuration fragments and batch scripts for a site.

Owns the command's words; `fragments` and `scripts` own the text.  `slackwater_slurm.cli` mounts it.
"""

import re
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from slackwater_slurm.templates.settings import NodeGroup


class Kind(StrEnum):
    """What can be rendered; the values are the files' names."""

    SLURM_CONF = "slurm.conf"
    PARTITIONS = "partitions.conf"
    GRES_CONF = "gres.conf"
    CGROUP_CONF = "cgroup.conf"
    QOS = "qos.sh"
    TRAIN = "train.sh"
    CLEAN = "clean.sh"


def render(
    kinds: Annotated[list[Kind] | None, typer.Argument(help="Which; all by default.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the files here, not the screen.")] = None,
    release: Annotated[
        str | None, typer.Option("--release", help="The site's Slurm release, 22.05.8; this machine's by default.")
    ] = None,
    node: Annotated[
        list[str] | None, typer.Option(help="Machines as NAMES:TYPE:GPUS, gpu[01-08]:h200:8; several times.")
    ] = None,
    num_gpus: Annotated[int, typer.Option(min=0, help="GPUs of the cluster: raises limits where needed.")] = 0,
    kill_wait: Annotated[int, typer.Option(min=1, help="Seconds from SIGTERM to SIGKILL.")] = 30,
    train: Annotated[str, typer.Option(help="The training partition's name.")] = "train",
    cleaning: Annotated[str, typer.Option(help="The cleaning partition's name.")] = "cleaning",
    gpu_type: Annotated[str, typer.Option(help="Ask for this type in the scripts; any by default.")] = "",
    workers: Annotated[int, typer.Option(min=1, help="Most cleaning workers of clean.sh.")] = 16,
    recordings: Annotated[str, typer.Option(help="The recordings, where every node sees them.")] = "/shared/recordings",
    ledger: Annotated[str, typer.Option(help="The ledger, where every node sees it.")] = "/shared/ledger",
) -> None:
    """Print or write what a site needs: slurm.conf lines with their reasons, and the scripts for sbatch."""
    from slackwater_slurm.core import SlurmVersion, UnknownShape
    from slackwater_slurm.templates import fragments, scripts

    wanted = kinds or list(Kind)
    try:
        groups = [_group(text) for text in node or ["gpu01:h200:8"]]
        names = ",".join(group.names for group in groups) if node else "ALL"
        texts: dict[Kind, str] = {}
        for kind in wanted:
            match kind:
                case Kind.SLURM_CONF:
                    version = SlurmVersion.parse(release or _installed_release())
                    texts[kind] = fragments.slurm_conf_fragment(version, kill_wait, num_gpus)
                case Kind.PARTITIONS:
                    texts[kind] = fragments.partitions_fragment(names, train, cleaning)
                case Kind.GRES_CONF:
                    texts[kind] = fragments.gres_conf_fragment(groups)
                case Kind.CGROUP_CONF:
                    texts[kind] = fragments.cgroup_conf_fragment()
                case Kind.QOS:
                    texts[kind] = fragments.qos_fragment()
                case Kind.TRAIN:
                    program = ("srun", "python", "train.py", "--resume")
                    script = scripts.TrainScript(program, partition=train, gpu_type=gpu_type)
                    texts[kind] = scripts.train_script(script)
                case Kind.CLEAN:
                    command = scripts.worker_command("slackwater", recordings, ledger)
                    fleet = scripts.CleanScript(command, partition=cleaning, gpu_type=gpu_type, max_workers=workers)
                    texts[kind] = scripts.clean_script(fleet)
    except (ValueError, UnknownShape) as error:
        raise typer.BadParameter(str(error)) from error
    if output is None:
        typer.echo("\n".join(text if len(texts) == 1 else f"### {kind.value}\n{text}" for kind, text in texts.items()))
        return
    try:
        output.mkdir(parents=True, exist_ok=True)
        for kind, text in texts.items():
            (output / kind.value).write_text(text)
    except OSError as error:
        raise typer.BadParameter(f"cannot write into {output}: {error}") from error
    typer.echo(f"wrote {', '.join(kind.value for kind in texts)} into {output}")


def _group(text: str) -> "NodeGroup":
    from slackwater_slurm.templates.settings import NodeGroup

    found = re.fullmatch(r"(?P<names>[A-Za-z0-9._,\[\]-]+):(?P<type>[A-Za-z0-9._-]+):(?P<gpus>\d+)", text)
    if found is None:
        raise ValueError(f"--node wants NAMES:TYPE:GPUS such as gpu[01-08]:h200:8, got {text!r}")
    return NodeGroup(found["names"], found["type"], int(found["gpus"]))


def _installed_release() -> str:
    """What `scontrol -V` prints.  Raises ValueError when no Slurm is installed and configured here."""
    import subprocess

    try:
        return subprocess.run(["scontrol", "-V"], capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise ValueError("no configured Slurm here to ask for its release; give --release 22.05.8") from error
