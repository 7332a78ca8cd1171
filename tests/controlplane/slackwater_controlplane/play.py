"""What pods of the standing cluster have to work with: folders of this machine, and images on its nodes.

Owns the paths that manifests/samples/cluster-up names, its recordings, and the image in which this checkout's engine
runs.  Who calls: standing.py before it starts nodes, and `images` of cli.py.
"""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import soundfile

from slackwater_controlplane import oci
from slackwater_controlplane.errors import ControlPlaneError
from slackwater_controlplane.images import Images
from slackwater_controlplane.node.node import Folders
from slackwater_controlplane.node.pods import python_paths

# On a node.  /run is the node's own, so no folder of these names comes to be on the machine.
RECORDINGS, LEDGERS, PYTHON = "/run/slackwater/recordings", "/run/slackwater/ledgers", "/run/slackwater/python"
LEDGER = "podcasts"  # of the sample's job
USER = 65532  # whom the operator's pods run as
COPIES = 40  # of each recording: minutes of cleaning on two cores, in which a person can try things
QUIETER = 0.98  # each copy than the one before
# The one with torch has 6 GB, on each node anew; this one has links.
ENGINE_IMAGE = "docker.io/slackwater/engine:checkout"
HOST = "/host"  # where a pod of it mounts PYTHON


def folders(cache: Path, ledgers: Path) -> Folders:
    """What nodes see: recordings and this checkout's Python, which nobody writes, and a folder of ledgers."""
    (recordings := recordings_folder(cache)).mkdir(parents=True, exist_ok=True)
    (ledgers / LEDGER).mkdir(parents=True)
    os.chown(ledgers / LEDGER, USER, USER)
    python = tuple((Path(path), f"{PYTHON}{path}") for path in python_paths())
    return Folders(written=((ledgers, LEDGERS),), read=((recordings, RECORDINGS), *python))


def recordings_folder(cache: Path) -> Path:
    """Where the recordings lie that nodes see, of all the clusters of a cache."""
    return cache / "controlplane" / "recordings"


def write_recordings(source: Path, target: Path) -> int:
    """Write each recording (.wav) of a folder many times, each time quieter: equal content would be one item.

    Returns how many it wrote: 0 when they are there.
    """
    whole = target / "quieter"
    if whole.exists():
        return 0
    written = 0
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".making-", dir=target) as folder:
        made = Path(folder) / whole.name
        made.mkdir()
        for number, file in enumerate(sorted(source.rglob("*.wav"))):
            samples, rate = soundfile.read(file, dtype="float32")
            for copy in range(COPIES):
                quieter = samples * np.float32(QUIETER**copy)
                soundfile.write(made / f"{number:04d}-{copy:02d}.flac", quieter, rate, subtype="PCM_16")
                written += 1
        made.rename(whole)  # all of them or none
    return written


@contextmanager
def archives(images: Images) -> Iterator[dict[str, Path]]:
    """The archives that nodes load, by the name of their image: operator, worker, and the engine of this checkout."""
    with tempfile.TemporaryDirectory() as folder:
        ours = [images.ours(name) for name in ("operator", "worker")]
        yield {image.name: image.archive for image in ours} | {ENGINE_IMAGE: engine_image(Path(folder))}


def why_no_engine() -> str | None:
    """Why the engine of this checkout cannot run in a pod; None = it can."""
    hidden = [path for path in python_paths() if Path(path).parts[1] == "tmp"]
    if not hidden:
        return None
    return f"{hidden[0]} is below /tmp, and a pod has a /tmp of its own; clone the repository somewhere else"


def engine_image(folder: Path) -> Path:
    """An image of links: whatever this checkout's Python needs is found below HOST, at its own path.

    Raises ControlPlaneError for a checkout that a pod cannot see so.
    """
    if (reason := why_no_engine()) is not None:
        raise ControlPlaneError(reason)
    root = folder / "root"
    for name in ("etc", "tmp"):
        (root / name).mkdir(parents=True)
    for name in sorted({Path(path).parts[1] for path in python_paths()}):
        (root / name).symlink_to(f"{HOST}/{name}")
    image = oci.Image(
        ENGINE_IMAGE,
        entrypoint=(sys.executable, "-m", "slackwater_operator"),
        env={"HOME": "/tmp", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1"},
        user=f"{USER}:{USER}",
    )
    return oci.write_image(image, oci.tree_layer(root), folder / "engine.tar")
