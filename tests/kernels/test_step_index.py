"""The flat index of a step: its chunks, shared-prefix segments and padding."""

import numpy as np
import pytest
import torch

from raybatch.kernels.attention_plan import AttentionPlan, DecodePart, PrefillPart, PrefixSegment
from raybatch.kernels.step_index import (
    MAX_RUNS,
    RUN_WORKS,
    Item,
    StepIndex,
    StepSize,
    cut_places,
    max_places,
    parts_of,
    rounds_of,
)
from tests.engine.batch.test_batch_builder import Steps


def index_of(plan, num_rows):
    return StepIndex(plan, num_rows=num_rows, num_kv_heads=2, block_size=4)


def written(index, size=None):
    """Return the parts of an index of some size as lists; 99 marks unwritten entries."""
    size = size or index.size
    out = np.full(size.num_index, 99, np.int32)
    index.write(size, out)
    return {name: part.tolist() for name, part in parts_of(size, out)._asdict().items()}


def items(numbers):
    return [Item(*row) for row in np.reshape(numbers, (-1, len(Item._fields))).tolist()]


def run(rows, blocks, *, chunk=None, first=0):
    return PrefixSegment(
        query_idx=torch.tensor(rows),
        block_ids=torch.tensor(blocks),
        num_tokens=4 * len(blocks),
        first_position=first,
        chunk=chunk,
    )


def plan_of(*segments):
    decode = DecodePart(
        block_ids=torch.tensor([3, 5, 7]),
        owners=torch.tensor([1, 0, 1]),
        num_valid=torch.tensor([4, 2, 1]),
        is_contiguous=False,
        first_positions=torch.tensor([0, 8, 4]),
    )
    prefill = PrefillPart(starts=(2, 5), lens=(3, 200))
    return AttentionPlan(num_decode=2, decode=decode, prefill=prefill, segments=segments)


def test_entries_are_ordered_by_row():
    parts = written(index_of(plan_of(), 205))
    assert parts["starts"] == [0, 1, 3]
    assert parts["entries"] == [5, 2, 8, 3, 4, 0, 7, 1, 4]


def test_a_run_that_a_chunk_alone_reads_is_part_of_its_items():
    parts = written(index_of(plan_of(run([2, 3, 4], [9, 8], chunk=0, first=12)), 205))
    assert items(parts["chunks"]) == [
        Item(2, 3, 2, 0, 8, 12, 2),
        Item(5, 128, 5, 2, 0, 0, 5),
        Item(133, 72, 133, 2, 0, 0, 5),
    ]
    assert parts["chunk_blocks"] == [9, 8]
    assert parts["runs"] == parts["row_starts"] == []


def test_of_two_runs_of_a_chunk_the_first_is_joined():
    parts = written(
        index_of(plan_of(run([2, 3, 4], [9], chunk=0), run([2, 3, 4], [8], chunk=0)), 205)
    )
    assert (parts["chunk_blocks"], parts["segment_blocks"]) == ([9], [8])


def test_rows_find_the_results_of_all_runs_that_they_read():
    index = index_of(plan_of(run([0, 1], [9]), run([1, 2, 3, 4], [8, 6], first=4)), 205)
    parts = written(index)
    assert items(parts["runs"]) == [Item(0, 2, 0, 0, 4, 0, 0), Item(2, 4, 2, 1, 8, 4, 0)]
    assert (parts["segment_rows"], parts["segment_blocks"]) == ([0, 1, 1, 2, 3, 4], [9, 8, 6])
    assert parts["order"] == [0, 1, 2, 3, 4, 5]
    assert parts["merged_rows"] == [0, 1, 2, 3, 4]
    assert parts["row_starts"] == [0, 1, 3, 4, 5, 6]
    assert parts["counts"] == [3, 2, 5, 0]
    assert (index.size.places, index.size.segment_queries) == (6, 4)


def test_padding_has_no_queries_no_entries_and_no_places():
    index = index_of(plan_of(run([0, 1], [9])), 205)
    size = StepSize(**{name: getattr(index.size, name) + 2 for name in StepSize.__slots__})
    parts = written(index, size)
    assert parts["starts"] == [0, 1, 3, 3, 3]
    assert [item.num_queries for item in items(parts["chunks"])] == [3, 128, 72, 0, 0]
    assert [item.num_queries for item in items(parts["runs"])] == [2, 0, 0]
    assert (parts["merged_rows"], parts["counts"]) == ([0, 1, 0, 0], [3, 1, 2, 0])
    assert parts["row_starts"] == [0, 1, 2, 2, 2]
    # only entries that nothing reads stay unwritten
    assert parts["entries"][9:] == [99] * 6


def test_the_plan_of_a_schedule_says_which_chunk_alone_reads_a_run():
    steps = Steps(range(10), [*range(8), 50, 51], budget=6)
    steps.step()
    batch = steps.step()
    assert batch.attention.prefill.lens == (4, 2)
    chunks = {part.chunk: part.query_idx.tolist() for part in batch.attention.segments}
    assert chunks[0] == [0, 1, 2, 3]
    for part in batch.attention.segments:
        assert (part.chunk is None) == (part.query_idx.tolist() == [0, 1, 2, 3, 4, 5])


def random_runs(rng, num_rows):
    """Return shared segments with any numbers of readers; one belongs to a chunk of the plan."""
    alone = run([2, 3, 4], [9, 8], chunk=0)
    longest = int(rng.choice([2, 40, 3000]))
    return [alone] + [
        run(
            np.flatnonzero(rng.random(num_rows) < rng.choice([0.01, 0.5, 1.0])).tolist() or [0],
            rng.integers(0, 9, rng.integers(1, longest)).tolist(),
        )
        for _ in range(rng.integers(1, 70))
    ]


def test_rounds_cover_all_runs_in_order_and_none_has_many_places():
    rng = np.random.default_rng(0)
    nums = set()
    for _ in range(25):
        num_rows = 205
        plan = plan_of(*random_runs(rng, num_rows))
        rounds = rounds_of(plan, num_rows)
        nums.add(len(rounds))
        assert list(plan.segments) == [part for one in rounds for part in one.segments]
        assert (plan.decode, plan.prefill) == (rounds[0].decode, rounds[0].prefill)
        assert all(one.decode is None and one.prefill is None for one in rounds[1:])
        for num_kv_heads in (1, 2, 8):
            for one in rounds:
                index = StepIndex(one, num_rows=num_rows, num_kv_heads=num_kv_heads, block_size=4)
                assert index.size.places <= max_places(num_rows, num_kv_heads)
    assert {1, 3} <= nums


def test_a_plan_of_few_runs_is_one_round():
    plan = plan_of(*[run(list(range(205)), [1]) for _ in range(MAX_RUNS)])
    (only,) = rounds_of(plan, 205)
    assert only is plan


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4, 8])
@pytest.mark.parametrize("num_groups", [1, 3, 28, 100])
def test_runs_are_cut_up_to_the_capacity_of_graphs(num_groups, num_kv_heads):
    num_rows, blocks = 320, list(range(500))
    groups = np.array_split(np.arange(num_rows), num_groups)
    plan = AttentionPlan(
        num_decode=num_rows,
        decode=None,
        prefill=None,
        segments=tuple(run(rows.tolist(), blocks) for rows in groups),
    )
    size = StepIndex(plan, num_rows=num_rows, num_kv_heads=num_kv_heads, block_size=4).size
    most = cut_places(num_rows)
    assert size.places <= most
    # enough programs, or no capacity to cut all runs again
    is_full = size.segment_items * num_kv_heads >= 0.75 * RUN_WORKS
    assert is_full or size.places + num_rows > 0.75 * most or size.segment_items == 8 * num_groups


@pytest.mark.parametrize("num_groups", [1, 2, 10])
def test_runs_that_are_not_cut_take_places_as_well(num_groups):
    num_rows, num_decode = 320, 100
    groups = np.array_split(np.arange(num_decode), num_groups)
    of_chunk = run(list(range(num_decode, num_rows)), list(range(1000)), chunk=0)
    plan = AttentionPlan(
        num_decode=num_decode,
        decode=None,
        prefill=PrefillPart(starts=(num_decode,), lens=(num_rows - num_decode,)),
        segments=(of_chunk, *(run(rows.tolist(), list(range(5000))) for rows in groups)),
    )
    size = StepIndex(
        plan, num_rows=num_rows, num_kv_heads=2, block_size=4, joins_segments=False
    ).size
    assert size.places <= cut_places(num_rows)
