"""The online softmax of attention: steps over keys, its end, and merges by log-sum-exp.

Scores are in units of log2 inside of a kernel, as the hardware's exponential is that of 2; what is
stored is a natural logarithm. A query that sees no key has a sum of 0, an output of 0 and a
log-sum-exp of -inf.
"""

import triton
import triton.language as tl


@triton.jit
def base_of(highest):
    """Return what scores are taken relative to; a finite number where there is no score."""
    return tl.where(highest == float("-inf"), 0.0, highest)


@triton.jit
def divisor_of(total):
    """Return what sums of weighted values are divided by; 1 where nothing has a weight."""
    return tl.where(total == 0.0, 1.0, total)


@triton.jit
def log_of(total):
    """Return the natural logarithm of a sum of weights, -inf where it is 0."""
    return tl.where(total == 0.0, float("-inf"), tl.log(divisor_of(total)))


@triton.jit
def attend_keys(q, k, v, is_visible, highest, total, acc, scale):
    """Take in a tile of keys [n, D] and values [n, D] for queries [m, D]."""
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
    """Return the output [m, D] and its log-sum-exp [m]."""
    lse = base_of(highest) * 0.6931471805599453 + log_of(total)
    return acc / divisor_of(total)[:, None], lse


@triton.jit
def merge_splits_kernel(
    parts_ptr,
    part_lses_ptr,
    out_ptr,
    lse_ptr,
    num_rows,
    NUM_SPLITS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_DIM: tl.constexpr,
):
    """Merge the splits of one row (a head of a token); parts are [NUM_SPLITS, rows, D].

    NUM_SPLITS is a power of two.
    """
    row = tl.program_id(0).to(tl.int64)
    dims, splits = tl.arange(0, TILE_DIM), tl.arange(0, NUM_SPLITS).to(tl.int64)
    lses = tl.load(part_lses_ptr + splits * num_rows + row)
    base = base_of(tl.max(lses, axis=0))
    weights = tl.exp(lses - base)
    total = tl.sum(weights, axis=0)
    places = (splits[:, None] * num_rows + row) * HEAD_DIM + dims[None, :]
    is_dim = dims < HEAD_DIM
    parts = tl.load(parts_ptr + places, mask=is_dim[None, :], other=0.0)
    merged = tl.sum(parts * weights[:, None], axis=0) / divisor_of(total)
    tl.store(out_ptr + row * HEAD_DIM + dims, merged.to(out_ptr.dtype.element_ty), mask=is_dim)
    tl.store(lse_ptr + row, base + log_of(total))


@triton.jit
def merge_parts_kernel(
    out_ptr,
    lse_ptr,
    parts_ptr,
    part_lses_ptr,
    order_ptr,
    starts_ptr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    TILE_DIM: tl.constexpr,
):
    """Add to some heads of one row, in place, its parts order[starts[row]..starts[row + 1]]."""
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * TILE_HEADS + tl.arange(0, TILE_HEADS)
    dims = tl.arange(0, TILE_DIM)
    is_head = heads < NUM_HEADS
    mask = is_head[:, None] & (dims < HEAD_DIM)[None, :]
    start = tl.load(starts_ptr + row)
    stop = tl.load(starts_ptr + row + 1)
    if start < stop:
        own_heads = row * NUM_HEADS + heads
        own_places = own_heads[:, None] * HEAD_DIM + dims[None, :]
        acc = tl.load(out_ptr + own_places, mask=mask, other=0.0).to(tl.float32)
        lse = tl.load(lse_ptr + own_heads, mask=is_head, other=0.0)
        for i in range(start, stop):
            part_heads = tl.load(order_ptr + i) * NUM_HEADS + heads
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
