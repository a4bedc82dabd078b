import math

import numpy as np
import pytest

from raybatch.policy.cost.cascade import CascadeThresholds, ReadTimes

RULE = CascadeThresholds(num_rows=(2, 4, 8), min_tokens=(math.inf, 100, 40))


@pytest.mark.parametrize(
    ("num_rows", "num_tokens", "expected"),
    [
        (2, 10**9, False),
        (4, 99, False),
        (4, 100, True),
        (8, 40, True),
        (8, 39, False),
        # more rows than were timed cost what the last ones did
        (1000, 40, True),
        (1000, 39, False),
    ],
)
def test_numbers_of_rows_that_were_timed(num_rows, num_tokens, expected):
    assert expected == RULE.pays(num_rows, num_tokens)


def test_rows_between_two_that_were_timed_need_what_both_need():
    assert not RULE.pays(3, 10**9)
    assert (False, True) == (RULE.pays(5, 99), RULE.pays(5, 100))


def rule_of(short, long):
    """The least length for two rows, of which runs of 64 and 512 took these times."""
    return CascadeThresholds.of([(2, ReadTimes(64, *short), ReadTimes(512, *long))]).min_tokens[0]


def test_the_least_length_is_where_nothing_is_saved():
    # by row 1 s a position; together half of it, and 97 s; 3 % of what is saved does not count
    found = rule_of((64.0, 97 + 32.0), (512.0, 97 + 256.0))
    assert found == pytest.approx(97 / 0.47)


def test_runs_that_never_save_time_are_never_read_together():
    assert rule_of((10.0, 12.0), (80.0, 90.0)) == math.inf
    assert rule_of((10.0, 10.0), (80.0, 80.0)) == math.inf


def test_runs_that_always_save_time_always_are():
    assert rule_of((60.0, 2.0), (100.0, 2.0)) == 0
    assert rule_of((10.0, 2.0), (10.0, 2.0)) == 0


def test_the_rule_is_in_order_of_rows():
    fast = ReadTimes(64, 2.0, 1.0), ReadTimes(512, 2.0, 1.0)
    slow = ReadTimes(64, 1.0, 2.0), ReadTimes(512, 1.0, 9.0)
    rule = CascadeThresholds.of([(8, *fast), (2, *slow)])
    assert ((2, 8), (math.inf, 0)) == (rule.num_rows, rule.min_tokens)


def test_a_position_costs_what_more_of_them_take_in_the_quicker_way():
    # 448 positions more: by row 4.48 s, together 2.24 s; of two rows, and four runs
    together = ReadTimes(64, 1.0, 2.0), ReadTimes(512, 5.48, 4.24)
    separate = ReadTimes(64, 1.0, 2.0), ReadTimes(512, 5.48, 9.0)
    rule = CascadeThresholds.of([(2, *together), (4, *separate)], num_runs=4)
    assert rule.position_s == pytest.approx((0.005 / 2 / 4, 0.01 / 4 / 4))


def test_rows_that_share_pay_for_memory_once():
    rows = np.array([1.0, 2.0, 3.0, 4.0, 100.0])
    rule = CascadeThresholds(num_rows=(2, 4), min_tokens=(math.inf, 8), position_s=(2.0, 4.0))
    computed, read, seconds = rule.cost(rows, 10)
    assert computed == pytest.approx(1 / rows)
    assert read == pytest.approx(1 / rows)
    assert seconds == pytest.approx([0.0, 1.0, 2.0, 3.0, 4.0 * 0.99])
    slower = rule.times(2.0)
    assert slower.cost(rows, 10).beside_s == pytest.approx(2 * seconds)
    assert [slower.pays(4, n) for n in (7, 8)] == [False, True]


def test_without_times_memory_is_read_once_from_a_length_on():
    rows = np.array([1.0, 2.0, 8.0])
    untimed = CascadeThresholds(num_rows=(2, 8), min_tokens=(100, 10))
    found = [each.tolist() for each in untimed.cost(rows, 50)]
    assert found == [[1, 1, 1], [1, 1, 1 / 8], [0, 0, 0]]
