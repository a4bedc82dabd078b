"""Products with 8-bit weights, and mixture of experts.

Experts: routing, a stable counting sort, grouped products, the weighted sum.

A slot is one expert choice of a token: slot s is choice s % TOP_K of token s // TOP_K. A place is
the index of a slot after sorting by expert. With the choices 1 2 | 0 1 of two tokens, the order of
slots is 2 0 3 1, and the places of slots are 1 3 0 2.
"""

import triton
import triton.language as tl

from raybatch.kernels.triton.jit.attention import load_tile


@triton.jit
def load_weight(ptr, places, mask, dtype: tl.constexpr):
    """Load a tile of a weight, converted to `dtype`; scales of 8-bit weights are not applied."""
    tile = tl.load(ptr + places, mask=mask, other=0.0)
    # Triton cannot convert 8 bits to all dtypes directly
    return tile if tile.dtype == dtype else tile.to(tl.float32).to(dtype)


@triton.jit(do_not_specialize=["num_rows"])
def scaled_linear_kernel(
    x_ptr,
    weight_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    stride_x,
    stride_weight,
    stride_in,
    stride_out,
    NUM_INPUTS: tl.constexpr,
    NUM_OUTPUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_ADDED: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_OUT: tl.constexpr,
    TILE_IN: tl.constexpr,
):
    """Compute one tile of x times an 8-bit weight [out, in] with scales per output.

    With IS_ADDED it is added to the output, otherwise written.
    """
    rows = tl.program_id(1).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    outputs = tl.program_id(0) * TILE_OUT + tl.arange(0, TILE_OUT)
    is_row, is_output = rows < num_rows, outputs < NUM_OUTPUTS
    total = tl.zeros((TILE_ROWS, TILE_OUT), dtype=tl.float32)
    for start in range(0, NUM_INPUTS, TILE_IN):
        inputs = start + tl.arange(0, TILE_IN)
        is_input = inputs < NUM_INPUTS
        x_places = rows[:, None] * stride_x + inputs[None, :]
        x = load_tile(x_ptr, x_places, is_row[:, None] & is_input[None, :])
        places = outputs[None, :].to(tl.int64) * stride_weight + inputs[:, None] * stride_in
        mask = is_input[:, None] & is_output[None, :]
        weight = load_weight(weight_ptr, places, mask, x.dtype)
        total += tl.dot(x, weight, input_precision="tf32x3")
    total *= tl.load(scales_ptr + outputs, mask=is_output, other=0.0)[None, :]
    if HAS_BIAS:
        total += tl.load(bias_ptr + outputs, mask=is_output, other=0.0).to(tl.float32)[None, :]
    targets = out_ptr + rows[:, None] * stride_out + outputs[None, :]
    mask = is_row[:, None] & is_output[None, :]
    if IS_ADDED:
        total += tl.load(targets, mask=mask, other=0.0).to(tl.float32)
    tl.store(targets, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def route_kernel(
    logits_ptr,
    weights_ptr,
    experts_ptr,
    num_tokens,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    IS_NORMALISED: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_EXPERTS: tl.constexpr,
):
    """Write the weights and numbers of the experts of TILE_ROWS tokens; ties go to the first."""
    tokens = tl.program_id(0).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    experts = tl.arange(0, TILE_EXPERTS)
    is_token = tokens < num_tokens
    mask = is_token[:, None] & (experts < NUM_EXPERTS)[None, :]
    places = tokens[:, None] * NUM_EXPERTS + experts[None, :]
    logits = tl.load(logits_ptr + places, mask=mask, other=float("-inf")).to(tl.float32)
    # keep padded rows finite
    logits = tl.where(is_token[:, None], logits, 0.0)
    shares = tl.exp(logits - tl.max(logits, axis=1)[:, None])
    divisor = tl.sum(shares, axis=1)
    # a NaN token must still choose existing experts
    shares = tl.where(shares == shares, shares, 0.0)
    if IS_NORMALISED:
        divisor = tl.zeros((TILE_ROWS,), dtype=tl.float32)
        left = shares
        for _ in range(TOP_K):
            divisor += tl.max(left, axis=1)
            chosen = tl.argmax(left, axis=1)
            left = tl.where(experts[None, :] == chosen[:, None], -1.0, left)
    left = shares
    for choice in range(TOP_K):
        share = tl.max(left, axis=1)
        chosen = tl.argmax(left, axis=1)
        left = tl.where(experts[None, :] == chosen[:, None], -1.0, left)
        weight = (share / divisor).to(weights_ptr.dtype.element_ty)
        tl.store(weights_ptr + tokens * TOP_K + choice, weight, mask=is_token)
        tl.store(experts_ptr + tokens * TOP_K + choice, chosen, mask=is_token)


@triton.jit
def _one_hot(
    experts_ptr,
    tile,
    num_slots,
    first,
    step,
    NUM_EXPERTS: tl.constexpr,
    TILE_SLOTS: tl.constexpr,
    TILE_EXPERTS: tl.constexpr,
):
    """Return the one-hot expert of each slot among first, first + step, ..; the last is others."""
    slots = tile * TILE_SLOTS + tl.arange(0, TILE_SLOTS)
    is_slot = slots < num_slots
    experts = tl.load(experts_ptr + slots, mask=is_slot, other=0).to(tl.int32)
    experts = tl.where(experts % step == first, experts // step, NUM_EXPERTS - 1)
    experts = tl.where(is_slot, experts, -1)
    return (experts[:, None] == tl.arange(0, TILE_EXPERTS)[None, :]).to(tl.int32)


@triton.jit(do_not_specialize=["num_slots", "program_tiles", "first", "step"])
def count_kernel(
    experts_ptr,
    counts_ptr,
    num_slots,
    program_tiles,
    first,
    step,
    NUM_EXPERTS: tl.constexpr,
    TILE_SLOTS: tl.constexpr,
    TILE_EXPERTS: tl.constexpr,
):
    """Count the slots of each expert in the tiles of a program.

    The counts are one column of `counts` [E, programs]. A slot is one expert choice of a token.
    """
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    experts = tl.arange(0, TILE_EXPERTS)
    counts = tl.zeros((TILE_EXPERTS,), dtype=tl.int32)
    for tile in range(program * program_tiles, (program + 1) * program_tiles):
        chosen = _one_hot(
            experts_ptr, tile, num_slots, first, step, NUM_EXPERTS, TILE_SLOTS, TILE_EXPERTS
        )
        counts += tl.sum(chosen, axis=0)
    tl.store(counts_ptr + experts * num_programs + program, counts, mask=experts < NUM_EXPERTS)


@triton.jit(do_not_specialize=["num_slots", "program_tiles", "first", "step"])
def place_kernel(
    experts_ptr,
    counts_ptr,
    order_ptr,
    places_ptr,
    row_starts_ptr,
    tile_ends_ptr,
    num_slots,
    program_tiles,
    first,
    step,
    NUM_EXPERTS: tl.constexpr,
    TILE_SLOTS: tl.constexpr,
    TILE_EXPERTS: tl.constexpr,
    TILE_COUNTS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    """Write the places of a program's slots (see `Permutation`), from the counts of all programs.

    The first program also writes the start of each expert's rows, and the end in tiles of
    TILE_ROWS rows.
    """
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    experts = tl.arange(0, TILE_EXPERTS)
    totals = tl.zeros((TILE_EXPERTS,), dtype=tl.int32)
    before = tl.zeros((TILE_EXPERTS,), dtype=tl.int32)
    for start in range(0, num_programs, TILE_COUNTS):
        programs = start + tl.arange(0, TILE_COUNTS)
        mask = (experts < NUM_EXPERTS)[:, None] & (programs < num_programs)[None, :]
        places = experts[:, None] * num_programs + programs[None, :]
        counts = tl.load(counts_ptr + places, mask=mask, other=0)
        totals += tl.sum(counts, axis=1)
        before += tl.sum(tl.where((programs < program)[None, :], counts, 0), axis=1)
    ends = tl.cumsum(totals, axis=0)
    bases = ends - totals + before
    for tile in range(program * program_tiles, (program + 1) * program_tiles):
        chosen = _one_hot(
            experts_ptr, tile, num_slots, first, step, NUM_EXPERTS, TILE_SLOTS, TILE_EXPERTS
        )
        ranks = tl.cumsum(chosen, axis=0) - 1
        places = tl.sum(chosen * (ranks + bases[None, :]), axis=1)
        slots = tile * TILE_SLOTS + tl.arange(0, TILE_SLOTS)
        is_slot = slots < num_slots
        tl.store(places_ptr + slots, places, mask=is_slot)
        tl.store(order_ptr + places, slots, mask=is_slot)
        bases += tl.sum(chosen, axis=0)
    if program == 0:
        is_expert = experts < NUM_EXPERTS
        tl.store(row_starts_ptr + experts, ends - totals, mask=is_expert)
        tl.store(row_starts_ptr + experts + 1, ends, mask=experts == NUM_EXPERTS - 1)
        tiles_of_expert = (totals + TILE_ROWS - 1) // TILE_ROWS
        tl.store(tile_ends_ptr + experts, tl.cumsum(tiles_of_expert, axis=0), mask=is_expert)


@triton.jit
def _find_rows(
    tile_ends_ptr,
    row_starts_ptr,
    tile,
    NUM_EXPERTS: tl.constexpr,
    TILE_EXPERTS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    """Return the expert of a tile, its first row, and the end of the expert's rows.

    With 5, 0 and 3 rows and tiles of 4, tile ends are 2 2 3: tile 1 is rows 4..5 of expert 0, and
    tile 2 is rows 5..8 of expert 2.
    """
    experts = tl.arange(0, TILE_EXPERTS)
    ends = tl.load(tile_ends_ptr + experts, mask=experts < NUM_EXPERTS, other=2147483647)
    expert = tl.sum((ends <= tile).to(tl.int32), axis=0)
    first_tile = tl.max(tl.where(ends <= tile, ends, 0), axis=0)
    start = tl.load(row_starts_ptr + expert)
    stop = tl.load(row_starts_ptr + expert + 1)
    return expert.to(tl.int64), start + (tile - first_tile) * TILE_ROWS, stop


@triton.jit
def _weight_places(outputs, stride_panel, stride_out, PANEL: tl.constexpr):
    return (outputs // PANEL).to(tl.int64) * stride_panel + (outputs % PANEL) * stride_out


@triton.jit
def gate_up_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    order_ptr,
    tile_ends_ptr,
    row_starts_ptr,
    scales_ptr,
    stride_x,
    stride_expert,
    stride_panel,
    stride_out,
    stride_in,
    TOP_K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    NUM_INPUTS: tl.constexpr,
    NUM_OUTPUTS: tl.constexpr,
    PANEL: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    TILE_EXPERTS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_OUT: tl.constexpr,
    TILE_IN: tl.constexpr,
):
    """Gather tiles of rows by expert, and compute silu(gate) * up of NUM_OUTPUTS = F columns.

    Programs loop over tiles with columns varying fastest, so that neighbouring programs read the
    same rows and expert.
    """
    num_columns: tl.constexpr = tl.cdiv(NUM_OUTPUTS, TILE_OUT)
    num_works = tl.load(tile_ends_ptr + NUM_EXPERTS - 1) * num_columns
    for work in range(tl.program_id(0), num_works, tl.num_programs(0)):
        expert, row_start, row_stop = _find_rows(
            tile_ends_ptr, row_starts_ptr, work // num_columns, NUM_EXPERTS, TILE_EXPERTS, TILE_ROWS
        )
        rows = row_start + tl.arange(0, TILE_ROWS)
        is_row = rows < row_stop
        tokens = (tl.load(order_ptr + rows, mask=is_row, other=0) // TOP_K).to(tl.int64)
        outputs = work % num_columns * TILE_OUT + tl.arange(0, TILE_OUT)
        is_output = outputs < NUM_OUTPUTS
        expert_ptr = weight_ptr + expert * stride_expert
        gate_places = _weight_places(outputs, stride_panel, stride_out, PANEL)
        up_places = _weight_places(outputs + NUM_OUTPUTS, stride_panel, stride_out, PANEL)
        gate = tl.zeros((TILE_ROWS, TILE_OUT), dtype=tl.float32)
        up = tl.zeros((TILE_ROWS, TILE_OUT), dtype=tl.float32)
        for start in range(0, NUM_INPUTS, TILE_IN):
            inputs = start + tl.arange(0, TILE_IN)
            is_input = inputs < NUM_INPUTS
            in_row = is_row[:, None] & is_input[None, :]
            places = tokens[:, None] * stride_x + inputs[None, :]
            x = load_tile(x_ptr, places, in_row)
            mask = is_input[:, None] & is_output[None, :]
            in_places = inputs[:, None] * stride_in
            gate_weight = load_weight(expert_ptr, gate_places[None, :] + in_places, mask, x.dtype)
            up_weight = load_weight(expert_ptr, up_places[None, :] + in_places, mask, x.dtype)
            gate += tl.dot(x, gate_weight, input_precision="tf32x3")
            up += tl.dot(x, up_weight, input_precision="tf32x3")
        if HAS_SCALES:
            of_outputs = scales_ptr + expert * 2 * NUM_OUTPUTS + outputs
            gate *= tl.load(of_outputs, mask=is_output, other=0.0)[None, :]
            up *= tl.load(of_outputs + NUM_OUTPUTS, mask=is_output, other=0.0)[None, :]
        made = (gate / (1.0 + tl.exp(-gate)) * up).to(out_ptr.dtype.element_ty)
        targets = rows.to(tl.int64)[:, None] * NUM_OUTPUTS + outputs[None, :]
        tl.store(out_ptr + targets, made, mask=is_row[:, None] & is_output[None, :])


@triton.jit
def down_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    tile_ends_ptr,
    row_starts_ptr,
    scales_ptr,
    stride_expert,
    stride_panel,
    stride_out,
    stride_in,
    NUM_EXPERTS: tl.constexpr,
    NUM_INPUTS: tl.constexpr,
    NUM_OUTPUTS: tl.constexpr,
    PANEL: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    TILE_EXPERTS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_OUT: tl.constexpr,
    TILE_IN: tl.constexpr,
):
    """Multiply tiles of rows, sorted by expert, with their expert's weight, as `gate_up_kernel`."""
    num_columns: tl.constexpr = tl.cdiv(NUM_OUTPUTS, TILE_OUT)
    num_works = tl.load(tile_ends_ptr + NUM_EXPERTS - 1) * num_columns
    for work in range(tl.program_id(0), num_works, tl.num_programs(0)):
        expert, row_start, row_stop = _find_rows(
            tile_ends_ptr, row_starts_ptr, work // num_columns, NUM_EXPERTS, TILE_EXPERTS, TILE_ROWS
        )
        rows = (row_start + tl.arange(0, TILE_ROWS)).to(tl.int64)
        is_row = rows < row_stop
        outputs = work % num_columns * TILE_OUT + tl.arange(0, TILE_OUT)
        is_output = outputs < NUM_OUTPUTS
        expert_ptr = weight_ptr + expert * stride_expert
        out_places = _weight_places(outputs, stride_panel, stride_out, PANEL)
        total = tl.zeros((TILE_ROWS, TILE_OUT), dtype=tl.float32)
        for start in range(0, NUM_INPUTS, TILE_IN):
            inputs = start + tl.arange(0, TILE_IN)
            is_input = inputs < NUM_INPUTS
            in_row = is_row[:, None] & is_input[None, :]
            x = load_tile(x_ptr, rows[:, None] * NUM_INPUTS + inputs[None, :], in_row)
            places = out_places[None, :] + inputs[:, None] * stride_in
            mask = is_input[:, None] & is_output[None, :]
            weight = load_weight(expert_ptr, places, mask, x.dtype)
            total += tl.dot(x, weight, input_precision="tf32x3")
        if HAS_SCALES:
            of_outputs = scales_ptr + expert * NUM_OUTPUTS + outputs
            total *= tl.load(of_outputs, mask=is_output, other=0.0)[None, :]
        targets = rows[:, None] * NUM_OUTPUTS + outputs[None, :]
        mask = is_row[:, None] & is_output[None, :]
        tl.store(out_ptr + targets, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize_on_alignment=["num_rows_ptr"])
def combine_kernel(
    rows_ptr,
    weights_ptr,
    places_ptr,
    num_rows_ptr,
    out_ptr,
    TOP_K: tl.constexpr,
    DIM: tl.constexpr,
    TILE_DIM: tl.constexpr,
):
    """Sum the weighted outputs of one token's experts.

    Places beyond the number of rows belong to absent experts.
    """
    token = tl.program_id(0).to(tl.int64)
    dims = tl.program_id(1) * TILE_DIM + tl.arange(0, TILE_DIM)
    is_dim = dims < DIM
    num_rows = tl.load(num_rows_ptr)
    total = tl.zeros((TILE_DIM,), dtype=tl.float32)
    for choice in range(TOP_K):
        slot = token * TOP_K + choice
        place = tl.load(places_ptr + slot).to(tl.int64)
        weight = tl.load(weights_ptr + slot).to(tl.float32)
        width = tl.where(place < num_rows, DIM, 0)
        row = tl.load(rows_ptr + place * DIM + dims, mask=dims < width, other=0.0)
        total += weight * row.to(tl.float32)
    tl.store(out_ptr + token * DIM + dims, total.to(out_ptr.dtype.element_ty), mask=is_dim)
