"""Rows of a quantised KV pool: 8-bit numbers, with the scale of the row behind them.

A row is the keys or the values of one token and KV head. With its scale in the row itself, whatever
copies rows, slots or blocks copies the scales with them:

    d0 d1 ... d[D-1]  (padding to 4)  s s s s       D numbers of one byte, and a float32

A pool of int8 holds whole numbers, one of uint8 the bits of float8_e4m3fn, which torch cannot
index and copy in all ways on all devices. A row of zero bytes stands for zeros.
"""

import torch

from raybatch.kernels.byte_weights import read_fp8

# types of the pools
INT8, FP8 = torch.int8, torch.uint8

# how a byte reads, and what the largest number of a row becomes
_FORMS = {INT8: (torch.int8, 127.0), FP8: (torch.float8_e4m3fn, 448.0)}
_SCALE_BYTES = 4
# rows that are smaller lose digits: the inverse of their scale would be infinite
_LEAST = 1e-30


def is_quantised(dtype: torch.dtype) -> bool:
    """Return whether a pool of this type holds quantised rows."""
    return dtype in _FORMS


def row_width(head_dim: int, dtype: torch.dtype) -> int:
    """Return the elements of a pool's row, R: D, or more where a row has a scale."""
    if not is_quantised(dtype):
        return head_dim
    return -(-head_dim // _SCALE_BYTES) * _SCALE_BYTES + _SCALE_BYTES


def quantise(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return rows [..., D] as a pool of `dtype` holds them, [..., R].

    The largest magnitude of a row becomes 127 in int8, and 448 in float8_e4m3fn. Of a row that has
    a number which is not finite, no number is when it is read.
    """
    element, largest = _FORMS[dtype]
    head_dim = x.shape[-1]
    values = x.float()
    highest = values.abs().amax(dim=-1, keepdim=True)
    # a tensor over a tensor: a number over one is rounded twice
    scaled = values * torch.full_like(highest, largest).div_(highest.clamp_min(_LEAST))
    if element is torch.int8:
        scaled = scaled.round_()
    # by rounding, the product may be a little above
    scaled = scaled.clamp_(-largest, largest).to(element)
    shape = (*x.shape[:-1], row_width(head_dim, dtype))
    rows = torch.zeros(shape, dtype=torch.uint8, device=x.device)
    rows[..., :head_dim] = scaled.view(torch.uint8)
    rows[..., -_SCALE_BYTES:] = (highest * (1.0 / largest)).view(torch.uint8)
    return rows.view(dtype)


def dequantise(rows: torch.Tensor, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the rows [..., R] of a quantised pool as numbers of `dtype`, [..., D]."""
    scales = rows[..., -_SCALE_BYTES:].view(torch.float32)
    elements = rows[..., :head_dim]
    numbers = elements.float() if rows.dtype is INT8 else read_fp8(elements)
    return numbers.mul_(scales).to(dtype)


def read_rows(rows: torch.Tensor, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Return rows of any pool as numbers: quantised ones in `dtype`, others as they are."""
    return dequantise(rows, head_dim, dtype) if is_quantised(rows.dtype) else rows
