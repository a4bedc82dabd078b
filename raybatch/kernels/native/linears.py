"""Dense linears in C: a panel of weights goes by once, while its rows' sums stay in registers.

On a CPU two to three times as fast as torch's at up to 16 rows, and a fifth faster beyond.
"""

import ctypes
import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from raybatch.kernels import linear as reference
from raybatch.kernels.linear import Linear
from raybatch.kernels.native.compiler import (
    FLOATS,
    WEIGHT_FORMS,
    CompiledOnce,
    address,
    compile_library,
    whole,
)

# outputs of one panel: two registers of AVX-512 for each of eight rows; 48 and 64 were slower
PANEL_WIDTH = 32

# results differ from torch's by a hundredth of this
_TOLERANCE = 1e-4
# bounds the [T, F] temporary
_MAX_ROWS = 256

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CompiledLinears:
    """The compiled forms of the ops of `raybatch.kernels.linear`, for panels of `PANEL_WIDTH`.

    Linears in another form go to torch.
    """

    libraries: Mapping[torch.dtype, ctypes.CDLL]

    def linear(self, x: torch.Tensor, layer: Linear) -> torch.Tensor:
        """See `raybatch.kernels.linear`."""
        if not self._knows(x, layer):
            return reference.linear(x, layer)
        outputs = x.new_empty(len(x), layer.num_outputs)
        self._multiply(x, layer, outputs, adds=False)
        return outputs

    def add_linear_(self, x: torch.Tensor, hidden: torch.Tensor, layer: Linear) -> None:
        """See `raybatch.kernels.linear`."""
        if self._knows(hidden, layer) and x.stride(1) == 1:
            self._multiply(hidden, layer, x, adds=True)
        else:
            reference.add_linear_(x, hidden, layer)

    def add_mlp_(
        self, x: torch.Tensor, hidden: torch.Tensor, gate_up: Linear, down: Linear
    ) -> None:
        """See `raybatch.kernels.linear`."""
        if not self._knows(hidden, gate_up):
            reference.add_mlp_(x, hidden, gate_up, down)
            return
        for start in range(0, len(x), _MAX_ROWS):
            rows = slice(start, start + _MAX_ROWS)
            self.add_linear_(x[rows], self._gated(hidden[rows], gate_up), down)

    def _knows(self, x: torch.Tensor, layer: Linear) -> bool:
        weight = layer.weight
        return (
            weight.dim() == 3
            and weight.shape[2] == PANEL_WIDTH
            and weight.dtype in self.libraries
            and weight.is_contiguous()
            and x.dtype == torch.float32
            and x.stride(1) == 1
        )

    def _gated(self, x: torch.Tensor, gate_up: Linear) -> torch.Tensor:
        hidden = x.new_empty(len(x), gate_up.num_outputs // 2)
        self.libraries[gate_up.weight.dtype].gated_linear(
            address(x),
            *whole(x.stride(0)),
            *(address(part) for part in (gate_up.weight, gate_up.scales, gate_up.bias)),
            address(hidden),
            *whole(len(x), x.shape[1], hidden.shape[1]),
        )
        return hidden

    def _multiply(
        self, x: torch.Tensor, layer: Linear, outputs: torch.Tensor, *, adds: bool
    ) -> None:
        self.libraries[layer.weight.dtype].linear(
            address(x),
            *whole(x.stride(0)),
            *(address(part) for part in (layer.weight, layer.scales, layer.bias, outputs)),
            *whole(outputs.stride(0), len(x), x.shape[1], layer.num_outputs, adds),
        )


@CompiledOnce
def compiled_linears(byte_dtype: torch.dtype | None = None) -> CompiledLinears | None:
    """Return the compiled ops, once per process; None where there is no compiler.

    `byte_dtype` is the dtype of the weights that are bytes, beside those in float32.
    """
    libraries: dict[torch.dtype, ctypes.CDLL] = {}
    for dtype in (torch.float32, *([] if byte_dtype is None else [byte_dtype])):
        names = {"WIDTH": PANEL_WIDTH, "WEIGHT_FORM": WEIGHT_FORMS[dtype]}
        library = compile_library("linears.c", names)
        if library is None:
            return None
        libraries[dtype] = library
    ops = CompiledLinears(libraries)
    if not all(_agree_with_torch(ops, dtype) for dtype in libraries):
        _logger.warning("the compiled linears are wrong on this host, so torch computes them")
        return None
    return ops


def _agree_with_torch(ops: CompiledLinears, dtype: torch.dtype) -> bool:
    """Return whether two linears of which one has a panel in part give what torch computes."""
    generator = torch.Generator().manual_seed(0)
    made = functools.partial(torch.randn, generator=generator, **FLOATS)
    num_rows, num_inputs, ffn_dim = 15, 40, PANEL_WIDTH
    gate_up, down = made(2, num_inputs, PANEL_WIDTH), made(2, ffn_dim, PANEL_WIDTH)
    x, gate_up_bias, down_bias = made(num_rows, num_inputs), made(2 * ffn_dim), made(num_inputs)
    x /= num_inputs**0.5
    scales: list[torch.Tensor | None] = [None, None]
    if dtype != torch.float32:
        gate_up, down = gate_up.mul_(30).round_().to(dtype), down.mul_(30).round_().to(dtype)
        scales = [made(2 * ffn_dim) / 30, made(num_inputs) / 30]
    layers = (
        Linear(gate_up, 2 * ffn_dim, gate_up_bias, scales[0]),
        Linear(down, num_inputs, down_bias, scales[1]),
    )
    output, expected = x.clone(), x.clone()
    ops.add_mlp_(output, x, *layers)
    reference.add_mlp_(expected, x, *layers)
    return torch.allclose(output, expected, atol=_TOLERANCE, rtol=_TOLERANCE)
