"""Where a ledger's names live.

Owns the one primitive everything rests on, "create this name if it is absent, with its whole content", and its
form on a POSIX folder.  `Store` is what the rest of the ledger may use, so that an object store can stand behind it.
"""

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Protocol

from slackwater_workers.core import PermanentError, StorageFull, TemporaryError

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_READ_ONLY = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})
_TEMPORARY_FOLDER = "tmp"
_STRAY_AGE_S = 3600.0


class PartFile(Protocol):
    """A name that grows at its end.  One writer, ever."""

    def write(self, piece: bytes) -> None:
        """Append `piece`; not durable before `sync`."""

    def sync(self) -> None:
        """Return when all that was written is on disk."""

    def close(self) -> None: ...


class Store(Protocol):
    """Names with bytes.  A name is a relative path with forward slashes.

    Every method raises StorageFull, PermanentError (not writable) or TemporaryError (the storage failed).
    """

    def create(self, name: str, content: bytes) -> bool:
        """Make `name` with its whole content, durably.  False when the name exists: somebody was first."""

    def read(self, name: str) -> bytes | None:
        """The content, or None when there is no such name."""

    def exists(self, name: str) -> bool: ...

    def names(self, folder: str) -> list[str]:
        """Last parts of the names directly under `folder`, sorted; empty when there are none."""

    def touch(self, name: str) -> float:
        """Set the name's time to the store's now, and return it (seconds; the store's clock, not ours)."""

    def modified_s(self, name: str) -> float | None:
        """When the name was made or touched, by the store's clock; None when there is no such name."""

    def open(self, name: str) -> BinaryIO | None:
        """The content as a seekable file; None when there is no such name."""

    def create_part(self, name: str) -> PartFile | None:
        """Make an empty name that can grow; None when the name exists."""

    def location(self, name: str) -> str:
        """Where a person or another process finds the name."""


class PosixStore:
    """A ledger in a folder, shared by every process that mounts it.

    Needs hard links and atomic rename within the folder: ext4, xfs, btrfs, tmpfs, NFS and the like.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._start = f"{root}/"  # joining strings: whoever follows a job looks at hundreds of names a second

    def create(self, name: str, content: bytes) -> bool:
        final = self._path(name)
        if final.exists():
            return False
        with self._errors():
            self._make_folder(final.parent)
            temporary = self._temporary()
            try:
                with temporary.open("xb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
                try:
                    os.link(temporary, final)
                except FileExistsError:
                    # On NFS a repeated request can report "exists" for our own success; two links tell.
                    return os.stat(temporary).st_nlink == 2
                self._sync_folder(final.parent)
            finally:
                temporary.unlink(missing_ok=True)
        return True

    def read(self, name: str) -> bytes | None:
        with self._errors():
            try:
                return self._path(name).read_bytes()
            except FileNotFoundError:
                return None

    def exists(self, name: str) -> bool:
        return self.modified_s(name) is not None

    def names(self, folder: str) -> list[str]:
        with self._errors():
            try:
                return sorted(os.listdir(self._start + folder))
            except FileNotFoundError:
                return []

    def touch(self, name: str) -> float:
        path = self._path(name)
        with self._errors():
            os.utime(path)  # without times: the file server's clock where there is one
            return os.stat(path).st_mtime

    def modified_s(self, name: str) -> float | None:
        with self._errors():
            try:
                return os.stat(self._start + name).st_mtime
            except FileNotFoundError:
                return None

    def open(self, name: str) -> BinaryIO | None:
        with self._errors():
            try:
                return open(self._start + name, "rb")
            except FileNotFoundError:
                return None

    def create_part(self, name: str) -> PartFile | None:
        path = self._path(name)
        with self._errors():
            self._make_folder(path.parent)
            try:
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644)
            except FileExistsError:
                return None
            self._sync_folder(path.parent)
        return PosixPart(self, descriptor)

    def location(self, name: str) -> str:
        return str(self._path(name))

    def prepare(self) -> None:
        """Make the folder and try one write, so that a read-only or full disk shows before any work."""
        with self._errors():
            self._make_folder(self.root / _TEMPORARY_FOLDER)
            probe = self._temporary()
            try:
                with probe.open("xb") as file:
                    file.write(b"\0" * 4096)
                    file.flush()
                    os.fsync(file.fileno())
                now_s = os.stat(probe).st_mtime
            finally:
                probe.unlink(missing_ok=True)
            self._sweep(now_s)

    def _sweep(self, now_s: float) -> None:
        """Remove what writers killed between write and link left behind, long after any live writer's time."""
        for stray in (self.root / _TEMPORARY_FOLDER).iterdir():
            try:
                if now_s - stray.stat().st_mtime > _STRAY_AGE_S:
                    stray.unlink()
            except FileNotFoundError:  # another worker swept it
                continue

    def _path(self, name: str) -> Path:
        return self.root / name

    def _temporary(self) -> Path:
        return self.root / _TEMPORARY_FOLDER / secrets.token_hex(12)

    def _make_folder(self, folder: Path) -> None:
        if folder.is_dir():
            return
        self._make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        self._sync_folder(folder.parent)

    @staticmethod
    def _sync_folder(folder: Path) -> None:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn the system's errors into the room's."""
        try:
            yield
        except FileNotFoundError as error:
            raise PermanentError(f"{error.filename} is gone; was the ledger {self.root} deleted?") from error
        except OSError as error:
            raise storage_error(error, str(self.root)) from error


class PosixPart:
    """A part file of a `PosixStore`."""

    def __init__(self, store: PosixStore, descriptor: int) -> None:
        self._store = store
        self._descriptor = descriptor

    def write(self, piece: bytes) -> None:
        with self._store._errors():
            view = memoryview(piece)
            while view:
                view = view[os.write(self._descriptor, view) :]

    def sync(self) -> None:
        with self._store._errors():
            os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


def storage_error(error: OSError, place: str) -> PermanentError | TemporaryError:
    """The room's error for a failed system call on `place`."""
    if error.errno in _FULL:
        return StorageFull(f"no space left on {place}; free some and start again, nothing is lost")
    if error.errno in _READ_ONLY:
        return PermanentError(f"cannot write in {place}: {error.strerror}; check its permissions and mount")
    if error.errno == errno.ENOTDIR or isinstance(error, FileExistsError):
        return PermanentError(f"{place} is in the way: it must be a folder or not exist yet")
    return TemporaryError(f"the storage of {place} failed: {error}")


def is_regular(path: Path) -> bool:
    """Whether `path` ends, through links, at a regular file.  Raises OSError when it ends nowhere."""
    return stat.S_ISREG(os.stat(path).st_mode)
