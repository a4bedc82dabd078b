"""The tensors of a layer's weights, whatever fields its record has; knows no name of them."""

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar, cast

import torch

# tensors start at cache lines, and at what transfers of a GPU are quickest from
_ALIGNMENT = 256

_T = TypeVar("_T")


def map_tensors(record: _T, change: Callable[[torch.Tensor], torch.Tensor]) -> _T:
    """Return a record with each of its tensors changed, and all else as it is.

    Args:
        record: a tensor, a dataclass, or lists, tuples and dicts of these.
        change: called for each tensor once, in the order of the fields.
    """
    return cast(_T, _map(record, change))


def tensors_of(record: object) -> list[torch.Tensor]:
    """Return the tensors of a record in the order of `map_tensors`."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(record, note)
    return found


def piece_bytes(num_elements: int, dtype: torch.dtype) -> int:
    """Return the bytes that a tensor takes in a buffer, up to where the next one starts."""
    return -(-num_elements * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


def packed_bytes(record: object) -> int:
    """Return the bytes of a buffer that holds the tensors of a record."""
    return sum(piece_bytes(tensor.numel(), tensor.dtype) for tensor in tensors_of(record))


def packed_into(record: _T, buffer: torch.Tensor) -> _T:
    """Return a record whose tensors are views of a buffer; what they hold is not copied.

    Args:
        record: whose shapes, dtypes and order in memory the views have.
        buffer: uint8, at least `packed_bytes` long.
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
