"""Linears and experts in C: each panel of weights is read once, sums stay in registers.

On a CPU, dense linears are two to three times as fast as torch's up to 16 rows, and at least as
fast beyond. Experts are about twice as fast as torch's separate products, most for few rows per
expert.
"""

import ctypes
import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from raybatch.kernels import linear as reference
from raybatch.kernels.linear import Linear
from raybatch.kernels.moe import PanelledExperts, Scaled, looped_experts
from raybatch.kernels.native.compiler import (
    CompiledOnce,
    call,
    compile_library,
    random_tensors,
    resemble,
)

# outputs of one panel: two registers of AVX-512 for each of eight rows; 48 and 64 were slower
PANEL_WIDTH = 32

# bounds the [T, F] temporary
_MAX_ROWS = 256
# a panel's row is a whole number of registers (16 or 8 floats), and 12 of 8 floats hold its sums
_WIDTH_STEP, _MAX_WIDTH = 16, 96
# weight formats in panels.h
_WEIGHT_FORMS = {torch.float32: 0, torch.int8: 1, torch.float8_e4m3fn: 2}

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CompiledLinears:
    """Compiled ops of `raybatch.kernels.linear` for panels of `PANEL_WIDTH`.

    Linears in another layout use torch.
    """

    libraries: Mapping[torch.dtype, ctypes.CDLL]

    def linear(self, x: torch.Tensor, layer: Linear) -> torch.Tensor:
        if not self._knows(x, layer):
            return reference.linear(x, layer)
        outputs = x.new_empty(len(x), layer.num_outputs)
        self._multiply(x, layer, outputs, adds=False)
        return outputs

    def add_linear_(self, x: torch.Tensor, hidden: torch.Tensor, layer: Linear) -> None:
        if self._knows(hidden, layer) and x.stride(1) == 1:
            self._multiply(hidden, layer, x, adds=True)
        else:
            reference.add_linear_(x, hidden, layer)

    def add_mlp_(
        self, x: torch.Tensor, hidden: torch.Tensor, gate_up: Linear, down: Linear
    ) -> None:
        if not self._knows(hidden, gate_up):
            reference.add_mlp_(x, hidden, gate_up, down)
            return
        for start in range(0, len(x), _MAX_ROWS):
            rows = hidden[start : start + _MAX_ROWS]
            (num_rows, num_inputs), ffn_dim = rows.shape, gate_up.num_outputs // 2
            gated = rows.new_empty(num_rows, ffn_dim)
            weights = gate_up.weight, gate_up.scales, gate_up.bias
            kernel = self.libraries[gate_up.weight.dtype].gated_linear
            call(kernel, rows, rows.stride(0), *weights, gated, num_rows, num_inputs, ffn_dim)
            self.add_linear_(x[start : start + _MAX_ROWS], gated, down)

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

    def _multiply(
        self, x: torch.Tensor, layer: Linear, outputs: torch.Tensor, *, adds: bool
    ) -> None:
        tensors = layer.weight, layer.scales, layer.bias, outputs
        sizes = outputs.stride(0), len(x), x.shape[1], layer.num_outputs, adds
        call(self.libraries[layer.weight.dtype].linear, x, x.stride(0), *tensors, *sizes)


@CompiledOnce
def compiled_linears(byte_dtype: torch.dtype | None = None) -> CompiledLinears | None:
    """Return the compiled ops, once per process; None without a compiler.

    `byte_dtype` is the dtype of quantized weights; others are float32.
    """
    libraries: dict[torch.dtype, ctypes.CDLL] = {}
    for dtype in (torch.float32, *([] if byte_dtype is None else [byte_dtype])):
        names = {"WIDTH": PANEL_WIDTH, "WEIGHT_FORM": _WEIGHT_FORMS[dtype]}
        library = compile_library("linears.c", names)
        if library is None:
            return None
        libraries[dtype] = library
    ops = CompiledLinears(libraries)
    if not all(_agree_with_torch(ops, dtype) for dtype in libraries):
        _logger.warning("compiled linears give wrong results on this host, using torch ops")
        return None
    return ops


def _random_weight(
    made: Callable[..., torch.Tensor], shape: tuple[int, ...], dtype: torch.dtype, *outputs: int
) -> Scaled:
    """Return a random weight in panels and its scales (None for float32)."""
    weight = made(*shape)
    if dtype == torch.float32:
        return weight, None
    return weight.mul_(30).round_().to(dtype), made(*outputs) / 30


def _agree_with_torch(ops: CompiledLinears, dtype: torch.dtype) -> bool:
    """Return whether two linears, one with a padded panel, match torch."""
    made, num_inputs, width = random_tensors(), 40, PANEL_WIDTH
    layers = []
    for shape, num_outputs in (
        ((2, num_inputs, width), 2 * width),
        ((2, width, width), num_inputs),
    ):
        weight, scales = _random_weight(made, shape, dtype, num_outputs)
        layers.append(Linear(weight, num_outputs, made(num_outputs), scales))
    x = made(15, num_inputs) / num_inputs**0.5
    output, expected = x.clone(), x.clone()
    ops.add_mlp_(output, x, *layers)
    reference.add_mlp_(expected, x, *layers)
    return resemble(output, expected)


@CompiledOnce
def panelled_experts(
    up_width: int, down_width: int, dtype: torch.dtype = torch.float32
) -> PanelledExperts | None:
    """Return the kernel for experts in panels of these widths, compiled once per process.

    None without a compiler, or if the kernel gives wrong results on this host.
    """
    if any(width % _WIDTH_STEP or width > _MAX_WIDTH for width in (up_width, down_width)):
        return None
    names = {"UP_WIDTH": up_width, "DOWN_WIDTH": down_width, "WEIGHT_FORM": _WEIGHT_FORMS[dtype]}
    library = compile_library("moe_experts.c", names)
    if library is None:
        return None
    compute = functools.partial(_compute_experts, library.compute_experts)
    if not _experts_agree_with_torch(compute, up_width, down_width, dtype):
        _logger.warning("compiled experts give wrong results on this host, using torch ops")
        return None
    return compute


def _compute_experts(
    kernel: Callable[..., None],
    x: torch.Tensor,  # [T, M]
    gate_up: torch.Tensor,  # [E, 2F / UP_WIDTH, M, UP_WIDTH]
    down: torch.Tensor,  # [E, M / DOWN_WIDTH, F, DOWN_WIDTH]
    tokens: torch.Tensor,  # int64 [R], sorted by expert
    targets: torch.Tensor,  # int64 [R]
    starts: torch.Tensor,  # int64 [E + 1]
    outputs: torch.Tensor,  # [N, M]
    *,
    up_scales: torch.Tensor | None = None,  # [E, 2F]
    down_scales: torch.Tensor | None = None,  # [E, M]
) -> None:
    """Write the outputs of all rows to their places."""
    if x.stride(1) != 1:
        x = x.contiguous()
    model_dim, ffn_dim = x.shape[1], down.shape[2]
    # new_empty: independent of torch's default dtype
    hidden = x.new_empty(int(starts.diff().max()), ffn_dim)
    weights, rows = (gate_up, down, up_scales, down_scales), (tokens, targets, starts)
    sizes = len(gate_up), model_dim, ffn_dim
    call(kernel, x, x.stride(0), *weights, *rows, *sizes, hidden, outputs)


def _experts_agree_with_torch(
    compute: PanelledExperts, up_width: int, down_width: int, dtype: torch.dtype
) -> bool:
    """Return whether two experts of two panels match torch."""
    model_dim, ffn_dim, num_rows, made = 2 * down_width, 2 * up_width, 15, random_tensors()
    x = made(num_rows, model_dim) / model_dim**0.5
    up = _random_weight(made, (2, 4, model_dim, up_width), dtype, 2, 2 * ffn_dim)
    down = _random_weight(made, (2, 2, ffn_dim, down_width), dtype, 2, model_dim)
    starts = torch.tensor([0, 13, num_rows])
    tokens, targets = torch.arange(num_rows).flip(0), torch.arange(num_rows).roll(1)
    scales = {"up_scales": up[1], "down_scales": down[1]}
    output, expected = torch.empty_like(x), torch.empty_like(x)
    compute(x, up[0], down[0], tokens, targets, starts, output, **scales)
    looped_experts(x, (up, down), tokens, targets, [13, 2], expected)
    return resemble(output, expected)
