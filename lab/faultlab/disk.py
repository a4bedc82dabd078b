"""A small separate file system that can be filled or made read-only; needs root."""

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SIZE_BYTES = 32 << 20
_CHUNK_BYTES = 64 << 10
_NUM_TRIES = 200


class SmallDisk:
    """A mounted tmpfs.

    Args:
        folder: where it is mounted.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def fill(self) -> None:
        """Take all the space that is left."""
        with open(self._filler, "ab", buffering=0) as file:
            size = _CHUNK_BYTES
            while size:
                try:
                    file.write(b"\0" * size)
                except OSError:
                    size //= 2

    def free(self) -> None:
        """Give the space back."""
        self._filler.unlink()

    def make_read_only(self) -> None:
        """Refuse every write from now on."""
        # it is busy while a process writes a file
        for _ in range(_NUM_TRIES):
            if not _mount("-o", "remount,ro", str(self._folder)):
                return
            time.sleep(0.02)
        raise OSError(f"{self._folder} cannot be made read-only")

    def make_writable(self) -> None:
        """Take writes again."""
        _mount("-o", f"remount,rw,size={_SIZE_BYTES}", str(self._folder))

    @property
    def _filler(self) -> Path:
        return self._folder / "filler"


def can_mount(folder: Path) -> bool:
    """Return whether a file system can be mounted here."""
    if os.geteuid():
        return False
    try:
        with small_disk(folder):
            return True
    except OSError:
        return False


@contextmanager
def small_disk(folder: Path) -> Iterator[SmallDisk]:
    """Mount a file system of 32 MiB.

    Raises:
        OSError: it cannot be mounted.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if _mount("-t", "tmpfs", "-o", f"size={_SIZE_BYTES}", "tmpfs", str(folder)):
        raise OSError(f"{folder} cannot be mounted")
    try:
        yield SmallDisk(folder)
    finally:
        # lazy: a process that was ended may still hold a file
        subprocess.run(["umount", "-l", str(folder)], capture_output=True, check=False)


def _mount(*arguments: str) -> int:
    return subprocess.run(["mount", *arguments], capture_output=True, check=False).returncode
