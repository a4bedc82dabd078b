"""Attention of chunks of prompts and over shared runs; one kernel serves both, one launch for each.

Chunks are causal over themselves, and see the prompt before them in full. What a chunk alone reads
of its prompt's earlier blocks is computed in the same program as the chunk itself, so there is
nothing to merge.

Other runs, the form for GPUs of `raybatch.kernels.context_attention`, are read once for all rows
that fit a program, and cut into spans where there would be too few programs otherwise. A second
launch merges all results of a row into its output.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import triton

from raybatch.kernels.attention_plan import ContextPart, PrefillPart
from raybatch.kernels.triton.jit.attention import merge_parts_kernel, ragged_kernel
from raybatch.kernels.triton.launch import (
    OPTIONS,
    TARGET_PROGRAMS,
    attention_tiles,
    dot_tile,
    power_of_two,
    rows_per_program,
)

# queries of an item at most; how many of them a program takes depends on the heads
_ITEM_QUERIES = 128
# shorter spans cost more in merging than they win
_MIN_SPAN_TOKENS = 256
# from here on, merging costs less than a single program that walks the whole run
_MAX_JOINED_TOKENS = 4096


class _Item(NamedTuple):
    """Some queries and the run of cached positions, or a part of one, that they see.

    Args:
        first_query: a row of the forward batch, or an index into the list of rows.
        num_queries: at most _ITEM_QUERIES.
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


@dataclass(frozen=True, slots=True)
class Items:
    """What one launch computes, in the form that every layer of a step uses.

    Args:
        table: int64 [I, fields of an item].
        rows: int64, the rows of all runs, one run after the other; not read for chunks.
        block_ids: int64, the blocks of all runs, one run after the other.
        positions: int64 [T].
        max_queries: of an item.
    """

    table: torch.Tensor
    rows: torch.Tensor
    block_ids: torch.Tensor
    positions: torch.Tensor
    max_queries: int


@dataclass(frozen=True, slots=True)
class PreparedContexts:
    """The contexts of a plan; a place is a partial result: of one row, over one span of one run.

    Args:
        order: int64 [places], places by row of the forward batch.
        starts: int64 [T + 1], where each row's places start in `order`.
    """

    items: Items
    order: torch.Tensor
    starts: torch.Tensor


def _made(
    items: Sequence[_Item],
    rows: torch.Tensor,
    block_ids: Sequence[torch.Tensor],
    positions: torch.Tensor,
) -> Items:
    table = torch.tensor(items, dtype=torch.int64).to(positions.device)
    blocks = torch.cat(tuple(block_ids)) if block_ids else positions
    return Items(table, rows, blocks, positions, max(item.num_queries for item in items))


def prepare_chunks(
    part: PrefillPart,
    contexts: Sequence[ContextPart],
    *,
    positions: torch.Tensor,  # int64 [T]
) -> tuple[Items, tuple[ContextPart, ...]]:
    """Join chunks with the runs that they read alone; return them, and the contexts left over.

    Reads two row numbers of each such run from the device.
    """
    joined = _runs_of_chunks(part, contexts)
    items: list[_Item] = []
    blocks: list[torch.Tensor] = []
    num_blocks = 0
    for start, length in zip(part.starts, part.lens, strict=True):
        run = joined.get(start)
        for query in range(0, length, _ITEM_QUERIES):
            items.append(
                _Item(
                    first_query=start + query,
                    num_queries=min(_ITEM_QUERIES, length - query),
                    first_place=start + query,
                    first_block=num_blocks,
                    num_tokens=run.num_tokens if run is not None else 0,
                    first_position=run.first_position if run is not None else 0,
                    chunk_start=start,
                )
            )
        if run is not None:
            blocks.append(run.block_ids)
            num_blocks += len(run.block_ids)
    left = {id(run) for run in joined.values()}
    others = tuple(context for context in contexts if id(context) not in left)
    return _made(items, positions, blocks, positions), others


def _runs_of_chunks(part: PrefillPart, contexts: Sequence[ContextPart]) -> dict[int, ContextPart]:
    """Return, by first row of a chunk, a run that all of the chunk reads and nobody else."""
    lens = dict(zip(part.starts, part.lens, strict=True))
    lengths = set(part.lens)
    candidates = [
        context
        for context in contexts
        if len(context.query_idx) in lengths and context.num_tokens <= _MAX_JOINED_TOKENS
    ]
    if not candidates:
        return {}
    bounds = torch.stack([context.query_idx[[0, -1]] for context in candidates]).tolist()
    runs: dict[int, ContextPart] = {}
    for context, (first, last) in zip(candidates, bounds, strict=True):
        # rows of a context differ, so these are all rows of the chunk; the order is of no matter
        if lens.get(first) == len(context.query_idx) == last - first + 1:
            runs.setdefault(first, context)
    return runs


def prepare_contexts(
    parts: Sequence[ContextPart],
    *,
    positions: torch.Tensor,  # int64 [T]
    pool: torch.Tensor,  # [N, G, B, D]
    windows: tuple[int | None, ...],
) -> PreparedContexts:
    """See `raybatch.kernels.context_attention`; this does not wait for the device."""
    del windows
    num_kv_heads, block_size = pool.shape[1:3]
    # so many positions a program takes, whole blocks, that enough programs fill the device
    work = sum(-(-len(part.query_idx) // _ITEM_QUERIES) * part.num_tokens for part in parts)
    span = max(_MIN_SPAN_TOKENS, work * num_kv_heads // TARGET_PROGRAMS)
    span = -(-span // block_size) * block_size
    items: list[_Item] = []
    queries_of_places: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = []
    first_query = first_block = num_places = 0
    for part in parts:
        num_queries = len(part.query_idx)
        for begin in range(0, part.num_tokens, span):
            for query in range(0, num_queries, _ITEM_QUERIES):
                items.append(
                    _Item(
                        first_query=first_query + query,
                        num_queries=min(_ITEM_QUERIES, num_queries - query),
                        first_place=num_places + query,
                        first_block=first_block + begin // block_size,
                        num_tokens=min(span, part.num_tokens - begin),
                        first_position=part.first_position + begin,
                        chunk_start=0,
                    )
                )
            queries_of_places.append(np.arange(first_query, first_query + num_queries))
            num_places += num_queries
        first_query += num_queries
        first_block += len(part.block_ids)
    device = positions.device
    rows = torch.cat([part.query_idx for part in parts])
    rows_of_places = rows[torch.from_numpy(np.concatenate(queries_of_places)).to(device)]
    ordered, order = rows_of_places.sort(stable=True)
    starts = torch.searchsorted(ordered, torch.arange(len(positions) + 1, device=device))
    made = _made(items, rows, [part.block_ids for part in parts], positions)
    return PreparedContexts(made, order, starts)


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
    shape = len(prepared.order), num_heads
    parts = torch.empty(*shape, head_dim, dtype=torch.float32, device=q.device)
    part_lses = torch.empty(shape, dtype=torch.float32, device=q.device)
    attend_items(parts, part_lses, q, None, k_pool, v_pool, prepared.items, window)
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


def attend_items(
    output: torch.Tensor,  # [places, H, D], contiguous, overwritten where items have a place
    lse: torch.Tensor,  # float32 [places, H], contiguous, overwritten where items have a place
    q: torch.Tensor,  # [T, H, D], last dimension contiguous
    own_kv: tuple[torch.Tensor, torch.Tensor] | None,  # [T, G, D] each, last dimension contiguous
    k_pool: torch.Tensor,  # [N, G, B, D]
    v_pool: torch.Tensor,  # [N, G, B, D]
    items: Items,
    window: int | None,
) -> None:
    """Compute the items; with keys and values of their own chunk, queries see those causally."""
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = k_pool.shape[1]
    heads_per_kv = num_heads // num_kv_heads
    assert k_pool.stride() == v_pool.stride(), "both pools are laid out alike"
    k, v = own_kv or (q, q)
    num_keys, tile_dim, most_lanes = attention_tiles(k_pool)
    # a lane for each head of a query
    num_lanes = min(most_lanes, dot_tile(items.max_queries * heads_per_kv))
    num_lanes = max(num_lanes, dot_tile(heads_per_kv))
    num_programs = triton.cdiv(items.max_queries, num_lanes // heads_per_kv)
    ragged_kernel[(len(items.table), num_kv_heads, num_programs)](
        q,
        k,
        v,
        k_pool,
        v_pool,
        output,
        lse,
        items.table,
        items.rows,
        items.positions,
        items.block_ids,
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        *k_pool.stride()[:3],
        NUM_HEADS=num_heads,
        HEADS_PER_KV=heads_per_kv,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=k_pool.shape[2],
        ITEM_FIELDS=len(_Item._fields),
        HAS_CHUNK=own_kv is not None,
        WINDOW=window or 0,
        TILE_LANES=num_lanes,
        TILE_KEYS=num_keys,
        TILE_DIM=tile_dim,
        num_warps=8 if num_lanes * tile_dim >= 8192 else 4,
        num_stages=2,
        **OPTIONS,
    )
