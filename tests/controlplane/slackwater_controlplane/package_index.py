"""How a build reaches this machine's package index: pip's settings as a file, and the certificate bundle.

Owns the reading of both.  An index may want a password in its address: what comes from here is written to files that
only root reads and that go with the build.
"""

import ast
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

BUNDLE = "/etc/ssl/certs/ca-certificates.crt"  # where Debian and the public slim images have theirs
_TAKEN = ("index-url", "extra-index-url", "trusted-host", "proxy", "retries", "timeout", "default-timeout")


def settings(environ: Mapping[str, str]) -> tuple[Path | None, str]:
    """The certificate bundle to mount at `BUNDLE`, if this machine has one, and the text of a `pip.conf`."""
    said = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], env=dict(environ), capture_output=True, text=True
    )
    found = pip_settings(said.stdout)
    bundle = next((path for name in (found.get("cert"), BUNDLE) if name and (path := Path(name)).is_file()), None)
    lines = [f"{name.removeprefix('default-')} = {found[name]}" for name in _TAKEN if name in found]
    if bundle is not None:
        lines.append(f"cert = {BUNDLE}")
    return bundle, "\n".join(["[global]", *lines, ""])


def pip_settings(listed: str) -> dict[str, str]:
    """Settings by name, from the lines of `pip config list`; the environment's come last and win."""
    found: dict[str, str] = {}
    for line in sorted(listed.splitlines(), key=lambda line: line.startswith(":env:")):
        name, sign, value = line.partition("=")
        if sign:
            # A value over several lines is several values; a continuation of a setting is indented.
            found[name.rpartition(".")[2]] = str(ast.literal_eval(value)).replace("\n", "\n    ")
    return found
