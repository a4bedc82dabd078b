"""Attention of prompt chunks and over segments: one kernel for both, one launch each.

Chunks are causal over themselves and read their earlier prompt in full. Other segments (the GPU
implementation of `raybatch.kernels.segment_attention`) are read once for all rows of a program. A
second launch merges all results of a row into its output.
"""

import torch
import triton

from raybatch.kernels.step_index import Item, Parts, StepSize
from raybatch.kernels.triton.jit.attention import merge_parts_kernel, ragged_kernel
from raybatch.kernels.triton.launch import (
    OPTIONS,
    Pools,
    attention_tiles,
    dot_tile,
    power_of_two,
    rows_per_program,
)

# looping programs by warps: per multiprocessor of an H100, registers hold one of 8 warps, or two
# of 4
LOOPING_PROGRAMS = {8: 132, 4: 264}
# merging programs, each loops over rows
MERGE_PROGRAMS = 264


def attend_chunks_into(
    output: torch.Tensor,  # [T, H, D], contiguous, overwritten in rows of chunks
    lse: torch.Tensor,  # float32 [T, H], contiguous, overwritten in rows of chunks
    q: torch.Tensor,  # [T, H, D], last dimension contiguous
    own_kv: tuple[torch.Tensor, torch.Tensor],  # [T, G, D] each, last dimension contiguous
    pools: Pools,
    size: StepSize,
    parts: Parts[torch.Tensor],
    positions: torch.Tensor,  # [T]
    window: int | None,
) -> None:
    """Write the attention of chunks over their own tokens and the segments joined to them."""
    # rows of a chunk are consecutive, so no row list is needed
    tables = parts.counts, parts.chunks, parts.chunks, positions, parts.chunk_blocks
    launch = size.chunk_items, size.chunk_queries
    _attend_items(output, lse, q, own_kv, pools, tables, launch, window)


def add_segments_(
    output: torch.Tensor,  # [T, H, D], contiguous, modified in place
    lse: torch.Tensor,  # float32 [T, H], contiguous, modified in place
    q: torch.Tensor,  # [T, H, D], last dimension contiguous
    pools: Pools,
    size: StepSize,
    parts: Parts[torch.Tensor],
    positions: torch.Tensor,  # [T]
    window: int | None,
) -> None:
    """Compute the attention over other segments, and merge it into `output` and `lse`."""
    num_heads, head_dim = q.shape[1:]
    shape = size.places, num_heads
    made = torch.empty(*shape, head_dim, dtype=torch.float32, device=q.device)
    made_lses = torch.empty(shape, dtype=torch.float32, device=q.device)
    tables = parts.counts[1:], parts.runs, parts.segment_rows, positions, parts.segment_blocks
    launch = size.segment_items, size.segment_queries
    _attend_items(made, made_lses, q, None, pools, tables, launch, window)
    tile_dim = power_of_two(head_dim)
    tile_heads = min(power_of_two(num_heads), rows_per_program(tile_dim))
    num_programs = min(size.merged_rows, MERGE_PROGRAMS)
    merge_parts_kernel[(num_programs, triton.cdiv(num_heads, tile_heads))](
        output,
        lse,
        made,
        made_lses,
        parts.counts[2:],
        parts.merged_rows,
        parts.order,
        parts.row_starts,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        TILE_HEADS=tile_heads,
        TILE_DIM=tile_dim,
        num_warps=4,
        **OPTIONS,
    )


def _attend_items(
    output: torch.Tensor,  # [places, H, D], contiguous, overwritten where items have a place
    lse: torch.Tensor,  # float32 [places, H], contiguous, overwritten where items have a place
    q: torch.Tensor,  # [T, H, D], last dimension contiguous
    own_kv: tuple[torch.Tensor, torch.Tensor] | None,  # [T, G, D] each, last dimension contiguous
    pools: Pools,
    tables: tuple[torch.Tensor, ...],  # number of items, items, rows, positions of rows, blocks
    launch: tuple[int, int],  # how many items, and the most queries of one
    window: int | None,
) -> None:
    """Compute the items; with `own`, queries also attend causally to their chunk."""
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = pools.k.shape[1]
    heads_per_kv = num_heads // num_kv_heads
    num_items, max_queries = launch
    k, v = own_kv or (q, q)
    num_keys, tile_dim, most_lanes = attention_tiles(q, pools.k)
    # one lane per query and head
    num_lanes = min(most_lanes, dot_tile(max_queries * heads_per_kv))
    num_lanes = max(num_lanes, dot_tile(heads_per_kv))
    num_parts = triton.cdiv(max_queries, num_lanes // heads_per_kv)
    num_warps = 8 if num_lanes * tile_dim >= 8192 else 4
    num_programs = min(num_items * num_kv_heads * num_parts, LOOPING_PROGRAMS[num_warps])
    ragged_kernel[(num_programs,)](
        q,
        k,
        v,
        *pools.tensors,
        output,
        lse,
        *tables,
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        *pools.k.stride()[:2],
        num_parts,
        NUM_HEADS=num_heads,
        HEADS_PER_KV=heads_per_kv,
        HEAD_DIM=head_dim,
        ITEM_FIELDS=len(Item._fields),
        HAS_CHUNK=own_kv is not None,
        WINDOW=window or 0,
        TILE_LANES=num_lanes,
        TILE_KEYS=num_keys,
        TILE_DIM=tile_dim,
        num_warps=num_warps,
        # one more stage for block ids, if registers allow
        num_stages=2 if num_warps == 8 else 3,
        **pools.options,
        **OPTIONS,
    )
