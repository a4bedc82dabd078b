"""Executes an `AttentionPlan`: the GPU implementation of `raybatch.kernels.attention`.

A layer has at most five launches for any number of sequences, chunks and segments, and two more for
every further MAX_RUNS segments of a row. Chunks may be computed by library functions instead
(`varlen`), with one more launch.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import triton

from raybatch.kernels.attention_plan import AttentionPlan
from raybatch.kernels.step_index import Index, Parts, StepIndex, StepSize, parts_of, rounds_of
from raybatch.kernels.triton.decode_attention import attend_decode_into
from raybatch.kernels.triton.jit.small_ops import heads_kernel
from raybatch.kernels.triton.launch import OPTIONS, Pools, power_of_two, rows_per_program
from raybatch.kernels.triton.ragged import add_segments_, attend_chunks_into

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
