import itertools

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from raybatch.errors import ConfigError
from raybatch.prefix.load import TokenCost
from raybatch.prefix.split import cut_units, split_groups
from tests.prefix.loads import loads, make_load

COST = TokenCost(prefill=1.0, decode=3.0)


def row_costs(load, cost):
    """Cost of every row and of the prefix of its group, in the order of ids."""
    members, prefixes = cost.of_members(load), cost.of_prefixes(load)
    group = np.repeat(np.arange(len(load)), load.num_rows)
    return group, (members / load.num_rows)[group], prefixes


def part_costs(group, member, prefixes, cuts):
    """Cost of the parts between `cuts`, by adding up rows and each part's own prefixes."""
    bounds = [0, *cuts, len(group)]
    return [
        sum(member[a:b]) + sum(prefixes[g] for g in set(group[a:b].tolist()))
        for a, b in itertools.pairwise(bounds)
    ]


def cuts_of(split, load):
    first = np.concatenate([[0], np.cumsum(split.end_member - split.first_member)])
    num_parts = len(split.part_cost)
    return [int(first[np.searchsorted(split.part, p)]) for p in range(1, num_parts)]


@given(loads(), st.integers(1, 5))
def test_every_row_is_in_exactly_one_piece(load, num_parts):
    split = split_groups(load, num_parts)
    rows = [
        (int(g), m)
        for g, a, b in zip(split.group, split.first_member, split.end_member, strict=True)
        for m in range(a, b)
    ]
    assert [(g, m) for g in range(len(load)) for m in range(load.num_rows[g])] == rows


@given(loads(), st.integers(1, 5))
@example(make_load([2], [3], [3], [0]), 4)
def test_part_costs_are_those_of_the_rows(load, num_parts):
    split = split_groups(load, num_parts, cost=COST)
    expected = part_costs(*row_costs(load, COST), cuts_of(split, load))
    assert expected == pytest.approx(split.part_cost.tolist())


@given(loads(max_groups=5, max_rows=3), st.integers(2, 3))
def test_the_heaviest_part_is_near_the_best_of_all_cuts(load, num_parts):
    """A cut misses its goal by at most a row, a prefix or what the spread allows."""
    group, member, prefixes = row_costs(load, COST)
    best = min(
        max(part_costs(group, member, prefixes, cuts))
        for cuts in itertools.combinations_with_replacement(range(len(group) + 1), num_parts - 1)
    )
    split = split_groups(load, num_parts, cost=COST)
    slack = 2 * (member.max() + prefixes.max()) + 0.05 * best
    assert split.part_cost.max() <= best + slack


@given(loads(), st.integers(1, 6))
def test_a_cut_costs_at_most_one_prefix(load, num_parts):
    split = split_groups(load, num_parts)
    num_cut = int(np.count_nonzero(split.first_member))
    assert num_cut <= num_parts - 1
    assert split.extra_prefill_tokens <= num_cut * load.prefix_tokens.max()


@given(
    st.lists(st.tuples(st.floats(0, 1), st.integers(1000, 3000)), min_size=1, max_size=30),
    st.integers(1, 8),
)
def test_parts_of_many_light_rows_differ_by_at_most_the_spread(groups, num_parts):
    shares, rows = (list(column) for column in zip(*groups, strict=True))
    # a row of 15 tokens and two of these prefixes are less than what a cut may miss its goal by
    largest_prefix = (0.0125 * 15 * sum(rows) / num_parts - 15) / 2
    prefix = [int(share * largest_prefix) for share in shares]
    load = make_load(prefix, [10 * n for n in rows], rows, [5 * n for n in rows])
    assert split_groups(load, num_parts).spread <= 0.05


def test_one_group_of_everything_is_cut_for_every_replica():
    load = make_load([1000], [200 * 640], [640], [100 * 640])
    split = split_groups(load, 4)
    assert [0, 160, 320, 480] == split.first_member.tolist()
    assert (3000, 0.0) == (split.extra_prefill_tokens, split.spread)


def test_a_border_between_groups_is_taken_where_it_balances():
    load = make_load([100] * 40, [160] * 40, [16] * 40)
    split = split_groups(load, 4)
    assert (0, 0.0) == (split.extra_prefill_tokens, split.spread)
    assert [10] * 4 == np.bincount(split.part).tolist()


def test_parts_follow_the_given_order():
    load = make_load([0] * 4, [10, 20, 30, 40], [1] * 4)
    split = split_groups(load, 2, order=np.array([3, 0, 1, 2]))
    assert ([3, 0, 1, 2], [0, 0, 1, 1]) == (split.group.tolist(), split.part.tolist())


def test_decode_counts_at_its_price():
    load = make_load([0] * 4, [10] * 4, [1] * 4, [30, 0, 0, 0])
    cheap = split_groups(load, 2, cost=TokenCost(decode=0)).part.tolist()
    dear = split_groups(load, 2, cost=TokenCost(decode=1)).part.tolist()
    assert ([0, 0, 1, 1], [0, 1, 1, 1]) == (cheap, dear)


def test_more_parts_than_rows_leave_parts_empty():
    split = split_groups(make_load([0], [10], [2]), 4)
    assert (2, 4) == (len(split.group), len(split.part_cost))


@pytest.mark.parametrize(("num_parts", "spread"), [(0, 0.05), (2, 0.0), (2, 1.0)])
def test_a_split_out_of_range_is_refused(num_parts, spread):
    with pytest.raises(ConfigError, match="max_spread"):
        split_groups(make_load([0], [1], [1]), num_parts, max_spread=spread)


def units(group_rows, target, maximum):
    return cut_units(np.array(group_rows), target_rows=target, max_rows=maximum).tolist()


def test_a_unit_closes_at_the_first_border_after_the_target():
    assert [0, 12, 24, 28] == units([4] * 7, 10, 20)


def test_a_group_that_would_exceed_the_maximum_begins_the_next_unit():
    assert [0, 8, 26] == units([8, 18], 10, 20)


def test_a_group_above_the_maximum_is_cut_into_equal_units():
    assert [0, 17, 34, 50] == units([50], 10, 20)


def test_rows_before_a_large_group_join_its_first_unit_if_that_costs_no_cut():
    assert [0, 18, 36, 53] == units([3, 50], 10, 20)


def test_the_end_of_a_large_group_goes_on_with_the_next_groups():
    assert [0, 11, 25] == units([21, 4], 12, 20)


def test_no_rows_make_no_units():
    assert [0] == units([], 10, 20)


@given(st.lists(st.integers(1, 60), max_size=40), st.integers(1, 20), st.integers(0, 20))
def test_units_hold_all_rows_and_stay_below_the_maximum(group_rows, target, more):
    bounds = units(group_rows, target, target + more)
    sizes = np.diff(bounds)
    assert sum(group_rows) == bounds[-1]
    assert all(0 < size <= target + more for size in sizes)


@given(st.lists(st.integers(1, 60), max_size=40), st.integers(1, 20), st.integers(0, 20))
def test_only_groups_above_the_maximum_are_cut_and_no_more_than_needed(group_rows, target, more):
    bounds, borders = units(group_rows, target, target + more), np.cumsum([0, *group_rows])
    for begin, end in itertools.pairwise(borders):
        num_cuts = sum(begin < bound < end for bound in bounds)
        assert num_cuts <= -(-(end - begin) // (target + more)) - 1


@pytest.mark.parametrize(("target", "maximum"), [(0, 5), (6, 5)])
def test_unit_sizes_out_of_range_are_refused(target, maximum):
    with pytest.raises(ConfigError, match=f"units of {target} rows, at most {maximum}"):
        units([1], target, maximum)
