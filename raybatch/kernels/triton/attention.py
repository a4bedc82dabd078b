"""Executes an `AttentionPlan`: the GPU implementation of `raybatch.kernels.attention`.

A layer has at most five launches for any number of sequences, chunks and segments, and two more for
every further MAX_RUNS segments of a row. Chunks may be computed by library functions instead
(`varlen`), with one more launch.

Decode rows vary widely in length, so the host spreads their blocks evenly over programs (`Spans`);
a second launch merges the results of rows that are cut. Chunks and segments have one kernel: chunks
are causal over themselves and read their earlier prompt in full, other segments are read once for
all rows of a program. A further launch merges all results of a row into its output.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import triton

from raybatch.kernels.attention_plan import AttentionPlan
from raybatch.kernels.byte_numbers import is_quantised
from raybatch.kernels.step_index import (
    ENTRY_FIELDS,
    MERGE_FIELDS,
    SPAN_FIELDS,
    Index,
    Item,
    Parts,
    StepIndex,
    StepSize,
    parts_of,
    rounds_of,
)
from raybatch.kernels.triton.jit.attention import (
    decode_kernel,
    merge_parts_kernel,
    merge_spans_kernel,
    ragged_kernel,
)
from raybatch.kernels.triton.jit.small_ops import heads_kernel
from raybatch.kernels.triton.launch import (
    OPTIONS,
    Pools,
    attention_tiles,
    dot_tile,
    power_of_two,
    rows_per_program,
)

# partial results merged at a time, and heads of one program
_TILE_PARTS, MERGE_HEADS = 4, 8
# merging programs per tile of heads, each loops over rows
SPAN_MERGE_PROGRAMS = 16


def attend_decode_into(
    output: torch.Tensor,  # [T, H, D], contiguous, overwritten in decode rows
    lse: torch.Tensor,  # float32 [T, H], contiguous, overwritten in decode rows
    q: torch.Tensor,  # [T, H, D], last dimension contiguous
    pools: Pools,
    size: StepSize,
    parts: Parts[torch.Tensor],
    positions: torch.Tensor,  # [T]
    window: int | None,
) -> None:
    """Write the attention of decode rows over their entries to `output` and `lse`.

    The output of a row without entries is 0.
    """
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = pools.k.shape[1]
    num_keys, tile_dim, _ = attention_tiles(q, pools.k)
    shape = size.span_places, num_heads
    made = torch.empty(*shape, head_dim, dtype=torch.float32, device=q.device)
    made_lses = torch.empty(shape, dtype=torch.float32, device=q.device)
    decode_kernel[(size.programs, num_kv_heads)](
        q,
        *pools.tensors,
        output,
        lse,
        made,
        made_lses,
        parts.entries,
        parts.programs,
        parts.spans,
        positions,
        *q.stride()[:2],
        *pools.k.stride()[:2],
        NUM_HEADS=num_heads,
        HEADS_PER_KV=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        ENTRY_FIELDS=ENTRY_FIELDS,
        SPAN_FIELDS=SPAN_FIELDS,
        WINDOW=window or 0,
        TILE_HEADS=dot_tile(num_heads // num_kv_heads),
        TILE_KEYS=num_keys,
        TILE_DIM=tile_dim,
        num_warps=4,
        # prefetch keys one tile ahead; 8-bit tiles are small, so two ahead
        num_stages=4 if is_quantised(pools.k.dtype) else 3,
        **pools.options,
        **OPTIONS,
    )
    if size.merges:
        grid = min(size.merges, SPAN_MERGE_PROGRAMS), triton.cdiv(num_heads, MERGE_HEADS)
        merge_spans_kernel[grid](
            made,
            made_lses,
            output,
            lse,
            parts.counts[3:],
            parts.merges,
            MERGE_FIELDS=MERGE_FIELDS,
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            TILE_PARTS=_TILE_PARTS,
            TILE_HEADS=MERGE_HEADS,
            TILE_DIM=power_of_two(head_dim),
            num_warps=4,
            **OPTIONS,
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


# prepares chunks for a library
PiecesOf = Callable[[StepSize, Parts[torch.Tensor]], Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedAttention:
    """An `AttentionPlan` prepared for all layers of a step.

    Args:
        has_padding: some rows may be in no part of the plan.
        rounds: (size, parts) of each further plan of `rounds_of`, merged in this order.
        last: the same for the rows with logits, if prepared together with the step.
        pieces: prompt chunks in the format of torch's `varlen_attn`; None if it is not used.
    """

    size: StepSize
    parts: Parts[torch.Tensor]
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    has_padding: bool
    rounds: tuple[tuple[StepSize, Parts[torch.Tensor]], ...] = ()
    last: "PreparedAttention | None" = None
    pieces: Any = None


def prepare_attention(
    plan: AttentionPlan,
    *,
    positions: torch.Tensor,  # [T]
    slot_mapping: torch.Tensor,  # [T]
    pool: torch.Tensor,  # [N, G, B, R]
    windows: tuple[int | None, ...],
    upload: Callable[[Index, torch.device], torch.Tensor] | None = None,
    last: tuple[AttentionPlan, torch.Tensor] | None = None,
    pieces_of: PiecesOf | None = None,
) -> PreparedAttention:
    """See `raybatch.kernels.attention`; one copy to the device, without host sync.

    The copy includes `last`. `pieces_of` prepares prompt chunks for another kernel; None: for the
    kernels of this package.

    Raises:
        ValueError: a layer has a sliding window, and the plan has no `first_positions`.
    """
    # int32 as in graphs: another dtype would compile another kernel
    positions, slot_mapping = positions.int(), slot_mapping.int()
    plans = [(plan, positions, slot_mapping)]
    if last is not None:
        rows = last[1]
        plans.append((last[0], positions.index_select(0, rows), slot_mapping.index_select(0, rows)))
    if any(window is not None for window in windows):
        for part in (plan.decode for plan, _, _ in plans):
            if part is not None and part.first_positions is None:
                raise ValueError(
                    "DecodePart.first_positions is None, but the model has a sliding window"
                )
    indices = [
        _indices(plan, len(of_rows), pool, joins_segments=pieces_of is None)
        for plan, of_rows, _ in plans
    ]
    whole = [index for rounds in indices for index in rounds]
    on_host = np.concatenate([index.array() for index in whole])
    on_device = (
        torch.from_numpy(on_host).to(positions.device)
        if upload is None
        else upload(on_host, positions.device)
    )
    arrays = iter(torch.split(on_device, [index.size.num_index for index in whole]))
    prepared = []
    for (_, of_rows, slots), rounds in zip(plans, indices, strict=True):
        first, *more = [(index.size, parts_of(index.size, next(arrays))) for index in rounds]
        prepared.append(
            PreparedAttention(
                size=first[0],
                parts=first[1],
                positions=of_rows,
                slot_mapping=slots,
                has_padding=False,
                rounds=tuple(more),
                pieces=pieces_of(*first) if pieces_of and first[0].chunk_items else None,
            )
        )
    return prepared[0] if last is None else replace(prepared[0], last=prepared[1])


def _indices(
    plan: AttentionPlan, num_rows: int, pool: torch.Tensor, *, joins_segments: bool
) -> list[StepIndex]:
    _, num_kv_heads, block_size, _ = pool.shape
    return [
        StepIndex(
            part,
            num_rows=num_rows,
            num_kv_heads=num_kv_heads,
            block_size=block_size,
            joins_segments=joins_segments,
        )
        for part in rounds_of(plan, num_rows, joins_segments=joins_segments)
    ]


def prepare_fixed(
    size: StepSize,
    index: torch.Tensor,  # int32 [size.num_index]
    *,
    positions: torch.Tensor,  # [size.rows]
    slot_mapping: torch.Tensor,  # [size.rows]
    pieces_of: PiecesOf | None = None,
) -> PreparedAttention:
    """Prepare a step whose index, positions and slots are always in the same tensors.

    So a CUDA graph can replay it. Padding up to `size` is computed too; the output of padded rows
    is zeros. With `pieces_of` the index must be a `StepIndex` without `joins_segments`.
    """
    parts = parts_of(size, index)
    return PreparedAttention(
        size=size,
        parts=parts,
        positions=positions,
        slot_mapping=slot_mapping,
        has_padding=True,
        pieces=pieces_of(size, parts) if pieces_of and size.chunk_items else None,
    )


def attend(
    q: torch.Tensor,  # [T, H, D], last dimension contiguous
    k: torch.Tensor,  # [T, G, D], last dimension contiguous
    v: torch.Tensor,  # [T, G, D], last dimension contiguous
    k_pool: torch.Tensor,  # [N, G, B, R]
    v_pool: torch.Tensor,  # [N, G, B, R]
    prepared: PreparedAttention,
    window: int | None,
    *,
    attend_pieces: Callable[..., None] | None = None,
) -> torch.Tensor:
    """See `raybatch.kernels.attention`.

    `attend_pieces` computes the chunks that `pieces_of` has prepared, if it was given.
    """
    size, parts, positions = prepared.size, prepared.parts, prepared.positions
    pools = Pools(k_pool, v_pool)
    make = torch.zeros if prepared.has_padding else torch.empty
    output = make(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    common = pools, size, parts
    if size.decode_rows:
        attend_decode_into(output, lse, q, *common, positions, window)
    if prepared.pieces is not None:
        assert attend_pieces is not None, "the step was prepared for a library"
        attend_pieces(output, lse, q, k, v, prepared.pieces, size, window)
    elif size.chunk_items:
        attend_chunks_into(output, lse, q, (k, v), *common, positions, window)
    for runs_size, runs in ((size, parts), *prepared.rounds):
        if runs_size.segment_items:
            add_segments_(output, lse, q, pools, runs_size, runs, positions, window)
    return output.flatten(1)


def finish_heads(
    projected: torch.Tensor,  # [T, heads, D], modified in place, last dimension contiguous
    num_queries: int,
    norms: torch.Tensor | None,  # [heads of queries and keys, D]
    eps: float,
    rotation: torch.Tensor,  # complex64 [T, 1, D / 2]
    k_pool: torch.Tensor,  # [N, G, B, R], modified in place
    v_pool: torch.Tensor,  # [N, G, B, R], modified in place
    prepared: PreparedAttention | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `raybatch.kernels.attention`; one kernel launch."""
    num_tokens, num_heads, head_dim = projected.shape
    num_kv_heads = (num_heads - num_queries) // 2
    num_turned = num_queries + num_kv_heads
    q, k = projected[:, :num_queries], projected[:, num_queries:num_turned]
    heads = q, k, projected[:, num_turned:]
    if not num_tokens:
        return heads
    pools = Pools(k_pool, v_pool)
    turns = torch.view_as_real(rotation).flatten(1)
    tile_pairs = power_of_two(head_dim // 2)
    tile_heads = min(power_of_two(num_heads), rows_per_program(tile_pairs, 2048))
    options = pools.options
    options["IS_BYTES"] &= bool(num_kv_heads)
    heads_kernel[(num_tokens, triton.cdiv(num_heads, tile_heads))](
        projected,
        projected if norms is None else norms,
        turns,
        *pools.tensors,
        projected if prepared is None else prepared.slot_mapping,
        eps,
        *projected.stride()[:2],
        0 if norms is None else norms.stride(0),
        turns.stride(0),
        *k_pool.stride()[:2],
        NUM_HEADS=num_heads,
        NUM_QUERIES=num_queries,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        HAS_NORMS=norms is not None,
        TILE_HEADS=tile_heads,
        TILE_PAIRS=tile_pairs,
        num_warps=4,
        **options,
        **OPTIONS,
    )
    return heads
