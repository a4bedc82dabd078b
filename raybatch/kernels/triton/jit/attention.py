"""Attention of decode tokens, of prompt chunks and over segments, by online softmax.

Scores are in units of log2 within a kernel, as the hardware has exp2; stored log-sum-exps are
natural. A query without a visible key has sum and output 0 and a log-sum-exp of -inf. A WINDOW of 0
means none.
"""

import triton
import triton.language as tl

from raybatch.kernels.triton.jit.small_ops import from_byte

IS_INTERPRETED: tl.constexpr = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def base_of(highest):
    """Return what to subtract from the scores of a softmax: `highest`, or 0 if it is -inf."""
    return tl.where(highest == float("-inf"), 0.0, highest)


@triton.jit
def divisor_of(total):
    """Return what to divide weighted sums by: the total weight, or 1 if it is 0."""
    return tl.where(total == 0.0, 1.0, total)


@triton.jit
def log_of(total):
    """Return the natural logarithm of a sum of weights; -inf if it is 0."""
    return tl.where(total == 0.0, float("-inf"), tl.log(divisor_of(total)))


@triton.jit
def load_tile(ptr, places, mask):
    """Load a tile as an operand of a matrix product; masked elements are 0."""
    tile = tl.load(ptr + places, mask=mask, other=0.0)
    # the interpreter represents bfloat16 as 16-bit integers and would multiply those
    if IS_INTERPRETED and tile.dtype == tl.bfloat16:
        tile = tile.to(tl.float32)
    return tile


@triton.jit
def load_pool_tile(
    ptr,
    scales_ptr,
    rows,
    dims,
    mask,
    dtype: tl.constexpr,
    ROW_WIDTH: tl.constexpr,
    IS_BYTES: tl.constexpr,
):
    """Load rows of the pool; 8-bit rows, which end with their scale, are converted to `dtype`."""
    places = rows[:, None] + dims[None, :]
    if IS_BYTES:
        numbers = from_byte(tl.load(ptr + places, mask=mask, other=0))
        scales = tl.load(scales_ptr + rows // 4 + ROW_WIDTH // 4 - 1)
        tile = tl.where(mask, (numbers * scales[:, None]).to(dtype), 0.0).to(dtype)
    else:
        tile = load_tile(ptr, places, mask)
    return tile


@triton.jit
def attend_keys(q, k, v, is_visible, highest, total, acc, HEAD_DIM):
    """Update the online softmax of queries [m, D] with a tile of keys and values [n, D].

    Returns the new `highest`, `total` and `acc`: maximum of scores, sum of weights, weighted sum.
    """
    scale: tl.constexpr = 1.4426950408889634 * HEAD_DIM**-0.5
    scores = tl.dot(q, tl.trans(k), input_precision="tf32x3") * scale
    scores = tl.where(is_visible, scores, float("-inf"))
    new_highest = tl.maximum(highest, tl.max(scores, axis=1))
    base = base_of(new_highest)
    weights = tl.exp2(scores - base[:, None])
    decay = tl.exp2(highest - base)
    total = total * decay + tl.sum(weights, axis=1)
    acc = acc * decay[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="tf32x3")
    return new_highest, total, acc


@triton.jit
def finish(highest, total, acc):
    """Return the output [m, D] of an online softmax and its log-sum-exp [m]."""
    lse = base_of(highest) * 0.6931471805599453 + log_of(total)
    return acc / divisor_of(total)[:, None], lse


@triton.jit(do_not_specialize_on_alignment=["num_merges_ptr", "merges_ptr"])
def merge_spans_kernel(
    parts_ptr,
    part_lses_ptr,
    out_ptr,
    lse_ptr,
    num_merges_ptr,
    merges_ptr,
    MERGE_FIELDS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_PARTS: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    TILE_DIM: tl.constexpr,
):
    """Merge the partial results of each row with several spans, for some heads.

    The results of a row are adjacent in [places, H, D].

    Programs loop over rows with a stride, as the number of rows varies by step.
    """
    heads = tl.program_id(1) * TILE_HEADS + tl.arange(0, TILE_HEADS)
    dims = tl.arange(0, TILE_DIM)
    is_head, is_dim = heads < NUM_HEADS, dims < HEAD_DIM
    for number in range(tl.program_id(0), tl.load(num_merges_ptr), tl.num_programs(0)):
        merge = merges_ptr + number * MERGE_FIELDS
        row, first = tl.load(merge).to(tl.int64), tl.load(merge + 1).to(tl.int64)
        num_parts = tl.load(merge + 2)
        highest = tl.full((TILE_HEADS,), float("-inf"), dtype=tl.float32)
        total = tl.zeros((TILE_HEADS,), dtype=tl.float32)
        acc = tl.zeros((TILE_HEADS, TILE_DIM), dtype=tl.float32)
        for start in range(0, num_parts, TILE_PARTS):
            parts = start + tl.arange(0, TILE_PARTS)
            part_heads = (first + parts)[:, None] * NUM_HEADS + heads[None, :]
            is_part = (parts < num_parts)[:, None] & is_head[None, :]
            lses = tl.load(part_lses_ptr + part_heads, mask=is_part, other=float("-inf"))
            new_highest = tl.maximum(highest, tl.max(lses, axis=0))
            base = base_of(new_highest)
            weights, decay = tl.exp(lses - base[None, :]), tl.exp(highest - base)
            places = part_heads[:, :, None] * HEAD_DIM + dims[None, None, :]
            mask = is_part[:, :, None] & is_dim[None, None, :]
            made = tl.load(parts_ptr + places, mask=mask, other=0.0)
            total = total * decay + tl.sum(weights, axis=0)
            acc = acc * decay[:, None] + tl.sum(made * weights[:, :, None], axis=0)
            highest = new_highest
        out_heads = row * NUM_HEADS + heads
        merged = acc / divisor_of(total)[:, None]
        lse = base_of(highest) + log_of(total)
        out_places = out_heads[:, None] * HEAD_DIM + dims[None, :]
        mask = is_head[:, None] & is_dim[None, :]
        tl.store(out_ptr + out_places, merged.to(out_ptr.dtype.element_ty), mask=mask)
        tl.store(lse_ptr + out_heads, lse, mask=is_head)


@triton.jit(
    do_not_specialize_on_alignment=["num_merged_ptr", "merged_ptr", "order_ptr", "starts_ptr"]
)
def merge_parts_kernel(
    out_ptr,
    lse_ptr,
    parts_ptr,
    part_lses_ptr,
    num_merged_ptr,
    merged_ptr,
    order_ptr,
    starts_ptr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    TILE_DIM: tl.constexpr,
):
    """Merge partial results into rows in place, for some heads.

    Row merged[i] has the partial results order[starts[i]:starts[i + 1]]. The number of programs is
    fixed; each loops over rows with a stride.
    """
    heads = tl.program_id(1) * TILE_HEADS + tl.arange(0, TILE_HEADS)
    dims = tl.arange(0, TILE_DIM)
    is_head = heads < NUM_HEADS
    mask = is_head[:, None] & (dims < HEAD_DIM)[None, :]
    for merged in range(tl.program_id(0), tl.load(num_merged_ptr), tl.num_programs(0)):
        row = tl.load(merged_ptr + merged).to(tl.int64)
        own_heads = row * NUM_HEADS + heads
        own_places = own_heads[:, None] * HEAD_DIM + dims[None, :]
        acc = tl.load(out_ptr + own_places, mask=mask, other=0.0).to(tl.float32)
        lse = tl.load(lse_ptr + own_heads, mask=is_head, other=0.0)
        for i in range(tl.load(starts_ptr + merged), tl.load(starts_ptr + merged + 1)):
            part_heads = tl.load(order_ptr + i).to(tl.int64) * NUM_HEADS + heads
            part_places = part_heads[:, None] * HEAD_DIM + dims[None, :]
            part = tl.load(parts_ptr + part_places, mask=mask, other=0.0)
            part_lse = tl.load(part_lses_ptr + part_heads, mask=is_head, other=0.0)
            base = base_of(tl.maximum(lse, part_lse))
            weight, part_weight = tl.exp(lse - base), tl.exp(part_lse - base)
            total = weight + part_weight
            acc = acc * weight[:, None] + part * part_weight[:, None]
            acc /= divisor_of(total)[:, None]
            lse = base + log_of(total)
        tl.store(out_ptr + own_places, acc.to(out_ptr.dtype.element_ty), mask=mask)
        tl.store(lse_ptr + own_heads, lse, mask=is_head)


@triton.jit
def load_entry(entry, is_there):
    """Return the block of an entry, its number of valid positions, and its first position."""
    block = tl.load(entry, mask=is_there, other=0).to(tl.int64)
    num_valid = tl.load(entry + 1, mask=is_there, other=0)
    return block, num_valid, tl.load(entry + 2, mask=is_there, other=0)


@triton.jit(
    do_not_specialize_on_alignment=["entries_ptr", "programs_ptr", "spans_ptr", "positions_ptr"]
)
def decode_kernel(
    q_ptr,
    k_pool_ptr,
    v_pool_ptr,
    k_scales_ptr,
    v_scales_ptr,
    out_ptr,
    lse_ptr,
    made_ptr,
    made_lse_ptr,
    entries_ptr,
    programs_ptr,
    spans_ptr,
    positions_ptr,
    stride_qt,
    stride_qh,
    stride_block,
    stride_head,
    NUM_HEADS: tl.constexpr,
    HEADS_PER_KV: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROW_WIDTH: tl.constexpr,
    IS_BYTES: tl.constexpr,
    ENTRY_FIELDS: tl.constexpr,
    SPAN_FIELDS: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    TILE_DIM: tl.constexpr,
):
    """Attend with the query heads of one KV head over the spans of one program.

    Program p has the spans programs[p]:programs[p + 1]. A span is a row, a range of its entries
    (block, valid positions, first position), and the place of its result in [places, H, D], or -1
    for the row's output [S, H, D].
    """
    IN_BLOCK: tl.constexpr = BLOCK_SIZE % TILE_KEYS == 0
    kv_head = tl.program_id(1)
    lanes, dims = tl.arange(0, TILE_HEADS), tl.arange(0, TILE_DIM)
    is_head, is_dim = lanes < HEADS_PER_KV, dims < HEAD_DIM
    heads = kv_head * HEADS_PER_KV + lanes
    query_mask = is_head[:, None] & is_dim[None, :]
    first_span = tl.load(programs_ptr + tl.program_id(0))
    for number in range(first_span, tl.load(programs_ptr + tl.program_id(0) + 1)):
        span = spans_ptr + number * SPAN_FIELDS
        row, place = tl.load(span).to(tl.int64), tl.load(span + 3).to(tl.int64)
        first = tl.load(span + 1)
        num_slots = (tl.load(span + 2) - first) * BLOCK_SIZE
        q_places = row * stride_qt + heads[:, None] * stride_qh + dims[None, :]
        q = load_tile(q_ptr, q_places, query_mask)
        position = tl.load(positions_ptr + row)

        highest = tl.full((TILE_HEADS,), float("-inf"), dtype=tl.float32)
        total = tl.zeros((TILE_HEADS,), dtype=tl.float32)
        acc = tl.zeros((TILE_HEADS, TILE_DIM), dtype=tl.float32)
        entry = entries_ptr + first * ENTRY_FIELDS
        if IN_BLOCK:
            block, num_valid, begin = load_entry(entry, num_slots > 0)
        for start in range(0, num_slots, TILE_KEYS):
            if IN_BLOCK:
                # all keys of a tile are in one block, whose id was loaded one tile earlier:
                # dependent loads are not prefetched
                offsets = start % BLOCK_SIZE + tl.arange(0, TILE_KEYS)
                is_visible = offsets < num_valid
                if WINDOW:
                    is_visible = is_visible & (position - (begin + offsets) < WINDOW)
                rows = block * stride_block + kv_head * stride_head + offsets * ROW_WIDTH
                following = start + TILE_KEYS
                block, num_valid, begin = load_entry(
                    entry + following // BLOCK_SIZE * ENTRY_FIELDS, following < num_slots
                )
            else:
                slots = start + tl.arange(0, TILE_KEYS)
                is_slot = slots < num_slots
                entries = entry + slots // BLOCK_SIZE * ENTRY_FIELDS
                offsets = slots % BLOCK_SIZE
                is_visible = offsets < tl.load(entries + 1, mask=is_slot, other=0)
                if WINDOW:
                    begins = tl.load(entries + 2, mask=is_slot, other=0)
                    is_visible = is_visible & (position - (begins + offsets) < WINDOW)
                blocks = tl.load(entries, mask=is_slot, other=0).to(tl.int64)
                rows = blocks * stride_block + kv_head * stride_head + offsets * ROW_WIDTH
            mask = is_visible[:, None] & is_dim[None, :]
            k = load_pool_tile(
                k_pool_ptr, k_scales_ptr, rows, dims, mask, q.dtype, ROW_WIDTH, IS_BYTES
            )
            v = load_pool_tile(
                v_pool_ptr, v_scales_ptr, rows, dims, mask, q.dtype, ROW_WIDTH, IS_BYTES
            )
            highest, total, acc = attend_keys(
                q, k, v, is_visible[None, :], highest, total, acc, HEAD_DIM
            )

        output, lse = finish(highest, total, acc)
        is_whole = place < 0
        out_heads = tl.where(is_whole, row, place) * NUM_HEADS + heads
        out_places = out_heads[:, None] * HEAD_DIM + dims[None, :]
        whole = output.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + out_places, whole, mask=query_mask & is_whole)
        tl.store(lse_ptr + out_heads, lse, mask=is_head & is_whole)
        tl.store(made_ptr + out_places, output, mask=query_mask & (place >= 0))
        tl.store(made_lse_ptr + out_heads, lse, mask=is_head & (place >= 0))


@triton.jit
def work_of_turn(turn, program, num_programs):
    """Return the index of the work item that a program does in a turn.

    Three programs get the items 0 1 2, then 5 4 3, then 6 7 8.
    """
    return turn * num_programs + program + turn % 2 * (num_programs - 1 - 2 * program)


@triton.jit(
    do_not_specialize=["num_parts"],
    do_not_specialize_on_alignment=[
        "num_items_ptr",
        "items_ptr",
        "rows_ptr",
        "positions_ptr",
        "block_ids_ptr",
    ],
)
def ragged_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    k_pool_ptr,
    v_pool_ptr,
    k_scales_ptr,
    v_scales_ptr,
    out_ptr,
    lse_ptr,
    num_items_ptr,
    items_ptr,
    rows_ptr,
    positions_ptr,
    block_ids_ptr,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    stride_block,
    stride_head,
    num_parts,
    NUM_HEADS: tl.constexpr,
    HEADS_PER_KV: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROW_WIDTH: tl.constexpr,
    IS_BYTES: tl.constexpr,
    ITEM_FIELDS: tl.constexpr,
    HAS_CHUNK: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE_LANES: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    TILE_DIM: tl.constexpr,
):
    """Compute the attention of the queries of items (`raybatch.kernels.step_index.Item`).

    With HAS_CHUNK the queries of an item are consecutive rows of one chunk, which they read
    causally in addition to the run; otherwise they are listed in `rows` and read only the run. Lane
    l is query l // HEADS_PER_KV and head l % HEADS_PER_KV: with 3 heads, 64 lanes hold 21 queries,
    and an item of 30 queries has two parts. Outputs are [places, H, D].

    Each part of an item is computed per KV head. The number of programs is fixed. They loop over
    parts, starting with the last items, which have the most keys; every other turn is reversed, to
    balance the load.
    """
    PROGRAM_QUERIES: tl.constexpr = TILE_LANES // HEADS_PER_KV
    NUM_KV_HEADS: tl.constexpr = NUM_HEADS // HEADS_PER_KV
    lanes, dims = tl.arange(0, TILE_LANES), tl.arange(0, TILE_DIM)
    is_dim = dims < HEAD_DIM
    num_items = tl.load(num_items_ptr)
    num_works = num_items * num_parts * NUM_KV_HEADS
    for turn in range(0, tl.cdiv(num_works, tl.num_programs(0))):
        work = work_of_turn(turn, tl.program_id(0), tl.num_programs(0))
        is_work = work < num_works
        kv_head = work % NUM_KV_HEADS
        part = num_items * num_parts - 1 - work // NUM_KV_HEADS
        item = items_ptr + part // num_parts * ITEM_FIELDS
        skipped = part % num_parts * PROGRAM_QUERIES
        num_queries = tl.load(item + 1, mask=is_work, other=0) - skipped
        num_queries = tl.minimum(num_queries, PROGRAM_QUERIES)
        if is_work & (num_queries > 0):
            first_query = tl.load(item).to(tl.int64) + skipped
            first_place, first_block = tl.load(item + 2).to(tl.int64) + skipped, tl.load(item + 3)
            num_tokens, first_position = tl.load(item + 4), tl.load(item + 5)
            chunk_start = tl.load(item + 6).to(tl.int64)

            queries, heads = lanes // HEADS_PER_KV, kv_head * HEADS_PER_KV + lanes % HEADS_PER_KV
            is_query = queries < num_queries
            if HAS_CHUNK:
                rows = first_query + queries
            else:
                rows = tl.load(rows_ptr + first_query + queries, mask=is_query, other=0).to(
                    tl.int64
                )
            positions = tl.load(positions_ptr + rows, mask=is_query, other=0)
            query_mask = is_query[:, None] & is_dim[None, :]
            q_places = rows[:, None] * stride_qt + heads[:, None] * stride_qh + dims[None, :]
            q = load_tile(q_ptr, q_places, query_mask)

            highest = tl.full((TILE_LANES,), float("-inf"), dtype=tl.float32)
            total = tl.zeros((TILE_LANES,), dtype=tl.float32)
            acc = tl.zeros((TILE_LANES, TILE_DIM), dtype=tl.float32)
            begin = 0
            if WINDOW:
                # skip tiles before the window of every query
                oldest = tl.min(tl.where(is_query, positions, 2147483647), axis=0)
                begin = tl.maximum(oldest - WINDOW + 1 - first_position, 0).to(tl.int32)
                begin = begin // TILE_KEYS * TILE_KEYS
            for start in range(begin, num_tokens, TILE_KEYS):
                keys = start + tl.arange(0, TILE_KEYS)
                is_key = keys < num_tokens
                offsets = keys % BLOCK_SIZE
                blocks = tl.load(
                    block_ids_ptr + first_block + keys // BLOCK_SIZE, mask=is_key, other=0
                )
                pool_rows = blocks.to(tl.int64) * stride_block + kv_head * stride_head
                pool_rows += offsets * ROW_WIDTH
                mask = is_key[:, None] & is_dim[None, :]
                k = load_pool_tile(
                    k_pool_ptr, k_scales_ptr, pool_rows, dims, mask, q.dtype, ROW_WIDTH, IS_BYTES
                )
                v = load_pool_tile(
                    v_pool_ptr, v_scales_ptr, pool_rows, dims, mask, q.dtype, ROW_WIDTH, IS_BYTES
                )
                is_visible = is_query[:, None] & is_key[None, :]
                if WINDOW:
                    distance = positions[:, None] - (first_position + keys)[None, :]
                    is_visible = is_visible & (distance < WINDOW)
                highest, total, acc = attend_keys(
                    q, k, v, is_visible, highest, total, acc, HEAD_DIM
                )

            if HAS_CHUNK:
                own = (rows - chunk_start).to(tl.int32)
                first_own = (first_query - chunk_start).to(tl.int32)
                num_keys = first_own + num_queries.to(tl.int32)
                begin = 0
                if WINDOW:
                    begin = tl.maximum(first_own - WINDOW + 1, 0) // TILE_KEYS * TILE_KEYS
                for start in range(begin, num_keys, TILE_KEYS):
                    keys = start + tl.arange(0, TILE_KEYS)
                    is_key = keys < num_keys
                    mask = is_key[:, None] & is_dim[None, :]
                    key_rows = chunk_start + keys
                    k_places = key_rows[:, None] * stride_kt + kv_head * stride_kh + dims[None, :]
                    v_places = key_rows[:, None] * stride_vt + kv_head * stride_vh + dims[None, :]
                    k = load_tile(k_ptr, k_places, mask)
                    v = load_tile(v_ptr, v_places, mask)
                    is_visible = is_query[:, None] & (keys[None, :] <= own[:, None])
                    if WINDOW:
                        is_visible = is_visible & (own[:, None] - keys[None, :] < WINDOW)
                    highest, total, acc = attend_keys(
                        q, k, v, is_visible, highest, total, acc, HEAD_DIM
                    )

            output, lse = finish(highest, total, acc)
            out_heads = (first_place + queries) * NUM_HEADS + heads
            out_places = out_heads[:, None] * HEAD_DIM + dims[None, :]
            tl.store(out_ptr + out_places, output.to(out_ptr.dtype.element_ty), mask=query_mask)
            tl.store(lse_ptr + out_heads, lse, mask=is_query)
