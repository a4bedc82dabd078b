"""Hides from raybatch what macOS lacks, in each process with this folder on its path.

Modules of raybatch see other `os`, `sys`, `mmap` and `platform`, and no files of the kernel; all
other packages see the real ones.
"""

import errno
import mmap
import os
import platform
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder, SourceFileLoader
from types import ModuleType

_FILES = ("/proc", "/sys", "/dev/shm")
# between a module and the file that it opens
_BETWEEN = ("codecs", "contextlib", "glob", "io", "os", "pathlib", "tempfile")


class _Hidden(ModuleType):
    """A module without names that begin so, or with others; what is set is set in the module."""

    def __init__(self, module: ModuleType, *prefixes: str, **others: object) -> None:
        super().__init__(module.__name__)
        missing = {name for name in dir(module) if name.startswith(prefixes)}
        self.__dict__.update(_module=module, _missing=missing, **others)

    def __getattr__(self, name: str) -> object:
        if name in self._missing:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r} on macOS")
        return getattr(self._module, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._module, name, value)


def _refuse(path: object) -> None:
    if isinstance(path, str | bytes | os.PathLike) and os.fsdecode(path).startswith(_FILES):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)


def _stat(path: object, *args: object, **options: object) -> os.stat_result:
    _refuse(path)
    return os.stat(path, *args, **options)


_LINUX_OF_OS = (
    *("sched_get", "sched_set", "sched_param", "memfd_", "MFD_", "posix_fa", "POSIX_FADV_"),
    *("eventfd", "EFD_", "O_TMPFILE", "O_PATH", "O_NOATIME", "pidfd_", "P_PIDFD", "timerfd_"),
    *("copy_file_range", "splice", "setns", "unshare", "getxattr", "setxattr", "getrandom"),
    # which macOS has from Python 3.13 on
    "waitid",
)
_HIDDEN = {
    "os": _Hidden(os, *_LINUX_OF_OS, stat=_stat),
    "sys": _Hidden(sys, "_no_name_begins_so", platform="darwin"),
    "mmap": _Hidden(mmap, "MADV_", "MAP_POPULATE", "MAP_STACK", "MAP_NORESERVE"),
    "platform": _Hidden(platform, "freedesktop_", system=lambda: "Darwin"),
}


class _Loader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        for name, hidden in _HIDDEN.items():
            if getattr(module, name, None) is hidden._module:
                setattr(module, name, hidden)


class _Finder(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if not name.startswith("raybatch"):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def _audit(event: str, args: tuple[object, ...]) -> None:
    if event not in ("open", "os.listdir", "os.scandir"):
        return
    frame = sys._getframe().f_back
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        frame = frame.f_back
    if frame is not None and frame.f_globals.get("__name__", "").startswith("raybatch"):
        _refuse(args[0])


sys.meta_path.insert(0, _Finder())
sys.addaudithook(_audit)
