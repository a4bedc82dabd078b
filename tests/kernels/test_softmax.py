"""Softmaxes of which some rows see nothing, and merges of parts that may be empty."""

import itertools
import math

import pytest
import torch

from raybatch.kernels.dense_attention import masked_softmax, merge_parts
from tests import tolerances

HALF = [torch.float16, torch.bfloat16]


def test_weights_are_those_of_torch_and_rows_without_a_key_have_none(rng):
    scores = torch.from_numpy(rng.normal(size=(3, 5, 7))).float()
    hidden = torch.from_numpy(rng.random((3, 5, 7)) < 0.5)
    hidden[1, 2] = True
    hidden[2, 4] = True
    scores.masked_fill_(hidden, -math.inf)
    weights, lse = masked_softmax(scores.clone())
    is_empty = hidden.all(dim=-1)
    torch.testing.assert_close(weights[~is_empty], scores[~is_empty].softmax(dim=-1))
    torch.testing.assert_close(lse, scores.logsumexp(dim=-1))
    assert not weights[is_empty].any()
    assert lse[is_empty].isneginf().all()


@pytest.mark.parametrize("highest", [3e38, -3e38])
def test_scores_at_the_ends_of_float32_have_weights(highest):
    weights, lse = masked_softmax(torch.tensor([[highest, highest, -math.inf]]))
    assert weights.tolist() == [[0.5, 0.5, 0.0]]
    assert lse.item() == pytest.approx(highest)


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_broken_score_breaks_its_row_and_no_other(broken):
    scores = torch.tensor([[0.0, broken], [0.0, 1.0], [-math.inf, broken], [-math.inf, -math.inf]])
    weights, lse = masked_softmax(scores)
    assert weights.isfinite().all(dim=-1).tolist() == [False, True, False, True]
    assert lse.isnan().tolist() == [True, False, True, False]


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_a_part_without_weight_changes_no_digit(dtype):
    torch.manual_seed(0)
    output, lse = torch.randn(4, 8).to(dtype), torch.randn(4)
    empty, nothing = torch.zeros(4, 8, dtype=dtype), torch.full((4,), -math.inf)
    for merged in (
        merge_parts(output, lse, empty, nothing),
        merge_parts(empty, nothing, output, lse),
    ):
        assert torch.equal(merged[0], output)
        assert torch.equal(merged[1], lse)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_parts_of_many_and_of_no_keys_merge_to_the_whole_in_any_order(rng, dtype):
    torch.manual_seed(1)
    scores, values = torch.randn(6, 40), torch.randn(40, 8)
    bounds = [0, 0, 13, 13, 14, 40, 40]
    parts = []
    for start, stop in itertools.pairwise(bounds):
        keys = torch.arange(40)
        hidden = (keys < start) | (keys >= stop)
        weights, lse = masked_softmax(scores.masked_fill(hidden, -math.inf))
        parts.append(((weights @ values).to(dtype), lse))
    expected = scores.softmax(dim=-1) @ values
    for _ in range(4):
        merged = parts[0]
        for place in rng.permutation(range(1, len(parts))):
            merged = merge_parts(*merged, *parts[place])
        # a merge rounds its weight and its output once
        tolerance = tolerances.of_sums(dtype, 2 * len(parts))
        tolerances.assert_close(merged[0].float(), expected, tolerance)
        torch.testing.assert_close(merged[1], scores.logsumexp(dim=-1))
