"""Anonymous shared memory (memfd) that other processes of the host map; leaves no file behind.

Processes open it through its owner's /proc entry. The system frees it with the last process that
maps it, even after a crash.
"""

import contextlib
import json
import mmap
import os
import weakref

from raybatch.errors import error_text


class MappedMemory:
    """Allocates zeroed memory that other processes can map.

    Args:
        purpose: shown in the system's list of open files.

    Attributes:
        memory: at least one byte.
        handle: text for `map_other` in another process; valid until `close`.

    Raises OSError: out of memory, or the system is not Linux.
    """

    def __init__(self, purpose: str, num_bytes: int) -> None:
        allocate = getattr(os, "posix_fallocate", None)
        if allocate is None or not hasattr(os, "memfd_create"):
            raise OSError("anonymous shared memory needs Linux")
        # not inherited by child processes
        descriptor = os.memfd_create(f"raybatch-{purpose}")
        self._close = weakref.finalize(self, os.close, descriptor)
        # allocate now: running out at a later write would kill the process
        allocate(descriptor, 0, max(1, num_bytes))
        self.memory = mmap.mmap(descriptor, max(1, num_bytes))
        self.handle = json.dumps((pid_namespace(), os.getpid(), descriptor, num_bytes))

    def close(self) -> None:
        """Invalidate the handle; existing mappings stay valid."""
        self._close()


def map_other(handle: str, *, is_written: bool) -> mmap.mmap:
    """Map the memory of another process.

    Raises OSError: it is not accessible from here, or its process has ended.
    """
    namespace, pid, descriptor, num_bytes = json.loads(handle)
    mode, access = ("r+b", mmap.ACCESS_WRITE) if is_written else ("rb", mmap.ACCESS_READ)
    try:
        # process ids of another container are meaningless here
        if namespace != pid_namespace():
            raise OSError("the process runs in another container")
        with open(f"/proc/{pid}/fd/{descriptor}", mode) as file:
            return mmap.mmap(file.fileno(), max(1, num_bytes), access=access)
    except (OSError, ValueError) as error:
        reason = error_text(error)
        raise OSError(f"cannot map the memory of process {pid} ({reason})") from error


def pid_namespace() -> int:
    """Return an id of the process-id namespace; 0 if unknown."""
    with contextlib.suppress(OSError):
        return os.stat("/proc/self/ns/pid").st_ino
    return 0
