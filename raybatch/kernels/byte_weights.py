"""Weights as bytes: int8 or fp8 (e4m3), with one float32 scale for each output of a linear.

Products are those of floats: bytes take a quarter of the memory, and few rows, whose time goes into
reading weights, are computed faster.
"""

from collections.abc import Mapping

import torch
from torch.nn import functional

__all__ = ["BYTE_DTYPES", "dequantize", "quantize", "quantized_scales"]

# the options' names, and the largest number of each type
BYTE_DTYPES: Mapping[str, torch.dtype] = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def quantized_scales(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the scale of each output of a weight [..., out, in], float32 [..., out].

    The largest weight of an output becomes the largest number of the type; where all are 0, the
    scale is 1.
    """
    largest = weight.float().abs().amax(dim=-1)
    return torch.where(largest == 0, 1.0, largest / _LARGEST[dtype])


def quantize(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a weight [..., out, in] divided by its scales, as the nearest numbers of `dtype`."""
    scaled = weight.float() / quantized_scales(weight, dtype).unsqueeze(-1)
    return scaled.round().to(dtype) if dtype == torch.int8 else scaled.to(dtype)


def dequantize(weight: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a linear's weight in `dtype`, [out, in] or in panels, with scales [out].

    Panels may hold more outputs than there are scales.
    """
    floats = weight.to(torch.float32)
    if weight.dim() == 2:
        return floats.mul_(scales.unsqueeze(1)).to(dtype)
    num_panels, _, width = weight.shape
    filled = functional.pad(scales, (0, num_panels * width - len(scales)))
    return floats.mul_(filled.view(num_panels, 1, width)).to(dtype)
