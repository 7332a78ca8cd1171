"""What an OCI archive holds: its configuration and its files, for tests that look into an image without a node.

Owns the reading; needs no container engine.
"""

import json
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

_GONE = ".wh."  # before the name of what a layer takes away


def config(archive: Path) -> dict[str, Any]:
    """The image's configuration: `config` has User, Entrypoint and Env."""
    with tarfile.open(archive) as tar:
        return dict(_blob(tar, _manifest(tar)["config"]["digest"]))


def unpack(archive: Path, folder: Path) -> None:
    """Write the image's root into an empty folder, as root.  Devices are left out."""
    with tarfile.open(archive) as tar:
        for layer in _layers(tar):
            for member in layer:
                path = folder / member.name
                if path.name.startswith(_GONE):
                    gone = path.with_name(path.name.removeprefix(_GONE))
                    shutil.rmtree(gone) if gone.is_dir() and not gone.is_symlink() else gone.unlink(missing_ok=True)
                elif not member.isdev():
                    if path.is_symlink():
                        path.unlink()  # what a later layer has in its place must not be written through it
                    layer.extract(member, folder, numeric_owner=True, filter="fully_trusted")


def _layers(tar: tarfile.TarFile) -> Iterator[tarfile.TarFile]:
    for layer in _manifest(tar)["layers"]:
        # As a stream: an engine's layer is larger than a test may have in memory.
        with tarfile.open(fileobj=_open(tar, layer["digest"]), mode="r|*") as opened:
            yield opened


def _manifest(tar: tarfile.TarFile) -> dict[str, Any]:
    index = tar.extractfile("index.json")
    assert index is not None
    [manifest] = json.load(index)["manifests"]
    return dict(_blob(tar, manifest["digest"]))


def _blob(tar: tarfile.TarFile, digest: str) -> Any:
    return json.load(_open(tar, digest))


def _open(tar: tarfile.TarFile, digest: str) -> IO[bytes]:
    file = tar.extractfile(f"blobs/{digest.replace(':', '/')}")
    assert file is not None
    return file
