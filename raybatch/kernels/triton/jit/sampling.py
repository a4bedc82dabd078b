"""Finds the token of a rank: by its logit if known, else by thresholds over the row.

Logits are compared as float32; probabilities are summed in float64 in the order of token ids, so
that a token depends only on its row.
"""

import triton
import triton.language as tl

_LOWEST: tl.constexpr = tl.constexpr(-0x7F800001)


@triton.jit
def key_of(x):
    """Return an integer for each float32, such that integers compare as the floats do."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def float_of(key):
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def weight_of(x, highest, temperature):
    """Return the probability of a logit divided by that of the highest logit."""
    return tl.exp((x - highest).to(tl.float64) / temperature)


@triton.jit
def load_logits(row_ptr, start, vocab_size, TILE: tl.constexpr):
    columns = start + tl.arange(0, TILE)
    # padding has no weight
    return tl.load(row_ptr + columns, mask=columns < vocab_size, other=float("-inf")), columns


@triton.jit
def count_above(row_ptr, vocab_size, threshold, TILE: tl.constexpr):
    counts = tl.zeros([TILE], tl.int32)
    for start in range(0, vocab_size, TILE):
        x, _ = load_logits(row_ptr, start, vocab_size, TILE)
        counts += (x > threshold).to(tl.int32)
    return tl.sum(counts, axis=0)


@triton.jit
def mass_above(row_ptr, vocab_size, threshold, highest, temperature, TILE: tl.constexpr):
    sums = tl.zeros([TILE], tl.float64)
    for start in range(0, vocab_size, TILE):
        x, _ = load_logits(row_ptr, start, vocab_size, TILE)
        sums += tl.where(x > threshold, weight_of(x, highest, temperature), 0.0)
    return tl.sum(sums, axis=0)


@triton.jit
def count_equal(row_ptr, vocab_size, value, TILE: tl.constexpr):
    counts = tl.zeros([TILE], tl.int32)
    for start in range(0, vocab_size, TILE):
        x, columns = load_logits(row_ptr, start, vocab_size, TILE)
        counts += ((x == value) & (columns < vocab_size)).to(tl.int32)
    return tl.sum(counts, axis=0)


@triton.jit
def least_from(row_ptr, vocab_size, threshold, TILE: tl.constexpr):
    """Return the smallest logit of a row that is at least `threshold`."""
    least = tl.full([TILE], float("inf"), tl.float32)
    for start in range(0, vocab_size, TILE):
        x, columns = load_logits(row_ptr, start, vocab_size, TILE)
        is_from = (x >= threshold) & (columns < vocab_size)
        least = tl.minimum(least, tl.where(is_from, x, float("inf")))
    return tl.min(least, axis=0)


@triton.jit
def smallest_of_top(row_ptr, vocab_size, top_k, highest, TILE: tl.constexpr):
    """Return the key (see `key_of`) of the `top_k`-th largest logit of a row."""
    low, high = tl.full([], _LOWEST, tl.int64), key_of(highest)
    while low < high:
        middle = (low + high) >> 1
        if count_above(row_ptr, vocab_size, float_of(middle), TILE) < top_k:
            high = middle
        else:
            low = middle + 1
    return high


@triton.jit
def last_kept(
    row_ptr, vocab_size, low, highest, temperature, limit, min_p, is_below, TILE: tl.constexpr
):
    """Return the smallest key from `low` on such that the logits above it weigh less than `limit`.

    Keys are those of `key_of`, weights those of `weight_of`. Without `is_below` the sum of weights
    may equal the limit. Logits of a weight below `min_p` are left out too.
    """
    high = key_of(highest)
    while low < high:
        middle = (low + high) >> 1
        value = float_of(middle)
        mass = mass_above(row_ptr, vocab_size, value, highest, temperature, TILE)
        is_kept = (mass < limit) | ((mass == limit) & (not is_below))
        if is_kept & (weight_of(value, highest, temperature) >= min_p):
            high = middle
        else:
            low = middle + 1
    return high


@triton.jit
def search_rank(
    row_ptr, vocab_size, highest, temperature, top_k, top_p, min_p, uniform, TILE: tl.constexpr
):
    """Sample from all logits of a row; return the logit, and how many equal ones precede it."""
    bottom = tl.full([], _LOWEST, tl.int64)
    if top_k < vocab_size:
        bottom = smallest_of_top(row_ptr, vocab_size, top_k, highest, TILE)
    least = float_of(bottom)
    total = mass_above(row_ptr, vocab_size, least, highest, temperature, TILE)
    num_least = count_equal(row_ptr, vocab_size, least, TILE)
    total += num_least * weight_of(least, highest, temperature)
    limit = top_p * total
    edge = last_kept(row_ptr, vocab_size, bottom, highest, temperature, limit, min_p, True, TILE)
    last = least_from(row_ptr, vocab_size, float_of(edge), TILE)
    before = mass_above(row_ptr, vocab_size, last, highest, temperature, TILE)
    num_last = count_equal(row_ptr, vocab_size, last, TILE)
    weight = weight_of(last, highest, temperature)
    # always keep the first token
    num_kept = tl.maximum(tl.ceil(share(limit - before, weight, num_last)).to(tl.int32), 1)
    target = uniform * (before + num_kept * weight)
    key = last_kept(
        row_ptr, vocab_size, key_of(last), highest, temperature, target, 0.0, False, TILE
    )
    chosen = float_of(key)
    before = mass_above(row_ptr, vocab_size, chosen, highest, temperature, TILE)
    if chosen > last:
        num_kept = count_equal(row_ptr, vocab_size, chosen, TILE)
    weight = weight_of(chosen, highest, temperature)
    rank = share(target - before, weight, num_kept - 1).to(tl.int32)
    return chosen, rank


@triton.jit
def share(mass, weight, most):
    """Return mass / weight, clipped to 0..`most`; `most` for zero weight."""
    has_weight = weight > 0.0
    count = mass / tl.where(has_weight, weight, 1.0)
    count = tl.where(has_weight, count, most.to(tl.float64))
    return tl.minimum(tl.maximum(count, 0.0), most.to(tl.float64))


@triton.jit(
    do_not_specialize_on_alignment=[
        "highest_ptr",
        "chosen_ptr",
        "rank_ptr",
        "settled_ptr",
        "temperature_ptr",
        "top_k_ptr",
        "top_p_ptr",
        "min_p_ptr",
        "uniform_ptr",
    ]
)
def rank_kernel(
    logits_ptr,
    ids_ptr,
    highest_ptr,
    chosen_ptr,
    rank_ptr,
    settled_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    uniform_ptr,
    vocab_size,
    stride_logits,
    TILE: tl.constexpr,
):
    """Write the token id of one row: that of the logit `chosen` after `rank` equal logits.

    If the row is not settled, both are sampled from all its logits first.
    """
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride_logits
    highest = tl.load(highest_ptr + row)
    chosen, rank = tl.load(chosen_ptr + row), tl.load(rank_ptr + row).to(tl.int32)
    is_broken = (highest != highest) | (tl.abs(highest) == float("inf"))
    if (tl.load(settled_ptr + row) == 0) & (not is_broken):
        chosen, rank = search_rank(
            row_ptr,
            vocab_size,
            highest,
            tl.load(temperature_ptr + row),
            tl.load(top_k_ptr + row),
            tl.load(top_p_ptr + row),
            tl.load(min_p_ptr + row),
            tl.load(uniform_ptr + row),
            TILE,
        )
    found = tl.zeros([], tl.int32)
    num_seen = tl.zeros([], tl.int32)
    start = tl.zeros([], tl.int32)
    while (start < vocab_size) & (num_seen <= rank):
        x, columns = load_logits(row_ptr, start, vocab_size, TILE)
        is_equal = ((x == chosen) & (columns < vocab_size)).to(tl.int32)
        is_wanted = (is_equal > 0) & (num_seen + tl.cumsum(is_equal, axis=0) == rank + 1)
        found += tl.sum(tl.where(is_wanted, columns, 0), axis=0)
        num_seen += tl.sum(is_equal, axis=0)
        start += TILE
    tl.store(ids_ptr + row, found.to(tl.int64))
