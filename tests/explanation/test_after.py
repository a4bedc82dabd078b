"""What a run did, from its output and its pool."""

import pytest

from raybatch.durable.units import UnitCounts
from raybatch.explanation.outcome import actual_of
from raybatch.records.pool_stats import PoolStats
from raybatch.records.types import ReplicaStats


@pytest.fixture
def tokens():
    return UnitCounts(
        prompt_tokens=1000, cached_tokens=700, generated_tokens=80, num_asked=30, num_copies=2
    )


def pool(*, preemptions, busy_s, kv_tokens=4096):
    engine = ReplicaStats(
        num_preemptions=preemptions,
        num_recomputed_tokens=10 * preemptions,
        num_swapped_tokens=7 * preemptions,
        swapped_bytes=900 * preemptions,
        num_rounded_tokens=5 * preemptions,
        num_rounded_sequences=2 * preemptions,
        num_weight_copies=3 * preemptions,
        weight_copy_bytes=300 * preemptions,
        num_weight_stalls=preemptions,
        kv_tokens=kv_tokens,
    )
    return PoolStats(num_replicas=2, busy_s=busy_s, replicas=(engine, engine))


def test_a_warm_pool_counts_from_the_start_of_the_run(tokens):
    before, after = pool(preemptions=3, busy_s=40.0), pool(preemptions=5, busy_s=47.0)
    found = actual_of(tokens, before, after, num_restarts=0, wall_s=4.0)
    assert (found.num_preemptions, found.recomputed_tokens) == (4, 40)
    assert (found.swapped_tokens, found.swapped_bytes) == (28, 3600)
    assert (found.rounded_tokens, found.num_rounded_sequences) == (20, 8)
    assert (found.num_weight_copies, found.weight_copy_bytes) == (12, 1200)
    assert found.num_weight_stalls == 4
    assert (found.engine_s, found.wall_s, found.num_replicas) == (7.0, 4.0, 2)


@pytest.mark.parametrize(
    ("before", "is_warm"),
    [
        (PoolStats(), False),
        (PoolStats(num_ready=2), False),
        (PoolStats(num_ready=2, busy_s=3.0), True),
        # stopped since, and started again with empty caches
        (PoolStats(num_ready=0, busy_s=3.0), False),
    ],
    ids=["new", "ready", "warm", "stopped"],
)
def test_engines_that_had_work_before_are_warm(tokens, before, is_warm):
    after = pool(preemptions=0, busy_s=9.0)
    assert is_warm == actual_of(tokens, before, after, num_restarts=0, wall_s=4.0).is_warm


def test_drafts_of_a_warm_pool_are_those_of_the_run(tokens):
    before, after = (
        PoolStats(replicas=(ReplicaStats(num_drafted_tokens=9 * k, num_accepted_tokens=4 * k),))
        for k in (1, 3)
    )
    found = actual_of(tokens, before, after, num_restarts=0, wall_s=4.0)
    assert (found.drafted_tokens, found.accepted_tokens) == (18, 8)


def test_tokens_and_copies_are_those_of_the_output(tokens):
    found = actual_of(tokens, PoolStats(), PoolStats(), num_restarts=0, wall_s=4.0)
    assert (found.prompt_tokens, found.computed_tokens, found.saved_tokens) == (1000, 300, 700)
    assert (found.num_rows, found.num_generated) == (30, 28)


def test_counters_that_died_with_an_engine_are_not_known(tokens):
    after = pool(preemptions=5, busy_s=9.0)
    found = actual_of(tokens, PoolStats(), after, num_restarts=1, wall_s=4.0)
    assert (found.num_preemptions, found.recomputed_tokens) == (None, None)
    assert (found.swapped_tokens, found.swapped_bytes) == (None, None)


def test_the_smallest_cache_of_the_engines_counts(tokens):
    small = ReplicaStats(kv_tokens=1024)
    after = PoolStats(replicas=(*pool(preemptions=0, busy_s=1.0).replicas, small))
    assert 1024 == actual_of(tokens, PoolStats(), after, num_restarts=0, wall_s=4.0).kv_tokens
