"""One call of one Slurm command: its environment, its time limit, its failure as one line.

Owns the process, and the judgement whether trying again can help.  Knows no output format.  Called by
the `text` and `documents` adapters.
"""

import logging
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from slackwater_slurm.core import OutputCut, SlurmError, SlurmMissing, SlurmRefused, SlurmUnavailable

logger = logging.getLogger(__name__)

# These change what commands print, whom they ask, or what sbatch submits; a login shell may set any of them.
_FOREIGN = ("SACCT_", "SALLOC_", "SBATCH_", "SCANCEL_", "SCONTROL_", "SINFO_", "SLURM_", "SPRIO_", "SQUEUE_", "SRUN_")
_KEPT = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT")
# Moments in seconds since the epoch; index sets written out instead of ending in "...".
_READING = {"LC_ALL": "C", "SLURM_TIME_FORMAT": "%s", "SLURM_BITSTR_LEN": "0"}

_NO_CONFIG = ("cannot stat file", "unable to process configuration", "could not establish a configuration source")
_NO_CREDENTIAL = ("munge", "credential", "authentication", "auth plugin")
_NO_ANSWER = (
    "unable to contact slurm controller",
    "connection refused",
    "connection reset",
    "connection timed out",
    "socket timed out",
    "transmitted or received",
    "communication connection failure",
    "unable to establish",
    "standby mode",
    "temporarily",
    "try again",
    " is down",
)
_NO_QUOTA = ("qos policy", "accounting/qos", "limit")

Watch = Callable[[str, float, bool], None]
"""Told of every call: the command's name, the seconds it took, whether it succeeded."""


class Commands:
    """Runs Slurm's commands on one cluster.

    environ: what commands inherit; variables that would change their output or their target are left out.
    conf: the cluster's slurm.conf; None = the machine's own.
    timeout_s: for each command; a dead controller keeps clients waiting 9 s by itself.
    prefix: put before each command, such as ("chroot", "/srv/slurm").
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        conf: Path | None = None,
        *,
        timeout_s: float = 10.0,
        prefix: Sequence[str] = (),
        watch: Watch | None = None,
    ) -> None:
        self._environ = {
            name: value for name, value in environ.items() if name in _KEPT or not name.startswith(_FOREIGN)
        }
        if conf is not None:
            self._environ["SLURM_CONF"] = str(conf)
        self._timeout_s = timeout_s
        self._prefix = tuple(prefix)
        self._watch = watch

    def run(self, *argv: str, stdin: str = "", passing: Sequence[str] = ()) -> str:
        """What the command prints.

        passing: phrases, lower case; a failure whose every line holds one of them is none.
        Raises SlurmUnavailable, SlurmRefused or SlurmMissing, in one line.
        """
        # A job inherits what sbatch was called with: our reading variables are not for it.
        environ = self._environ if argv[0] == "sbatch" else self._environ | _READING
        began_s = time.monotonic()
        is_ok = False
        try:
            done = subprocess.run(
                [*self._prefix, *argv],
                input=stdin,
                env=environ,
                capture_output=True,
                text=True,
                encoding="utf-8",
                errors="backslashreplace",  # job names are bytes of anybody's choice
                timeout=self._timeout_s,
            )
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            is_ok = done.returncode == 0 or (
                bool(lines) and all(any(phrase in line.lower() for phrase in passing) for line in lines)
            )
        except subprocess.TimeoutExpired as error:
            raise self._too_slow(argv[0], error.stderr) from error
        except OSError as error:
            raise SlurmMissing(
                f"{argv[0]} cannot be run ({error.strerror}); install Slurm's commands (Debian: slurm-client) "
                "or put them on PATH"
            ) from error
        finally:
            took_s = time.monotonic() - began_s
            logger.debug("ran command=%s took_s=%.3f ok=%s", argv[0], took_s, is_ok)
            if self._watch is not None:
                self._watch(argv[0], took_s, is_ok)
        if not is_ok:
            raise failure(argv[0], done.returncode, done.stderr or done.stdout)
        return done.stdout

    def _too_slow(self, command: str, stderr: bytes | None) -> SlurmError:
        said = (stderr or b"").decode("utf-8", "backslashreplace")
        if any(phrase in said for phrase in _NO_CONFIG):  # commands look for a missing slurm.conf for a minute
            return failure(command, 1, said)
        return SlurmUnavailable(
            f"{command} gave no answer within {self._timeout_s:g} s; is slurmctld overloaded or down?", delay_s=5.0
        )


def failure(command: str, returncode: int, said: str) -> SlurmError:
    """The error that fits what a failed command said, in one line."""
    # `scontrol ping` frames its last words in stars.
    lines = [_without_speaker(line, command) for line in said.splitlines() if line.strip("* ")]
    whole = " ".join(lines).lower()
    line = lines[-1][:300] if lines else f"ended with {returncode} and said nothing"
    if any(phrase in whole for phrase in _NO_CONFIG):
        return SlurmMissing(f"{command}: no usable slurm.conf ({lines[0][:200]}); set SLURM_CONF to the cluster's")
    if any(phrase in whole for phrase in _NO_CREDENTIAL):
        return SlurmUnavailable(
            f"{command}: the credential was not accepted ({line}); "
            "munged must run here and on the controller, with one key and clocks that agree",
            delay_s=10.0,
        )
    if any(phrase in whole for phrase in _NO_ANSWER):
        return SlurmUnavailable(f"{command}: the controller does not answer ({line})", delay_s=5.0)
    if any(phrase in whole for phrase in _NO_QUOTA):
        return SlurmRefused(f"{command}: {line}; a quota is used up, ask for less or have it raised")
    return SlurmRefused(f"{command}: {line}")


def whole_lines(command: str, output: str) -> list[str]:
    """The lines of an output; raises OutputCut when the last one has no end."""
    if output and not output.endswith("\n"):
        raise OutputCut(f"{command}: the output ends inside a line ({output[-40:]!r})")
    return output.splitlines()


def _without_speaker(line: str, command: str) -> str:
    """`sbatch: error: Batch job …` without its first words."""
    for word in (f"{command}: ", "error: ", "fatal: "):
        line = line.strip("* ").removeprefix(word)
    return line
