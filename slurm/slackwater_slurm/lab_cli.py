"""`slackwater slurm up` and `down`: the lab for a person.

Owns the words on the terminal; `lab` does the work.  `cli` mounts both.
"""

from pathlib import Path
from typing import Annotated

import typer

from slackwater_slurm.core import SlurmError

# Only root can make it, and it is gone after a restart, as the processes are.
FOLDER = Path("/run/slackwater-slurm")

Folder = Annotated[Path, typer.Option(help="Where the cluster keeps everything it has; a short path.")]


def up(
    folder: Folder = FOLDER,
    defaults: Annotated[bool, typer.Option("--defaults", help="Slurm's default settings instead of ours.")] = False,
) -> None:
    """Start a real Slurm on this machine: four nodes with GPUs that are only counted.  Needs root."""
    from slackwater_slurm.lab import Lab
    from slackwater_slurm.lab_config import LabSettings

    lab = Lab(folder, LabSettings(tuned=not defaults))
    try:
        if is_new := not lab.is_alive("slurmctld"):
            lab.stop()  # what a crash left over
            lab.start()
        nodes = lab.run("sinfo", "-h", "-N", "-p", "train", "-O", "NodeList:10,StateLong:12,Gres:20")
        version = lab.run("sinfo", "-V").split()[-1]
    except SlurmError as error:
        lab.stop()
        raise typer.BadParameter(str(error)) from error
    typer.echo(f"Slurm {version} {'is up' if is_new else 'was up already'}:\n{nodes.rstrip()}\n")
    typer.echo(f"  export SLURM_CONF={lab.conf}")
    typer.echo("  sbatch --partition=cleaning --gres=gpu:1 --array=0-11 --requeue --wrap 'exec sleep 600'")
    typer.echo("  sbatch --partition=train --gres=gpu:h200:4 --wrap 'sleep 20'")
    typer.echo("  squeue\n\nmake slurm-down ends it with all its jobs.")


def down(folder: Folder = FOLDER) -> None:
    """End the Slurm that `up` started, with every job in it, and remove its folder."""
    import shutil

    from slackwater_slurm.lab import Lab

    try:
        lab = Lab.attach(folder)
    except SlurmError as error:
        raise typer.BadParameter(str(error)) from error
    lab.stop()
    shutil.rmtree(lab.folder)
    typer.echo(f"ended; {lab.folder} is removed")
