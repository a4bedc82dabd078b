"""What ends a run early."""

import pytest

from raybatch.config import LimitConfig
from raybatch.errors import ConfigError
from raybatch.policy.deadline import Spent, reason_to_stop


def spent(**changes):
    values = {"wall_s": 60.0, "engine_s": 90.0, "num_replicas": 2, "tokens": 1000}
    return Spent(**{**values, "rows_done": 200, "rows_failed": 4, **changes})


@pytest.mark.parametrize(
    ("limit", "above", "reason"),
    [
        ({"max_wall_s": 60}, {"max_wall_s": 61}, "max_wall_s reached: 60 s"),
        ({"max_tokens": 1000}, {"max_tokens": 1001}, "max_tokens reached: 1000 tokens"),
        ({"max_engine_hours": 0.025}, {"max_engine_hours": 0.026}, "engine_hours reached: 0.03 "),
        (
            {"max_cost": 0.2, "price_per_engine_hour": 6.0},
            {"max_cost": 0.21, "price_per_engine_hour": 6.0},
            "cost reached: 0.20 ",
        ),
        ({"max_error_rate": 0.019}, {"max_error_rate": 0.02}, "4 of 200 rows failed"),
    ],
)
def test_a_run_stops_at_its_limit_and_not_before(limit, above, reason):
    assert reason in reason_to_stop(LimitConfig(**limit), spent())
    assert reason_to_stop(LimitConfig(**above), spent()) is None


def test_a_share_of_errors_counts_only_after_some_rows():
    limits = LimitConfig(max_error_rate=0.0, min_rows_for_error_rate=201)
    assert reason_to_stop(limits, spent()) is None
    assert reason_to_stop(limits, spent(rows_done=201)) is not None


def test_engines_and_answers_with_prices_share_a_budget():
    limits = LimitConfig(max_cost=0.5, price_per_engine_hour=6.0)
    assert "cost reached: 0.50 " in reason_to_stop(limits, spent(cost=0.3))
    assert reason_to_stop(limits, spent(cost=0.29)) is None
    assert "cost reached: 0.00123 " in reason_to_stop(
        LimitConfig(max_cost=0.001), spent(cost=0.00123)
    )


def test_no_limits_never_stop():
    assert reason_to_stop(LimitConfig(), spent(wall_s=1e12, rows_failed=200)) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_error_rate": 5}, "a number from 0 to 1"),
        ({"max_tokens": -1}, r"limits\.max_tokens must be a whole number of at least 0"),
    ],
)
def test_wrong_limits_are_refused_by_name(options, message):
    with pytest.raises(ConfigError, match=message):
        LimitConfig(**options)
