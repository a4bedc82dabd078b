"""Attention of ragged sets of queries over runs of cached positions and over their own chunk.

All sets of a step are one launch: a table has a row per tile of queries and run (or part of one).
"""

import triton
import triton.language as tl

from raybatch.kernels.triton.jit.softmax import attend_keys, finish


@triton.jit
def ragged_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    k_pool_ptr,
    v_pool_ptr,
    out_ptr,
    lse_ptr,
    items_ptr,
    rows_ptr,
    positions_ptr,
    block_ids_ptr,
    scale,
    window,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    stride_block,
    stride_head,
    stride_slot,
    NUM_HEADS: tl.constexpr,
    HEADS_PER_KV: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ITEM_FIELDS: tl.constexpr,
    HAS_CHUNK: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    UPCAST: tl.constexpr,
    TILE_LANES: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    TILE_DIM: tl.constexpr,
):
    """Attend with the heads of one KV head of some queries of one item of the table.

    With HAS_CHUNK the item's queries are neighbouring rows of one chunk, which they see causally
    beside the run; else they are listed in `rows`, and see the run alone. Lane l is query
    l // HEADS_PER_KV and head l % HEADS_PER_KV: with 3 heads, 64 lanes hold 21 queries, and an item
    of 30 queries takes two programs. Outputs are [places, H, D].
    """
    PROGRAM_QUERIES: tl.constexpr = TILE_LANES // HEADS_PER_KV
    item = items_ptr + tl.program_id(0) * ITEM_FIELDS
    skipped = tl.program_id(2) * PROGRAM_QUERIES
    num_queries = tl.minimum(tl.load(item + 1) - skipped, PROGRAM_QUERIES)
    if num_queries <= 0:
        return
    first_query = tl.load(item) + skipped
    first_place, first_block = tl.load(item + 2) + skipped, tl.load(item + 3)
    num_tokens, first_position = tl.load(item + 4).to(tl.int32), tl.load(item + 5)
    chunk_start = tl.load(item + 6)
    kv_head = tl.program_id(1)

    lanes, dims = tl.arange(0, TILE_LANES), tl.arange(0, TILE_DIM)
    queries, heads = lanes // HEADS_PER_KV, kv_head * HEADS_PER_KV + lanes % HEADS_PER_KV
    is_query, is_dim = queries < num_queries, dims < HEAD_DIM
    if HAS_CHUNK:
        rows = first_query + queries
    else:
        rows = tl.load(rows_ptr + first_query + queries, mask=is_query, other=0)
    positions = tl.load(positions_ptr + rows, mask=is_query, other=0)
    query_mask = is_query[:, None] & is_dim[None, :]
    q_places = rows[:, None] * stride_qt + heads[:, None] * stride_qh + dims[None, :]
    q = tl.load(q_ptr + q_places, mask=query_mask, other=0.0)
    if UPCAST:
        q = q.to(tl.float32)

    highest = tl.full((TILE_LANES,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((TILE_LANES,), dtype=tl.float32)
    acc = tl.zeros((TILE_LANES, TILE_DIM), dtype=tl.float32)
    begin = 0
    if HAS_WINDOW:
        # tiles that lie before the window of every query are not read
        oldest = tl.min(tl.where(is_query, positions, 2147483647), axis=0)
        begin = tl.maximum(oldest - window + 1 - first_position, 0).to(tl.int32)
        begin = begin // TILE_KEYS * TILE_KEYS
    for start in range(begin, num_tokens, TILE_KEYS):
        keys = start + tl.arange(0, TILE_KEYS)
        is_key = keys < num_tokens
        offsets = keys % BLOCK_SIZE
        blocks = tl.load(block_ids_ptr + first_block + keys // BLOCK_SIZE, mask=is_key, other=0)
        pool_rows = blocks * stride_block + kv_head * stride_head + offsets * stride_slot
        places = pool_rows[:, None] + dims[None, :]
        mask = is_key[:, None] & is_dim[None, :]
        k = tl.load(k_pool_ptr + places, mask=mask, other=0.0)
        v = tl.load(v_pool_ptr + places, mask=mask, other=0.0)
        if UPCAST:
            k = k.to(tl.float32)
            v = v.to(tl.float32)
        is_visible = is_query[:, None] & is_key[None, :]
        if HAS_WINDOW:
            distance = positions[:, None] - (first_position + keys)[None, :]
            is_visible = is_visible & (distance < window)
        highest, total, acc = attend_keys(q, k, v, is_visible, highest, total, acc, scale)

    if HAS_CHUNK:
        own = (rows - chunk_start).to(tl.int32)
        first_own = (first_query - chunk_start).to(tl.int32)
        num_keys = first_own + num_queries.to(tl.int32)
        begin = 0
        if HAS_WINDOW:
            begin = tl.maximum(first_own - window + 1, 0) // TILE_KEYS * TILE_KEYS
        for start in range(begin, num_keys, TILE_KEYS):
            keys = start + tl.arange(0, TILE_KEYS)
            is_key = keys < num_keys
            mask = is_key[:, None] & is_dim[None, :]
            key_rows = chunk_start + keys
            k_places = key_rows[:, None] * stride_kt + kv_head * stride_kh + dims[None, :]
            v_places = key_rows[:, None] * stride_vt + kv_head * stride_vh + dims[None, :]
            k = tl.load(k_ptr + k_places, mask=mask, other=0.0)
            v = tl.load(v_ptr + v_places, mask=mask, other=0.0)
            if UPCAST:
                k = k.to(tl.float32)
                v = v.to(tl.float32)
            is_visible = is_query[:, None] & (keys[None, :] <= own[:, None])
            if HAS_WINDOW:
                is_visible = is_visible & (own[:, None] - keys[None, :] < window)
            highest, total, acc = attend_keys(q, k, v, is_visible, highest, total, acc, scale)

    output, lse = finish(highest, total, acc)
    out_heads = (first_place + queries) * NUM_HEADS + heads
    out_places = out_heads[:, None] * HEAD_DIM + dims[None, :]
    tl.store(out_ptr + out_places, output.to(out_ptr.dtype.element_ty), mask=query_mask)
    tl.store(lse_ptr + out_heads, lse, mask=is_query)
