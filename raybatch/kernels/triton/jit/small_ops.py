"""RMS norm, finishing of heads (norm, rotation, KV store), and gating."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    num_heads,
    eps,
    stride_xt,
    stride_xh,
    stride_wh,
    DIM: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_DIM: tl.constexpr,
):
    """Normalise TILE_ROWS rows; row r is head r % num_heads of token r // num_heads."""
    rows = tl.program_id(0).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    dims = tl.arange(0, TILE_DIM)
    tokens, heads = rows // num_heads, rows % num_heads
    is_dim = (dims < DIM)[None, :]
    mask = (rows < num_rows)[:, None] & is_dim
    places = tokens[:, None] * stride_xt + heads[:, None] * stride_xh + dims[None, :]
    x = tl.load(x_ptr + places, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=1) * (1.0 / DIM) + eps)
    weights = tl.load(
        weight_ptr + heads[:, None] * stride_wh + dims[None, :], mask=is_dim, other=0.0
    ).to(tl.float32)
    # round in between, as the reference does
    scaled = (x * scale[:, None]).to(x_ptr.dtype.element_ty).to(tl.float32)
    made = (scaled * weights).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + rows[:, None] * DIM + dims[None, :], made, mask=mask)


@triton.jit
def to_byte(x, scale, dtype: tl.constexpr):
    """Round x * scale to the nearest 8-bit number: int8, or the bits of float8_e4m3fn."""
    IS_INT: tl.constexpr = dtype == tl.int8
    LARGEST: tl.constexpr = 127.0 if IS_INT else 448.0
    # adding this constant rounds to nearest, ties to even, at the last kept digit
    DIGIT: tl.constexpr = 12582912.0 if IS_INT else 24576.0
    x = x * scale
    rounded = (x + DIGIT) - DIGIT
    if not IS_INT:
        # normal numbers, from 2^-6 on, keep three mantissa bits
        bits = x.to(tl.int32, bitcast=True)
        bits += 0x7FFFF + ((bits >> 20) & 1)
        three = (bits & -0x100000).to(tl.float32, bitcast=True)
        rounded = tl.where(tl.abs(x) < 0.015625, rounded, three)
    # rounding may exceed the range slightly
    rounded = tl.minimum(tl.maximum(rounded, -LARGEST), LARGEST)
    kind: tl.constexpr = tl.int8 if IS_INT else tl.float8e4nv
    return rounded.to(kind).to(dtype, bitcast=True)


@triton.jit
def from_byte(x):
    """Convert an 8-bit pool element to float32."""
    kind: tl.constexpr = tl.float8e4nv if x.dtype == tl.uint8 else tl.int8
    return x.to(kind, bitcast=True).to(tl.float32)


@triton.jit
def split_pairs(x):
    """Split pairs of neighbours in [n, m]; return all first and all second ones, [n, m / 2]."""
    return tl.split(tl.reshape(x, x.shape[0], x.shape[1] // 2, 2))


@triton.jit
def join_pairs(first, second):
    return tl.reshape(tl.join(first, second), first.shape[0], 2 * first.shape[1])


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def heads_kernel(
    x_ptr,
    norms_ptr,
    table_ptr,
    k_pool_ptr,
    v_pool_ptr,
    k_scales_ptr,
    v_scales_ptr,
    slots_ptr,
    eps,
    stride_xt,
    stride_xh,
    stride_norm,
    stride_table,
    stride_block,
    stride_head,
    NUM_HEADS: tl.constexpr,
    NUM_QUERIES: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROW_WIDTH: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    IS_BYTES: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    TILE_PAIRS: tl.constexpr,
):
    """Normalise and rotate queries and keys of one token in place; store its keys and values.

    Heads are queries, keys and values, in that order. A table row is cos, sin, cos, sin, ... of the
    token's angles. With blocks of 16, slot 37 is offset 5 of block 2, for every KV head.
    """
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * TILE_HEADS + tl.arange(0, TILE_HEADS)
    # head rows are contiguous: load and store them as one piece
    dims = tl.arange(0, 2 * TILE_PAIRS)
    is_dim = (dims < HEAD_DIM)[None, :]
    is_head = (heads < NUM_HEADS)[:, None]
    is_turned = (heads < NUM_QUERIES + NUM_KV_HEADS)[:, None]
    mask, turned = is_head & is_dim, is_head & is_turned & is_dim
    places = token * stride_xt + heads[:, None] * stride_xh + dims[None, :]
    real, imaginary = split_pairs(tl.load(x_ptr + places, mask=mask, other=0.0).to(tl.float32))
    dtype = x_ptr.dtype.element_ty
    if HAS_NORMS:
        square = tl.sum(real * real + imaginary * imaginary, axis=1)[:, None]
        scale = tl.rsqrt(square * (1.0 / HEAD_DIM) + eps)
        weights = norms_ptr + heads[:, None] * stride_norm + dims[None, :]
        weight, next_weight = split_pairs(tl.load(weights, mask=turned, other=0.0).to(tl.float32))
        # round where the reference rounds
        normed = ((real * scale).to(dtype).to(tl.float32) * weight).to(dtype).to(tl.float32)
        next_normed = (imaginary * scale).to(dtype).to(tl.float32) * next_weight
        real = tl.where(is_turned, normed, real)
        imaginary = tl.where(is_turned, next_normed.to(dtype).to(tl.float32), imaginary)
    turns = table_ptr + token * stride_table + dims[None, :]
    # heads without rotation have an angle of 0
    still = tl.where(dims % 2 == 0, 1.0, 0.0)[None, :]
    angles = tl.load(turns + tl.zeros_like(heads)[:, None], mask=turned, other=0.0)
    cosine, sine = split_pairs(tl.where(turned, angles, still))
    one = (real * cosine - imaginary * sine).to(dtype)
    two = (real * sine + imaginary * cosine).to(dtype)
    if NUM_KV_HEADS:
        slot = tl.load(slots_ptr + token).to(tl.int64)
        row = slot // BLOCK_SIZE * stride_block + slot % BLOCK_SIZE * ROW_WIDTH
        is_key = is_turned & (heads >= NUM_QUERIES)[:, None]
        kv_heads = heads - NUM_QUERIES
        kv_heads = tl.where(kv_heads >= NUM_KV_HEADS, kv_heads - NUM_KV_HEADS, kv_heads)
        rows = row + kv_heads[:, None] * stride_head
        targets = rows + dims[None, :]
        is_k, is_v = is_key & mask, mask & (~is_turned)
        if IS_BYTES:
            LARGEST: tl.constexpr = 127.0 if k_pool_ptr.dtype.element_ty == tl.int8 else 448.0
            x, y = one.to(tl.float32), two.to(tl.float32)
            highest = tl.max(tl.maximum(tl.abs(x), tl.abs(y)), axis=1)
            # max ignores NaN: propagate it, so that the whole row becomes NaN
            highest += tl.sum(x * 0.0 + y * 0.0, axis=1)
            highest = highest[:, None]
            factor = tl.div_rn(tl.zeros_like(highest) + LARGEST, tl.maximum(highest, 1e-30))
            byte: tl.constexpr = k_pool_ptr.dtype.element_ty
            stored_one, stored_two = to_byte(x, factor, byte), to_byte(y, factor, byte)
            of_row = highest * (1.0 / LARGEST)
            scale_places = rows // 4 + ROW_WIDTH // 4 - 1
            tl.store(k_scales_ptr + scale_places, of_row, mask=is_head & is_key)
            tl.store(v_scales_ptr + scale_places, of_row, mask=is_head & (~is_turned))
            # a chunk attends to the dequantized values
            is_kept = (heads >= NUM_QUERIES)[:, None]
            one = tl.where(is_kept, (from_byte(stored_one) * of_row).to(dtype), one)
            two = tl.where(is_kept, (from_byte(stored_two) * of_row).to(dtype), two)
        else:
            stored_one, stored_two = one, two
        stored = join_pairs(stored_one, stored_two)
        tl.store(k_pool_ptr + targets, stored, mask=is_k)
        tl.store(v_pool_ptr + targets, stored, mask=is_v)
    if IS_BYTES:
        turned = mask
    tl.store(x_ptr + places, join_pairs(one, two), mask=turned)


@triton.jit
def gate_kernel(x_ptr, out_ptr, num_outputs, stride_x, TILE: tl.constexpr):
    """Write silu(gate) * up of one row [gate, up]."""
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = places < num_outputs
    source = x_ptr + row * stride_x + places
    gate = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(source + num_outputs, mask=mask, other=0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    gated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * num_outputs + places, (gated * up).to(dtype), mask=mask)
