"""Mixture of experts: the GPU implementation of `raybatch.kernels.moe`.

Nothing is read back to the host. Rows are not copied for the experts: the first product gathers
them, and the weighted sum gathers the results.
"""

import math
from typing import NamedTuple

import torch
import triton
from torch.nn import functional

from raybatch.kernels.moe import MAX_ROW_TILE, Chosen
from raybatch.kernels.triton.jit.moe import (
    combine_kernel,
    count_kernel,
    down_kernel,
    gate_up_kernel,
    place_kernel,
    route_kernel,
)
from raybatch.kernels.triton.launch import OPTIONS, dot_tile, power_of_two, rows_per_program
from raybatch.kernels.triton.linear import gated

# one-hot entries that a program sorts at a time, and programs that share all of them; each reads
# the counts of all
_SORT_ENTRIES = 8192
_SORT_PROGRAMS = 128
# counts that a program sums at a time; twice as many do not fit its registers
_COUNT_ENTRIES = 2048
# tile rows divided by the mean rows per expert
_ROOM = 1.3
# looping programs of products: eight per multiprocessor of an H100
PRODUCT_PROGRAMS = 1056


class ProductTile(NamedTuple):
    """Tile of a matrix product: output columns per program, and launch parameters.

    If the product has gate and up, a program computes that number of columns of each.
    """

    columns: int
    num_warps: int = 4
    num_stages: int = 3


# by tile rows. Estimated, not measured: with few rows there are enough programs; with many, wider
# tiles have more arithmetic per byte from L2. `scripts/gpu_call.sh` measures them
GATE_UP_TILES = {
    16: ProductTile(64),
    32: ProductTile(64),
    64: ProductTile(128),
    MAX_ROW_TILE: ProductTile(128, num_warps=8),
}
DOWN_TILES = dict(GATE_UP_TILES)
# bytes that a program reads of each row at a time
_INPUT_BYTES = 128


class Permutation(NamedTuple):
    """Expert choices sorted by expert; slot s is choice s % K of token s // K.

    Slots of absent experts come last: they count as those of one more expert, E - 1.

    Args:
        order: int32 [T * K], the slot at each place.
        places: int32 [T * K], the place of each slot.
        row_starts: int32 [E + 1], the first place of each expert.
        tile_ends: int32 [E], number of tiles of the experts up to and including each.
        tile_rows: rows of a tile; a tile has one expert.
    """

    order: torch.Tensor
    places: torch.Tensor
    row_starts: torch.Tensor
    tile_ends: torch.Tensor
    tile_rows: int


def route(
    x: torch.Tensor,  # [T, M]
    router: torch.Tensor,  # [E, M]
    top_k: int,
    norm_topk_prob: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the experts of each token; return (weights [T, K], expert numbers int32 [T, K])."""
    logits = functional.linear(x, router)
    num_tokens, num_experts = logits.shape
    weights = x.new_empty(num_tokens, top_k)
    experts = torch.empty(num_tokens, top_k, dtype=torch.int32, device=x.device)
    tile = power_of_two(num_experts)
    tile_rows = rows_per_program(tile, 2048)
    if num_tokens:
        route_kernel[(triton.cdiv(num_tokens, tile_rows),)](
            logits,
            weights,
            experts,
            num_tokens,
            NUM_EXPERTS=num_experts,
            TOP_K=top_k,
            IS_NORMALISED=norm_topk_prob,
            TILE_ROWS=tile_rows,
            TILE_EXPERTS=tile,
            num_warps=4,
            **OPTIONS,
        )
    return weights, experts


def permute(
    chosen: torch.Tensor,  # int [T, K]
    num_here: int,
    experts: slice | None = None,
) -> Permutation:
    """Sort all expert choices by expert, then by token.

    `experts` is the subset that is present, `num_here` of them; None if all are.
    """
    chosen = chosen.reshape(-1).contiguous()
    num_slots, device = len(chosen), chosen.device
    first, step = (0, 1) if experts is None else (experts.start or 0, experts.step or 1)
    num_experts = num_here + (experts is not None)
    tile_experts = power_of_two(num_experts)
    tile_slots = max(16, _SORT_ENTRIES // tile_experts)
    num_shards = triton.cdiv(num_slots, tile_slots)
    program_tiles = triton.cdiv(num_shards, _SORT_PROGRAMS)
    num_programs = triton.cdiv(num_shards, program_tiles) if num_slots else 0
    tile_rows = min(MAX_ROW_TILE, dot_tile(math.ceil(_ROOM * num_slots / (num_here * step))))

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    counts = empty(num_experts, num_programs)
    order, places = empty(num_slots), empty(num_slots)
    row_starts, tile_ends = empty(num_experts + 1), empty(num_experts)
    sizes = {
        "NUM_EXPERTS": num_experts,
        "TILE_SLOTS": tile_slots,
        "TILE_EXPERTS": tile_experts,
        "num_warps": 4,
    }
    if num_slots:
        run = num_slots, program_tiles, first, step
        count_kernel[(num_programs,)](chosen, counts, *run, **sizes, **OPTIONS)
        place_kernel[(num_programs,)](
            chosen,
            counts,
            order,
            places,
            row_starts,
            tile_ends,
            *run,
            # independent of the number of programs, to avoid recompilation
            TILE_COUNTS=min(_SORT_PROGRAMS, max(1, _COUNT_ENTRIES // tile_experts)),
            TILE_ROWS=tile_rows,
            **sizes,
            **OPTIONS,
        )
    return Permutation(order, places, row_starts, tile_ends, tile_rows)


def unpermute(
    rows: torch.Tensor,  # [T * K, M], sorted by expert
    weights: torch.Tensor,  # [T, K]
    places: torch.Tensor,  # int32 [T * K]
    num_rows: torch.Tensor,  # int32 [1]
) -> torch.Tensor:
    """Return the weighted sum of each token's expert outputs, [T, M].

    Rows from `num_rows` on belong to absent experts and are left out.
    """
    (num_tokens, top_k), dim = weights.shape, rows.shape[1]
    output = rows.new_empty(num_tokens, dim)
    if not num_tokens:
        return output
    tile = min(1024, power_of_two(dim))
    combine_kernel[(num_tokens, triton.cdiv(dim, tile))](
        rows,
        weights.contiguous(),
        places,
        num_rows,
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
    experts: slice | None = None,
    chosen: Chosen | None = None,
    min_grouped_rows: int | None = None,
) -> torch.Tensor:
    """See `raybatch.kernels.moe`; experts without a token are not read.

    If there are at least `min_grouped_rows` expert choices (None: never), it uses torch's grouped
    matrix products, for float weights [E, out, in] with all experts present.
    """
    weights, numbers = route(x, router, top_k, norm_topk_prob) if chosen is None else chosen
    if not len(x):
        return torch.empty_like(x)
    permutation = permute(numbers, len(gate_up), experts)
    is_whole = experts is None
    if is_whole and min_grouped_rows is not None and numbers.numel() >= min_grouped_rows:
        rows = _grouped(x, gate_up, down, permutation, top_k)
    else:
        scales = gate_up_scales, down_scales
        rows = _experts(x, (gate_up, down), scales, permutation, top_k)
    num_rows = permutation.row_starts[len(gate_up) : len(gate_up) + 1]
    return unpermute(rows, weights, permutation.places, num_rows)


def _grouped(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, permutation: Permutation, top_k: int
) -> torch.Tensor:
    """Compute `_experts` by torch's grouped product."""
    ends = permutation.row_starts[1:]
    rows = x.index_select(0, permutation.order // top_k)
    hidden = functional.grouped_mm(rows, gate_up.transpose(1, 2), offs=ends)
    return functional.grouped_mm(gated(hidden), down.transpose(1, 2), offs=ends)


def _experts(
    x: torch.Tensor,
    factors: tuple[torch.Tensor, torch.Tensor],  # gate and up, then down
    scales: tuple[torch.Tensor | None, torch.Tensor | None],
    permutation: Permutation,
    top_k: int,
) -> torch.Tensor:
    """Return the experts' outputs of their rows, [T * K, M], sorted by expert."""
    gate_up, down = factors
    gate_up_scales, down_scales = scales
    num_rows, num_experts, model_dim = len(permutation.order), len(gate_up), x.shape[1]
    ffn_dim = down.shape[2]
    hidden = x.new_empty(num_rows, ffn_dim)
    rows = x.new_empty(num_rows, model_dim)
    x = x if x.stride(1) == 1 else x.contiguous()
    tile_rows = permutation.tile_rows
    # upper bound, as only the device knows the number of tiles: each used expert may have a
    # partial one
    num_used = min(num_experts, num_rows)
    max_tiles = (num_rows + num_used * (tile_rows - 1)) // tile_rows
    shared = {
        "NUM_EXPERTS": num_experts,
        "TILE_EXPERTS": power_of_two(num_experts),
        "TILE_ROWS": tile_rows,
        "HAS_SCALES": gate_up_scales is not None,
        **OPTIONS,
    }
    tile = GATE_UP_TILES[tile_rows]
    gate_up_kernel[_programs(tile, max_tiles, ffn_dim, x.element_size())](
        x,
        gate_up,
        hidden,
        permutation.order,
        permutation.tile_ends,
        permutation.row_starts,
        x if gate_up_scales is None else gate_up_scales,
        x.stride(0),
        **_layout(gate_up),
        TOP_K=top_k,
        NUM_INPUTS=model_dim,
        NUM_OUTPUTS=ffn_dim,
        **_of_tile(tile, ffn_dim, model_dim, x.element_size()),
        **shared,
    )
    tile = DOWN_TILES[tile_rows]
    down_kernel[_programs(tile, max_tiles, model_dim, x.element_size())](
        hidden,
        down,
        rows,
        permutation.tile_ends,
        permutation.row_starts,
        x if down_scales is None else down_scales,
        **_layout(down),
        NUM_INPUTS=ffn_dim,
        NUM_OUTPUTS=model_dim,
        **_of_tile(tile, model_dim, ffn_dim, x.element_size()),
        **shared,
    )
    return rows


def _layout(weight: torch.Tensor) -> dict[str, int]:
    """Return the strides of a weight of either layout, indexed by o // PANEL, i, o % PANEL."""
    if weight.dim() == 3:
        expert, panel, inner = weight.stride()
        width, out = 1, 0
    else:
        expert, panel, inner, out = weight.stride()
        width = weight.shape[3]
    strides = {"stride_expert": expert, "stride_panel": panel, "stride_in": inner}
    return {"PANEL": width, "stride_out": out, **strides}


def _programs(tile: ProductTile, max_tiles: int, num_outputs: int, item_bytes: int) -> tuple[int]:
    """Return the grid of a product of at most `max_tiles` row tiles."""
    columns = _columns(tile, num_outputs, item_bytes)
    return (min(max_tiles * triton.cdiv(num_outputs, columns), PRODUCT_PROGRAMS),)


def _of_tile(
    tile: ProductTile, num_outputs: int, num_inputs: int, item_bytes: int
) -> dict[str, int]:
    """Return the launch options of a tile."""
    return {
        "TILE_OUT": _columns(tile, num_outputs, item_bytes),
        "TILE_IN": min(_INPUT_BYTES // item_bytes, dot_tile(num_inputs)),
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }


def _columns(tile: ProductTile, num_outputs: int, item_bytes: int) -> int:
    # three-pass float32 products have no registers for more
    return min(tile.columns, 256 // item_bytes, dot_tile(num_outputs))
