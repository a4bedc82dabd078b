"""How many tokens keep experts busy, and which bound a batch meets first."""

from dataclasses import replace

import pytest

from raybatch.errors import ConfigError
from raybatch.policy.batches.layer_plan import BatchPlan, MemoryBudget, Workload, memory_need
from raybatch.policy.batches.search import gate_target, hiding_tokens, saturating_tokens
from raybatch.policy.cost.roofline import Roofline
from tests.policy.layers import MODEL, SPARSE, costs

DECODE = Workload(cached_tokens=500)
HERE = BatchPlan(attention_tokens=64, gate_tokens=64)
PLENTY = 10**13


@pytest.mark.parametrize("serial_fraction", [0.0, 1.0])
@pytest.mark.parametrize("efficiency", [0.5, 0.8, 0.95])
def test_the_knee_is_the_first_batch_that_comes_near_the_best_rate(serial_fraction, efficiency):
    cost = Roofline(fixed_s=1e-5, operation_s=1e-11, byte_s=2e-11, serial_fraction=serial_fraction)
    best = cost.seconds(SPARSE.ffn_work(10**9)) / 10**9
    first = next(
        n
        for n in range(1, 100_000)
        if cost.seconds(SPARSE.ffn_work(n)) / n <= 1.000001 * best / efficiency
    )
    found = saturating_tokens(SPARSE, cost, efficiency=efficiency)
    assert pytest.approx(first, rel=0.001, abs=1) == found


def test_a_knee_asks_for_an_efficiency_below_one():
    with pytest.raises(ConfigError, match="efficiency is 1"):
        saturating_tokens(SPARSE, Roofline(fixed_s=1, operation_s=1, byte_s=1), efficiency=1.0)


def test_experts_that_cost_nothing_have_no_knee():
    with pytest.raises(ConfigError, match="cost nothing"):
        saturating_tokens(SPARSE, Roofline(fixed_s=1e-9, operation_s=0, byte_s=0))


@pytest.mark.parametrize("bandwidth", [1e10, 1e11])
def test_loads_are_hidden_from_the_first_batch_that_computes_as_long(bandwidth):
    found = costs(link_bytes_per_s=bandwidth)
    load_s = SPARSE.ffn_bytes / bandwidth + 1e-6
    tokens = hiding_tokens(SPARSE, found)
    assert found.ffn.seconds(SPARSE.ffn_work(tokens)) >= load_s
    assert found.ffn.seconds(SPARSE.ffn_work(tokens - 1)) < load_s


def target(plan=HERE, workload=DECODE, *, device=PLENTY, host=PLENTY, saturated=16384):
    memory = MemoryBudget(device_bytes=device, host_bytes=host)
    return gate_target(MODEL, plan, workload, memory, saturated_tokens=saturated)


def bytes_of(tokens, plan=HERE, workload=DECODE):
    return memory_need(MODEL, replace(plan, gate_tokens=tokens), workload)


def test_what_fits_is_bound_by_saturation():
    found = target()
    assert (16384, "saturation") == (found.tokens, found.bound)


def test_memory_of_the_device_bounds_kv_that_lives_there():
    found = target(device=bytes_of(1000).device_bytes)
    assert (1000, "device memory") == (found.tokens, found.bound)
    found = target(device=bytes_of(1000).device_bytes - 1)
    assert 999 == found.tokens


def test_memory_of_the_host_bounds_kv_that_lives_there():
    plan = replace(HERE, has_kv_on_host=True)
    found = target(plan, host=bytes_of(1000, plan).host_bytes)
    assert (1000, "host memory") == (found.tokens, found.bound)


def test_too_few_sequences_bound_a_batch():
    found = target(workload=replace(DECODE, waiting_sequences=77))
    assert (77, "waiting sequences") == (found.tokens, found.bound)


def test_one_long_prompt_saturates_where_decoding_needs_many_sequences():
    prefill = Workload(tokens_per_sequence=16384, waiting_sequences=1)
    assert "saturation" == target(workload=prefill).bound


def test_the_smallest_bound_is_the_active_one():
    plan = replace(HERE, has_kv_on_host=True)
    workload = replace(DECODE, waiting_sequences=900)
    host = bytes_of(1000, plan).host_bytes
    assert "waiting sequences" == target(plan, workload, host=host).bound
    assert "saturation" == target(plan, workload, host=host, saturated=800).bound


def test_less_than_a_token_is_an_error():
    with pytest.raises(ConfigError, match="device memory does not hold one token"):
        target(device=1000)
