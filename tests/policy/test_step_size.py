"""Steps of a slow device: short where that costs nothing, long where they are worth it."""

import pytest

from raybatch.policy.step_size import MAX_STEP_S, StepSize

MOST = 2048


def settle(seconds_of, *, num_steps=40, first=256):
    """Return the sizes of full steps on a device that takes so long for a number of tokens."""
    size, sizes = StepSize(first, MOST), []
    for _ in range(num_steps):
        sizes.append(size.tokens)
        size.note(size.tokens, seconds_of(size.tokens))
    return sizes


def test_a_fast_device_has_the_largest_steps_soon():
    assert settle(lambda n: n / 10_000)[:4] == [256, 512, 1024, 2048]


@pytest.mark.parametrize("tokens_per_s", [20.0, 100.0, 400.0])
def test_steps_stay_short_where_larger_ones_are_no_faster(tokens_per_s):
    sizes = settle(lambda n: n / tokens_per_s)
    assert sizes[-1] == 256 or sizes[-1] / tokens_per_s <= MAX_STEP_S
    # what was tried, once
    assert sum(size > sizes[-1] for size in sizes) <= 1


def test_steps_grow_where_each_has_a_price_of_its_own():
    assert settle(lambda n: 10.0 + n / 1000)[-1] == MOST


def test_steps_grow_as_far_as_it_pays():
    sizes = settle(lambda n: n / (100.0 if n > 256 else 50.0))
    assert sizes[-1] == 512


def test_steps_that_are_not_full_tell_nothing():
    size = StepSize(256, MOST)
    for _ in range(20):
        size.note(100, 0.01)
    assert size.tokens == 256


def test_a_budget_that_is_smaller_than_the_first_size_is_the_size():
    size = StepSize(256, 100)
    size.note(100, 0.01)
    assert size.tokens == 100
