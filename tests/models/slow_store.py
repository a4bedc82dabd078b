"""A store that opens files slowly and logs the ranges that it served, `slow://FOLDER`.

Its files are in a local folder.
"""

import json
import os
import time
from pathlib import Path

import fsspec
from fsspec.implementations.local import LocalFileSystem

from raybatch.models import source, store

OPEN_S = 0.05
RANGE_BYTES = 64 << 10


class SlowFileSystem(LocalFileSystem):
    """Lists and reads a folder; logs each served range as a line of a file next to it."""

    protocol = "slow"

    @classmethod
    def _strip_protocol(cls, path):
        return "/" + str(path).removeprefix("slow://").strip("/")

    def ls(self, path, detail=True, **kwargs):
        entries = super().ls(self._strip_protocol(path), detail=True, **kwargs)
        return entries if detail else [entry["name"] for entry in entries]

    def cat_file(self, path, start=None, end=None, **kwargs):
        time.sleep(OPEN_S)
        with Path(path).open("rb") as file:
            file.seek(start)
            data = file.read(end - start)
        given(Path(path).parent, [os.getpid(), Path(path).name, start, len(data)])
        return data


def given(folder: Path, fact: list[object]) -> None:
    """Log a range in one write, which a kill does not cut."""
    log = folder.with_suffix(".log")
    fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, json.dumps(fact).encode() + b"\n")
    os.close(fd)


def read_log(folder: Path) -> list[tuple[int, str, int, int]]:
    """Return process, file, start and length of all served ranges."""
    log = folder.with_suffix(".log")
    lines = log.read_text().splitlines() if log.exists() else []
    return [tuple(json.loads(line)) for line in lines]


fsspec.register_implementation("slow", SlowFileSystem, clobber=True)


def fetch_model(uri: str, cache: str) -> None:
    """Fetch a model in ranges of 64 KiB, in a separate process."""
    os.environ["RAYBATCH_CACHE_DIR"] = cache
    store.RANGE_BYTES = RANGE_BYTES
    source.resolve_model(uri)
