"""Attention of one token per sequence over its blocks of the pool."""

import triton
import triton.language as tl

from raybatch.kernels.triton.jit.softmax import attend_keys, finish


@triton.jit
def decode_kernel(
    q_ptr,
    k_pool_ptr,
    v_pool_ptr,
    out_ptr,
    lse_ptr,
    block_ids_ptr,
    num_valid_ptr,
    first_positions_ptr,
    starts_ptr,
    positions_ptr,
    scale,
    window,
    stride_qt,
    stride_qh,
    stride_block,
    stride_head,
    stride_slot,
    NUM_HEADS: tl.constexpr,
    HEADS_PER_KV: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    UPCAST: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    TILE_DIM: tl.constexpr,
):
    """Attend with the heads of one KV head of one sequence over one split of its blocks.

    Sequence s has the entries starts[s]..starts[s + 1] of the block arrays; with 5 of them and 2
    splits, the first takes 3. Outputs are [NUM_SPLITS, S, H, D].
    """
    sequence = tl.program_id(0).to(tl.int64)
    kv_head, split = tl.program_id(1), tl.program_id(2)
    stop = tl.load(starts_ptr + sequence + 1)
    first = tl.load(starts_ptr + sequence)
    per_split = tl.cdiv(stop - first, NUM_SPLITS)
    first += split * per_split
    num_slots = ((tl.minimum(first + per_split, stop) - first) * BLOCK_SIZE).to(tl.int32)

    lanes, dims = tl.arange(0, TILE_HEADS), tl.arange(0, TILE_DIM)
    is_head, is_dim = lanes < HEADS_PER_KV, dims < HEAD_DIM
    heads = kv_head * HEADS_PER_KV + lanes
    query_mask = is_head[:, None] & is_dim[None, :]
    q_places = sequence * stride_qt + heads[:, None] * stride_qh + dims[None, :]
    q = tl.load(q_ptr + q_places, mask=query_mask, other=0.0)
    if UPCAST:
        q = q.to(tl.float32)
    position = tl.load(positions_ptr + sequence)

    highest = tl.full((TILE_HEADS,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((TILE_HEADS,), dtype=tl.float32)
    acc = tl.zeros((TILE_HEADS, TILE_DIM), dtype=tl.float32)
    for start in range(0, num_slots, TILE_KEYS):
        slots = start + tl.arange(0, TILE_KEYS)
        is_slot = slots < num_slots
        entries, offsets = first + slots // BLOCK_SIZE, slots % BLOCK_SIZE
        is_visible = offsets < tl.load(num_valid_ptr + entries, mask=is_slot, other=0)
        if HAS_WINDOW:
            begins = tl.load(first_positions_ptr + entries, mask=is_slot, other=0)
            is_visible = is_visible & (position - (begins + offsets) < window)
        blocks = tl.load(block_ids_ptr + entries, mask=is_slot, other=0)
        rows = blocks * stride_block + kv_head * stride_head + offsets * stride_slot
        places = rows[:, None] + dims[None, :]
        mask = is_visible[:, None] & is_dim[None, :]
        k = tl.load(k_pool_ptr + places, mask=mask, other=0.0)
        v = tl.load(v_pool_ptr + places, mask=mask, other=0.0)
        if UPCAST:
            k = k.to(tl.float32)
            v = v.to(tl.float32)
        highest, total, acc = attend_keys(q, k, v, is_visible[None, :], highest, total, acc, scale)

    output, lse = finish(highest, total, acc)
    out_heads = (split * tl.num_programs(0) + sequence) * NUM_HEADS + heads
    out_places = out_heads[:, None] * HEAD_DIM + dims[None, :]
    tl.store(out_ptr + out_places, output.to(out_ptr.dtype.element_ty), mask=query_mask)
    tl.store(lse_ptr + out_heads, lse, mask=is_head)
