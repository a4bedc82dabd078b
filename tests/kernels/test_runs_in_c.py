"""Cascade attention in C: decode rows read shared-prefix segments together."""

import math
from dataclasses import replace

import pytest
import torch

from raybatch.kernels.attention import attend, prepare_attention
from raybatch.kernels.attention_plan import AttentionPlan, PrefixSegment
from raybatch.kernels.byte_numbers import is_quantised, quantise, read_rows
from raybatch.kernels.native.compiler import host_vectors
from raybatch.kernels.native.decode_attention import decode_form
from tests import tolerances
from tests.kernels.keyless_rows import BLOCK_SIZE, part_of
from tests.kernels.test_rows_without_keys import HEAD_DIM, NUM_HEADS, NUM_KV_HEADS, POOLS
from tests.oracles import dense_attention

# as in other tests, so that all use one kernel
NUM_GROUPED = NUM_HEADS // NUM_KV_HEADS


@pytest.fixture(params=["avx512", "avx2", "plain"])
def compiled(request, monkeypatch):
    """A function that returns a kernel compiled for the vectors."""
    if request.param not in host_vectors():
        pytest.skip("not on this processor")
    monkeypatch.setenv("RAYBATCH_KERNEL_VECTORS", request.param)

    def of(*, head_dim=HEAD_DIM, num_grouped=NUM_GROUPED, kv_dtype=torch.float32):
        found = decode_form(
            head_dim=head_dim, num_grouped=num_grouped, block_size=BLOCK_SIZE, kv_dtype=kv_dtype
        )
        return found or pytest.skip("no C compiler here")

    return of


class Step:
    """Rows of a tree of shared-prefix segments, each with some unshared positions.

    `runs` are (rows, positions), whole blocks; a row reads its runs in this order.
    """

    def __init__(
        self, num_rows, runs, *, head_dim=HEAD_DIM, num_grouped=NUM_GROUPED, kv_dtype=torch.float32
    ):
        torch.manual_seed(0)
        self.head_dim, self.tables, segments, own = head_dim, [[] for _ in range(num_rows)], [], []
        ids = iter(torch.randperm(sum(-(-n // BLOCK_SIZE) for _, n in runs) + num_rows).tolist())
        for rows, num_tokens in runs:
            blocks = [next(ids) for _ in range(num_tokens // BLOCK_SIZE)]
            segments.append(
                PrefixSegment(
                    query_idx=torch.tensor(rows),
                    block_ids=torch.tensor(blocks),
                    num_tokens=num_tokens,
                    first_position=len(self.tables[rows[0]]) * BLOCK_SIZE,
                )
            )
            for row in rows:
                self.tables[row] += blocks
        positions = []
        for row, table in enumerate(self.tables):
            block, first, valid = next(ids), len(table) * BLOCK_SIZE, 1 + row % BLOCK_SIZE
            own.append((block, row, valid, first))
            table.append(block)
            positions.append(first + valid - 1)
        self.positions = torch.tensor(positions)
        num_blocks = 1 + max(max(table) for table in self.tables)
        pools = torch.randn(2, num_blocks, NUM_KV_HEADS, BLOCK_SIZE, head_dim)
        self.pools = quantise(pools, kv_dtype) if is_quantised(kv_dtype) else pools
        self.q = torch.randn(num_rows, NUM_KV_HEADS * num_grouped, head_dim)
        self.plan = AttentionPlan(
            num_decode=num_rows, decode=part_of(own), prefill=None, segments=tuple(segments)
        )

    def run(self, form, window=None):
        prepared = prepare_attention(
            self.plan,
            positions=self.positions,
            slot_mapping=self.positions,
            pool=self.pools[0],
            windows=(window,),
            decode=form,
        )
        assert prepared.segments is None, "not read in C"
        kv = self.q[:, :NUM_KV_HEADS]
        return attend(self.q, kv, kv, *self.pools, prepared, window)

    def check(self, form, window=None):
        """Compare every row with dense attention."""
        keys, values = (read_rows(pool, self.head_dim, torch.float32) for pool in self.pools)
        actual = self.run(form, window)
        tolerance = tolerances.of_sums(
            torch.float32, self.head_dim + max(map(len, self.tables)) * BLOCK_SIZE
        )
        for i, (table, position) in enumerate(
            zip(self.tables, self.positions.tolist(), strict=True)
        ):
            own = (pool[table].transpose(1, 2).flatten(0, 1) for pool in (keys, values))
            expected = dense_attention(self.q[i : i + 1], *own, [position], window).flatten(1)
            tolerances.assert_close(actual[i : i + 1], expected, tolerance)


def tree(num_rows, *lengths):
    """Runs of all rows, of each half, of each quarter and so on."""
    runs = []
    for level, length in enumerate(lengths):
        size = num_rows // 2**level
        runs += [(list(range(i, i + size)), length) for i in range(0, num_rows, size)]
    return runs


@pytest.mark.parametrize("dtype", POOLS.values(), ids=POOLS.keys())
def test_trees_of_runs_over_each_kind_of_pool(compiled, dtype):
    form = compiled(kv_dtype=dtype)
    for num_rows in (2, 4, 12):
        # shorter and longer than one read, and no multiple of it
        Step(num_rows, tree(num_rows, 204, 16), kv_dtype=dtype).check(form)


def test_a_head_dim_that_fills_no_register(compiled):
    shape = {"head_dim": 6, "num_grouped": 1}
    Step(20, tree(20, 48, 32), **shape).check(compiled(**shape))


@pytest.mark.parametrize("window", [20, 60, 100, 1000])
def test_windows_hide_another_part_of_a_run_from_each_row(compiled, window):
    Step(12, tree(12, 96, 32)).check(compiled(), window)


def test_a_row_with_its_runs_outside_the_window_gets_zeros_without_weight(compiled):
    step, form = Step(2, [([0, 1], 8)]), compiled()
    part = replace(part_of([]), runs=step.plan.segments)
    lists = form.plan(part, positions=torch.tensor([40, 7]), pool=step.pools[0], windows=(20,))
    output, lse = form.attend(step.q, *step.pools, lists, 20)
    assert not output[0].any()
    assert lse[0].isneginf().all()
    assert lse[1].isfinite().all()


def test_more_rows_than_fit_at_once(compiled):
    # tiles of 32 floats by 256 hold 4 rows
    shape = {"head_dim": 256, "num_grouped": 3}
    Step(70, [(list(range(70)), 80)], **shape).check(compiled(**shape))


def test_the_result_of_a_row_does_not_depend_on_other_rows(compiled):
    form = compiled()
    together = Step(24, [(list(range(24)), 208)])
    expected = together.run(form)
    segments = together.plan.segments
    for rows in ([0], [3, 4], list(range(20))):
        alone = PrefixSegment(
            query_idx=torch.tensor(rows), block_ids=segments[0].block_ids, num_tokens=208
        )
        together.plan = AttentionPlan(
            num_decode=24, decode=together.plan.decode, prefill=None, segments=(alone,)
        )
        assert torch.equal(expected[rows], together.run(form)[rows])


@pytest.mark.parametrize("broken", [math.nan, math.inf])
@pytest.mark.parametrize("pool", [0, 1], ids=["keys", "values"])
def test_broken_kv_changes_only_its_readers(compiled, pool, broken):
    step = Step(6, [([0, 1], 96), ([2, 3], 96)])
    block = int(step.plan.segments[0].block_ids[3])
    step.pools[pool][block, 1, 2] = broken
    step.q.abs_()
    output = step.run(compiled()).view(6, NUM_KV_HEADS, -1)
    assert not output[:2, 1].isfinite().all(-1).any()
    assert output[:2, 0].isfinite().all()
    assert output[2:].isfinite().all()


@pytest.mark.parametrize("step_size", [-0.75, 0.75])
def test_scores_that_fall_or_rise_far_along_a_run(compiled, step_size):
    step = Step(9, [(list(range(9)), 208)])
    keys, blocks = step.pools[0].zero_(), step.plan.segments[0].block_ids
    keys[blocks, ..., 0] = (step_size * torch.arange(208.0)).view(-1, 1, BLOCK_SIZE)
    step.q.zero_()[..., 0] = HEAD_DIM**0.5
    step.check(compiled())
