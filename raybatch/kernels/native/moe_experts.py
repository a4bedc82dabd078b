"""Experts in C: each reads its weights once, while the sums of its rows stay in registers.

On a CPU about twice as fast as products of torch, which start anew for every expert; most where an
expert has few rows.
"""

import functools
import logging
from collections.abc import Callable

import torch
from torch.nn import functional

from raybatch.kernels.byte_weights import dequantise_weight
from raybatch.kernels.moe import PanelledExperts
from raybatch.kernels.native.compiler import (
    FLOATS,
    WEIGHT_FORMS,
    CompiledOnce,
    address,
    compile_library,
    whole,
)

# the result differs from torch's by a hundredth of this
_TOLERANCE = 1e-4
# registers of 16 and of 8 floats take a panel's row whole, and 12 of the latter hold its sums
_WIDTH_STEP, _MAX_WIDTH = 16, 96

_logger = logging.getLogger(__name__)


@CompiledOnce
def panelled_experts(
    up_width: int, down_width: int, dtype: torch.dtype = torch.float32
) -> PanelledExperts | None:
    """Return the kernel for panels of these widths, compiled once per process; None without one."""
    if any(width % _WIDTH_STEP or width > _MAX_WIDTH for width in (up_width, down_width)):
        return None
    names = {"UP_WIDTH": up_width, "DOWN_WIDTH": down_width, "WEIGHT_FORM": WEIGHT_FORMS[dtype]}
    library = compile_library("moe_experts.c", names)
    if library is None:
        return None
    compute = functools.partial(_compute, library.compute_experts)
    if not _agrees_with_torch(compute, up_width, down_width, dtype):
        _logger.warning("the compiled experts are wrong on this host, so torch computes them")
        return None
    return compute


def _compute(
    kernel: Callable[..., None],
    x: torch.Tensor,  # [T, M]
    gate_up: torch.Tensor,  # [E, 2F / UP_WIDTH, M, UP_WIDTH]
    down: torch.Tensor,  # [E, M / DOWN_WIDTH, F, DOWN_WIDTH]
    tokens: torch.Tensor,  # int64 [R], sorted by expert
    targets: torch.Tensor,  # int64 [R]
    starts: torch.Tensor,  # int64 [E + 1]
    *,
    up_scales: torch.Tensor | None = None,  # [E, 2F]
    down_scales: torch.Tensor | None = None,  # [E, M]
) -> torch.Tensor:
    """Return the outputs of all rows at their places, [R, M]."""
    if x.stride(1) != 1:
        x = x.contiguous()
    num_experts, model_dim, ffn_dim = len(gate_up), x.shape[1], down.shape[2]
    # whatever the process takes by default
    hidden = x.new_empty(int(starts.diff().max()), ffn_dim)
    outputs = x.new_empty(len(tokens), model_dim)
    kernel(
        address(x),
        *whole(x.stride(0)),
        *(address(tensor) for tensor in (gate_up, down, up_scales, down_scales)),
        *(address(tensor) for tensor in (tokens, targets, starts)),
        *whole(num_experts, model_dim, ffn_dim),
        address(hidden),
        address(outputs),
    )
    return outputs


def _agrees_with_torch(
    compute: PanelledExperts, up_width: int, down_width: int, dtype: torch.dtype
) -> bool:
    """Return whether two experts of two panels give what torch computes."""
    generator = torch.Generator().manual_seed(0)
    model_dim, ffn_dim, num_rows = 2 * down_width, 2 * up_width, 15
    made = functools.partial(torch.randn, generator=generator, **FLOATS)
    x = made(num_rows, model_dim) / model_dim**0.5
    gate_up = made(2, 4, model_dim, up_width)
    down = made(2, 2, ffn_dim, down_width)
    scales: tuple[torch.Tensor | None, torch.Tensor | None] = None, None
    if dtype != torch.float32:
        gate_up, down = gate_up.mul_(30).round_().to(dtype), down.mul_(30).round_().to(dtype)
        scales = made(2, 2 * ffn_dim) / 30, made(2, model_dim) / 30
    starts = torch.tensor([0, 13, num_rows])
    tokens, targets = torch.arange(num_rows).flip(0), torch.arange(num_rows).roll(1)
    output = compute(
        x, gate_up, down, tokens, targets, starts, up_scales=scales[0], down_scales=scales[1]
    )
    for expert in range(2):
        rows = slice(int(starts[expert]), int(starts[expert + 1]))
        expert_scales = [None if part is None else part[expert] for part in scales]
        weights = [
            (part if of is None else dequantise_weight(part, of, torch.float32)).mT.flatten(0, 1)
            for part, of in zip((gate_up[expert], down[expert]), expert_scales, strict=True)
        ]
        gate, up = functional.linear(x[tokens[rows]], weights[0]).chunk(2, dim=1)
        expected = functional.linear(functional.silu(gate) * up, weights[1])
        if not torch.allclose(output[targets[rows]], expected, atol=_TOLERANCE, rtol=_TOLERANCE):
            return False
    return True
