"""Paged decode attention, the form for GPUs of `raybatch.kernels.decode_attention`.

Few sequences with many blocks would leave most of a GPU idle, so the blocks of a sequence are split
over programs, whose results are merged by log-sum-exp.
"""

from dataclasses import dataclass

import torch

from raybatch.kernels.attention_plan import MAX_SPLITS, DecodePart, FixedDecode
from raybatch.kernels.triton.jit.attention import decode_kernel, merge_splits_kernel
from raybatch.kernels.triton.launch import (
    OPTIONS,
    TARGET_PROGRAMS,
    attention_tiles,
    dot_tile,
    power_of_two,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeWalk:
    """A `DecodePart` by sequence, in the form that every layer of a step uses.

    Args:
        block_ids: int64 [P], those of sequence 0, then of sequence 1, and so on.
        num_valid: int64 [P], valid positions of each.
        first_positions: int64 [P], position of the first slot of each; None without windows.
        starts: int64 [S + 1], where each sequence starts in them.
        positions: int64 [S], of the decode tokens.
        num_splits: programs per sequence and KV head, a power of two.
    """

    block_ids: torch.Tensor
    num_valid: torch.Tensor
    first_positions: torch.Tensor | None
    starts: torch.Tensor
    positions: torch.Tensor
    num_splits: int


def plan_walk(
    part: DecodePart,
    *,
    positions: torch.Tensor,  # int64 [S], of the decode tokens
    pool: torch.Tensor,  # [N, G, B, D], keys of any layer
    windows: tuple[int | None, ...],
) -> DecodeWalk:
    """Turn a part into the walk that `attend_decode_into` executes.

    Raises:
        ValueError: a layer has a sliding window, and the part has no first positions.
    """
    first_positions = part.first_positions
    if all(window is None for window in windows):
        first_positions = None
    elif first_positions is None:
        raise ValueError("DecodePart.first_positions is needed by a sliding window")
    num_seqs = len(positions)
    owners, order = part.owners.sort(stable=True)
    starts = torch.searchsorted(owners, torch.arange(num_seqs + 1, device=owners.device))
    return DecodeWalk(
        block_ids=part.block_ids.index_select(0, order),
        num_valid=part.num_valid.index_select(0, order),
        first_positions=None if first_positions is None else first_positions.index_select(0, order),
        starts=starts,
        positions=positions,
        num_splits=_num_splits(num_seqs * pool.shape[1], len(order) // num_seqs),
    )


def fixed_walk(
    part: FixedDecode, *, pool: torch.Tensor, windows: tuple[int | None, ...]
) -> DecodeWalk:
    """Turn a part into the walk that `attend_decode_into` executes, by operations of fixed shapes.

    The grid is that of the longest row there may be; a split without entries has no weight.
    """
    has_windows = any(window is not None for window in windows)
    return DecodeWalk(
        block_ids=part.block_ids,
        num_valid=part.num_valid,
        first_positions=part.first_positions if has_windows else None,
        starts=part.starts,
        positions=part.positions,
        num_splits=_num_splits(len(part.positions) * pool.shape[1], part.max_row_blocks),
    )


def _num_splits(num_programs: int, blocks_per_seq: int) -> int:
    """Return a power of two, so that few different kernels are compiled."""
    splits = min(MAX_SPLITS, TARGET_PROGRAMS // num_programs, blocks_per_seq)
    return 1 << max(0, splits.bit_length() - 1)


def attend_decode_into(
    output: torch.Tensor,  # [S, H, D], contiguous, overwritten
    lse: torch.Tensor,  # float32 [S, H], contiguous, overwritten
    q: torch.Tensor,  # [S, H, D], last dimension contiguous
    k_pool: torch.Tensor,  # [N, G, B, D]
    v_pool: torch.Tensor,  # [N, G, B, D]
    walk: DecodeWalk,
    window: int | None,
) -> None:
    """Compute the decode tokens."""
    num_seqs, num_heads, head_dim = q.shape
    num_kv_heads, num_splits = k_pool.shape[1], walk.num_splits
    assert k_pool.stride() == v_pool.stride(), "both pools are laid out alike"
    if not num_seqs:
        return
    num_keys, tile_dim, _ = attention_tiles(k_pool)
    parts, part_lses = output, lse
    if num_splits > 1:
        parts = torch.empty(num_splits, *q.shape, dtype=torch.float32, device=q.device)
        part_lses = torch.empty(num_splits, *lse.shape, dtype=torch.float32, device=q.device)
    decode_kernel[(num_seqs, num_kv_heads, num_splits)](
        q,
        k_pool,
        v_pool,
        parts,
        part_lses,
        walk.block_ids,
        walk.num_valid,
        walk.num_valid if window is None else walk.first_positions,
        walk.starts,
        walk.positions,
        *q.stride()[:2],
        *k_pool.stride()[:3],
        NUM_HEADS=num_heads,
        HEADS_PER_KV=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=k_pool.shape[2],
        NUM_SPLITS=num_splits,
        WINDOW=window or 0,
        TILE_HEADS=dot_tile(num_heads // num_kv_heads),
        TILE_KEYS=num_keys,
        TILE_DIM=tile_dim,
        num_warps=4,
        num_stages=2,
        **OPTIONS,
    )
    if num_splits > 1:
        merge_splits_kernel[(num_seqs * num_heads,)](
            parts,
            part_lses,
            output,
            lse,
            num_seqs * num_heads,
            NUM_SPLITS=num_splits,
            HEAD_DIM=head_dim,
            TILE_DIM=power_of_two(head_dim),
            num_warps=2,
            **OPTIONS,
        )
