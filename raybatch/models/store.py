"""A folder behind a URI: what its store lists of it, and its files on this host.

There is one copy of each file, complete or absent, whoever asks at the same time. A file grows
beside its place under a lock that ends with its owner. Behind its bytes lies a mark for each range
that is complete, so that after a kill the next process goes on from there.
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

# what a file system knows of the content: a checksum, else a time of change
_CHECKSUMS = ("ETag", "etag", "md5Hash", "crc32c", "blob_id")
_VERSIONS = (*_CHECKSUMS, "LastModified", "mtime", "updated", "created")
# what a killed process loses at most is a range for each of its threads
RANGE_BYTES = 32 << 20
RANGE_THREADS = 8
_FILE_THREADS = 4
_POLL_S = 0.1
_PROGRESS_S = 15.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredFile:
    """A file as its store lists it.

    Args:
        version: what tells its content from another one as far as the store knows, "" for nothing.
        version_key: of it in what the store says of a file; "" where it is but a time of change.
        md5: of its bytes, where the store vouches for one.
    """

    path: str
    size: int
    version: str = ""
    version_key: str = ""
    md5: bytes | None = None


class _StoppedError(Exception):
    """Another file of the same call has failed."""


def fetch_files(
    filesystem: Any,  # noqa: ANN401 - of fsspec
    files: Mapping[str, StoredFile],
    target: Path,
    *,
    what: str,
) -> int:
    """Bring files into the folder `target`, by name; return the bytes that this call has fetched.

    Files that another process is at are left to it, and taken over where it ends. `what` names them
    all in messages.

    Raises:
        ConfigError: there is no room for them, or a file has changed in the store.
        Exception: whatever the file system raises.
    """
    fetch = _Fetch(filesystem, files, target, what=what)
    missing = fetch.missing()
    if not missing:
        return 0
    try:
        target.mkdir(parents=True, exist_ok=True)
        fetch.check_space()
        with _told(fetch):
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
        """Return about how much of the files is on this host, whoever has fetched it."""
        num_bytes = 0
        for name, file in self._files.items():
            if self._is_there(name):
                num_bytes += file.size
            elif (growing := _status(self._growing(name))) is not None:
                # it has holes
                num_bytes += min(file.size, growing.st_blocks * 512)
        return num_bytes

    def check_space(self) -> None:
        free = shutil.disk_usage(self._target).free
        if self.total_bytes - self.bytes_here() > free:
            raise self.no_room(free)

    def no_room(self, free: int) -> ConfigError:
        needed = max(0, self.total_bytes - self.bytes_here())
        return ConfigError(
            f"{self.what} needs {gigabytes(needed)} more in {self._target}, and {gigabytes(free)}"
            " are free there; make room, or take a folder on a larger disk (RAYBATCH_CACHE_DIR, or "
            "--to of raybatch fetch)"
        )

    def run(self, names: Sequence[str]) -> None:
        with (
            ThreadPoolExecutor(RANGE_THREADS) as self._range_pool,
            ThreadPoolExecutor(_FILE_THREADS) as file_pool,
        ):
            try:
                # first what nobody is at
                for waits in (False, True):
                    running = {file_pool.submit(self._fetch, n, waits=waits): n for n in names}
                    # the first that fails ends all, whichever it is
                    names = [running[done] for done in as_completed(running) if not done.result()]
            except BaseException:
                self._stop.set()
                file_pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _fetch(self, name: str, *, waits: bool) -> bool:
        """Return whether the file is there now; False where another process is at it."""
        growing = self._growing(name)
        while not self._is_there(name):
            with _opened(growing) as fd:
                if not _try_lock(fd):
                    if not waits:
                        return False
                    self._pause()
                elif not _is_at(fd, growing):
                    continue  # it was finished meanwhile
                elif self._is_there(name):
                    growing.unlink()
                else:
                    self._complete(fd, name)
                    growing.replace(self._target / name)
        return True

    def _complete(self, fd: int, name: str) -> None:
        """Fetch what is missing of a file, which is locked."""
        file = self._files[name]
        num_ranges = -(-file.size // RANGE_BYTES)
        length = os.fstat(fd).st_size
        if length == file.size:
            return  # it was killed before it had its name
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
            # the file is open for as long as one of them runs
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
                f"{file.path} gave {len(data)} bytes where {stop - start} were asked for; start "
                "again"
            )
        _write(fd, data, start)
        # a mark must not outlast its range in a crash of the host
        os.fsync(fd)
        _write(fd, b"\1", file.size + index)
        with self._counting:
            self.num_fetched += len(data)

    def _check(self, fd: int, name: str) -> None:
        """Refuse bytes that are not those of the file that was listed, and drop them."""
        file = self._files[name]
        if file.md5 is not None and _md5(fd, file.size) != file.md5:
            os.ftruncate(fd, 0)
            raise UnreachableError(f"{file.path} was damaged on its way here; start again")
        self._filesystem.invalidate_cache()
        now = self._filesystem.info(file.path)
        if now["size"] != file.size or str(now.get(file.version_key, file.version)) != file.version:
            os.ftruncate(fd, 0)
            raise UnreachableError(f"{file.path} was replaced while it was fetched; start again")

    def _pause(self) -> None:
        if self._stop.wait(_POLL_S):
            raise _StoppedError

    def _is_there(self, name: str) -> bool:
        status = _status(self._target / name)
        return status is not None and status.st_size == self._files[name].size

    def _growing(self, name: str) -> Path:
        return self._target / f".{name}.partial"


@contextmanager
def _told(fetch: _Fetch) -> Iterator[None]:
    """Log how far a fetch is, where it takes long, and what it came to."""
    is_over, began, at_first = threading.Event(), time.monotonic(), fetch.bytes_here()

    def tell() -> None:
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

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
    _logger.info(
        "fetched %s of %s of %s in %.1f s",
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
    """Lock a file until it is closed, also by a kill; return whether nobody else had it."""
    import fcntl  # Windows has none

    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise ConfigError(
            f"the cache folder has a file system without locks ({error_text(error)}); set "
            "RAYBATCH_CACHE_DIR to a folder on a disk of this host"
        ) from error
    return True


def _is_at(fd: int, path: Path) -> bool:
    """Return whether an open file still has this name."""
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
    """Return a number of bytes as people read it."""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.1f} MB"


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreFolder:
    """The files of a folder that somebody wants, by name; `what` names the folder in errors."""

    uri: str
    what: str
    root: str
    filesystem: Any
    files: Mapping[str, StoredFile]

    def digest(self, names: Collection[str]) -> str:
        """Return what names the content of some of the files, as far as a listing tells."""
        digest = hashlib.sha256()
        for name in sorted(names):
            file = self.files[name]
            digest.update(f"\0{name}\0{file.size}\0{file.version}".encode())
        return digest.hexdigest()[:32]

    @property
    def cached_at(self) -> Path:
        """Return the folder of this host for these files, and no others from that place."""
        place = hashlib.sha256(f"{self.uri}\0{self.digest(self.files)}".encode()).hexdigest()
        return cache_dir() / "models" / f"{PurePosixPath(self.root).name}-{place[:16]}"

    def has(self, names: Collection[str]) -> bool:
        """Return whether some of the files are in the cache."""
        paths = ((self.cached_at / name, self.files[name]) for name in names)
        return all(path.is_file() and path.stat().st_size == file.size for path, file in paths)

    def fetch(self, names: Collection[str], target: Path | None = None) -> int:
        """Bring some of the files to a folder, by default the cached one; return bytes fetched.

        Raises:
            ConfigError: they cannot be read, or there is no room for them.
        """
        what = f"{self.what} {self.uri!r}"
        wanted = {name: self.files[name] for name in sorted(names)}
        try:
            return fetch_files(self.filesystem, wanted, target or self.cached_at, what=what)
        except ConfigError:
            raise
        except Exception as error:  # each file system has errors of its own
            raise UnreachableError(f"{what} cannot be downloaded: {error_text(error)}") from error


def local_path(uri: str) -> Path | None:
    """Return the folder of a URI of this host; None for one that lies elsewhere."""
    if not uri.startswith(("file://", "local://")):
        return None
    return Path(fsspec.core.url_to_fs(uri)[1])


def list_folder(uri: str, *, what: str, patterns: Sequence[str], needed: str = "") -> StoreFolder:
    """Ask a store for the files at `uri` whose names match; `needed` is one of them.

    Raises:
        ConfigError: the folder cannot be read, or lacks that file.
    """
    try:
        filesystem, root = fsspec.core.url_to_fs(uri)
        # what this process has seen of it may be old
        filesystem.invalidate_cache()
        listing = filesystem.ls(root, detail=True)
    except Exception as error:  # each file system has errors of its own
        raise UnreachableError(f"{what} {uri!r} cannot be read: {error_text(error)}") from error
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
        raise ConfigError(f"{what} {uri!r} has no {needed}; pass the folder that holds it")
    uri = uri.rstrip("/")
    return StoreFolder(uri=uri, what=what, root=root, filesystem=filesystem, files=wanted)


def _stored_file(entry: Mapping[str, Any]) -> StoredFile:
    key = next((key for key in _VERSIONS if entry.get(key) is not None), "")
    md5 = entry.get("md5Hash")  # of Google's; an ETag of S3 is one only without encryption
    return StoredFile(
        path=entry["name"],
        size=entry["size"],
        version=str(entry.get(key, "")),
        version_key=key if key in _CHECKSUMS else "",
        md5=None if md5 is None else base64.b64decode(md5),
    )
