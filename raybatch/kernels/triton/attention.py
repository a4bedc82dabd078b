"""Executes an `AttentionPlan`, the form for GPUs of `raybatch.kernels.attention`.

A layer is at most five launches, however many sequences, chunks and shared runs a step has.
"""

from dataclasses import dataclass

import torch

from raybatch.errors import ConfigError
from raybatch.kernels.attention_plan import AttentionPlan, FixedDecode
from raybatch.kernels.byte_numbers import is_quantised
from raybatch.kernels.triton.decode_attention import (
    DecodeWalk,
    attend_decode_into,
    fixed_walk,
    plan_walk,
)
from raybatch.kernels.triton.jit.small_ops import store_kv_kernel
from raybatch.kernels.triton.launch import OPTIONS, power_of_two
from raybatch.kernels.triton.ragged import (
    Items,
    PreparedContexts,
    attend_items,
    merge_contexts_,
    prepare_chunks,
    prepare_contexts,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedAttention:
    """A plan in the form that every layer of a step uses."""

    num_decode: int
    block_ids: torch.Tensor
    block_offsets: torch.Tensor
    walk: DecodeWalk | None
    chunks: Items | None = None
    contexts: PreparedContexts | None = None


def prepare_attention(
    plan: AttentionPlan,
    *,
    positions: torch.Tensor,  # int64 [T]
    slot_mapping: torch.Tensor,  # int64 [T]
    pool: torch.Tensor,  # [N, G, B, D]
    windows: tuple[int | None, ...],
) -> PreparedAttention:
    """See `raybatch.kernels.attention`.

    Raises:
        ConfigError: the pool is quantised.
        ValueError: a layer has a sliding window, and the plan lacks what that needs.
    """
    if is_quantised(pool.dtype):
        raise ConfigError(
            "engine.kv_cache_dtype: Triton's kernels read no KV of 8 bits; leave it at 'auto', or "
            "run the ops of torch, which do"
        )
    walk = None
    if plan.decode is not None and plan.num_decode:
        rows = positions[: plan.num_decode]
        walk = plan_walk(plan.decode, positions=rows, pool=pool, windows=windows)
    chunks, contexts = None, plan.contexts
    if plan.prefill is not None:
        chunks, contexts = prepare_chunks(plan.prefill, contexts, positions=positions)
    shared = None
    if contexts:
        shared = prepare_contexts(contexts, positions=positions, pool=pool, windows=windows)
    return PreparedAttention(
        num_decode=plan.num_decode,
        block_ids=slot_mapping // pool.shape[2],
        block_offsets=slot_mapping % pool.shape[2],
        walk=walk,
        chunks=chunks,
        contexts=shared,
    )


def prepare_fixed(
    part: FixedDecode, *, pool: torch.Tensor, windows: tuple[int | None, ...]
) -> PreparedAttention:
    """See `raybatch.kernels.attention`."""
    return PreparedAttention(
        num_decode=len(part.positions),
        block_ids=part.slot_mapping // pool.shape[2],
        block_offsets=part.slot_mapping % pool.shape[2],
        walk=fixed_walk(part, pool=pool, windows=windows),
    )


def attend(
    q: torch.Tensor,  # [T, H, D], last dimension contiguous
    k: torch.Tensor,  # [T, G, D], last dimension contiguous
    v: torch.Tensor,  # [T, G, D], last dimension contiguous
    k_pool: torch.Tensor,  # [N, G, B, D]
    v_pool: torch.Tensor,  # [N, G, B, D]
    prepared: PreparedAttention,
    window: int | None,
) -> torch.Tensor:
    """See `raybatch.kernels.attention`."""
    output = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    if prepared.walk is not None:
        rows = slice(0, prepared.num_decode)
        attend_decode_into(output[rows], lse[rows], q[rows], k_pool, v_pool, prepared.walk, window)
    if prepared.chunks is not None:
        attend_items(output, lse, q, (k, v), k_pool, v_pool, prepared.chunks, window)
    if prepared.contexts is not None:
        merge_contexts_(output, lse, q, k_pool, v_pool, prepared.contexts, window)
    return output.flatten(1)


def store_kv(
    k: torch.Tensor,  # [T, G, D], last dimension contiguous
    v: torch.Tensor,  # [T, G, D], last dimension contiguous
    k_pool: torch.Tensor,  # [N, G, B, D], modified in place
    v_pool: torch.Tensor,  # [N, G, B, D], modified in place
    prepared: PreparedAttention,
) -> None:
    """Write the KV of this step's tokens to their slots."""
    num_tokens, num_kv_heads, head_dim = k.shape
    if not num_tokens:
        return
    assert k_pool.stride() == v_pool.stride(), "both pools are laid out alike"
    store_kv_kernel[(num_tokens,)](
        k,
        v,
        k_pool,
        v_pool,
        prepared.block_ids,
        prepared.block_offsets,
        *k.stride()[:2],
        *v.stride()[:2],
        *k_pool.stride()[:3],
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        TILE_HEADS=power_of_two(num_kv_heads),
        TILE_DIM=power_of_two(head_dim),
        num_warps=4,
        **OPTIONS,
    )
