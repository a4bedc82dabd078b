"""Mixture of experts, the form for GPUs of `raybatch.kernels.moe`.

Nothing is read back to the host, so a layer costs launches and no wait. Rows are not copied on
their way to the experts: the first product gathers them, and the weighted sum gathers its results.
"""

from typing import NamedTuple

import torch
import triton

from raybatch.kernels import moe
from raybatch.kernels.moe import route
from raybatch.kernels.triton.jit.moe import (
    combine_kernel,
    count_kernel,
    down_kernel,
    gate_up_kernel,
    place_kernel,
)
from raybatch.kernels.triton.launch import OPTIONS, dot_tile, power_of_two

# entries of the one-hot matrix that one program sorts
_SORT_ENTRIES = 8192
_MAX_ROW_TILE = 128
_OUT_TILE = 64


class Permutation(NamedTuple):
    """Slots sorted by expert; slot s is choice s % K of token s // K.

    Args:
        order: int32 [T * K], the slot at each place.
        places: int32 [T * K], the place of each slot.
        row_starts: int32 [E + 1], the first place of each expert.
    """

    order: torch.Tensor
    places: torch.Tensor
    row_starts: torch.Tensor


def permute(
    experts: torch.Tensor,  # int64 [T, K]
    num_experts: int,
) -> Permutation:
    """Sort all choices of experts, those of one expert by token."""
    chosen = experts.reshape(-1).contiguous()
    num_slots, device = len(chosen), chosen.device
    tile_experts = power_of_two(num_experts)
    tile_slots = max(16, _SORT_ENTRIES // tile_experts)
    num_tiles = triton.cdiv(num_slots, tile_slots)
    counts = torch.empty(num_experts, num_tiles, dtype=torch.int32, device=device)
    sizes = {
        "NUM_EXPERTS": num_experts,
        "TILE_SLOTS": tile_slots,
        "TILE_EXPERTS": tile_experts,
        "num_warps": 4,
    }
    order = torch.empty(num_slots, dtype=torch.int32, device=device)
    places = torch.empty_like(order)
    if num_slots:
        count_kernel[(num_tiles,)](chosen, counts, num_slots, **sizes, **OPTIONS)
    ends = counts.view(-1).cumsum(0, dtype=torch.int32)
    bases = ends - counts.view(-1)
    if num_slots:
        place_kernel[(num_tiles,)](chosen, bases, order, places, num_slots, **sizes, **OPTIONS)
    row_starts = torch.zeros(num_experts + 1, dtype=torch.int32, device=device)
    row_starts[1:] = counts.sum(1, dtype=torch.int32).cumsum(0)
    return Permutation(order, places, row_starts)


def unpermute(
    rows: torch.Tensor,  # [T * K, M], sorted by expert
    weights: torch.Tensor,  # [T, K]
    places: torch.Tensor,  # int32 [T * K]
) -> torch.Tensor:
    """Return the weighted sum of each token's rows, [T, M]."""
    (num_tokens, top_k), dim = weights.shape, rows.shape[1]
    output = rows.new_empty(num_tokens, dim)
    if not num_tokens:
        return output
    tile = min(1024, power_of_two(dim))
    combine_kernel[(num_tokens, triton.cdiv(dim, tile))](
        rows,
        weights.contiguous(),
        places,
        output,
        TOP_K=top_k,
        DIM=dim,
        TILE_DIM=tile,
        num_warps=4,
        **OPTIONS,
    )
    return output


def moe_ffn(
    x: torch.Tensor,  # [T, M]
    router: torch.Tensor,  # [E, M]
    gate_up: torch.Tensor,  # [E, 2F, M], or in panels [E, 2F / P, M, P]
    down: torch.Tensor,  # [E, M, F], or in panels [E, M / P, F, P]
    *,
    top_k: int,
    norm_topk_prob: bool,
    gate_up_scales: torch.Tensor | None = None,  # float32 [E, 2F]
    down_scales: torch.Tensor | None = None,  # float32 [E, M]
) -> torch.Tensor:
    """See `raybatch.kernels.moe`, where weights that are bytes go.

    Experts without a token are not read.
    """
    if gate_up_scales is not None:
        return moe.moe_ffn(
            x,
            router,
            gate_up,
            down,
            top_k=top_k,
            norm_topk_prob=norm_topk_prob,
            gate_up_scales=gate_up_scales,
            down_scales=down_scales,
        )
    weights, experts = route(x, router, top_k, norm_topk_prob)
    permutation = permute(experts, len(gate_up))
    rows = _experts(x, gate_up, down, permutation, top_k)
    return unpermute(rows, weights, permutation.places)


def _experts(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, permutation: Permutation, top_k: int
) -> torch.Tensor:
    """Return what the experts make of their rows, [T * K, M], sorted by expert."""
    num_rows, num_experts, model_dim = len(permutation.order), len(gate_up), x.shape[1]
    ffn_dim = down.shape[2]
    hidden = x.new_empty(num_rows, ffn_dim)
    rows = x.new_empty(num_rows, model_dim)
    if not num_rows:
        return rows
    x = x if x.stride(1) == 1 else x.contiguous()
    tile_rows = min(_MAX_ROW_TILE, dot_tile(triton.cdiv(num_rows, num_experts)))
    tiles_of_expert = (permutation.row_starts.diff() + tile_rows - 1) // tile_rows
    tile_ends = tiles_of_expert.cumsum(0, dtype=torch.int32)
    # how many tiles there are is known to the device alone; those beyond do nothing
    max_tiles = num_rows // tile_rows + min(num_experts, num_rows)
    shared = {
        "NUM_EXPERTS": num_experts,
        "TILE_EXPERTS": power_of_two(num_experts),
        "TILE_ROWS": tile_rows,
        "num_warps": 8 if tile_rows == _MAX_ROW_TILE else 4,
        "num_stages": 3,
        **OPTIONS,
    }
    out_tile, in_tile = _tiles(ffn_dim, model_dim, x.element_size())
    gate_up_kernel[(max_tiles, triton.cdiv(ffn_dim, out_tile))](
        x,
        gate_up,
        hidden,
        permutation.order,
        tile_ends,
        permutation.row_starts,
        x.stride(0),
        **_layout(gate_up),
        TOP_K=top_k,
        NUM_INPUTS=model_dim,
        NUM_OUTPUTS=ffn_dim,
        TILE_OUT=out_tile,
        TILE_IN=in_tile,
        **shared,
    )
    out_tile, in_tile = _tiles(model_dim, ffn_dim, x.element_size())
    down_kernel[(max_tiles, triton.cdiv(model_dim, out_tile))](
        hidden,
        down,
        rows,
        tile_ends,
        permutation.row_starts,
        **_layout(down),
        NUM_INPUTS=ffn_dim,
        NUM_OUTPUTS=model_dim,
        TILE_OUT=out_tile,
        TILE_IN=in_tile,
        **shared,
    )
    return rows


def _layout(weight: torch.Tensor) -> dict[str, int]:
    """Return how a weight of either form lies: output o of input i is o // PANEL, i, o % PANEL."""
    if weight.dim() == 3:
        expert, panel, inner = weight.stride()
        width, out = 1, 0
    else:
        expert, panel, inner, out = weight.stride()
        width = weight.shape[3]
    strides = {"stride_expert": expert, "stride_panel": panel, "stride_in": inner}
    return {"PANEL": width, "stride_out": out, **strides}


def _tiles(num_outputs: int, num_inputs: int, item_bytes: int) -> tuple[int, int]:
    """Return how many columns and how many inputs a program takes at a time."""
    return min(_OUT_TILE, dot_tile(num_outputs)), min(128 // item_bytes, dot_tile(num_inputs))
