"""Attention over shared runs, the form for GPUs of `raybatch.kernels.context_attention`.

All runs of a step are one launch, whatever their lengths and however many rows read them. A run is
read once for all rows that fit a program, and cut into spans where there would be too few programs
otherwise. A second launch merges all results of a row into its output.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton

from raybatch.kernels.attention_plan import ContextPart
from raybatch.kernels.triton.decode_attention import TARGET_PROGRAMS
from raybatch.kernels.triton.jit.softmax import merge_parts_kernel
from raybatch.kernels.triton.launch import OPTIONS, power_of_two, rows_per_program, to_table
from raybatch.kernels.triton.ragged import ITEM_QUERIES, Item, attend_items

# shorter spans cost more in merging than they win
_MIN_SPAN_TOKENS = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedContexts:
    """The contexts of a plan in the form that every layer of a step uses.

    A place is a partial result: of one row, over one span of one run.

    Args:
        items: int64 [I, fields of Item].
        rows: int64, the rows of all runs, one run after the other.
        block_ids: int64, the blocks of all runs, one run after the other.
        positions: int64 [T].
        max_queries: of an item.
        order: int64 [places], places by row of the forward batch.
        starts: int64 [T + 1], where each row's places start in `order`.
    """

    items: torch.Tensor
    rows: torch.Tensor
    block_ids: torch.Tensor
    positions: torch.Tensor
    max_queries: int
    order: torch.Tensor
    starts: torch.Tensor


def prepare_contexts(
    parts: Sequence[ContextPart],
    *,
    positions: torch.Tensor,  # int64 [T]
    pool: torch.Tensor,  # [N, G, B, D]
    has_windows: bool,
) -> PreparedContexts:
    """Do once per step what all layers share, without waiting for the device.

    `positions` are those of every row of the forward batch in its sequence; of `pool`, the keys of
    any layer, only shape and dtype are read.
    """
    del has_windows
    num_kv_heads, block_size = pool.shape[1:3]
    span = _span_tokens(parts, num_kv_heads, block_size)
    items: list[Item] = []
    places_of_rows: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = []
    first_query = first_block = num_places = 0
    for part in parts:
        num_queries = len(part.query_idx)
        for begin in range(0, part.num_tokens, span):
            for query in range(0, num_queries, ITEM_QUERIES):
                items.append(
                    Item(
                        first_query=first_query + query,
                        num_queries=min(ITEM_QUERIES, num_queries - query),
                        first_place=num_places + query,
                        first_block=first_block + begin // block_size,
                        num_tokens=min(span, part.num_tokens - begin),
                        first_position=part.first_position + begin,
                        chunk_start=0,
                    )
                )
            places_of_rows.append(np.arange(first_query, first_query + num_queries))
            num_places += num_queries
        first_query += num_queries
        first_block += len(part.block_ids)
    device = positions.device
    rows = torch.cat([part.query_idx for part in parts])
    rows_of_places = rows[torch.from_numpy(np.concatenate(places_of_rows)).to(device)]
    ordered, order = rows_of_places.sort(stable=True)
    starts = torch.searchsorted(ordered, torch.arange(len(positions) + 1, device=device))
    return PreparedContexts(
        items=to_table(items, len(Item._fields), device),
        rows=rows,
        block_ids=torch.cat([part.block_ids for part in parts]),
        positions=positions,
        max_queries=max(item.num_queries for item in items),
        order=order,
        starts=starts,
    )


def _span_tokens(parts: Sequence[ContextPart], num_kv_heads: int, block_size: int) -> int:
    """Return how many positions a program takes, whole blocks: enough programs fill the device."""
    work = sum(-(-len(part.query_idx) // ITEM_QUERIES) * part.num_tokens for part in parts)
    span = max(_MIN_SPAN_TOKENS, work * num_kv_heads // TARGET_PROGRAMS)
    return -(-span // block_size) * block_size


def merge_contexts_(
    output: torch.Tensor,  # [T, H, D], contiguous, modified in place
    lse: torch.Tensor,  # float32 [T, H], contiguous, modified in place
    q: torch.Tensor,  # [T, H, D], last dimension contiguous
    k_pool: torch.Tensor,  # [N, G, B, D]
    v_pool: torch.Tensor,  # [N, G, B, D]
    prepared: PreparedContexts,
    window: int | None,
) -> None:
    """Add what the rows see of their contexts to what they have seen so far."""
    num_rows, num_heads, head_dim = q.shape
    num_places, device = len(prepared.order), q.device
    parts = torch.empty(num_places, num_heads, head_dim, dtype=torch.float32, device=device)
    part_lses = torch.empty(num_places, num_heads, dtype=torch.float32, device=device)
    attend_items(
        parts,
        part_lses,
        q,
        None,
        k_pool,
        v_pool,
        items=prepared.items,
        rows=prepared.rows,
        positions=prepared.positions,
        block_ids=prepared.block_ids,
        max_queries=prepared.max_queries,
        window=window,
    )
    tile_dim = power_of_two(head_dim)
    tile_heads = min(power_of_two(num_heads), rows_per_program(tile_dim))
    merge_parts_kernel[(num_rows, triton.cdiv(num_heads, tile_heads))](
        output,
        lse,
        parts,
        part_lses,
        prepared.order,
        prepared.starts,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        TILE_HEADS=tile_heads,
        TILE_DIM=tile_dim,
        num_warps=4,
        **OPTIONS,
    )
