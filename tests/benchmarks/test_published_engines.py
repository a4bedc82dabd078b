"""Prices of published engines compared with the paper's, and pools split by phase."""

import numpy as np
import pytest
from published_engines import H20, H200, R1, Engine
from split_pool import SplitPool

from raybatch_lab.simulator.links import LinkSpec
from raybatch_lab.simulator.rows import SimulatedRows

UNIT = Engine(gpu=H20, num_gpus=16)


def test_the_model_has_its_published_sizes():
    assert R1.weight_bytes - 2 * R1.head_params == pytest.approx(671e9, rel=0.001)
    assert R1.kv_bytes == 70_272


def test_a_prompt_takes_what_the_paper_counts_at_full_rates():
    # an H100 multiplies as an H200 does
    seconds = R1.prompt_s(2048, H200.fp8_flops, H200.bf16_flops)
    assert seconds == pytest.approx(0.112, rel=0.05)


def test_engines_hold_as_many_rows_as_those_of_the_paper():
    rows_of = {kv: Engine(gpu=H20, num_gpus=8, kv=kv).kv_tokens / 10_000 for kv in KV}
    assert 8 <= rows_of["copied"] <= 16
    assert rows_of["host"] == pytest.approx(1800, rel=0.1)
    # copies of attention weights leave no room on so few GPUs
    assert rows_of["spread"] < 0


KV = ("copied", "host", "spread")


@pytest.mark.parametrize("tokens", [128, 16_384])
def test_a_step_takes_the_longer_of_reading_and_multiplying(tokens):
    spec = UNIT.spec()
    token_s = R1.token_s(0.55 * 16 * H20.fp8_flops, 0.55 * 16 * H20.bf16_flops)
    read_s = R1.read_bytes(tokens, 16, copies_attention=True) / (0.8 * H20.bytes_per_s)
    found = spec.cost.step_s + float(spec.cost.tokens_s(tokens)) - 3.4e-3
    assert found == pytest.approx(max(read_s, tokens * token_s))
    assert (tokens > spec.full_step_tokens) == (tokens * token_s > read_s)


def split(num_engines, **network):
    rows = SimulatedRows.of(np.full(24, 9000), np.array([1, *range(50, 73)]))
    return SplitPool(rows, UNIT.spec(), num_engines, network=LinkSpec(**network)), rows


@pytest.mark.parametrize("num_engines", [(1, 2), (2, 1)])
def test_each_phase_is_computed_where_it_belongs(num_engines):
    pool, rows = split(num_engines)
    completion_s = pool.run()
    assert pool.ended_s.max() == completion_s
    stats = [member.engine.stats() for member in pool.members]
    prompts, outputs = stats[: num_engines[0]], stats[num_engines[0] :]
    assert sum(s.generated_tokens for s in prompts) == len(rows)
    assert sum(s.generated_tokens for s in outputs) == rows.output.sum() - len(rows)
    assert sum(s.num_chunk_tokens for s in prompts) == rows.prompt.sum()
    assert sum(s.num_chunk_tokens for s in outputs) <= rows.prompt.sum() // 100
    assert all(s.num_steps for s in stats)


def test_kv_takes_the_network():
    (near, _), (far, _) = split((1, 1)), split((1, 1), latency_s=7.0)
    near_s, far_s = near.run(), far.run()
    assert far_s == pytest.approx(near_s + 7, rel=0.02)
    # the row of one token needs no other engine
    assert near.ended_s[0] == far.ended_s[0]
