import math
import random

import pytest
import torch

from raybatch.kernels import decode_attention
from raybatch.kernels.attention import TORCH_DECODE, attend, prepare_attention, store_kv
from raybatch.kernels.attention_plan import AttentionPlan, DecodePart, PrefillPart, PrefixSegment
from raybatch.kernels.byte_numbers import FP8, INT8, is_quantised, quantise, read_rows
from raybatch.kernels.dense_attention import attend_windowed
from raybatch.kernels.native.decode_attention import decode_form
from tests import tolerances
from tests.oracles import dense_attention

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, NUM_BLOCKS = 6, 2, 10, 4, 64
# largest score, and longest context
TOLERANCE = tolerances.of_sums(torch.float32, HEAD_DIM + NUM_BLOCKS * BLOCK_SIZE)


FORMS = {
    "torch": ("torch", torch.float32),
    "compiled": ("compiled", torch.float32),
    "torch-int8": ("torch", INT8),
    "compiled-int8": ("compiled", INT8),
    "compiled-fp8": ("compiled", FP8),
}


@pytest.fixture(params=FORMS.values(), ids=FORMS.keys(), autouse=True)
def decode(request, monkeypatch):
    """The form of decode attention, and the pool, for both kinds of steps below."""
    kind, pool_dtype = request.param
    form = TORCH_DECODE
    if kind == "compiled":
        form = decode_form(
            head_dim=HEAD_DIM,
            num_grouped=NUM_HEADS // NUM_KV_HEADS,
            block_size=BLOCK_SIZE,
            kv_dtype=pool_dtype,
        )
        if form is None:
            pytest.skip("no C compiler here")
    for steps in (Step, SharedRuns):
        monkeypatch.setattr(steps, "decode", form)
        monkeypatch.setattr(steps, "pool_dtype", pool_dtype)
    return form


def random_pool(num_blocks, dtype):
    rows = torch.randn(num_blocks, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    return quantise(rows, dtype) if is_quantised(dtype) else rows


def numbers(pool, blocks):
    """Return the numbers in a sequence of blocks, [positions, G, D]."""
    rows = read_rows(pool[blocks], HEAD_DIM, torch.float32)
    return rows.transpose(1, 2).flatten(0, 1)


class Step:
    """Sequences with random KV in a pool, and the plan of one step that continues them.

    Each is (cached tokens, new tokens); the first `num_decode` have one new token each. With
    `shared`, that many leading tokens of all decode sequences are the same and in one context.
    """

    decode, pool_dtype = TORCH_DECODE, torch.float32

    def __init__(self, sequences, num_decode=0, window=None, shared=0, seed=0, dense_blocks=False):
        torch.manual_seed(seed)
        self.window = window
        self.k_pool = random_pool(NUM_BLOCKS, self.pool_dtype)
        self.v_pool = random_pool(NUM_BLOCKS, self.pool_dtype)
        total = sum(new for _, new in sequences)
        self.q = torch.randn(total, NUM_HEADS, HEAD_DIM)
        self.k = torch.randn(total, NUM_KV_HEADS, HEAD_DIM)
        self.v = torch.randn(total, NUM_KV_HEADS, HEAD_DIM)
        free = list(range(NUM_BLOCKS))
        if not dense_blocks:
            random.Random(seed).shuffle(free)
        shared_blocks = [free.pop(0) for _ in range(shared // BLOCK_SIZE)]
        self.tables, self.sequences = [], sequences
        for i, (cached, new) in enumerate(sequences):
            table = list(shared_blocks) if i < num_decode else []
            while len(table) * BLOCK_SIZE < cached + new:
                table.append(free.pop(0))
            self.tables.append(table)
        self.positions = torch.cat([torch.arange(c, c + n) for c, n in sequences])
        self.slots = torch.tensor(
            [
                table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE
                for table, (c, n) in zip(self.tables, sequences, strict=True)
                for p in range(c, c + n)
            ]
        )
        self.plan = self._plan(num_decode, shared)

    def _plan(self, num_decode, shared):
        entries, segments, starts, row = [], [], [], 0
        for i, (table, (cached, new)) in enumerate(zip(self.tables, self.sequences, strict=True)):
            if i < num_decode:
                for j, block in enumerate(table):
                    if j >= shared // BLOCK_SIZE:
                        valid = min(BLOCK_SIZE, cached + 1 - j * BLOCK_SIZE)
                        entries.append((block, i, valid, j * BLOCK_SIZE))
            else:
                starts.append(row)
                if cached:
                    blocks = torch.tensor(table[: -(-cached // BLOCK_SIZE)])
                    rows = torch.arange(row, row + new)
                    segments.append(
                        PrefixSegment(query_idx=rows, block_ids=blocks, num_tokens=cached)
                    )
            row += new
        if shared:
            blocks = torch.tensor(self.tables[0][: shared // BLOCK_SIZE])
            rows = torch.arange(num_decode).flip(0)
            segments.append(PrefixSegment(query_idx=rows, block_ids=blocks, num_tokens=shared))
        decode = None
        if entries:
            blocks, owners, valid, first = map(torch.tensor, zip(*sorted(entries), strict=True))
            decode = DecodePart(
                block_ids=blocks,
                owners=owners,
                num_valid=valid,
                is_contiguous=bool((blocks.diff() == 1).all()),
                first_positions=first,
            )
        lens = tuple(new for _, new in self.sequences[num_decode:])
        prefill = PrefillPart(starts=tuple(starts), lens=lens) if lens else None
        return AttentionPlan(
            num_decode=num_decode, decode=decode, prefill=prefill, segments=tuple(segments)
        )

    def run(self):
        prepared = prepare_attention(
            self.plan,
            positions=self.positions,
            slot_mapping=self.slots,
            pool=self.k_pool,
            windows=(self.window,),
            decode=self.decode,
        )
        store_kv(self.k, self.v, self.k_pool, self.v_pool, prepared)
        return attend(self.q, self.k, self.v, self.k_pool, self.v_pool, prepared, self.window)

    def expected(self):
        outputs, row = [], 0
        for table, (cached, new) in zip(self.tables, self.sequences, strict=True):
            keys, values = numbers(self.k_pool, table), numbers(self.v_pool, table)
            positions = list(range(cached, cached + new))
            q = self.q[row : row + new]
            outputs.append(dense_attention(q, keys, values, positions, self.window))
            row += new
        return torch.cat(outputs).flatten(1)

    def check(self):
        actual = self.run()
        tolerances.assert_close(actual, self.expected(), TOLERANCE)


def test_stored_keys_and_values_are_in_their_slots():
    step = Step([(0, 5), (3, 2)])
    step.run()
    everything = slice(None)
    assert torch.equal(step.k, numbers(step.k_pool, everything)[step.slots])
    assert torch.equal(step.v, numbers(step.v_pool, everything)[step.slots])


@pytest.mark.parametrize("lengths", [[1], [3, 3, 3], [1, 9, 2, 17], [49, 5, 60], [8, 8, 16]])
def test_prompts_attend_causally_to_themselves(lengths):
    Step([(0, length) for length in lengths]).check()


@pytest.mark.parametrize("cached", [[0], [1, 2, 3], [7, 0, 30, 11]])
@pytest.mark.parametrize("dense_blocks", [True, False], ids=["dense", "scattered"])
@pytest.mark.parametrize("max_gap_blocks", [0, 1, 1000])
def test_decode_tokens_attend_to_all_their_blocks(
    cached, dense_blocks, max_gap_blocks, monkeypatch
):
    block_bytes = 2 * NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM * 4
    monkeypatch.setattr(decode_attention, "_RUN_COST_BYTES", max_gap_blocks * block_bytes)
    Step([(n, 1) for n in cached], num_decode=len(cached), dense_blocks=dense_blocks).check()


def test_a_block_that_two_decode_tokens_own_serves_both():
    step = Step([(5, 1), (7, 1)], num_decode=2, dense_blocks=True)
    first, second = step.tables[0][0], step.tables[1][0]
    part = step.plan.decode
    doubled = part.block_ids.where(part.block_ids != second, first)
    order = doubled.argsort(stable=True)
    for name in ("owners", "num_valid", "first_positions"):
        object.__setattr__(part, name, getattr(part, name)[order])
    object.__setattr__(part, "block_ids", doubled[order])
    object.__setattr__(part, "is_contiguous", False)
    step.tables[1][0] = first
    step.check()


def test_a_run_of_blocks_with_two_owners_is_walked_twice_and_not_block_by_block():
    blocks = torch.tensor([3, 3, 4, 4, 5, 5, 40])
    runs, rows, walked = decode_attention._plan_runs(blocks, max_gap=0)
    assert [(3, 3), (1, 40), (3, 3)] == [(run.stop - run.start, run.block) for run in runs]
    assert torch.equal(walked[rows], blocks)
    assert sorted(rows.tolist()) == list(range(7))


def test_chunks_see_their_cached_context():
    Step([(5, 4), (0, 3), (16, 55)]).check()


def test_decode_and_chunks_run_in_one_step():
    Step([(9, 1), (2, 1), (0, 6), (12, 5)], num_decode=2).check()


def test_members_of_a_group_see_the_shared_prefix():
    Step([(13, 1), (8, 1), (21, 1), (0, 7)], num_decode=3, shared=8).check()


class SharedRuns:
    """Decode tokens that share prefix segments of whole blocks, and read one further block each.

    Args:
        runs: for each (members, blocks); a member reads its runs in this order.
    """

    decode, pool_dtype = TORCH_DECODE, torch.float32

    def __init__(self, num_decode, runs, window=None):
        torch.manual_seed(0)
        self.window = window
        num_blocks = num_decode + sum(count for _, count in runs)
        self.k_pool = random_pool(num_blocks, self.pool_dtype)
        self.v_pool = random_pool(num_blocks, self.pool_dtype)
        self.q = torch.randn(num_decode, NUM_HEADS, HEAD_DIM)
        free = torch.randperm(num_blocks).tolist()
        self.tables = [[] for _ in range(num_decode)]
        segments = []
        for members, count in runs:
            blocks = [free.pop() for _ in range(count)]
            segments.append(
                PrefixSegment(
                    query_idx=torch.tensor(members),
                    block_ids=torch.tensor(blocks),
                    num_tokens=count * BLOCK_SIZE,
                    first_position=len(self.tables[members[0]]) * BLOCK_SIZE,
                )
            )
            for member in members:
                self.tables[member] += blocks
        first = torch.tensor([len(table) * BLOCK_SIZE for table in self.tables])
        own = torch.tensor([free.pop() for _ in self.tables])
        self.positions = first + torch.arange(num_decode) % BLOCK_SIZE
        for table, block in zip(self.tables, own.tolist(), strict=True):
            table.append(block)
        order = own.argsort()
        decode = DecodePart(
            block_ids=own[order],
            owners=order,
            num_valid=(self.positions - first + 1)[order],
            is_contiguous=False,
            first_positions=first[order],
        )
        self.plan = AttentionPlan(
            num_decode=num_decode, decode=decode, prefill=None, segments=tuple(segments)
        )

    def check(self):
        prepared = prepare_attention(
            self.plan,
            positions=self.positions,
            slot_mapping=self.positions,
            pool=self.k_pool,
            windows=(self.window,),
            decode=self.decode,
        )
        k = self.q[:, :NUM_KV_HEADS]
        actual = attend(self.q, k, k, self.k_pool, self.v_pool, prepared, self.window)
        expected = []
        for i, table in enumerate(self.tables):
            keys, values = numbers(self.k_pool, table), numbers(self.v_pool, table)
            position = [int(self.positions[i])]
            expected.append(dense_attention(self.q[i : i + 1], keys, values, position, self.window))
        tolerances.assert_close(actual, torch.cat(expected).flatten(1), TOLERANCE)


@pytest.mark.parametrize("window", [None, 6, 9])
@pytest.mark.parametrize(
    "runs",
    [
        [([0, 1], 2), ([2, 3], 2), ([4, 5], 2)],
        [([0, 2, 5], 2), ([1, 3], 2), ([4], 2)],
        [([0, 1, 2, 3, 4, 5], 1), ([1, 3, 5], 2), ([5], 2)],
        [([3, 4], 1), ([0, 1, 2], 3), ([3, 4], 3)],
    ],
    ids=["alike", "of other sizes", "nested", "of other lengths"],
)
def test_runs_that_some_decode_tokens_share_are_computed_together(runs, window):
    SharedRuns(6, runs, window).check()


def test_sets_of_queries_above_the_padding_limit_are_exact():
    many = list(range(70))
    SharedRuns(71, [(many, 1), ([70], 1)]).check()


@pytest.mark.parametrize("window", [1, 3, 8, 50])
def test_a_window_hides_older_positions_in_every_part(window):
    Step([(13, 1), (8, 1), (21, 1), (0, 7), (17, 9), (0, 56)], 3, window, shared=8).check()


@pytest.mark.parametrize(
    ("sequence", "num_decode", "window"),
    [((8, 1), 1, 8), ((0, 9), 0, 8), ((0, 50), 0, 49), ((5, 4), 0, 8), ((8, 1), 0, 8)],
    ids=["decode", "prompt", "long prompt", "chunk", "one-token chunk"],
)
def test_the_first_position_behind_the_window_is_hidden(sequence, num_decode, window):
    Step([sequence], num_decode, window=window).check()


def test_windowed_prompts_longer_than_a_tile_are_exact():
    torch.manual_seed(0)
    q, k, v = (torch.randn(300, NUM_KV_HEADS, HEAD_DIM) for _ in range(3))
    places = torch.arange(300)
    output, _ = attend_windowed(
        q.transpose(0, 1).unsqueeze(1),
        k.transpose(0, 1),
        v.transpose(0, 1),
        query_positions=places,
        key_positions=places,
        window=20,
    )
    expected = dense_attention(q, k, v, list(range(300)), 20)
    tolerances.assert_close(output.squeeze(1).transpose(0, 1), expected, TOLERANCE)


def test_a_window_without_first_positions_is_refused():
    step = Step([(13, 1)], num_decode=1, window=4)
    object.__setattr__(step.plan.decode, "first_positions", None)
    with pytest.raises(ValueError, match="first_positions"):
        step.run()


def test_garbage_in_unused_slots_and_foreign_blocks_does_not_leak():
    step = Step([(2, 1), (5, 1)], num_decode=2)
    # a quantised pool rounds them
    k, v = step.k.clone(), step.v.clone()
    clean = step.run()
    step.k, step.v = k, v
    used = torch.zeros(NUM_BLOCKS, dtype=torch.bool)
    used[[block for table in step.tables for block in table]] = True
    for pool, garbage in ((step.k_pool, 1e30), (step.v_pool, math.nan)):
        rows = torch.full((NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM), garbage)
        pool[~used] = quantise(rows, pool.dtype) if is_quantised(pool.dtype) else rows
    assert torch.equal(clean, step.run())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_close_to_float32(dtype):
    step = Step([(9, 1), (2, 1), (0, 6), (12, 5)], num_decode=2)
    expected = step.run()
    step.q, step.k, step.v = step.q.to(dtype), step.k.to(dtype), step.v.to(dtype)
    if not is_quantised(step.k_pool.dtype):
        step.k_pool, step.v_pool = step.k_pool.to(dtype), step.v_pool.to(dtype)
    prepared = prepare_attention(
        step.plan,
        positions=step.positions,
        slot_mapping=step.slots,
        pool=step.k_pool,
        windows=(None,),
    )
    actual = attend(step.q, step.k, step.v, step.k_pool, step.v_pool, prepared, None)
    assert actual.dtype == dtype
    # scores, weights and outputs are rounded
    tolerances.assert_close(actual.float(), expected, tolerances.of_sums(dtype, 3))
