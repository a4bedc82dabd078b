"""What a run has spent, over all of its plans and waves, against its limits."""

import pytest

from raybatch.config import LimitConfig
from raybatch.job.watching import LimitWatch, WavesSoFar
from raybatch.records.pool_stats import PoolStats


def watch(**limits):
    return LimitWatch(LimitConfig(**limits), PoolStats(busy_s=100.0))


def test_a_run_is_stopped_once():
    limits = watch(max_tokens=10)
    assert limits.observe(PoolStats(prompt_tokens=9)) is None
    assert "limits.max_tokens reached: 12 " in limits.observe(
        PoolStats(prompt_tokens=9, generated_tokens=3)
    )
    assert limits.observe(PoolStats(prompt_tokens=20)) is None
    assert "12 tokens" in limits.reason


def test_hours_of_engines_count_from_the_begin_of_the_run():
    limits = watch(max_engine_hours=0.01)
    assert limits.observe(PoolStats(busy_s=120.0)) is None
    assert limits.observe(PoolStats(busy_s=137.0)) is not None


def test_tokens_of_waves_count():
    waves = WavesSoFar(again=PoolStats(generated_tokens=5), rows_written=0, rows_failed=0)
    assert watch(max_tokens=10).observe(PoolStats(generated_tokens=5), waves) is not None


def test_answers_and_waves_share_a_budget():
    limits = watch(max_cost=1.0)
    waves = WavesSoFar(again=PoolStats(cost=0.25), rows_written=0, rows_failed=0)
    assert limits.observe(PoolStats(cost=0.7), waves) is None
    assert limits.observe(PoolStats(cost=0.75), waves) is not None
    assert limits.spent.cost == 1.0


@pytest.mark.parametrize(("failed", "is_stopped"), [(1, False), (6, True)])
def test_rows_that_a_wave_repaired_are_no_errors(failed, is_stopped):
    limits = watch(max_error_rate=0.5, min_rows_for_error_rate=10)
    waves = WavesSoFar(again=PoolStats(), rows_written=10, rows_failed=failed)
    stats = PoolStats(rows_done=10, errors={"ReplicaCrash": 9})
    assert is_stopped == (limits.observe(stats, waves) is not None)


def test_a_run_is_stopped_by_whoever_is_asked_beside_the_limits():
    answers = iter([None, "cancelled", "cancelled"])
    limits = LimitWatch(LimitConfig(), PoolStats(), ending=lambda: next(answers))
    found = [limits.observe(PoolStats()) for _ in range(3)]
    assert (found, limits.reason) == ([None, "cancelled", None], "cancelled")
