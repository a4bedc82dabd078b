"""Safetensors files written one tensor at a time and mapped with huge pages.

Writing holds no copy of the model in memory. Float32 products of few rows are bound by how fast
weights are read, and with pages of 4 KiB a good part of that time goes into address translation.
"""

import ctypes
import json
import mmap
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

_DTYPE_NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
}

# shape, dtype, and the function that builds the tensor
Part = tuple[tuple[int, ...], torch.dtype, Callable[[], torch.Tensor]]

# tensors start at cache lines, which vector loads of the mapped file profit from
_ALIGNMENT = 64


def write_tensors(target: Path, parts: Mapping[str, Part]) -> None:
    """Write the named tensors; the file appears complete.

    Raises:
        ValueError: a built tensor does not have the announced shape.
        OSError: the folder cannot be written.
    """
    header: dict[str, Any] = {}
    end = 0
    for name, (shape, dtype, _) in parts.items():
        begin, end = end, end + torch.Size(shape).numel() * dtype.itemsize
        header[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": shape, "data_offsets": (begin, end)}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-(len(encoded) + 8) % _ALIGNMENT)
    descriptor, temporary = tempfile.mkstemp(dir=target.parent, suffix=".tmp")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(len(encoded).to_bytes(8, "little") + encoded)
            for name, (shape, dtype, build) in parts.items():
                tensor = build().to(dtype).contiguous()
                if tuple(tensor.shape) != shape:
                    raise ValueError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")
                file.write(tensor.view(-1).view(torch.uint8).numpy().data)
            file.flush()
            _forget_pages(file.fileno())
        # mkstemp makes files for one user, a cache folder may serve several
        os.chmod(temporary, 0o644)
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise


def _forget_pages(descriptor: int) -> None:
    """Drop what the system caches of a written file: reading brings it back in huge pages."""
    os.fsync(descriptor)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def advise_huge_pages(tensors: Iterable[torch.Tensor]) -> None:
    """Ask the system to map the pages of these tensors, parts of one mapped file, as huge ones.

    Call it before they are first read. The pages stay shared with other processes. Without
    effect where the system or the file system has no huge pages for files.
    """
    spans = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors if t.nbytes]
    madvise = getattr(ctypes.CDLL(None), "madvise", None) if sys.platform == "linux" else None
    if madvise is None or not spans:
        return
    begin = min(begin for begin, _ in spans) // mmap.PAGESIZE * mmap.PAGESIZE
    end = max(end for _, end in spans)
    madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_HUGEPAGE)


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold the lock file at `path`; on Windows there is no lock and the last writer wins."""
    with path.open("w") as file:
        if sys.platform != "win32":
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield
