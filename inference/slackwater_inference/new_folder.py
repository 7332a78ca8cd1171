"""A folder that appears under its name whole, or not at all.

Owns the hidden folder that is filled in its place, its lock, and what is left of a run that was killed.  Called by
`quantize`.
"""

import fcntl
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slackwater_inference.core import PermanentError

_PIECE_BYTES = 16 * 1024**2


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder to fill; it gets the name `out` when the block ends, and is removed where that ends with an error.

    What a killed run left is removed first.  Raises PermanentError where `out` exists or another process fills it.
    """
    if not out.parent.is_dir():
        raise PermanentError(f"{out.parent} must be a folder, to make {out.name} in")
    begun = out.with_name(f".{out.name}.begun")
    with _locked(out.with_name(f".{out.name}.lock"), out):
        if out.is_symlink() or out.exists():
            raise PermanentError(f"{out} exists; choose another name, or remove it first")
        if begun.exists():
            shutil.rmtree(begun)
        begun.mkdir()
        try:
            yield begun
            _sync(begun)
            begun.rename(out)
        except BaseException:
            shutil.rmtree(begun, ignore_errors=True)
            raise
        _sync(out.parent)


@contextmanager
def _locked(path: Path, out: Path) -> Iterator[None]:
    """Alone until the block ends.  A file and open for writing, since NFS locks neither folders nor readers."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise PermanentError(f"another process is writing {out}; wait for it, or choose another name") from error
        if os.fstat(descriptor).st_nlink == 0:  # it ended, and removed the file, between our opening and locking it
            raise PermanentError(f"another process was writing {out} until now; look at it, or try again")
        try:
            yield
        finally:
            path.unlink()
    finally:
        os.close(descriptor)


def require_room(folder: Path, size_bytes: int, out: Path) -> None:
    """Raise PermanentError where the disk of `folder` has no room for what `out` will take."""
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < size_bytes:
        raise PermanentError(
            f"{out} takes {math.ceil(size_bytes / 1e6):,} MB and the disk has {free_bytes // 10**6:,} MB free; "
            "make room first"
        )


def copy_file(source: Path, target: Path) -> None:
    """The same bytes under a new name, on the disk when this returns; a link's file is copied, not the link."""
    with source.open("rb") as read, target.open("xb") as write:
        shutil.copyfileobj(read, write, _PIECE_BYTES)
        write.flush()
        os.fsync(write.fileno())


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
