"""Seconds of replicas for ranges of lengths, and of moves."""

from dataclasses import replace

import numpy as np
import pytest

from raybatch.errors import ConfigError
from raybatch.policy.cost.cost_model import EngineLimits
from raybatch_lab.stages.lengths import RangeWork, RowLengths
from raybatch_lab.stages.replica_seconds import (
    MoveCosts,
    batch_rows,
    iteration_seconds,
    stage_seconds,
)
from tests.lab.stages.pools import QUALITY, pool

# ten rows of 20 tokens that make 80 more
TEN = RowLengths(np.full(10, 20), np.full(10, 80))
MOVES_FREE = {"factor": 1.0, "places": 4}


def test_a_stage_takes_what_its_tokens_prompts_and_steps_take():
    tokens, contexts = 10 * 80, 10 * sum(range(21, 101))
    expected = (
        QUALITY.step_s * tokens / 4
        + QUALITY.row_s * tokens
        + QUALITY.context_s * contexts
        + QUALITY.prompt_token_s * 10 * 20
    )
    found = stage_seconds(pool(1, **MOVES_FREE), TEN, 0, 128, 1)
    assert float(found) == pytest.approx(expected)


def test_two_replicas_take_half():
    one, two = (float(stage_seconds(pool(2, **MOVES_FREE), TEN, 0, 128, n)) for n in (1, 2))
    assert two == pytest.approx(one / 2)


def test_moves_take_the_links_of_both_sides():
    still = pool(1, bytes_per_s=1e12, weight=0.0)
    moving = pool(1, bytes_per_s=1e6)
    for low, high, lengths in ((0, 64, 64), (64, 128, 64), (32, 64, 32 + 64)):
        more = stage_seconds(moving, TEN, low, high, 1) - stage_seconds(still, TEN, low, high, 1)
        assert float(more) == pytest.approx(10 * lengths * 100.0 / 1e6)


@pytest.mark.parametrize(
    ("kv_tokens", "rows", "expected"), [(10**9, 100, 32.0), (1000, 100, 10.0), (10**9, 5, 5.0)]
)
def test_a_batch_is_bound_by_places_by_kv_and_by_rows(kv_tokens, rows, expected):
    work = RangeWork.of_sums(np.array([1.0, 100.0, 10_000.0, 0.0, 0.0, 0.0]))
    limits = EngineLimits(kv_tokens=kv_tokens, max_num_seqs=32, block_size=16)
    assert expected == float(batch_rows(replace(pool(1), limits=limits), work, rows, 1))


def test_an_iteration_takes_the_step_and_its_batch():
    given_pool = pool(1, **MOVES_FREE)
    tokens_s = iteration_seconds(given_pool, TEN, 32, 128, 1)
    mean = np.mean(range(33, 101))
    expected = QUALITY.step_s + 4 * (QUALITY.row_s + QUALITY.context_s * mean)
    assert tokens_s == pytest.approx(expected)


def test_a_stage_without_tokens_has_no_iterations():
    assert 0.0 == iteration_seconds(pool(1), TEN, 128, 256, 1)


@pytest.mark.parametrize("given", [(1.0, 0.0, 1.0), (-1.0, 1.0, 1.0), (1.0, 1.0, -1.0)])
def test_moves_that_make_no_sense_are_refused(given):
    token_bytes, bytes_per_s, weight = given
    with pytest.raises(ConfigError, match="bytes_per_s above 0"):
        MoveCosts(kv_bytes_per_token=token_bytes, bytes_per_s=bytes_per_s, weight=weight)


def test_a_pool_without_replicas_is_refused():
    with pytest.raises(ConfigError, match="at least 1"):
        pool(0)
