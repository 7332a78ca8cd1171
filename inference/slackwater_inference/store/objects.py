"""Content-addressed objects: recordings, covers, and what was derived from them.

Owns the layout in a folder, an S3 bucket or memory, and the check that what is read is what was written.  Does
not know who refers to an object (voices does).  Every call blocks; callers on a loop make it in a thread.

Layout: `objects/<first two digits>/<digest>` and, made from it, `derived/<digest>/<name>`.
"""

import hashlib
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, unquote, urlsplit

from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError
from obstore.store import LocalStore, MemoryStore, S3Store

from slackwater_inference.store.errors import NotFound, StoreFault, StoreUnavailable

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig, S3Config

logger = logging.getLogger(__name__)

MEMORY_URL = "memory://"
_SHA256_BYTES = 32
_STATUS = re.compile(r"status code: (\d{3})")
_NO_PERMISSION = ("Permission denied", "Read-only file system", "Operation not permitted")
# A caller waits: give up long before the client library would by itself (three minutes).
_RETRY: "RetryConfig" = {"max_retries": 3, "retry_timeout": timedelta(seconds=10)}
_CLIENT: "ClientConfig" = {"timeout": timedelta(seconds=60), "connect_timeout": timedelta(seconds=5)}


class ObjectStore:
    """Bytes by their SHA-256.  Safe to use from threads and from several processes.

    url: `memory://` (gone with the process); a folder, as a path or `file://`; or
    `s3://bucket/prefix?endpoint=https://host&region=name`.  S3 credentials come from where the AWS tools take
    them: the variables AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the machine's role.
    Raises StoreFault if the place does not exist or refuses us, StoreUnavailable if it does not answer.
    """

    def __init__(self, url: str) -> None:
        self.name = url.partition("?")[0]
        with self._wrapped("open"):
            self._store = _open(url)
            # A wrong bucket or password is said at start, not at the first voice.
            next(iter(self._store.list(prefix="objects", chunk_size=1)), None)

    def put(self, data: bytes) -> str:
        """Keep `data`; returns its digest (SHA-256, hex).  Atomic; keeping the same again changes nothing."""
        digest = hashlib.sha256(data).hexdigest()
        self._write(_path(digest), data)
        return digest

    def get(self, digest: str) -> bytes:
        """The bytes with this digest.  Raises NotFound, and StoreFault if what is stored has another digest."""
        data = self._read(_path(digest))
        if data is None:
            raise NotFound(f"{self.name} has no object {digest}")
        if hashlib.sha256(data).hexdigest() != digest:
            raise StoreFault(f"the object {digest} in {self.name} is damaged; bring it back from a backup")
        return data

    def delete(self, digest: str) -> None:
        """Remove the object and everything derived from it.  One that is not there is no error."""
        with self._wrapped("delete from"):
            for listed in self._store.list(prefix=f"derived/{digest}"):
                for meta in listed:
                    self._delete(meta["path"])
            self._delete(_path(digest))

    def put_derived(self, digest: str, name: str, data: bytes) -> None:
        """Keep what was made from the object `digest` under `name`, until that object is deleted."""
        self._write(_derived_path(digest, name), hashlib.sha256(data).digest() + data)

    def get_derived(self, digest: str, name: str) -> bytes | None:
        """What `put_derived` kept, or None: not there, or damaged, so that the caller makes it anew."""
        stored = self._read(_derived_path(digest, name))
        if stored is None:
            return None
        checksum, data = stored[:_SHA256_BYTES], stored[_SHA256_BYTES:]
        if hashlib.sha256(data).digest() != checksum:
            logger.warning("derived object %s/%s in %s is damaged; it is made anew", digest, name, self.name)
            return None
        return data

    def _write(self, path: str, data: bytes) -> None:
        with self._wrapped("write"):
            self._store.put(path, data)
            if isinstance(self._store, LocalStore) and self._store.prefix is not None:
                # The client library renames a finished file into place, but does not wait for the disk.
                file = self._store.prefix / path
                for flushed in (file, file.parent):
                    descriptor = os.open(flushed, os.O_RDONLY)
                    try:
                        os.fsync(descriptor)
                    finally:
                        os.close(descriptor)

    def _read(self, path: str) -> bytes | None:
        with self._wrapped("read"):
            try:
                return bytes(self._store.get(path).bytes())
            except FileNotFoundError:
                return None

    def _delete(self, path: str) -> None:
        try:
            self._store.delete(path)
        except FileNotFoundError:
            return

    @contextmanager
    def _wrapped(self, verb: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise StoreFault(f"cannot {verb} {self.name}: there is no such bucket or folder") from error
        except (PermissionDeniedError, UnauthenticatedError, PermissionError) as error:
            raise StoreFault(f"cannot {verb} {self.name}: no permission; check its owner or the credentials") from error
        except (BaseError, OSError, ValueError) as error:
            raise self._other(verb, error) from error

    def _other(self, verb: str, error: Exception) -> StoreFault | StoreUnavailable:
        # The client library has one class for everything else; its message holds the server's or system's own words.
        words = str(error)
        status = _STATUS.search(words)
        if status and status[1] == "404":
            return StoreFault(f"cannot {verb} {self.name}: there is no such bucket")
        if (status and status[1] in ("401", "403")) or any(sign in words for sign in _NO_PERMISSION):
            return StoreFault(f"cannot {verb} {self.name}: no permission; check its owner or the credentials")
        if "No space left on device" in words:
            return StoreUnavailable(f"cannot {verb} {self.name}: the disk is full", retry_after_s=60.0)
        if isinstance(error, ValueError):
            return StoreFault(f"cannot {verb} {self.name}: {_short(words)}")
        return StoreUnavailable(f"cannot {verb} {self.name} now: {_short(words)}", retry_after_s=5.0)


def _open(url: str) -> LocalStore | MemoryStore | S3Store:
    parts = urlsplit(url)
    if url == MEMORY_URL:
        return MemoryStore()
    if parts.scheme == "s3":
        return _open_s3(parts.netloc, parts.path.strip("/"), dict(parse_qsl(parts.query, keep_blank_values=True)))
    if parts.scheme not in ("", "file"):
        raise StoreFault(f"objects must be a folder, file://, s3:// or memory://, got {parts.scheme}://")
    folder = Path(unquote(parts.path)) if parts.scheme else Path(url)
    if folder.exists() and not folder.is_dir():
        raise StoreFault(f"objects must be a folder, and {folder} is a file")
    return LocalStore(folder.absolute(), mkdir=True)


def _open_s3(bucket: str, prefix: str, options: dict[str, str]) -> S3Store:
    unknown = options.keys() - {"endpoint", "region"}
    if unknown or not bucket:
        raise StoreFault(
            f"an S3 address is s3://bucket/prefix?endpoint=URL&region=NAME, got {', '.join(unknown) or 'no bucket'}"
        )
    config: S3Config = {}
    client: ClientConfig = {**_CLIENT}
    if "endpoint" in options:
        config["endpoint"] = options["endpoint"]
        client["allow_http"] = options["endpoint"].startswith("http://")  # the operator wrote it, so it is wanted
    if "region" in options:
        config["region"] = options["region"]
    return S3Store(bucket, prefix=prefix or None, config=config, client_options=client, retry_config=_RETRY)


def _path(digest: str) -> str:
    return f"objects/{digest[:2]}/{digest}"


def _derived_path(digest: str, name: str) -> str:
    return f"derived/{digest}/{name}"


def _short(words: str) -> str:
    lines = words.strip().splitlines()
    return lines[0][:200] if lines else "no reason given"
