"""Draws from rows of logits: two passes over the vocabulary, and a little per row.

A tile is some blocks of 256 tokens. The first pass leaves the largest logit, its token and a sum of
exponentials for each tile; the second, for rows that draw, the sum of weights of each block.
"""

import triton
import triton.language as tl


@triton.jit
def _is_finite(x):
    # of NaN nothing is true
    return (x > float("-inf")) & (x < float("inf"))


@triton.jit
def tile_maxima_kernel(
    logits_ptr,
    maxima_ptr,
    tokens_ptr,
    sums_ptr,
    stride_row,
    VOCAB_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Find the largest logit of one tile of one row, the first of equals; a NaN is the largest."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens = tile * TILE + tl.arange(0, TILE)
    is_token = tokens < VOCAB_SIZE
    x = tl.load(logits_ptr + row * stride_row + tokens, mask=is_token, other=float("-inf"))
    is_nan = (x != x) & is_token
    highest = tl.max(tl.where(is_nan, float("-inf"), x), axis=0)
    has_nan = tl.max(is_nan.to(tl.int32), axis=0) > 0
    is_best = tl.where(has_nan, is_nan, (x == highest) & is_token)
    token = tl.min(tl.where(is_best, tokens, VOCAB_SIZE), axis=0)
    base = tl.where(_is_finite(highest), highest, 0.0)
    total = tl.sum(tl.where(is_token, tl.exp(tl.minimum(x - base, 0.0)), 0.0), axis=0)
    place = row * tl.num_programs(1) + tile
    tl.store(maxima_ptr + place, tl.where(has_nan, float("nan"), highest))
    tl.store(tokens_ptr + place, token)
    tl.store(sums_ptr + place, total)


@triton.jit
def join_maxima_kernel(
    maxima_ptr,
    tokens_ptr,
    sums_ptr,
    best_ptr,
    max_logits_ptr,
    normalizers_ptr,
    NUM_TILES: tl.constexpr,
    TILE_TILES: tl.constexpr,
):
    """Join the tiles of one row: its likeliest token, that one's logit, the log of all sums."""
    row = tl.program_id(0).to(tl.int64)
    tiles = tl.arange(0, TILE_TILES)
    is_tile = tiles < NUM_TILES
    places = row * NUM_TILES + tiles
    maxima = tl.load(maxima_ptr + places, mask=is_tile, other=float("-inf"))
    tokens = tl.load(tokens_ptr + places, mask=is_tile, other=2147483647)
    sums = tl.load(sums_ptr + places, mask=is_tile, other=0.0)
    is_nan = maxima != maxima
    has_nan = tl.max(is_nan.to(tl.int32), axis=0) > 0
    highest = tl.max(tl.where(is_nan, float("-inf"), maxima), axis=0)
    is_best = tl.where(has_nan, is_nan, maxima == highest)
    # tiles come in the order of tokens, so the lowest token is in the first of equal tiles
    best = tl.min(tl.where(is_best & is_tile, tokens, 2147483647), axis=0)
    base = tl.where(_is_finite(highest), highest, 0.0)
    decay = tl.exp(tl.minimum(maxima - base, 0.0))
    total = tl.sum(tl.where(is_tile, sums * decay, 0.0), axis=0)
    tl.store(best_ptr + row, best.to(tl.int64))
    tl.store(max_logits_ptr + row, tl.where(has_nan, float("nan"), highest))
    tl.store(normalizers_ptr + row, base + tl.log(total))


@triton.jit
def _weights(x, max_logit, temperature, min_p, is_token):
    weights = tl.exp(tl.div_rn(x - max_logit, temperature))
    return tl.where(is_token & (weights >= min_p), weights, 0.0)


@triton.jit
def block_sums_kernel(
    logits_ptr,
    max_logits_ptr,
    temperature_ptr,
    min_p_ptr,
    sums_ptr,
    stride_row,
    num_blocks,
    VOCAB_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
):
    """Sum the weights of some blocks of one row, unless it is broken or draws nothing."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperature_ptr + row).to(tl.float32)
    max_logit = tl.load(max_logits_ptr + row)
    if (temperature > 0.0) & _is_finite(max_logit):
        min_p = tl.load(min_p_ptr + row).to(tl.float32)
        blocks = tile * TILE_BLOCKS + tl.arange(0, TILE_BLOCKS)
        tokens = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        is_token = tokens < VOCAB_SIZE
        x = tl.load(logits_ptr + row * stride_row + tokens, mask=is_token, other=float("-inf"))
        sums = tl.sum(_weights(x, max_logit, temperature, min_p, is_token), axis=1)
        tl.store(sums_ptr + row * num_blocks + blocks, sums, mask=blocks < num_blocks)


@triton.jit
def invert_kernel(
    logits_ptr,
    best_ptr,
    max_logits_ptr,
    normalizers_ptr,
    temperature_ptr,
    min_p_ptr,
    uniform_ptr,
    sums_ptr,
    token_ids_ptr,
    logprobs_ptr,
    stride_row,
    VOCAB_SIZE: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
):
    """Find the token where the running sum of one row passes its share, and its log probability."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row).to(tl.float32)
    token = tl.load(best_ptr + row)
    max_logit = tl.load(max_logits_ptr + row)
    if (temperature > 0.0) & _is_finite(max_logit):
        min_p = tl.load(min_p_ptr + row).to(tl.float32)
        blocks = tl.arange(0, TILE_BLOCKS)
        is_block = blocks < NUM_BLOCKS
        sums = tl.load(sums_ptr + row * NUM_BLOCKS + blocks, mask=is_block, other=0.0)
        sums = sums.to(tl.float64)
        ends = tl.cumsum(sums, axis=0)
        target = tl.load(uniform_ptr + row) * tl.max(ends, axis=0)
        last = tl.max(tl.where(sums > 0.0, blocks, 0), axis=0)
        found = tl.sum((is_block & (ends <= target)).to(tl.int32), axis=0)
        found = tl.minimum(found, last)
        before = tl.sum(tl.where(blocks == found, ends - sums, 0.0), axis=0)
        columns = tl.arange(0, BLOCK)
        tokens = found * BLOCK + columns
        is_token = tokens < VOCAB_SIZE
        x = tl.load(logits_ptr + row * stride_row + tokens, mask=is_token, other=float("-inf"))
        weights = _weights(x, max_logit, temperature, min_p, is_token).to(tl.float64)
        inside = tl.cumsum(weights, axis=0)
        last_column = tl.max(tl.where(weights > 0.0, columns, 0), axis=0)
        offset = tl.sum((inside <= target - before).to(tl.int32), axis=0)
        token = (found * BLOCK + tl.minimum(offset, last_column)).to(tl.int64)
    chosen = tl.load(logits_ptr + row * stride_row + token)
    tl.store(token_ids_ptr + row, token)
    tl.store(logprobs_ptr + row, chosen - tl.load(normalizers_ptr + row))
