"""Weights as bytes: int8 or fp8 (e4m3), with one float32 scale for each output of a linear.

Products are those of floats: bytes take a quarter of the memory, and few rows, whose time goes into
reading weights, are computed faster.
"""

from collections.abc import Mapping

import torch
from torch.nn import functional

# the options' names, and the largest number of each type
BYTE_DTYPES: Mapping[str, torch.dtype] = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}

# 0x87f00000 as an int32
_BITS = 0x87F00000 - (1 << 32)


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
