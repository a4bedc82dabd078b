"""Paged decode attention: the GPU implementation of `raybatch.kernels.decode_attention`.

Row lengths vary widely, so the host spreads their blocks evenly over programs
(`raybatch.kernels.decode_spans`); a second launch merges the results of rows that are cut.
"""

import torch
import triton

from raybatch.kernels.byte_numbers import is_quantised
from raybatch.kernels.decode_spans import MERGE_FIELDS, SPAN_FIELDS
from raybatch.kernels.step_index import ENTRY_FIELDS, Parts, StepSize
from raybatch.kernels.triton.jit.attention import decode_kernel, merge_spans_kernel
from raybatch.kernels.triton.launch import OPTIONS, Pools, attention_tiles, dot_tile, power_of_two

# partial results merged at a time, and heads of one program
_TILE_PARTS, MERGE_HEADS = 4, 8
# merging programs per tile of heads, each loops over rows
MERGE_PROGRAMS = 16


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
        grid = min(size.merges, MERGE_PROGRAMS), triton.cdiv(num_heads, MERGE_HEADS)
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
