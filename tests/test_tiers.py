import itertools

import pytest

from tests.tiers import examples, pairs, singles

AXES = ["abcd", [1, 2, 3], [True, False], [None, "x"]]


def in_default_tier(found):
    return [param.values for param in found if not param.marks]


def test_pairs_are_the_full_product_once():
    assert [param.values for param in pairs(*AXES)] == list(itertools.product(*AXES))


@pytest.mark.parametrize("axes", [AXES, AXES[:2], ["ab", "ab", "ab"]], ids=len)
def test_few_of_a_product_have_all_its_pairs(axes):
    chosen = in_default_tier(pairs(*axes))
    for first, second in itertools.combinations(range(len(axes)), 2):
        found = {(values[first], values[second]) for values in chosen}
        assert found == set(itertools.product(axes[first], axes[second]))


def test_no_more_are_taken_than_twice_the_least():
    # no fewer can have all pairs of the two longest axes
    assert 12 <= len(in_default_tier(pairs(*AXES))) <= 16
    assert 6 == len(in_default_tier(pairs([1, 2, 3], [4, 5])))


def test_singles_have_each_value_and_no_two_of_the_longest_axis():
    chosen = in_default_tier(singles(*AXES))
    assert len(chosen) == 4
    assert [set(found) for found in zip(*chosen, strict=True)] == [set(axis) for axis in AXES]
    assert in_default_tier(singles("abc")) == [("a",), ("b",), ("c",)]


def test_the_rest_is_exhaustive():
    (mark,) = next(param for param in pairs(*AXES) if param.marks).marks
    assert mark.name == "exhaustive"


def test_property_tests_are_short_unless_all_is_asked_for(request):
    is_long = request.config.getoption("markexpr").strip() == "exhaustive"
    assert examples(3, full=50) == (50 if is_long else 3)
