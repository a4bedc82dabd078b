"""Compiled libraries on disk: what tells them apart, and a folder that is this user's alone.

To load a library is to run it, so a folder that others can write into is not used.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

_CPU_INFO = Path("/proc/cpuinfo")
# what tells processors apart there, on x86 and on ARM; others change from core to core
_CPU_FIELDS = frozenset(
    {
        *("vendor_id", "cpu family", "model", "model name", "stepping", "flags"),
        *("Features", "CPU implementer", "CPU architecture", "CPU variant", "CPU part"),
    }
)
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH

_logger = logging.getLogger(__name__)


def library_name(command: Iterable[str], files: Iterable[Path]) -> str | None:
    """Return the name of what a command makes here of files: a hash of all that decides about it.

    None where the host does not tell its processor: another one may lack an instruction. `command`
    has the compiler, its flags and its version.
    """
    processor = _processor()
    if processor is None:
        return None
    parts = [platform.machine(), processor, *command]
    contents = [part.encode() for part in parts] + [file.read_bytes() for file in files]
    # each by itself: parts that are put together otherwise are other parts
    digests = b"".join(hashlib.sha256(content).digest() for content in contents)
    return f"{hashlib.sha256(digests).hexdigest()[:32]}.so"


def find_or_build(folder: Path, name: str | None, build: Callable[[Path], None]) -> ctypes.CDLL:
    """Return the library of a name; what nobody has kept is built, and kept for the next process.

    Processes that ask at the same time build it once.

    Args:
        folder: where libraries are kept; it is made.
        name: of the library; None for one that cannot be told from others, which is not kept.
        build: writes the library to a path.

    Raises:
        OSError: what was built cannot be loaded, or there is no room to build it.
    """
    with ExitStack() as open_things:
        private = None if name is None else open_things.enter_context(_private_folder(folder))
        if private is None or name is None:
            return _built(build, None)
        library = _loaded(private / name)
        if library is None:
            _take_turn(private, open_things)
            library = _loaded(private / name)
        return library or _built(build, private / name)


def _built(build: Callable[[Path], None], kept: Path | None) -> ctypes.CDLL:
    # a mapped file is not gone at once on every file system
    with tempfile.TemporaryDirectory(prefix="raybatch-", ignore_cleanup_errors=True) as folder:
        path = Path(folder) / "kernel.so"
        build(path)
        library = ctypes.CDLL(str(path))
        if kept is not None:
            _keep(path, kept)
        return library


@contextmanager
def _private_folder(folder: Path) -> Iterator[Path | None]:
    """Make a folder, and yield a path to it that stays its own whoever moves what is above it.

    None where it cannot be had or where others than this user and root can write into it.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        _logger.info("compiled kernels are not kept: %s", error)
        yield None
        return
    try:
        status = os.fstat(handle)
        is_private = status.st_uid in (0, os.getuid()) and not status.st_mode & _WRITABLE_BY_OTHERS
        if not is_private:
            _logger.info("compiled kernels are not kept in %s: others can write there", folder)
        yield Path(f"/proc/self/fd/{handle}") if is_private else None
    finally:
        os.close(handle)


def _take_turn(folder: Path, until: ExitStack) -> None:
    """Wait while another process builds; where files cannot be locked, nobody waits."""
    # Windows has no such locks; nothing is kept there
    import fcntl

    with suppress(OSError):
        lock = until.enter_context((folder / ".lock").open("w"))
        fcntl.flock(lock, fcntl.LOCK_EX)


def _loaded(path: Path) -> ctypes.CDLL | None:
    """Return the library of a file; None if there is none, or one that cannot be loaded."""
    # a process that has loaded a path before does not look at the file again
    if not path.exists():
        return None
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        return None


def _keep(built: Path, path: Path) -> None:
    """Copy a library so that processes which look for it see all of it or nothing."""
    try:
        # a folder of its own goes away with what was not moved out of it
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".") as staged:
            whole = Path(staged) / path.name
            shutil.copyfile(built, whole)
            with whole.open("rb+") as file:
                # a host that goes down must not leave the name of a file without its content
                os.fsync(file.fileno())
            os.replace(whole, path)
    except OSError as error:
        _logger.info("compiled kernels are not kept: %s", error)


def _processor() -> str | None:
    """Return what tells this host's processor from others, None where that cannot be read."""
    try:
        first, _, _ = _CPU_INFO.read_text(encoding="utf-8", errors="replace").partition("\n\n")
    except OSError:
        return None
    fields = (line.partition(":") for line in first.splitlines())
    lines = sorted(
        f"{name.strip()}={value}" for name, _, value in fields if name.strip() in _CPU_FIELDS
    )
    return "\n".join(lines) or None
