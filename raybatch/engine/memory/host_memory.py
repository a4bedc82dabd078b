"""How much memory a device has left."""

from pathlib import Path

import torch

_CGROUP = Path("/sys/fs/cgroup")
_UNKNOWN_BYTES = 4 << 30


def free_memory_bytes(device: torch.device) -> int:
    """Return the free bytes of a GPU, or what this process may still take on the host.

    A container's limit counts as the host's size; where the system tells nothing it is 4 GiB.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    candidates = [_meminfo("MemAvailable"), _available_in_cgroup()]
    return min((value for value in candidates if value is not None), default=_UNKNOWN_BYTES)


def host_memory_bytes() -> int | None:
    """Return the memory of the host in all, or a container's limit; None if nothing tells."""
    candidates = [_meminfo("MemTotal"), _cgroup_limit()]
    return min((value for value in candidates if value is not None), default=None)


def _meminfo(name: str) -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None


def _cgroup_limit() -> int | None:
    try:
        limit = (_CGROUP / "memory.max").read_text(encoding="ascii").strip()
    except OSError:
        return None
    return None if limit == "max" else int(limit)


def _available_in_cgroup() -> int | None:
    limit = _cgroup_limit()
    if limit is None:
        return None
    try:
        used = int((_CGROUP / "memory.current").read_text(encoding="ascii"))
        statistics = (_CGROUP / "memory.stat").read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return None
    # file pages, such as mapped weights, are given back when memory gets short
    reclaimable = sum(
        int(line.split()[1])
        for line in statistics
        if line.startswith(("inactive_file ", "active_file "))
    )
    return max(limit - used + reclaimable, 0)
