"""Numbers of 8 bits: int8 or fp8 (e4m3), of weights and in rows of the KV pool.

Weights have one float32 scale for each output of a linear. Products are those of floats: bytes take
a quarter of the memory, and few rows, whose time goes into reading weights, are computed faster.

A row of a quantised KV pool is the keys or the values of one token and KV head. With its scale in
the row itself, whatever copies rows, slots or blocks copies the scales with them:

    d0 d1 ... d[D-1]  (padding to 4)  s s s s       D numbers of one byte, and a float32

A pool of int8 holds whole numbers, one of uint8 the bits of float8_e4m3fn, which torch cannot
index and copy in all ways on all devices. A row of zero bytes stands for zeros.
"""

from collections.abc import Mapping

import torch
from torch.nn import functional

# the options' names, and the largest number of each type
BYTE_DTYPES: Mapping[str, torch.dtype] = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
# types of the pools
INT8, FP8 = torch.int8, torch.uint8
# how a byte of a pool reads
_ELEMENTS = {INT8: torch.int8, FP8: torch.float8_e4m3fn}

# 0x87f00000 as an int32
_BITS = 0x87F00000 - (1 << 32)
_SCALE_BYTES = 4
# rows that are smaller lose digits: the inverse of their scale would be infinite
_LEAST = 1e-30


def weight_scales(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the scale of each output of a weight [..., out, in], float32 [..., out].

    The largest weight of an output becomes the largest number of the type; where all are 0, the
    scale is 1.
    """
    if weight.dim() > 2:
        # one expert after the other, as floats take several times the memory
        return torch.stack([weight_scales(part, dtype) for part in weight])
    largest = weight.abs().amax(dim=-1).float()
    return torch.where(largest == 0, 1.0, largest / _LARGEST[dtype])


def quantise_weight(weight: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a weight [..., out, in] over its scales [..., out], the nearest numbers of `dtype`."""
    if weight.dim() > 2:
        parts = zip(weight, scales, strict=True)
        return torch.stack([quantise_weight(part, of, dtype) for part, of in parts])
    scaled = weight / scales.unsqueeze(-1)
    return scaled.round_().to(dtype) if dtype == torch.int8 else scaled.to(dtype)


def dequantise_weight(
    weight: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return a linear's weight in `dtype`, [out, in] or in panels, with scales [out].

    Panels may hold more outputs than there are scales.
    """
    is_fp8 = weight.dtype == torch.float8_e4m3fn
    floats = read_fp8(weight.view(torch.uint8)) if is_fp8 else weight.to(torch.float32)
    factors = scales.unsqueeze(1)
    if weight.dim() == 3:
        num_panels, _, width = weight.shape
        filled = functional.pad(scales, (0, num_panels * width - len(scales)))
        factors = filled.view(num_panels, 1, width)
    return floats.mul_(factors).to(dtype)


def read_fp8(elements: torch.Tensor) -> torch.Tensor:
    """Return the numbers of bits uint8 in float32; a tenth of the time of torch on a CPU.

    Put where float32 has sign, exponent and digits, they are a number whose exponent is too low by
    120. The bits of NaN read as 480.
    """
    bits = elements.to(torch.int32)
    bits.bitwise_left_shift_(24).bitwise_right_shift_(4).bitwise_and_(_BITS)
    return bits.view(torch.float32).mul_(2.0**120)


def is_quantised(dtype: torch.dtype) -> bool:
    """Return whether a pool of this type holds quantised rows."""
    return dtype in _ELEMENTS


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
    element = _ELEMENTS[dtype]
    largest = _LARGEST[element]
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
