"""Launches the ragged attention kernel, which serves chunks of prompts and shared runs alike."""

import math
from typing import NamedTuple

import torch
import triton

from raybatch.kernels.triton.jit.ragged import ragged_kernel
from raybatch.kernels.triton.launch import OPTIONS, AttentionTiles, dot_tile, needs_upcast

# queries of an item at most; how many of them a program takes depends on the heads
ITEM_QUERIES = 128


class Item(NamedTuple):
    """Some queries and the run of cached positions, or a part of one, that they see.

    Args:
        first_query: a row of the forward batch, or an index into the list of rows.
        num_queries: at most ITEM_QUERIES.
        first_place: where the first query's output goes; the others follow.
        first_block: of the run, an index into the list of blocks.
        num_tokens: of the run, from the first slot of its first block on; may be 0.
        first_position: of the run, in the sequence.
        chunk_start: row of the forward batch where the queries' chunk starts, if they have one.
    """

    first_query: int
    num_queries: int
    first_place: int
    first_block: int
    num_tokens: int
    first_position: int
    chunk_start: int


def attend_items(
    output: torch.Tensor,  # [places, H, D], contiguous, overwritten
    lse: torch.Tensor,  # float32 [places, H], contiguous, overwritten
    q: torch.Tensor,  # [T, H, D], last dimension contiguous
    own_kv: tuple[torch.Tensor, torch.Tensor] | None,  # [T, G, D] each
    k_pool: torch.Tensor,  # [N, G, B, D]
    v_pool: torch.Tensor,  # [N, G, B, D]
    *,
    items: torch.Tensor,  # int64 [I, fields of Item]
    rows: torch.Tensor,  # int64, read only without own keys
    positions: torch.Tensor,  # int64 [T]
    block_ids: torch.Tensor,  # int64
    max_queries: int,
    window: int | None,
) -> None:
    """Compute the items; with keys and values of their own chunk, queries see those causally.

    No item has more than `max_queries`.
    """
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = k_pool.shape[1]
    heads_per_kv = num_heads // num_kv_heads
    assert k_pool.stride() == v_pool.stride(), "both pools are laid out alike"
    k, v = own_kv or (q, q)
    tiles = AttentionTiles.of(k_pool)
    # a lane for each head of a query
    num_lanes = min(tiles.most_lanes, dot_tile(max_queries * heads_per_kv))
    num_lanes = max(num_lanes, dot_tile(heads_per_kv))
    num_programs = triton.cdiv(max_queries, num_lanes // heads_per_kv)
    ragged_kernel[(len(items), num_kv_heads, num_programs)](
        q,
        k,
        v,
        k_pool,
        v_pool,
        output,
        lse,
        items,
        rows,
        positions,
        block_ids,
        math.log2(math.e) / math.sqrt(head_dim),
        window or 0,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        k_pool.stride(0),
        k_pool.stride(1),
        k_pool.stride(2),
        NUM_HEADS=num_heads,
        HEADS_PER_KV=heads_per_kv,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=k_pool.shape[2],
        ITEM_FIELDS=len(Item._fields),
        HAS_CHUNK=own_kv is not None,
        HAS_WINDOW=window is not None,
        UPCAST=needs_upcast(q),
        TILE_LANES=num_lanes,
        TILE_KEYS=tiles.num_keys,
        TILE_DIM=tiles.dim,
        num_warps=8 if num_lanes * tiles.dim >= 8192 else 4,
        num_stages=2,
        **OPTIONS,
    )
