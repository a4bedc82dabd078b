"""Paged decode attention, the form for GPUs of `raybatch.kernels.decode_attention`.

Few sequences with many blocks would leave most of a GPU idle, so the blocks of a sequence are split
over programs, whose results are merged by log-sum-exp.
"""

import torch

from raybatch.kernels.step_index import ENTRY_FIELDS, MAX_SPLITS, TARGET_PROGRAMS, Parts, StepSize
from raybatch.kernels.triton.jit.attention import decode_kernel, merge_splits_kernel
from raybatch.kernels.triton.launch import OPTIONS, Pools, attention_tiles, dot_tile, power_of_two


def splits_of(num_programs: int, blocks_per_seq: int) -> int:
    """Return a power of two, so that few different kernels are compiled."""
    splits = min(MAX_SPLITS, TARGET_PROGRAMS // num_programs, blocks_per_seq)
    return 1 << max(0, splits.bit_length() - 1)


def attend_decode_into(
    output: torch.Tensor,  # [S, H, D], contiguous, overwritten
    lse: torch.Tensor,  # float32 [S, H], contiguous, overwritten
    q: torch.Tensor,  # [S, H, D], last dimension contiguous
    pools: Pools,
    size: StepSize,
    parts: Parts[torch.Tensor],
    positions: torch.Tensor,  # [S]
    window: int | None,
) -> None:
    """Compute the decode tokens; one without entries gets 0."""
    num_seqs, num_heads, head_dim = q.shape
    num_kv_heads = pools.k.shape[1]
    num_splits = splits_of(num_seqs * num_kv_heads, size.row_blocks)
    num_keys, tile_dim, _ = attention_tiles(q, pools.k)
    made, made_lses = output, lse
    if num_splits > 1:
        made = torch.empty(num_splits, *q.shape, dtype=torch.float32, device=q.device)
        made_lses = torch.empty(num_splits, *lse.shape, dtype=torch.float32, device=q.device)
    decode_kernel[(num_seqs, num_kv_heads, num_splits)](
        q,
        *pools.tensors,
        made,
        made_lses,
        parts.entries,
        parts.starts,
        positions,
        *q.stride()[:2],
        *pools.k.stride()[:3],
        NUM_HEADS=num_heads,
        HEADS_PER_KV=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        ENTRY_FIELDS=ENTRY_FIELDS,
        NUM_SPLITS=num_splits,
        WINDOW=window or 0,
        TILE_HEADS=dot_tile(num_heads // num_kv_heads),
        TILE_KEYS=num_keys,
        TILE_DIM=tile_dim,
        num_warps=4,
        num_stages=2,
        **pools.options,
        **OPTIONS,
    )
    if num_splits > 1:
        merge_splits_kernel[(num_seqs * num_heads,)](
            made,
            made_lses,
            output,
            lse,
            num_seqs * num_heads,
            NUM_SPLITS=num_splits,
            HEAD_DIM=head_dim,
            TILE_DIM=power_of_two(head_dim),
            num_warps=2,
            **OPTIONS,
        )
