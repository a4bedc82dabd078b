"""Folders behind a URI: listing at the store, and cached files on this host.

Files in the cache are complete or absent, also with concurrent processes. A file is fetched into a
temporary name under a lock that ends with its owner. Marks after its bytes record complete ranges,
so that another process can resume after a kill.
"""

import base64
import errno
import hashlib
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec

from raybatch.config import cache_dir
from raybatch.errors import ConfigError, UnreachableError, error_text

_logger = logging.getLogger(__name__)

# content versions in file listings: checksums; otherwise the modification time is used
_CHECKSUMS = ("ETag", "etag", "md5Hash", "crc32c", "blob_id")
_VERSIONS = (*_CHECKSUMS, "LastModified", "mtime", "updated", "created")
# bytes of a range; a killed process loses at most one per thread
RANGE_BYTES = 32 << 20
RANGE_THREADS = 8
_FILE_THREADS = 4
_POLL_S = 0.1
_PROGRESS_S = 15.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredFile:
    """A file as its store lists it.

    Args:
        version: version of the content, such as an ETag or a modification time; "" if unknown.
        version_key: key of the version in the store's listing; "" for a modification time.
        md5: MD5 digest of its bytes, if the store guarantees one.
    """

    path: str
    size: int
    version: str = ""
    version_key: str = ""
    md5: bytes | None = None


class _StoppedError(Exception):
    """Raised after another file of the same call failed."""


def fetch_files(
    filesystem: Any,  # noqa: ANN401 - of fsspec
    files: Mapping[str, StoredFile],
    target: Path,
    *,
    what: str,
) -> int:
    """Fetch the missing ones of `files` into the folder `target`; return the bytes fetched now.

    The keys are the names of the files there. Files that another process is fetching are left to
    it; if it ends early, this call fetches them. `what` names the files in messages.

    Raises:
        ConfigError: too little disk space, or a file changed in the store.
        Exception: errors of the file system.
    """
    fetch = _Fetch(filesystem, files, target, what=what)
    missing = fetch.missing()
    if not missing:
        return 0
    try:
        target.mkdir(parents=True, exist_ok=True)
        fetch.check_space()
        with _logged(fetch):
            fetch.run(missing)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise fetch.no_room(shutil.disk_usage(target).free) from error
    return fetch.num_fetched


class _Fetch:
    """One call of `fetch_files`."""

    def __init__(
        self,
        filesystem: Any,  # noqa: ANN401
        files: Mapping[str, StoredFile],
        target: Path,
        *,
        what: str,
    ) -> None:
        self._filesystem, self._files, self._target = filesystem, files, target
        self._stop, self._counting = threading.Event(), threading.Lock()
        self.what, self.num_fetched = what, 0
        self.total_bytes = sum(file.size for file in files.values())

    def missing(self) -> list[str]:
        return [name for name in self._files if not self._is_there(name)]

    def bytes_here(self) -> int:
        """Return the approximate bytes of the files already here, fetched by any process."""
        num_bytes = 0
        for name, file in self._files.items():
            if self._is_there(name):
                num_bytes += file.size
            elif (growing := _status(self._growing(name))) is not None:
                # sparse file
                num_bytes += min(file.size, growing.st_blocks * 512)
        return num_bytes

    def check_space(self) -> None:
        free = shutil.disk_usage(self._target).free
        if self.total_bytes - self.bytes_here() > free:
            raise self.no_room(free)

    def no_room(self, free: int) -> ConfigError:
        needed = max(0, self.total_bytes - self.bytes_here())
        return ConfigError(
            f"{self.what} needs {gigabytes(needed)} more in {self._target}, but only "
            f"{gigabytes(free)} are free; free disk space, or use a larger disk "
            "(RAYBATCH_CACHE_DIR, or --to of raybatch fetch)"
        )

    def run(self, names: Sequence[str]) -> None:
        with (
            ThreadPoolExecutor(RANGE_THREADS) as self._range_pool,
            ThreadPoolExecutor(_FILE_THREADS) as file_pool,
        ):
            try:
                # first the files that no other process is fetching
                for waits in (False, True):
                    running = {file_pool.submit(self._fetch, n, waits=waits): n for n in names}
                    # the first failure ends all
                    names = [running[done] for done in as_completed(running) if not done.result()]
            except BaseException:
                self._stop.set()
                file_pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _fetch(self, name: str, *, waits: bool) -> bool:
        """Return whether the file is complete now; False if another process is fetching it."""
        growing = self._growing(name)
        while not self._is_there(name):
            with _opened(growing) as fd:
                if not _try_lock(fd):
                    if not waits:
                        return False
                    self._pause()
                elif not _is_at(fd, growing):
                    continue  # finished by another process meanwhile
                elif self._is_there(name):
                    growing.unlink()
                else:
                    self._complete(fd, name)
                    growing.replace(self._target / name)
        return True

    def _complete(self, fd: int, name: str) -> None:
        """Fetch the missing ranges of a locked file."""
        file = self._files[name]
        num_ranges = -(-file.size // RANGE_BYTES)
        length = os.fstat(fd).st_size
        if length == file.size:
            return  # complete, but a kill prevented its rename
        if length != file.size + num_ranges:
            os.ftruncate(fd, 0)
            os.ftruncate(fd, file.size + num_ranges)
        marks = os.pread(fd, num_ranges, file.size)
        todo = [index for index, mark in enumerate(marks) if not mark]
        self._in_parallel(partial(self._fetch_range, fd, file), todo)
        self._check(fd, name)
        os.ftruncate(fd, file.size)
        os.fsync(fd)

    def _in_parallel(self, work: Callable[[int], None], todo: Iterable[int]) -> None:
        futures: list[Future[None]] = []
        try:
            futures.extend(self._range_pool.submit(work, index) for index in todo)
            for future in futures:
                future.result()
        finally:
            # keep the file open while any of them runs
            for future in futures:
                future.cancel()
            wait(futures)

    def _fetch_range(self, fd: int, file: StoredFile, index: int) -> None:
        if self._stop.is_set():
            raise _StoppedError
        start = index * RANGE_BYTES
        stop = min(start + RANGE_BYTES, file.size)
        data = self._filesystem.cat_file(file.path, start=start, end=stop)
        if len(data) != stop - start:
            raise UnreachableError(
                f"{file.path} returned {len(data)} bytes instead of {stop - start}; try again"
            )
        _write(fd, data, start)
        # a mark must not survive a host crash without its range
        os.fsync(fd)
        _write(fd, b"\1", file.size + index)
        with self._counting:
            self.num_fetched += len(data)

    def _check(self, fd: int, name: str) -> None:
        """Raise and discard the bytes if they differ from the listed file."""
        file = self._files[name]
        if file.md5 is not None and _md5(fd, file.size) != file.md5:
            os.ftruncate(fd, 0)
            raise UnreachableError(f"{file.path} was damaged in transfer; try again")
        self._filesystem.invalidate_cache()
        now = self._filesystem.info(file.path)
        if now["size"] != file.size or str(now.get(file.version_key, file.version)) != file.version:
            os.ftruncate(fd, 0)
            raise UnreachableError(f"{file.path} was replaced during the fetch; try again")

    def _pause(self) -> None:
        if self._stop.wait(_POLL_S):
            raise _StoppedError

    def _is_there(self, name: str) -> bool:
        status = _status(self._target / name)
        return status is not None and status.st_size == self._files[name].size

    def _growing(self, name: str) -> Path:
        return self._target / f".{name}.partial"


@contextmanager
def _logged(fetch: _Fetch) -> Iterator[None]:
    """Log the progress of a long fetch, and its result."""
    is_over, began, at_first = threading.Event(), time.monotonic(), fetch.bytes_here()

    def log_progress() -> None:
        while not is_over.wait(_PROGRESS_S):
            here = fetch.bytes_here()
            speed = (here - at_first) / (time.monotonic() - began)
            _logger.info(
                "fetching %s: %s of %s, %.0f MB/s",
                fetch.what,
                gigabytes(here),
                gigabytes(fetch.total_bytes),
                speed / 1e6,
            )

    thread = threading.Thread(target=log_progress, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
    _logger.info(
        "fetched %s of %s for %s in %.1f s",
        gigabytes(fetch.num_fetched),
        gigabytes(fetch.total_bytes),
        fetch.what,
        time.monotonic() - began,
    )


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        yield fd
    finally:
        os.close(fd)


def _try_lock(fd: int) -> bool:
    """Try to lock a file until it is closed, also by a kill; False if another process has it."""
    import fcntl  # Windows has none

    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise ConfigError(
            f"the file system of the cache folder does not support locks ({error_text(error)}); "
            "set RAYBATCH_CACHE_DIR to a folder on a local disk"
        ) from error
    return True


def _is_at(fd: int, path: Path) -> bool:
    """Return whether an open file is still at this path."""
    status = _status(path)
    return status is not None and os.path.samestat(status, os.fstat(fd))


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _write(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        num_written = os.pwrite(fd, view, offset)
        view, offset = view[num_written:], offset + num_written


def _md5(fd: int, size: int) -> bytes:
    digest = hashlib.md5(usedforsecurity=False)
    for start in range(0, size, 1 << 20):
        digest.update(os.pread(fd, min(1 << 20, size - start), start))
    return digest.digest()


def gigabytes(num_bytes: int) -> str:
    """Return a number of bytes as a text in MB, or in GB from 100 MB on."""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.1f} MB"


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreFolder:
    """A folder of a store and its listed files, by name; `what` names the folder in messages."""

    uri: str
    what: str
    root: str
    filesystem: Any
    files: Mapping[str, StoredFile]

    def digest(self, names: Collection[str]) -> str:
        """Return a digest of names, sizes and versions of the files `names`, as listed."""
        digest = hashlib.sha256()
        for name in sorted(names):
            file = self.files[name]
            digest.update(f"\0{name}\0{file.size}\0{file.version}".encode())
        return digest.hexdigest()[:32]

    @property
    def cached_at(self) -> Path:
        """Return the local cache folder for these versions of the files."""
        place = hashlib.sha256(f"{self.uri}\0{self.digest(self.files)}".encode()).hexdigest()
        return cache_dir() / "models" / f"{PurePosixPath(self.root).name}-{place[:16]}"

    def has(self, names: Collection[str]) -> bool:
        """Return whether all of `names` are in the cache."""
        paths = ((self.cached_at / name, self.files[name]) for name in names)
        return all(path.is_file() and path.stat().st_size == file.size for path, file in paths)

    def fetch(self, names: Collection[str], target: Path | None = None) -> int:
        """Fetch some of the files to a folder, by default the cache; return the fetched bytes.

        Raises:
            ConfigError: reading failed, or too little disk space.
        """
        what = f"{self.what} {self.uri!r}"
        wanted = {name: self.files[name] for name in sorted(names)}
        try:
            return fetch_files(self.filesystem, wanted, target or self.cached_at, what=what)
        except ConfigError:
            raise
        except Exception as error:  # file systems raise various errors
            raise UnreachableError(f"could not download {what}: {error_text(error)}") from error


def local_path(uri: str) -> Path | None:
    """Return the path that a `file://` URI names; None for another URI."""
    if not uri.startswith(("file://", "local://")):
        return None
    return Path(fsspec.core.url_to_fs(uri)[1])


def list_folder(uri: str, *, what: str, patterns: Sequence[str], needed: str = "") -> StoreFolder:
    """Return the listing of the files at `uri` whose names match one of `patterns`.

    The file `needed` must be among them; "": none must be. `what` names the folder in messages.

    Raises:
        ConfigError: the folder is not readable, or lacks that file.
    """
    try:
        filesystem, root = fsspec.core.url_to_fs(uri)
        # an earlier listing of this process may be stale
        filesystem.invalidate_cache()
        listing = filesystem.ls(root, detail=True)
    except Exception as error:  # file systems raise various errors
        raise UnreachableError(f"could not read {what} {uri!r}: {error_text(error)}") from error
    files = {
        PurePosixPath(entry["name"]).name: _stored_file(entry)
        for entry in listing
        if entry["type"] == "file"
    }
    wanted = {
        name: file
        for name, file in files.items()
        if any(fnmatchcase(name, pattern) for pattern in patterns)
    }
    if needed and needed not in wanted:
        raise ConfigError(f"{what} {uri!r} has no {needed}; pass the folder that contains it")
    uri = uri.rstrip("/")
    return StoreFolder(uri=uri, what=what, root=root, filesystem=filesystem, files=wanted)


def _stored_file(entry: Mapping[str, Any]) -> StoredFile:
    key = next((key for key in _VERSIONS if entry.get(key) is not None), "")
    md5 = entry.get("md5Hash")  # Google Cloud Storage; an S3 ETag is an MD5 only without encryption
    return StoredFile(
        path=entry["name"],
        size=entry["size"],
        version=str(entry.get(key, "")),
        version_key=key if key in _CHECKSUMS else "",
        md5=None if md5 is None else base64.b64decode(md5),
    )
