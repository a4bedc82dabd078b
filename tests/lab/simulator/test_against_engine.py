"""A simulated engine takes the steps of the real one, whose model is a fake."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raybatch.actors.queue.row_states import ALONE
from raybatch.config import EngineConfig
from raybatch.engine.engine import Engine
from raybatch.policy.cost.cost_model import EngineLimits
from raybatch.policy.cost.step_forecast import StepSimulation
from raybatch_lab.simulator.engine import EngineSpec, SimulatedEngine
from raybatch_lab.simulator.rows import SimulatedRows
from tests.engine.fakes import FakeRunner, FakeSampler, FakeSpec, FakeStopChecker
from tests.lab.simulator.pools import costs
from tests.tiers import examples

VOCAB, BLOCK, MAX_TOKENS = 1000, 4, 40
# what tells apart tokens and prompts in the seconds of a step
PAIR_S = 1000.0


def real_engine(*, num_blocks, max_num_seqs, full_step_tokens):
    config = EngineConfig(
        block_size_tokens=BLOCK,
        max_batched_tokens=max_num_seqs + 12,
        max_num_seqs=max_num_seqs,
        speculative_tokens=None,
    )
    runner = FakeRunner(
        num_blocks=num_blocks,
        block_size=BLOCK,
        spec=FakeSpec(VOCAB, tuple(range(0, VOCAB, 30)), 512),
        full_step_tokens=full_step_tokens,
    )
    return Engine(runner, FakeSampler(), FakeStopChecker(), config), runner


def run_real(engine, runner, rows):
    """Return the seconds of each step as a simulation prices it, and the tokens of each row."""
    requests = [rows.request(row) for row in range(len(rows))]
    # prefixes of groups are negative
    engine.add([replace(r, prompt_token_ids=r.prompt_token_ids % VOCAB) for r in requests])
    lengths, seconds = {}, []
    while engine.num_unfinished():
        num_before = len(runner.steps)
        lengths |= {c.request_id: len(c.token_ids) for c in engine.step()}
        for made in runner.steps[num_before:]:
            pairs = sum(n * (n + 1) / 2 for n in made.chunk_lens)
            seconds.append(made.num_tokens + PAIR_S * pairs)
    return seconds, np.array([lengths[row] for row in range(len(rows))])


def run_simulated(rows, *, num_blocks, max_num_seqs, full_step_tokens):
    model = costs(
        step_s=0.0,
        token_s=1.0,
        kv_tokens=num_blocks * BLOCK,
        max_num_seqs=max_num_seqs,
        block_size=BLOCK,
        max_batched_tokens=max_num_seqs + 12,
    )
    spec = EngineSpec(cost=replace(model, pair_s=PAIR_S), full_step_tokens=full_step_tokens)
    engine, seconds = SimulatedEngine(rows, spec), []
    engine.add(range(len(rows)))
    while len(ends := engine.begin()):
        engine.compute(len(ends))
        seconds += np.diff(ends, prepend=0.0).tolist()
    engine.scheduler.check()
    return seconds, engine.stats()


def rows_of(own, groups):
    prompts = np.array(own)
    group = np.array(groups)
    prefix = np.where(group == ALONE, 0, 2 * BLOCK)
    rows = SimulatedRows.of(prompts + prefix, np.ones(len(own), np.int64), max_tokens=MAX_TOKENS)
    return replace(rows, group=group, prefix=prefix)


own_tokens = st.lists(st.integers(1, 30), min_size=1, max_size=14)


@given(
    own_tokens,
    st.integers(0, 40),
    st.integers(1, 6),
    st.sampled_from((0.0, 8.0, math.inf)),
    st.booleans(),
)
@settings(max_examples=examples(25, full=1500), deadline=None)
def test_steps_are_those_of_the_engine(own, spare, max_num_seqs, full_step_tokens, is_grouped):
    groups = [row // 3 if is_grouped else ALONE for row in range(len(own))]
    rows = rows_of(own, groups)
    longest = int(rows.prompt.max()) + MAX_TOKENS
    shape = {
        "num_blocks": spare + -(-longest // BLOCK),
        "max_num_seqs": max_num_seqs,
        "full_step_tokens": full_step_tokens,
    }
    engine, runner = real_engine(**shape)
    measured, outputs = run_real(engine, runner, rows)
    simulated, stats = run_simulated(replace(rows, output=outputs), **shape)
    assert simulated == pytest.approx(measured)
    real = engine.stats()
    for name in ("generated_tokens", "cached_tokens", "num_preemptions", "num_recomputed_tokens"):
        assert getattr(real, name) == getattr(stats, name)


def test_steps_are_those_of_the_forecast():
    rng = np.random.default_rng(3)
    prompts, outputs = rng.integers(1, 60, 200), rng.integers(1, 90, 200)
    rows = SimulatedRows.of(prompts, outputs).with_oracle()
    limits = EngineLimits(
        kv_tokens=BLOCK * 100, max_num_seqs=16, block_size=BLOCK, max_batched_tokens=28
    )
    forecast = StepSimulation(prompts.tolist(), outputs.tolist(), limits)
    forecast.run()
    rows = replace(rows, max_tokens=rows.output)
    simulated, stats = run_simulated(
        rows, num_blocks=100, max_num_seqs=16, full_step_tokens=math.inf
    )
    assert len(forecast.decode_rows) == len(simulated)
    assert forecast.num_preemptions == stats.num_preemptions > 0
