"""Decode rows over programs: every entry once, in order, and work that is nearly equal."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raybatch.kernels.step_index import DECODE_PROGRAMS, most_programs, spans_of
from raybatch_lab.simulator.workloads import make_rows
from tests.tiers import examples


def starts_of(counts):
    return np.concatenate(([0], np.cumsum(counts))).astype(np.int64)


def tokens_of_programs(made, block_size):
    """Entries that each program reads, in tokens."""
    lengths = (made.spans[:, 2] - made.spans[:, 1]) * block_size
    return np.array([lengths[a:b].sum() for a, b in pairwise(made.programs)])


@settings(max_examples=examples(150, full=3000))
@given(
    counts=st.lists(st.one_of(st.integers(0, 3), st.integers(0, 700)), min_size=1, max_size=40),
    block_size=st.sampled_from([4, 16, 64, 128]),
    most=st.integers(1, 70),
)
def test_every_row_has_its_entries_once_and_in_order(counts, block_size, most):
    starts = starts_of(counts)
    made = spans_of(starts, block_size=block_size, most=most)
    spans, merges = made.spans, made.merges
    assert made.programs[0] == 0
    assert made.programs[-1] == len(spans)
    assert (np.diff(made.programs) >= 0).all()
    assert len(made.programs) - 1 <= most
    places = []
    for row, count in enumerate(counts):
        own = spans[spans[:, 0] == row]
        assert own[0, 1] == starts[row]
        assert own[-1, 2] == starts[row] + count
        assert (own[1:, 1] == own[:-1, 2]).all()
        assert (own[:, 1] < own[:, 2]).all() or len(own) == 1
        merge = merges[merges[:, 0] == row].tolist()
        if len(own) == 1:
            assert (own[0, 3], merge) == (-1, [])
        else:
            [[_, first, number]] = merge
            assert own[:, 3].tolist() == list(range(first, first + number))
            places += own[:, 3].tolist()
    assert places == list(range(made.num_places))
    # what a captured step has room for
    assert len(spans) <= len(counts) + most - 1
    assert len(merges) < most
    assert made.num_places <= 2 * (most - 1)


def tail_lengths():
    """W4 in the middle of a run: rows at a random place of their answer."""
    rows = make_rows("W4", num_rows=4000)
    rng = np.random.default_rng(0)
    # a row is met in proportion to how long it runs
    chosen = rng.choice(len(rows.output), 256, p=rows.output / rows.output.sum())
    return 1024 + (rows.output[chosen] * rng.random(256)).astype(int)


LENGTHS = {
    "W4": tail_lengths(),
    "one of 32k": np.array([500] * 255 + [32_768]),
    "8 of 64k": np.full(8, 65_536),
    "1 of 128k": np.array([131_072]),
}


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("num_kv_heads", [4, 8])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_the_longest_program_is_little_longer_than_the_mean(lengths, num_kv_heads, block_size):
    starts = starts_of(-(-lengths // block_size))
    most = most_programs(num_kv_heads, DECODE_PROGRAMS)
    made = spans_of(starts, block_size=block_size, most=most)
    tokens = tokens_of_programs(made, block_size)
    assert len(tokens) == most
    assert tokens.max() <= 1.3 * tokens.mean()


def test_few_short_rows_take_few_programs():
    made = spans_of(starts_of([1, 2]), block_size=64, most=64)
    assert made.programs.tolist() == [0, 1, 2]
    assert made.spans.tolist() == [[0, 0, 1, -1], [1, 1, 3, -1]]


def test_no_rows_have_no_spans():
    made = spans_of(np.zeros(1, np.int64), block_size=16, most=64)
    assert (len(made.programs), len(made.spans), len(made.merges)) == (0, 0, 0)
