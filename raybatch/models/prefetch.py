"""Fetches a model to this host, or to a folder such as a volume, before an engine needs it."""

import os
import re
import socket
import tempfile
import time
import uuid
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from raybatch.errors import ConfigError
from raybatch.models.checkpoint import weight_names
from raybatch.models.source import (
    cached_bytes,
    fetch_from_hub,
    is_hub_model,
    is_local_model,
    list_model,
    text_names,
)
from raybatch.models.store import StoreFolder, gigabytes

# file that records the content of a user's folder
_ORIGIN = ".raybatch-fetch"
# a URI that was parsed as a path, which drops its second slash
_URI = re.compile(r"[a-z][a-z0-9+.-]+:/")


@dataclass(frozen=True, kw_only=True, slots=True)
class Prefetched:
    """Where a fetched model is on a host, its size, and what this fetch added.

    `num_bytes` is the size of the model; `fetched_bytes` were fetched now, in `seconds`.
    """

    source: str
    host: str
    folder: Path
    num_files: int
    num_bytes: int
    fetched_bytes: int
    seconds: float

    def __str__(self) -> str:
        took = f"fetched {gigabytes(self.fetched_bytes)} in {self.seconds:.1f} s"
        return (
            f"{self.source} is in {self.folder} on {self.host}: {self.num_files} files, "
            f"{gigabytes(self.num_bytes)}; {took if self.fetched_bytes else 'already present'}"
        )


def prefetch(source: str, *, with_weights: bool = True, to: Path | None = None) -> Prefetched:
    """Fetch the missing files of a remote model, into the folder `to` or, if None, the cache.

    Raises:
        ConfigError: the model is local or not found, there is too little disk space, or the folder
            is not writable or has other files.
    """
    if is_local_model(source):
        way_out = "pass a hub id or a URI such as s3://bucket/model"
        if source != "demo" and not Path(source).expanduser().exists():
            raise ConfigError(f"model folder {source!r} does not exist; {way_out}")
        what = "comes with raybatch" if source == "demo" else "is a folder of this host"
        raise ConfigError(f"model {source!r} {what}, so there is nothing to fetch; {way_out}")
    if to is not None:
        _make(to)
    began = time.monotonic()
    if is_hub_model(source):
        before = cached_bytes(source) if to is None else _bytes_in(to)
        folder = fetch_from_hub(source, with_weights=with_weights, to=to)
        fetched = (cached_bytes(source) if to is None else _bytes_in(folder)) - before
    else:
        stored = list_model(source)
        folder = to or stored.cached_at
        texts = text_names(stored)
        if to is not None:
            _claim(to, stored, texts)
        fetched = stored.fetch(texts, folder)
        if with_weights:
            fetched += stored.fetch(weight_names(folder, stored.files, where=source), folder)
    return Prefetched(
        source=source,
        host=socket.gethostname(),
        folder=folder,
        num_files=len(_files_in(folder)),
        num_bytes=_bytes_in(folder),
        fetched_bytes=fetched,
        seconds=time.monotonic() - began,
    )


def _make(folder: Path) -> None:
    if _URI.match(str(folder)):
        raise ConfigError(f"--to {folder} is a URI; pass a local folder, such as a mounted volume")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # an existing folder may not be writable
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"--to {folder} is not writable: {error.strerror}") from error


def _claim(folder: Path, stored: StoreFolder, names: Collection[str]) -> None:
    """Record the content of a folder; raises ConfigError if it has other files of these names."""
    origin, digest = folder / _ORIGIN, stored.digest(stored.files)
    # a concurrent process writes its record before its files
    has_files = any((folder / name).exists() for name in names)
    found = origin.read_text(encoding="utf-8") if origin.exists() else None
    if found == digest:
        return
    if found is not None or has_files:
        raise ConfigError(
            f"the folder {str(folder)!r} has files that differ from {stored.uri!r}; choose an "
            "empty folder, or empty it"
        )
    if not _created(origin, digest):  # another process was faster
        _claim(folder, stored, names)


def _created(path: Path, text: str) -> bool:
    """Create a file with its text atomically; False if it exists."""
    staged = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    staged.write_text(text, encoding="utf-8")
    try:
        os.link(staged, path)
    except FileExistsError:
        return False
    except OSError:  # without hard links concurrent creation is not detected
        staged.replace(path)
    finally:
        staged.unlink(missing_ok=True)
    return True


def _files_in(folder: Path) -> list[Path]:
    files = folder.iterdir() if folder.is_dir() else ()
    return [path for path in files if path.is_file() and not path.name.startswith(".")]


def _bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in _files_in(folder))
