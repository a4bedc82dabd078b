"""Simulated engines that schedule as vLLM does."""

from dataclasses import replace

import numpy as np
import pytest

from raybatch_lab.measured_runs import simulate_steps
from raybatch_lab.simulator.engine import EngineSpec, SimulatedEngine
from raybatch_lab.simulator.rows import SimulatedRows
from tests.lab.simulator.pools import costs

BLOCK = 16


def spec_of(*, is_vllm=True, has_cache=True, **limits):
    return EngineSpec(
        cost=costs(block_size=BLOCK, **limits), is_vllm=is_vllm, enable_prefix_caching=has_cache
    )


def known(prompt, output):
    rows = SimulatedRows.of(np.array(prompt), np.array(output)).with_oracle()
    return replace(rows, max_tokens=rows.output)


def run(rows, spec):
    engine = SimulatedEngine(rows, spec)
    engine.add(range(len(rows)))
    while len(ends := engine.begin()):
        engine.compute(len(ends))
        engine.scheduler.check()
    return engine.stats()


def test_a_preempted_row_finds_its_output_again():
    # both come to 5 blocks, and there are 8
    rows, limits = known([16, 16], [64, 64]), {"kv_tokens": 8 * BLOCK}
    ours, theirs = (run(rows, spec_of(is_vllm=kind, **limits)) for kind in (False, True))
    assert ours.num_preemptions == theirs.num_preemptions == 1
    assert 0 <= theirs.num_recomputed_tokens < ours.num_recomputed_tokens


def test_without_a_cache_nothing_is_found_again():
    rows, limits = known([16, 16], [64, 64]), {"kv_tokens": 8 * BLOCK, "has_cache": False}
    ours, theirs = (run(rows, spec_of(is_vllm=kind, **limits)) for kind in (False, True))
    assert theirs.num_recomputed_tokens == ours.num_recomputed_tokens > 0


@pytest.mark.parametrize("has_cache", [True, False])
def test_a_group_shares_its_prefix_and_each_row_reads_it_for_itself(has_cache):
    rows = known([40, 40], [4, 4])
    rows = replace(rows, group=np.array([3, 3]), prefix=np.array([35, 35]))
    steps, stats = simulate_steps(rows, spec_of(has_cache=has_cache))
    # whole blocks alone
    assert stats.cached_tokens == (2 * BLOCK if has_cache else 0)
    assert all(step.shared_pairs == 0 for step in steps)
    assert steps[-1].context_reads == 2 * 43


def test_rows_share_nothing_that_they_did_not_say():
    assert run(known([40] * 4, [8] * 4), spec_of()).cached_tokens == 0
