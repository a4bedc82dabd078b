"""Memory of one process that others of its host map, without a name that could be left behind.

Others open it by way of the process that has it. The system frees it with the last process that has
it mapped, however that ends.
"""

import contextlib
import json
import mmap
import os
import weakref

from raybatch.errors import error_text


class MappedMemory:
    """New memory of this process, zeroed.

    Args:
        purpose: what the system's tables of open files show.

    Attributes:
        memory: at least one byte of it.
        handle: a text by which `map_other` finds it in another process, until `close` is called.

    Raises OSError: the system has not so much, or is no Linux.
    """

    def __init__(self, purpose: str, num_bytes: int) -> None:
        allocate = getattr(os, "posix_fallocate", None)
        if allocate is None or not hasattr(os, "memfd_create"):
            raise OSError("processes share memory without a name on Linux alone")
        # no process that this one starts gets it
        descriptor = os.memfd_create(f"raybatch-{purpose}")
        self._close = weakref.finalize(self, os.close, descriptor)
        # what the system does not have would end the process at a later write
        allocate(descriptor, 0, max(1, num_bytes))
        self.memory = mmap.mmap(descriptor, max(1, num_bytes))
        self.handle = json.dumps((pid_namespace(), os.getpid(), descriptor, num_bytes))

    def close(self) -> None:
        """Let nobody else map it; who has mapped it keeps it."""
        self._close()


def map_other(handle: str, *, is_written: bool) -> mmap.mmap:
    """Return the memory of another process.

    Raises OSError: it cannot be reached from here, or its process has ended.
    """
    namespace, pid, descriptor, num_bytes = json.loads(handle)
    mode, access = ("r+b", mmap.ACCESS_WRITE) if is_written else ("rb", mmap.ACCESS_READ)
    try:
        # a process of another container has its number for itself
        if namespace != pid_namespace():
            raise OSError("it runs in another container")
        with open(f"/proc/{pid}/fd/{descriptor}", mode) as file:
            return mmap.mmap(file.fileno(), max(1, num_bytes), access=access)
    except (OSError, ValueError) as error:
        reason = error_text(error)
        raise OSError(f"the memory of process {pid} cannot be mapped ({reason})") from error


def pid_namespace() -> int:
    """Return what tells processes that see each other by the same numbers; 0 where nothing does."""
    with contextlib.suppress(OSError):
        return os.stat("/proc/self/ns/pid").st_ino
    return 0
