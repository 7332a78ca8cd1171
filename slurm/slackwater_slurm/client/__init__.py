"""Ways to reach a Slurm controller: one protocol, three adapters, and the choice between them.

Owns `open_client`.  Called by the room's commands and by `cluster`.
"""

from collections.abc import Mapping
from pathlib import Path

from slackwater_slurm.client.base import SlurmClient
from slackwater_slurm.client.command import Commands, Watch
from slackwater_slurm.client.text import TextClient
from slackwater_slurm.core import SlurmMissing

ADAPTERS = ("text", "json", "pyslurm")


def open_client(
    environ: Mapping[str, str],
    adapter: str = "text",
    *,
    conf: Path | None = None,
    timeout_s: float = 10.0,
    watch: Watch | None = None,
) -> SlurmClient:
    """The client for one cluster; asks nothing of the controller yet (pyslurm's does).

    environ: this process's environment.   conf: the cluster's slurm.conf; None = the machine's own.
    watch: told of every command and library call.
    Raises SlurmMissing when the adapter cannot be used here, ValueError for an unknown one.
    """
    if adapter == "text":
        return TextClient(Commands(environ, conf, timeout_s=timeout_s, watch=watch))
    if adapter == "json":
        from slackwater_slurm.client.documents import JsonClient

        return JsonClient(Commands(environ, conf, timeout_s=timeout_s, watch=watch))
    if adapter == "pyslurm":
        from slackwater_slurm.client.pyslurm import PyslurmClient

        if conf is not None and environ.get("SLURM_CONF") != str(conf):
            raise SlurmMissing(f"pyslurm reads the environment's SLURM_CONF; start this process with SLURM_CONF={conf}")
        return PyslurmClient(environ, timeout_s=timeout_s, watch=watch)
    raise ValueError(f"the adapter must be one of {', '.join(ADAPTERS)}, got {adapter!r}")
