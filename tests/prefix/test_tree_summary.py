"""The prefix tree reduced to boxes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raybatch.prefix.block_keys import find_representatives
from raybatch.prefix.tree import build_tree, join_summaries, summarize_tree, tree_stats
from tests.prefix.prompts import block_sizes, draw_prefix_tree, keys_of, prompt_lists


def outline(prompts, block_size=2, **options):
    keys = keys_of(prompts, block_size)
    tree = build_tree(keys)
    return summarize_tree(tree, keys, **options), tree, keys


def area(boxes):
    return sum(box.num_rows * (box.token_stop - box.token_start) for box in boxes)


def test_wide_nodes_come_first_and_rows_without_a_prefix_last():
    boxes, _, _ = outline([[9, 9], [1, 1, 2, 2], [1, 1, 3, 3], [1, 1, 2, 2], [5, 5], [5, 5]])
    found = [(b.row_start, b.row_stop, b.token_start, b.token_stop, b.num_nodes) for b in boxes]
    assert sorted(found) == [
        (0, 2, 2, 4, 1),
        (0, 3, 0, 2, 1),
        (2, 3, 2, 4, 0),
        (3, 5, 0, 2, 1),
        (5, 6, 0, 2, 0),
    ]


def test_an_example_row_runs_through_its_box():
    prompts = [[1, 1, 2, 2], [7, 7], [1, 1, 2, 2], [1, 1, 3, 3]]
    boxes, _, _ = outline(prompts)
    shown = {tuple(prompts[b.example_row][int(b.token_start) : int(b.token_stop)]) for b in boxes}
    assert shown == {(1, 1), (2, 2), (3, 3), (7, 7)}


@given(prompt_lists, block_sizes)
def test_the_area_of_the_boxes_is_the_number_of_tokens(prompts, block_size):
    boxes, _, keys = outline(prompts, block_size)
    assert area(boxes) == pytest.approx(keys.num_tokens.sum())


@given(st.integers(0, 50))
def test_many_nodes_are_put_together_without_losing_rows_or_tokens(seed):
    boxes, tree, keys = outline(draw_prefix_tree(seed, 100), max_boxes=30)
    assert len(boxes) <= 30 or max(b.num_nodes for b in boxes) > 1
    assert area(boxes) == pytest.approx(keys.num_tokens.sum())
    assert max((b.row_stop for b in boxes), default=0) <= tree.num_rows


def test_boxes_of_all_nodes_save_what_the_tree_saves_but_for_covered_rows(rng):
    prompts = [[*range(i % 7 * 10, i % 7 * 10 + 10), 1000 + i] for i in range(60)]
    boxes, tree, keys = outline(prompts, max_boxes=10_000)
    assert tree_stats(tree, keys, find_representatives(keys)).saved_tokens == sum(
        box.saved_tokens for box in boxes
    )


def test_ten_thousand_groups_become_a_few_boxes():
    shared = np.repeat(np.arange(10_000), 2)
    boxes, _, _ = outline([[i, i, 20_000 + n] for n, i in enumerate(shared.tolist())])
    assert len(boxes) <= 600
    assert sum(box.num_nodes for box in boxes) == 10_000


def test_no_rows_have_no_boxes():
    assert outline([])[0] == []


def test_parts_stand_side_by_side():
    first, tree, _ = outline([[1, 1, 5], [1, 1, 6]])
    second, _, _ = outline([[2, 2, 5], [2, 2, 6], [3, 3]])
    joined = join_summaries([(first, tree.num_rows), (second, 3)])
    assert area(first) + area(second) == area(joined)
    assert [(0, 2), (0, 2), (2, 4), (2, 4), (4, 5)] == sorted(
        (box.row_start, box.row_stop) for box in joined
    )
