"""The flat index of a step: what chunks and shared runs become, and where padding lies."""

import numpy as np
import torch

from raybatch.kernels.attention_plan import AttentionPlan, ContextPart, DecodePart, PrefillPart
from raybatch.kernels.step_index import Item, StepIndex, StepSize, parts_of
from tests.engine.test_batch_builder import Steps


def index_of(plan, num_rows):
    return StepIndex(plan, num_rows=num_rows, num_kv_heads=2, block_size=4)


def written(index, size=None):
    """The parts of an index in some size, as lists; what is not written is 99."""
    size = size or index.size
    out = np.full(size.num_index, 99, np.int32)
    index.write(size, out)
    return {name: part.tolist() for name, part in parts_of(size, out)._asdict().items()}


def items(numbers):
    return [Item(*row) for row in np.reshape(numbers, (-1, len(Item._fields))).tolist()]


def run(rows, blocks, *, chunk=None, first=0):
    return ContextPart(
        query_idx=torch.tensor(rows),
        block_ids=torch.tensor(blocks),
        num_tokens=4 * len(blocks),
        first_position=first,
        chunk=chunk,
    )


def plan_of(*contexts):
    decode = DecodePart(
        block_ids=torch.tensor([3, 5, 7]),
        owners=torch.tensor([1, 0, 1]),
        num_valid=torch.tensor([4, 2, 1]),
        is_contiguous=False,
        first_positions=torch.tensor([0, 8, 4]),
    )
    prefill = PrefillPart(starts=(2, 5), lens=(3, 200))
    return AttentionPlan(num_decode=2, decode=decode, prefill=prefill, contexts=contexts)


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
    assert (parts["chunk_blocks"], parts["run_blocks"]) == ([9], [8])


def test_rows_find_the_results_of_all_runs_that_they_read():
    index = index_of(plan_of(run([0, 1], [9]), run([1, 2, 3, 4], [8, 6], first=4)), 205)
    parts = written(index)
    assert items(parts["runs"]) == [Item(0, 2, 0, 0, 4, 0, 0), Item(2, 4, 2, 1, 8, 4, 0)]
    assert (parts["run_rows"], parts["run_blocks"]) == ([0, 1, 1, 2, 3, 4], [9, 8, 6])
    assert parts["order"] == [0, 1, 2, 3, 4, 5]
    assert parts["row_starts"] == [0, 1, 3, 4, 5] + [6] * 201
    assert (index.size.places, index.size.run_queries) == (6, 4)


def test_padding_has_no_queries_no_entries_and_no_places():
    index = index_of(plan_of(run([0, 1], [9])), 205)
    size = StepSize(**{name: getattr(index.size, name) + 2 for name in StepSize.__slots__})
    parts = written(index, size)
    assert parts["starts"] == [0, 1, 3, 3, 3]
    assert [item.num_queries for item in items(parts["chunks"])] == [3, 128, 72, 0, 0]
    assert [item.num_queries for item in items(parts["runs"])] == [2, 0, 0]
    assert parts["row_starts"] == [0, 1] + [2] * 206
    # of entries alone, what nothing reads is left as it was
    assert parts["entries"][9:] == [99] * 6


def test_the_plan_of_a_schedule_says_which_chunk_alone_reads_a_run():
    steps = Steps(range(10), [*range(8), 50, 51], budget=6)
    steps.step()
    batch = steps.step()
    assert batch.attention.prefill.lens == (4, 2)
    chunks = {part.chunk: part.query_idx.tolist() for part in batch.attention.contexts}
    assert chunks[0] == [0, 1, 2, 3]
    for part in batch.attention.contexts:
        assert (part.chunk is None) == (part.query_idx.tolist() == [0, 1, 2, 3, 4, 5])
