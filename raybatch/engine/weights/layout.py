"""Records of a model's weights, layouts of linears on a CPU, prepared files, packing into a buffer.

```
layer   attention: norm, qkv, o          on every device that runs the model
        ffn: norm, router                on every device as well
             shard: gate_up and down,    on the device, in host memory, or at another replica
             or experts
```

A prepared tensor carries its layout at the end of its name. Shapes are those that the decoder sees,
[..., out, in], except for panels. Prepared files are written one tensor at a time, so that the
model is not copied in memory, and mapped with huge pages: float32 products of few rows are bound by
memory bandwidth, and 4 KiB pages spend much of it on address translation.
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

from raybatch.kernels.linear import Linear


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionWeights:
    """Weights of an attention block: qkv [(H + 2G) * D, M] and o [M, H * D], as [outputs, inputs].

    qk_norm [H + G, D] holds the norms of queries and keys.
    """

    norm: torch.Tensor
    qkv: Linear
    o: Linear
    qk_norm: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class FfnShard:
    """Linears or experts of a feed-forward block, or of one shard of it; without norm and router.

    A dense block has gate_up with 2F outputs and M inputs, and down with M outputs and F inputs. A
    sparse one has experts_gate_up [E, 2F, M] and experts_down [E, M, F], in any memory order. On a
    CPU these may be in panels of P outputs (`raybatch.kernels.linear`): [E, 2F/P, M, P] and [E,
    M/P, F, P]. Quantized experts have scales [E, 2F] and [E, M]. `experts` are the indices of the
    experts in a sparse shard; None: all.
    """

    gate_up: Linear | None = None
    down: Linear | None = None
    experts_gate_up: torch.Tensor | None = None
    experts_down: torch.Tensor | None = None
    experts_gate_up_scales: torch.Tensor | None = None
    experts_down_scales: torch.Tensor | None = None
    experts: slice | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class FfnWeights:
    """Weights of a feed-forward block; router is [E, M].

    `shard` is a placeholder without data if its weights are elsewhere.
    """

    norm: torch.Tensor
    shard: FfnShard
    router: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerWeights:
    attention: AttentionWeights
    ffn: FfnWeights


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelWeights:
    """All weights: embed [V, M], norm [M], and the head with V outputs.

    If tied, embed and head are one tensor, and embed may be in the head's panels.
    """

    embed: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    head: Linear


# shape, dtype, and the function that builds the tensor
Part = tuple[tuple[int, ...], torch.dtype, Callable[[], torch.Tensor]]

# Linears with at most this many outputs are stored as [in, out], for which float32 products of 16
# to 128 rows on a CPU are up to 1.4 times as fast; wider ones are faster as [out, in].
_MAX_OUTPUTS_ACROSS = 2048
LAYER_LINEARS = frozenset(("qkv", "o", "gate_up", "down", "experts_gate_up", "experts_down"))
_ACROSS = ".across"

# Large linears are stored in panels (see raybatch.kernels.linear), up to twice as fast for few
# rows, and gate_up for any number of rows; small ones stay in the CPU cache between steps. Experts
# see fewer rows, for which narrow panels are better. Small experts have panels too: torch is not
# slower, and compiled ops need them. gate_up holds two linears, which must not share a panel.
_PANEL_WIDTHS = {"gate_up": (128, 64), "experts_gate_up": (48, 32), "experts_down": (48, 32)}
_MIN_PANELLED_BYTES = {"gate_up": 256 << 10}
_PANELS = ".panels"

# stored in panels for compiled ops, as is an embedding table tied to the head
DENSE_LINEARS = frozenset(("qkv", "o", "gate_up", "down", "head", "table"))

# tensors start at cache lines, at an alignment that is fast for GPU transfers
_ALIGNMENT = 256
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class WeightForm:
    """Dtypes and panel width of a model's weights."""

    # of weights that are not quantized
    dtype: torch.dtype
    # outputs per panel of dense linears, for compiled ops on a CPU; None: layout for torch
    panel_width: int | None = None
    # 8-bit dtype (`raybatch.kernels.byte_numbers`) of all linears but head and routers; None
    # leaves them in `dtype`
    byte_dtype: torch.dtype | None = None
    # [out, in] of dense linears in float32 that lie as torch wants them all the same
    for_torch: tuple[tuple[int, ...], ...] = ()


def lay_out(
    name: str,
    part: Part,
    panel_width: int | None = None,
    for_torch: Collection[tuple[int, ...]] = (),
) -> tuple[str, Part]:
    """Return the name and the layout in which a tensor is stored for a CPU.

    `part` is the tensor, of shape [..., out, in]; in a layer, its name is "<index>.<field of
    LayerWeights>". With a `panel_width`, dense linears get panels of that many outputs for compiled
    ops, the last one padded with zeros, except for float32 ones whose shape is in `for_torch`.
    With None they are laid out for torch.
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
    """Return the name of a tensor before `lay_out`, and its view for the decoder."""
    if prepared_name.endswith(_ACROSS):
        return prepared_name.removesuffix(_ACROSS), tensor.mT
    return prepared_name.removesuffix(_PANELS), tensor


def _panel_width(field: str, shape: tuple[int, ...]) -> int | None:
    """Return the panel width of a linear; None if it has no panels."""
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
    """Apply a function to each tensor of a record, in the order of the fields.

    A record is a tensor, a dataclass, or lists, tuples and dicts of these.
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
    """Return a record of the same form on the meta device, without data."""
    return map_tensors(record, lambda tensor: torch.empty_like(tensor, device="meta"))


def has_data(record: object) -> bool:
    """Return whether no tensor of a record is a placeholder."""
    return not any(tensor.is_meta for tensor in tensors_of(record))


def piece_bytes(num_elements: int, dtype: torch.dtype) -> int:
    """Return the bytes that a tensor takes in a buffer, rounded up to the alignment."""
    return -(-num_elements * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


def packed_bytes(record: object) -> int:
    return sum(piece_bytes(tensor.numel(), tensor.dtype) for tensor in tensors_of(record))


def packed_into(record: _T, buffer: torch.Tensor) -> _T:
    """Return a record whose tensors are views of a buffer; copies no data.

    The views have the shapes, dtypes and memory order of the record's tensors; `buffer` is uint8,
    at least `packed_bytes` long.
    """
    start = 0

    def place(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal start
        # linears may be views [out, in] of memory [in, out]: keep that order, it decides the speed
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


# tensors start at cache lines, for aligned vector loads from the mapped file
_FILE_ALIGNMENT = 64


def write_tensors(target: Path, parts: Mapping[str, Part]) -> None:
    """Write tensors, by name, to the safetensors file `target`, atomically.

    Raises ValueError: a built tensor has another shape than announced. Raises OSError: the folder
    is not writable.
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
            # drop the page cache: reading brings the file back in huge pages
            os.fsync(file.fileno())
            if sys.platform == "linux":
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        # mkstemp makes private files, but users may share a cache folder
        os.chmod(temporary, 0o644)
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise


def advise_huge_pages(tensors: Iterable[torch.Tensor]) -> None:
    """Advise huge pages for these tensors, parts of one mapped file.

    Call it before they are first read. The pages stay shared with other processes. No effect if the
    system or the file system has no huge pages for files.
    """
    spans = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors if t.nbytes]
    if sys.platform == "linux" and spans:
        begin = min(begin for begin, _ in spans) // mmap.PAGESIZE * mmap.PAGESIZE
        end = max(end for _, end in spans)
        madvise = ctypes.CDLL(None).madvise
        madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_HUGEPAGE)


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on the file at `path` in the context.

    Windows has no such lock: there the last writer wins.
    """
    with path.open("w") as file:
        if sys.platform != "win32":
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield
