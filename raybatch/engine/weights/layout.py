"""How the linears of a model lie in memory on a CPU, where that decides their speed, and in files.

A prepared tensor carries its layout at the end of its name. All shapes are those that the decoder
sees, [..., out, in], but for panels. Tensors of a layer are also packed into one buffer here.
Files of prepared tensors are written one tensor at a time, so that no copy of the model is held,
and mapped with huge pages: float32 products of few rows are bound by how fast weights are read, and
with pages of 4 KiB a good part of that time goes into address translation.
"""

import ctypes
import json
import mmap
import os
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch.nn import functional

# shape, dtype, and the function that builds the tensor
Part = tuple[tuple[int, ...], torch.dtype, Callable[[], torch.Tensor]]

# Linears with at most so many outputs lie in memory as [in, out], which float32 products on a CPU
# read up to 1.4 times as fast at 16 to 128 rows; wider ones are faster as [out, in].
_MAX_OUTPUTS_ACROSS = 2048
LAYER_LINEARS = frozenset(("qkv", "o", "gate_up", "down", "experts_gate_up", "experts_down"))
_ACROSS = ".across"

# Large linears lie in panels (see raybatch.kernels.linear), which few rows read up to twice as
# fast, and gate_up any number of rows; small ones stay in the processor's cache from one step to
# the next. Experts see fewer rows than dense layers, for which narrow panels are better, and small
# ones lose nothing in torch while the compiled form needs panels. gate_up holds two linears, which
# must not share a panel.
_PANEL_WIDTHS = {"gate_up": (128, 64), "experts_gate_up": (48, 32), "experts_down": (48, 32)}
_MIN_PANELLED_BYTES = {"gate_up": 256 << 10}
_PANELS = ".panels"

# all dense linears lie in panels for compiled ops, and so does a table that is also the head
DENSE_LINEARS = frozenset(("qkv", "o", "gate_up", "down", "head", "table"))

# tensors start at cache lines, and at what transfers of a GPU are quickest from
_ALIGNMENT = 256
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class WeightForm:
    """How the weights of a model are kept."""

    # of all that are not bytes
    dtype: torch.dtype
    # outputs of the panels of dense linears, for compiled ops on a CPU; None lays them out for
    # torch
    panel_width: int | None = None
    # dtype of the weights of all linears but head and routers, one of
    # `raybatch.kernels.byte_numbers`; None leaves them in `dtype`
    byte_dtype: torch.dtype | None = None
    # [out, in] of dense linears in float32 that lie as torch wants them all the same
    for_torch: tuple[tuple[int, ...], ...] = ()


def lay_out(
    name: str,
    part: Part,
    panel_width: int | None = None,
    for_torch: Collection[tuple[int, ...]] = (),
) -> tuple[str, Part]:
    """Return the name and form under which a tensor is prepared for a CPU.

    The tensor has the shape [..., out, in]; in a layer, its name is "<index>.<field of
    LayerWeights>". `panel_width` outputs are those of the panels that all dense linears are to have
    for compiled ops, the last one filled up with zeros; None lays them out for torch, and so it
    does those of float32 whose shape is in `for_torch`.
    """
    shape, dtype, build = part
    field = name.rpartition(".")[2]
    width = None
    if (
        panel_width is not None
        and field in DENSE_LINEARS
        and not (dtype == torch.float32 and shape in for_torch)
        # gate and up must not share a panel
        and not (field == "gate_up" and (shape[0] // 2) % panel_width)
    ):
        width = panel_width
    elif dtype == torch.float32 or (panel_width is not None and field.startswith("experts_")):
        width = _panel_width(field, shape)
    if width is not None:
        return name + _PANELS, _in_panels(part, width)
    if field in LAYER_LINEARS and shape[-2] <= _MAX_OUTPUTS_ACROSS:
        across = (*shape[:-2], shape[-1], shape[-2])
        return name + _ACROSS, (across, dtype, lambda: build().mT.contiguous())
    return name, part


def view_of(prepared_name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
    """Return the plain name of a prepared tensor, and the view of it that the decoder uses."""
    if prepared_name.endswith(_ACROSS):
        return prepared_name.removesuffix(_ACROSS), tensor.mT
    return prepared_name.removesuffix(_PANELS), tensor


def _panel_width(field: str, shape: tuple[int, ...]) -> int | None:
    """Return the width of a linear's panels; None where it is better without."""
    if field not in _PANEL_WIDTHS:
        return None
    num_outputs = shape[-2] // 2 if field.endswith("gate_up") else shape[-2]
    if num_outputs * shape[-1] * torch.float32.itemsize < _MIN_PANELLED_BYTES.get(field, 0):
        return None
    return next((width for width in _PANEL_WIDTHS[field] if num_outputs % width == 0), None)


def _in_panels(part: Part, width: int) -> Part:
    (*experts, num_outputs, num_inputs), dtype, build = part
    panels = (*experts, -(-num_outputs // width))

    def build_panels() -> torch.Tensor:
        filled = build()
        if num_outputs % width:
            filled = functional.pad(filled, (0, 0, 0, -num_outputs % width))
        return filled.view(*panels, width, num_inputs).mT.contiguous()

    return (*panels, num_inputs, width), dtype, build_panels


def map_tensors(record: _T, change: Callable[[torch.Tensor], torch.Tensor]) -> _T:
    """Return a record with each of its tensors changed, and all else as it is.

    A record is a tensor, a dataclass, or lists, tuples and dicts of these; each tensor is changed
    once, in the order of the fields.
    """
    value: Any = record
    changed: Any = value
    if isinstance(value, torch.Tensor):
        changed = change(value)
    elif is_dataclass(value) and not isinstance(value, type):
        of_fields = {f.name: getattr(value, f.name) for f in fields(value) if f.init}
        changed = replace(value, **map_tensors(of_fields, change))
    elif isinstance(value, dict):
        changed = {key: map_tensors(inner, change) for key, inner in value.items()}
    elif isinstance(value, list | tuple):
        inner = [map_tensors(item, change) for item in value]
        changed = type(value)(*inner) if hasattr(value, "_fields") else type(value)(inner)
    return cast(_T, changed)


def tensors_of(record: object) -> list[torch.Tensor]:
    """Return the tensors of a record in the order of `map_tensors`."""
    tensors: list[torch.Tensor] = []

    def collect(tensor: torch.Tensor) -> torch.Tensor:
        tensors.append(tensor)
        return tensor

    map_tensors(record, collect)
    return tensors


def placeholder(record: _T) -> _T:
    """Return a record of the same form without data; whatever reads it raises."""
    return map_tensors(record, lambda tensor: torch.empty_like(tensor, device="meta"))


def has_data(record: object) -> bool:
    """Return whether no tensor of a record is a placeholder."""
    return not any(tensor.is_meta for tensor in tensors_of(record))


def piece_bytes(num_elements: int, dtype: torch.dtype) -> int:
    """Return the bytes that a tensor takes in a buffer, up to where the next one starts."""
    return -(-num_elements * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


def packed_bytes(record: object) -> int:
    return sum(piece_bytes(tensor.numel(), tensor.dtype) for tensor in tensors_of(record))


def packed_into(record: _T, buffer: torch.Tensor) -> _T:
    """Return a record whose tensors are views of a buffer; what they hold is not copied.

    The views have the shapes, dtypes and order in memory of the record's tensors; `buffer` is
    uint8, at least `packed_bytes` long.
    """
    start = 0

    def place(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal start
        # linears may lie as [in, out] behind a view of [out, in], which decides their speed
        strides = torch.empty_like(tensor, device="meta").stride()
        stop = start + tensor.numel() * tensor.dtype.itemsize
        piece = buffer[start:stop].view(tensor.dtype).as_strided(tensor.shape, strides)
        start += piece_bytes(tensor.numel(), tensor.dtype)
        return piece

    return map_tensors(record, place)


_DTYPE_NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
}


# tensors start at cache lines, which vector loads of the mapped file profit from
_FILE_ALIGNMENT = 64


def write_tensors(target: Path, parts: Mapping[str, Part]) -> None:
    """Write the named tensors; the file appears complete.

    Raises ValueError where a built tensor does not have the announced shape, OSError where the
    folder cannot be written.
    """
    header: dict[str, Any] = {}
    end = 0
    for name, (shape, dtype, _) in parts.items():
        begin, end = end, end + torch.Size(shape).numel() * dtype.itemsize
        header[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": shape, "data_offsets": (begin, end)}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-(len(encoded) + 8) % _FILE_ALIGNMENT)
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
            # drop what the system caches of it: reading brings it back in huge pages
            os.fsync(file.fileno())
            if sys.platform == "linux":
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        # mkstemp makes files for one user, a cache folder may serve several
        os.chmod(temporary, 0o644)
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise


def advise_huge_pages(tensors: Iterable[torch.Tensor]) -> None:
    """Ask the system to map the pages of these tensors, parts of one mapped file, as huge ones.

    Call it before they are first read. The pages stay shared with other processes. Without
    effect where the system or the file system has no huge pages for files.
    """
    spans = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors if t.nbytes]
    if sys.platform == "linux" and spans:
        begin = min(begin for begin, _ in spans) // mmap.PAGESIZE * mmap.PAGESIZE
        end = max(end for _, end in spans)
        madvise = ctypes.CDLL(None).madvise
        madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_HUGEPAGE)


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold the lock file at `path`; on Windows there is no lock and the last writer wins."""
    with path.open("w") as file:
        if sys.platform != "win32":
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield
