"""How the linears of a model lie in memory on a CPU, where that decides their speed.

A prepared tensor carries its layout at the end of its name. All shapes are those that the decoder
sees, [..., out, in], but for panels. Tensors of a layer are also packed into one buffer here.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar, cast

import torch
from torch.nn import functional

from raybatch.engine.weights.tensor_file import Part

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
_DENSE = frozenset(("qkv", "o", "gate_up", "down", "head", "table"))

# tensors start at cache lines, and at what transfers of a GPU are quickest from
_ALIGNMENT = 256
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class WeightForm:
    """How the weights of a model are kept.

    Args:
        dtype: of all that are not bytes.
        panel_width: outputs of the panels of dense linears, for compiled ops on a CPU; None lays
            them out for torch.
        byte_dtype: dtype of the weights of all linears but head and routers, one of
            `raybatch.kernels.byte_numbers`; None leaves them in `dtype`.
    """

    dtype: torch.dtype
    panel_width: int | None = None
    byte_dtype: torch.dtype | None = None


def lay_out(name: str, part: Part, panel_width: int | None = None) -> tuple[str, Part]:
    """Return the name and form under which a tensor is prepared for a CPU.

    Args:
        name: of the tensor; in a layer "<index>.<field of LayerWeights>".
        part: the tensor in the shape [..., out, in].
        panel_width: outputs of the panels that all dense linears are to have for compiled ops, the
            last one filled up with zeros; None lays them out for torch.
    """
    shape, dtype, build = part
    field = name.rpartition(".")[2]
    width = None
    if panel_width is not None and _is_dense(field, shape, panel_width):
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


def _is_dense(field: str, shape: tuple[int, ...], width: int) -> bool:
    """Return whether a tensor is of a dense linear; gate and up must not share a panel."""
    return field in _DENSE and not (field == "gate_up" and (shape[0] // 2) % width)


def _panel_width(field: str, shape: tuple[int, ...]) -> int | None:
    """Return the width of a linear's panels; None where it is better without."""
    widths = _PANEL_WIDTHS.get(field, ())
    if not widths:
        return None
    num_outputs = shape[-2] // 2 if field.endswith("gate_up") else shape[-2]
    if num_outputs * shape[-1] * torch.float32.itemsize < _MIN_PANELLED_BYTES.get(field, 0):
        return None
    return next((width for width in widths if num_outputs % width == 0), None)


def _in_panels(part: Part, width: int) -> Part:
    shape, dtype, build = part
    *experts, num_outputs, num_inputs = shape
    panels = (*experts, -(-num_outputs // width))
    num_missing = -num_outputs % width

    def build_panels() -> torch.Tensor:
        filled = build()
        if num_missing:
            filled = functional.pad(filled, (0, 0, 0, num_missing))
        return filled.view(*panels, width, num_inputs).mT.contiguous()

    return (*panels, num_inputs, width), dtype, build_panels


def map_tensors(record: _T, change: Callable[[torch.Tensor], torch.Tensor]) -> _T:
    """Return a record with each of its tensors changed, and all else as it is.

    A record is a tensor, a dataclass, or lists, tuples and dicts of these; each tensor is changed
    once, in the order of the fields.
    """
    return cast(_T, _map(record, change))


def tensors_of(record: object) -> list[torch.Tensor]:
    """Return the tensors of a record in the order of `map_tensors`."""
    tensors: list[torch.Tensor] = []

    def collect(tensor: torch.Tensor) -> torch.Tensor:
        tensors.append(tensor)
        return tensor

    map_tensors(record, collect)
    return tensors


def piece_bytes(num_elements: int, dtype: torch.dtype) -> int:
    """Return the bytes that a tensor takes in a buffer, up to where the next one starts."""
    return -(-num_elements * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


def packed_bytes(record: object) -> int:
    """Return the bytes of a buffer that holds the tensors of a record."""
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


def _map(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:  # noqa: ANN401
    if isinstance(value, torch.Tensor):
        return change(value)
    if is_dataclass(value) and not isinstance(value, type):
        changed = {f.name: _map(getattr(value, f.name), change) for f in fields(value) if f.init}
        return replace(value, **changed)
    if isinstance(value, dict):
        return {key: _map(inner, change) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        inner = [_map(item, change) for item in value]
        return type(value)(*inner) if hasattr(value, "_fields") else type(value)(inner)
    return value
