"""Simulated pools: what becomes of rows, and how long it takes."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raybatch.actors.queue.row_states import ALONE
from raybatch.config import PoolConfig
from raybatch.errors import ConfigError
from raybatch.policy.pool.snapshot import RowMove
from raybatch_lab.simulator.engine import alone_seconds
from raybatch_lab.simulator.events import Death, Policies, PoolSpec
from raybatch_lab.simulator.links import LinkSpec
from raybatch_lab.simulator.pool import SimulatedPool
from raybatch_lab.simulator.rows import SimulatedRows
from tests.lab.simulator.pools import MESSAGE_S, costs, engine_spec, fixed_rows, run_pool
from tests.tiers import examples

lengths = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 80)), min_size=1, max_size=60)
deaths = st.lists(
    st.one_of(
        st.builds(Death, rank=st.integers(0, 1), at_s=st.floats(0, 5)),
        st.builds(Death, rank=st.integers(0, 1), at_fraction=st.floats(0, 0.99)),
    ),
    max_size=4,
)


def rows_of(pairs, *, is_grouped=False):
    prompt, output = map(np.array, zip(*pairs, strict=True))
    rows = SimulatedRows.of(prompt, output)
    if not is_grouped:
        return rows
    group = np.arange(len(pairs)) // 4
    return replace(rows, prompt=prompt + 32, group=group, prefix=np.full(len(pairs), 32))


@given(lengths, deaths, st.integers(2, 5), st.booleans())
@settings(max_examples=examples(60, full=3000), deadline=None)
def test_every_row_finishes_once_whatever_dies(pairs, deaths, num_replicas, is_grouped):
    outcome = run_pool(
        rows_of(pairs, is_grouped=is_grouped),
        num_replicas,
        spec=engine_spec(kv_tokens=40 * 16),
        deaths=tuple(deaths),
        start_s=0.5,
        options=PoolConfig(keep_tokens_every_s=0.3),
    )
    assert outcome.finished.tolist() == [1] * len(pairs)


@given(lengths, deaths)
@settings(max_examples=examples(20, full=500), deadline=None)
def test_equal_arguments_have_equal_outcomes(pairs, deaths):
    runs = [run_pool(rows_of(pairs), 3, deaths=tuple(deaths), start_s=0.1) for _ in range(2)]
    assert runs[0].completion_s == runs[1].completion_s
    assert runs[0].replicas == runs[1].replicas


def test_one_replica_takes_the_sum_of_its_steps():
    rows, spec = fixed_rows(40), engine_spec(context_s=1e-5)
    outcome = run_pool(rows, 1, spec=spec)
    # the first pull and its answer, and the last report
    ways_s = 3 * MESSAGE_S
    assert outcome.completion_s == pytest.approx(alone_seconds(rows, spec) + ways_s)


def test_a_step_costs_what_the_cost_model_says():
    rows = fixed_rows(2, prompt=10, output=3)
    # a step of both prompts, then two of both rows
    expected = (0.01 + 20 * 0.001) + 2 * (0.01 + 2 * 0.001)
    assert alone_seconds(rows, engine_spec()) == pytest.approx(expected)


def test_each_decoded_token_reads_its_context():
    rows = fixed_rows(2, prompt=10, output=4)
    with_context = alone_seconds(rows, engine_spec(context_s=1.0))
    without = alone_seconds(rows, engine_spec())
    assert with_context - without == pytest.approx(2 * (11 + 12 + 13))


def test_a_slow_replica_takes_longer_for_every_step():
    rows = fixed_rows(40)
    outcome = run_pool(rows, 1, slowness={0: 3.0})
    expected = 3 * alone_seconds(rows, engine_spec()) + 3 * MESSAGE_S
    assert outcome.completion_s == pytest.approx(expected)


def test_a_prefix_that_rows_share_is_read_once():
    rows = rows_of([(4, 3), (4, 3)], is_grouped=True)
    grouped = replace(rows, group=np.zeros(2, np.int64))
    alone = replace(rows, group=np.full(2, ALONE), prefix=np.zeros(2, np.int64))
    model = replace(costs(step_s=0.0, token_s=0.0), context_s=1.0, shared_read_s=1.0)
    spec = replace(engine_spec(), cost=model)
    # two steps, in each of which one of both reads of 32 tokens is saved
    assert alone_seconds(alone, spec) - alone_seconds(grouped, spec) == pytest.approx(2 * 32)


def test_a_prefix_with_one_reader_is_its_own_context():
    rows = rows_of([(4, 3)], is_grouped=True)
    model = replace(costs(step_s=0.0, token_s=0.0), context_s=1.0)
    spec = replace(engine_spec(), cost=model)
    assert alone_seconds(rows, spec) == pytest.approx(37 + 38)


def test_a_replica_at_half_speed_gets_half_of_the_rows():
    outcome = run_pool(fixed_rows(900), 2, slowness={1: 2.0})
    fast, slow = (replica.num_rows for replica in outcome.replicas)
    assert slow / fast == pytest.approx(0.5, abs=0.06)


def test_two_replicas_take_half_as_long():
    rows = fixed_rows(800)
    one, two = (run_pool(rows, n).completion_s for n in (1, 2))
    assert two == pytest.approx(one / 2, rel=0.05)


def test_unstarted_rows_go_to_a_replica_that_has_none():
    outcome = run_pool(fixed_rows(64, output=200), 2, late_s={1: 5.0})
    assert outcome.num_stolen > 0
    assert outcome.replicas[1].num_rows > 16


def test_the_rows_of_a_replica_that_dies_run_elsewhere():
    outcome = run_pool(fixed_rows(200), 2, deaths=(Death(rank=0, at_fraction=0.5),), start_s=1000.0)
    assert outcome.num_deaths == 1
    dead, other = outcome.replicas
    assert (dead.rank, other.rank) == (0, 1)
    assert other.num_rows > 120


def test_kept_tokens_are_not_generated_again():
    rows = fixed_rows(4, output=2000)
    death = (Death(rank=0, at_s=12.0),)

    def generated(every_s):
        options = PoolConfig(keep_tokens_every_s=every_s)
        outcome = run_pool(rows, 1, deaths=death, options=options)
        return sum(replica.stats.generated_tokens for replica in outcome.replicas)

    lost = generated(None) - 4 * 2000
    assert 0 < generated(1.0) - 4 * 2000 < lost / 2


def test_a_row_that_is_in_all_deaths_is_given_up():
    rows = fixed_rows(1, output=4000)
    options = PoolConfig(max_row_crashes=2)
    deaths = tuple(Death(rank=0, at_s=float(at)) for at in (1, 2, 3))
    outcome = run_pool(rows, 1, deaths=deaths, options=options)
    assert (outcome.num_given_up, outcome.completion_s) == (1, 2.0)


def test_a_pool_of_which_no_replica_is_left_is_an_error():
    # deaths without rows, each of which counts as a start that failed
    deaths = tuple(Death(rank=0, at_s=at_s) for at_s in (0.0005, 0.3, 2.0))
    deaths += (Death(rank=0, at_fraction=0.9),)
    store = LinkSpec(latency_s=100.0)
    options = PoolConfig(max_start_failures=1)
    with pytest.raises(ConfigError, match="with 4 unfinished rows"):
        run_pool(fixed_rows(4), 1, deaths=deaths, store=store, options=options)


def test_requests_wait_for_a_slow_store():
    store = LinkSpec(bytes_per_s=4 * 8.0, latency_s=1.0)
    slow = run_pool(fixed_rows(8), 1, store=store).completion_s
    assert slow - run_pool(fixed_rows(8), 1).completion_s == pytest.approx(8 + 1)


def test_a_row_that_no_engine_holds_is_refused():
    with pytest.raises(ConfigError, match=r"may have 108 tokens, .* holds 64"):
        run_pool(fixed_rows(1, output=100), 1, spec=engine_spec(kv_tokens=64))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_replicas": 0}, "must be at least 1"),
        ({"num_replicas": 2, "slowness": {2: 2.0}}, "no replica of rank 2; .* are 0 to 1"),
        ({"num_replicas": 2, "slowness": {1: 0.0}}, "slowness of rank 1 is 0.0"),
    ],
)
def test_a_pool_that_cannot_be_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        PoolSpec(**options)


@pytest.mark.parametrize(
    "when", [{}, {"at_s": 1.0, "at_fraction": 0.5}, {"at_fraction": 1.0}, {"at_s": -1.0}]
)
def test_a_death_without_a_moment_is_refused(when):
    with pytest.raises(ConfigError, match=r"Death|cannot die"):
        Death(rank=0, **when)


class Moving:
    """A pool of two replicas with one long row, which can be moved."""

    def __init__(self, *, kv_bytes_per_token=0.0, deaths=(), **network):
        self.rows = fixed_rows(1, prompt=64, output=1000)
        spec = replace(engine_spec(), kv_bytes_per_token=kv_bytes_per_token)
        still = {"policies": Policies(moves_rows=False), "start_s": 0.0}
        pool = PoolSpec(num_replicas=2, network=LinkSpec(**network), deaths=deaths, **still)
        self.pool = SimulatedPool(self.rows, spec, pool)
        self.pool.begin()

    def move_at(self, time_s, *, with_kv=True):
        clock = self.pool.clock
        clock.run(lambda: clock.now > 0.1)
        (source,) = [r for r in self.pool.members if self.pool.queue.load(r).num_rows]
        target = 1 - source
        clock.at(time_s, lambda: self.pool.move(RowMove(0, source, target, with_kv)))
        return source, target

    def run(self):
        outcome = self.pool.finish()
        return outcome, {replica.rank: replica for replica in outcome.replicas}


def test_a_row_goes_on_at_another_replica_with_its_kv():
    moving = Moving()
    source, target = moving.move_at(5.0)
    outcome, replicas = moving.run()
    assert (outcome.num_moved, outcome.finished.tolist()) == (1, [1])
    assert replicas[target].num_rows == 1
    assert sum(r.stats.generated_tokens for r in outcome.replicas) == 1000
    # all but the token whose KV the next step makes
    generated = replicas[source].stats.generated_tokens
    assert replicas[target].stats.num_migrated_kv_tokens == 64 + generated - 1
    assert replicas[target].stats.num_recomputed_tokens == 0


def test_a_row_that_moves_without_kv_is_computed_again():
    moving = Moving()
    source, target = moving.move_at(5.0, with_kv=False)
    _, replicas = moving.run()
    generated = replicas[source].stats.generated_tokens
    assert replicas[target].stats.num_recomputed_tokens == 64 + generated


def test_a_move_takes_the_time_of_the_link():
    plain, slow = (
        Moving(kv_bytes_per_token=100.0),
        Moving(kv_bytes_per_token=100.0, bytes_per_s=10_000.0, latency_s=0.5),
    )
    ends = []
    for moving in (plain, slow):
        source, _ = moving.move_at(5.0)
        outcome, replicas = moving.run()
        ends.append((outcome.completion_s, replicas[source].stats.generated_tokens))
    (plain_s, generated), (slow_s, same) = ends
    assert generated == same
    num_bytes = (64 + generated) * 4 + (64 + generated - 1) * 100
    assert slow_s - plain_s == pytest.approx(0.5 + num_bytes / 10_000)


@pytest.mark.parametrize("dead", ["source", "target"])
def test_a_death_during_a_move_loses_no_row(dead):
    moving = Moving(bytes_per_s=100.0)
    source, target = moving.move_at(5.0)
    rank = {"source": source, "target": target}[dead]
    moving.pool.clock.at(5.5, lambda: moving.pool.kill(rank))
    outcome, _ = moving.run()
    assert outcome.finished.tolist() == [1]
    assert outcome.num_deaths == 1


def test_the_tokens_of_a_row_that_moved_outlive_its_target():
    moving = Moving()
    _, target = moving.move_at(5.0)
    moving.pool.clock.at(6.0, lambda: moving.pool.kill(target))
    outcome, _ = moving.run()
    # what the target generated in a second, at 11 ms a token, is generated again
    lost = sum(replica.stats.generated_tokens for replica in outcome.replicas) - 1000
    assert 80 < lost < 100


def test_a_row_that_comes_too_late_goes_on_at_its_source_with_its_kv():
    moving = Moving(bytes_per_s=100.0)
    source, target = moving.move_at(5.0)
    moving.pool.clock.at(5.5, lambda: moving.pool.kill(target))
    outcome, replicas = moving.run()
    assert sum(replica.stats.generated_tokens for replica in outcome.replicas) == 1000
    assert replicas[source].num_rows == 1
    assert replicas[source].stats.num_recomputed_tokens == 0
    assert outcome.num_moved == 0


@pytest.mark.slow
def test_thousands_of_rows_on_many_replicas_finish():
    rng = np.random.default_rng(0)
    output = np.rint(rng.lognormal(math.log(40), 1.5, 3000)).clip(1, 4000).astype(np.int64)
    rows = SimulatedRows.of(np.full(3000, 128), output)
    outcome = run_pool(rows, 128, spec=engine_spec(kv_tokens=1 << 18, max_num_seqs=32))
    assert (outcome.finished == 1).all()
