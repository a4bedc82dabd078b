"""Writes keys and values into the pool, the form for GPUs of `attention.store_kv`."""

from typing import Protocol

import torch

from raybatch.kernels.triton.jit.kv_store import store_kv_kernel
from raybatch.kernels.triton.launch import OPTIONS, power_of_two


class Slots(Protocol):
    """Where the tokens of a step go, int64 [T] each; a prepared attention is one."""

    @property
    def block_ids(self) -> torch.Tensor: ...

    @property
    def block_offsets(self) -> torch.Tensor: ...


def store_kv(
    k: torch.Tensor,  # [T, G, D], last dimension contiguous
    v: torch.Tensor,  # [T, G, D], last dimension contiguous
    k_pool: torch.Tensor,  # [N, G, B, D], modified in place
    v_pool: torch.Tensor,  # [N, G, B, D], modified in place
    prepared: Slots,
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
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        k_pool.stride(0),
        k_pool.stride(1),
        k_pool.stride(2),
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        TILE_HEADS=power_of_two(num_kv_heads),
        TILE_DIM=power_of_two(head_dim),
        num_warps=4,
        **OPTIONS,
    )
