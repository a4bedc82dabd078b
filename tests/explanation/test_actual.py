"""What a run did, from its output and its pool."""

import dataclasses

import pytest

from raybatch.explanation.actual import count_actual
from raybatch.stages.schema import OutputSchema
from raybatch.stages.tally import TokenTally
from raybatch.types import PoolStats, ReplicaStats


@pytest.fixture
def tokens():
    tally = TokenTally(OutputSchema())
    tally.prompt, tally.cached, tally.generated = 1000, 700, 80
    tally.num_asked, tally.num_copies = 30, 2
    return tally


def pool(*, preemptions, busy_s, restarts):
    engine = ReplicaStats(num_preemptions=preemptions, num_recomputed_tokens=10 * preemptions)
    return PoolStats(
        num_replicas=2, num_restarts=restarts, busy_s=busy_s, replicas=(engine, engine)
    )


def test_a_warm_pool_counts_from_the_start_of_the_run(tokens):
    before = pool(preemptions=3, busy_s=40.0, restarts=1)
    found = count_actual(
        tokens, before=before, after=pool(preemptions=5, busy_s=47.0, restarts=2), wall_s=4.0
    )
    assert (found.num_preemptions, found.recomputed_tokens) == (4, 40)
    assert (found.engine_s, found.num_restarts, found.num_replicas) == (7.0, 1, 2)


def test_tokens_and_copies_are_those_of_the_output(tokens):
    found = count_actual(tokens, before=PoolStats(), after=PoolStats(), wall_s=4.0)
    assert (found.prompt_tokens, found.computed_tokens, found.saved_tokens) == (1000, 300, 700)
    assert (found.num_rows, found.num_generated) == (30, 28)


def test_preemptions_of_engines_that_have_ended_are_not_known(tokens):
    after = dataclasses.replace(pool(preemptions=5, busy_s=9.0, restarts=0), replicas=())
    found = count_actual(tokens, before=PoolStats(), after=after, wall_s=4.0)
    assert (found.num_preemptions, found.recomputed_tokens) == (None, None)
