import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raybatch.kernels.dense_attention import merge_parts
from tests import tolerances

# a part's log-sum-exp may be 40, whose rounding error is 40 times that of 1
TOLERANCE = 40 * tolerances.of_sums(torch.float32, 1)
LSE = st.one_of(st.just(-math.inf), st.floats(-40, 40, width=32))
PART = st.tuples(st.integers(0, 2**31), LSE)


def part(drawn):
    seed, lse = drawn
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, 3, generator=generator), torch.tensor([lse])


def assert_same(first, second):
    torch.testing.assert_close(first[1], second[1], rtol=TOLERANCE, atol=TOLERANCE)
    if first[1].item() > -math.inf:
        torch.testing.assert_close(first[0], second[0], rtol=TOLERANCE, atol=TOLERANCE)
    assert first[0].isfinite().all()


@settings(max_examples=200, deadline=None)
@given(PART, PART)
def test_merging_is_commutative(a, b):
    a, b = part(a), part(b)
    assert_same(merge_parts(*a, *b), merge_parts(*b, *a))


@settings(max_examples=200, deadline=None)
@given(PART, PART, PART)
def test_merging_is_associative(a, b, c):
    a, b, c = part(a), part(b), part(c)
    left = merge_parts(*merge_parts(*a, *b), *c)
    right = merge_parts(*a, *merge_parts(*b, *c))
    assert_same(left, right)


@settings(max_examples=100, deadline=None)
@given(PART)
def test_an_empty_part_changes_nothing(a):
    a = part(a)
    empty = part((1, -math.inf))
    assert_same(a, merge_parts(*a, *empty))


def test_two_empty_parts_are_empty():
    _, lse = merge_parts(*part((1, -math.inf)), *part((2, -math.inf)))
    assert lse.item() == -math.inf


@pytest.mark.parametrize("cut", [0, 1, 5, 9])
def test_parts_of_a_softmax_merge_to_the_whole(rng, cut):
    scores = torch.from_numpy(rng.normal(size=10)).float()
    values = torch.from_numpy(rng.normal(size=(10, 4))).float()

    def attend(where):
        lse = scores[where].logsumexp(0, keepdim=True)
        weights = (scores[where] - lse.nan_to_num(neginf=0.0)).exp()
        return (weights @ values[where]).unsqueeze(0), lse

    merged = merge_parts(*attend(slice(0, cut)), *attend(slice(cut, 10)))
    assert_same(attend(slice(0, 10)), merged)
