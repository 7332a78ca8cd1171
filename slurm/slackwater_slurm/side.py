"""The Slurm side of an operator: the controller of `slackwater slurm run`, for as long as a replica leads.

Owns which keys of the file mean something there: the cluster, its connection and the port of the metrics are the
operator's.  Found by `slackwater operator run --side slurm=FILE` through its entry point; satisfies
`slackwater_operator.operate.sides.Side`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from slackwater_operator.core import PermanentError
from slackwater_operator.kube.connection import Connection
from slackwater_operator.operate.sides import Term
from slackwater_slurm.config import Config, Kubernetes, load
from slackwater_slurm.placed import follow
from slackwater_slurm.service import Service, connector
from slackwater_slurm.sources import Listed, Several


@dataclass(frozen=True, slots=True)
class SlurmSide:
    """One Slurm beside the pools of a cluster.   environ: where Slurm's commands and configuration are looked for."""

    config: Config
    kubernetes: Kubernetes
    connection: Connection
    environ: Mapping[str, str]

    @property
    def pools(self) -> tuple[str, ...]:
        """The CapacityPools that it stands beside."""
        return self.kubernetes.pools

    def run(self, term: Term) -> None:
        """Size the arrays until told to stop; they stay as they are then.

        Raises PermanentError for what a person must mend, TemporaryError when the replica leads no longer.
        """
        with follow(self.kubernetes, self.connection, term.fence) as placed:
            Service(
                self.config,
                connector(self.config, self.environ),
                Several((Listed(self.config.jobs), placed)),
                fence=term.fence,
                tell=term.tell,
                show=term.show,
            ).run(term.stop)


def open_side(file: Path, connection: Connection, environ: Mapping[str, str]) -> SlurmSide:
    """The side of a configuration file; nothing is asked of Slurm yet.

    Raises PermanentError with one line that names the file and the key.
    """
    config = load(file)
    if config.kubernetes is None:
        raise PermanentError(f"{file}: kubernetes.pools: is required in the operator; it says whose jobs are taken")
    for key, value in (
        ("kubernetes.kubeconfig", config.kubernetes.kubeconfig),
        ("kubernetes.context", config.kubernetes.context),
        ("metrics_port", config.metrics_port),
    ):
        if value is not None:
            raise PermanentError(f"{file}: {key}: leave it out in the operator, which uses its own; got {str(value)!r}")
    return SlurmSide(config, config.kubernetes, connection, environ)
