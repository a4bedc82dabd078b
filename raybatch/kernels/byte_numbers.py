"""8-bit quantization, int8 or fp8 (e4m3), of weights and of KV pool rows.

Weights have one float32 scale per output of a linear. Products are computed in floats: 8-bit
weights need a quarter of the memory, which speeds up small, memory-bound batches.

A row of a quantized KV pool is the keys or the values of one token and KV head. It contains its
scale, so that copies of rows, slots or blocks include the scales:

    d0 d1 ... d[D-1]  (padding to 4)  s s s s       D numbers of one byte, and a float32

An int8 pool holds integers; a uint8 pool holds the bits of float8_e4m3fn, because torch does not
support indexing and copying of that dtype on all devices. A row of zero bytes is zeros.
"""

from collections.abc import Mapping

import torch
from torch.nn import functional

# dtypes by option value
BYTE_DTYPES: Mapping[str, torch.dtype] = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
# dtypes of the pools
INT8, FP8 = torch.int8, torch.uint8
# dtype of the elements of a pool
_ELEMENTS = {INT8: torch.int8, FP8: torch.float8_e4m3fn}

# 0x87f00000 as an int32
_BITS = 0x87F00000 - (1 << 32)
_SCALE_BYTES = 4
# smaller rows lose precision: the inverse of their scale would overflow
_LEAST = 1e-30


def weight_scales(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the scale of each output of a weight [..., out, in], float32 [..., out].

    The largest weight of an output maps to the largest number of the dtype; for zeros the scale is
    1.
    """
    if weight.dim() > 2:
        # expert by expert, as floats need several times the memory
        return torch.stack([weight_scales(part, dtype) for part in weight])
    largest = weight.abs().amax(dim=-1).float()
    return torch.where(largest == 0, 1.0, largest / _LARGEST[dtype])


def quantise_weight(weight: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Quantize a weight [..., out, in] by its scales [..., out] to the nearest `dtype` values."""
    if weight.dim() > 2:
        parts = zip(weight, scales, strict=True)
        return torch.stack([quantise_weight(part, of, dtype) for part, of in parts])
    scaled = weight / scales.unsqueeze(-1)
    return scaled.round_().to(dtype) if dtype == torch.int8 else scaled.to(dtype)


def dequantise_weight(
    weight: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Dequantize a linear's weight, [out, in] or in panels, with scales [out], to `dtype`.

    Panels may have more outputs than scales.
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
    """Convert float8_e4m3fn numbers, given as uint8 bits, to float32.

    It is ten times faster than torch on a CPU. The bits are shifted into sign, exponent and
    mantissa of a float32, whose exponent is then too low by 120. NaN becomes 480.
    """
    bits = elements.to(torch.int32)
    bits.bitwise_left_shift_(24).bitwise_right_shift_(4).bitwise_and_(_BITS)
    return bits.view(torch.float32).mul_(2.0**120)


def is_quantised(dtype: torch.dtype) -> bool:
    """Return whether a pool of this dtype is quantized."""
    return dtype in _ELEMENTS


def row_width(head_dim: int, dtype: torch.dtype) -> int:
    """Return R, the elements of a pool row: D, or more if a row contains its scale."""
    if not is_quantised(dtype):
        return head_dim
    return -(-head_dim // _SCALE_BYTES) * _SCALE_BYTES + _SCALE_BYTES


def quantise(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Quantize rows [..., D] for a pool of `dtype`, [..., R].

    The largest magnitude of a row maps to 127 in int8, and 448 in float8_e4m3fn. A row with a
    non-finite number reads back as non-finite everywhere.
    """
    element = _ELEMENTS[dtype]
    largest = _LARGEST[element]
    head_dim = x.shape[-1]
    values = x.float()
    highest = values.abs().amax(dim=-1, keepdim=True)
    # divide tensor by tensor: scalar over tensor is rounded twice
    scaled = values * torch.full_like(highest, largest).div_(highest.clamp_min(_LEAST))
    if element is torch.int8:
        scaled = scaled.round_()
    # rounding may exceed the range slightly
    scaled = scaled.clamp_(-largest, largest).to(element)
    shape = (*x.shape[:-1], row_width(head_dim, dtype))
    rows = torch.zeros(shape, dtype=torch.uint8, device=x.device)
    rows[..., :head_dim] = scaled.view(torch.uint8)
    rows[..., -_SCALE_BYTES:] = (highest * (1.0 / largest)).view(torch.uint8)
    return rows.view(dtype)


def dequantise(rows: torch.Tensor, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Dequantize pool rows [..., R] to `dtype`, [..., D]."""
    scales = rows[..., -_SCALE_BYTES:].view(torch.float32)
    elements = rows[..., :head_dim]
    numbers = elements.float() if rows.dtype is INT8 else read_fp8(elements)
    return numbers.mul_(scales).to(dtype)


def pool_rows(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return numbers [..., D] as rows of a pool of `dtype`, [..., R]."""
    return quantise(x, dtype) if is_quantised(dtype) else x.to(dtype)


def read_rows(rows: torch.Tensor, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Return pool rows: quantized ones are dequantized to `dtype`, others are unchanged."""
    return dequantise(rows, head_dim, dtype) if is_quantised(rows.dtype) else rows
