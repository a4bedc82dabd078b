"""From costs and memory to a plan, and to what keeps it from being larger."""

import pytest

from raybatch.errors import ConfigError
from raybatch.policy.batches.layer_plan import (
    BatchPlan,
    MemoryBudget,
    ModuleCosts,
    Workload,
    memory_need,
)
from raybatch.policy.batches.search import hiding_tokens, plan_batches, saturating_tokens
from tests.policy.layers import MODEL, SPARSE, costs

DECODE = Workload(cached_tokens=500)
PLENTY = 10**13
BATCH = BatchPlan(attention_tokens=1, gate_tokens=200)


def planned(*, device=PLENTY, host=0, workload=DECODE, found: ModuleCosts | None = None):
    memory = MemoryBudget(device_bytes=device, host_bytes=host)
    return plan_batches(MODEL, found or costs(), workload, memory)


def test_with_memory_for_all_the_experts_are_kept_busy():
    found = planned()
    assert "saturation" == found.target.bound
    assert saturating_tokens(SPARSE, costs().ffn) == found.search.best.plan.gate_tokens
    assert found.search.best.plan.parameter_buffers is None


def test_memory_is_filled_to_the_last_sequence_where_it_is_short():
    found = planned(device=memory_need(MODEL, BATCH, DECODE).device_bytes)
    assert "device memory" == found.target.bound
    assert 200 == found.target.tokens == found.search.best.plan.gate_tokens


def test_few_sequences_make_a_small_batch():
    found = planned(workload=Workload(cached_tokens=500, waiting_sequences=9))
    assert ("waiting sequences", 9) == (found.target.bound, found.target.tokens)
    assert 9 == found.search.best.plan.gate_tokens


def test_streamed_experts_ask_for_a_batch_that_hides_them():
    slow = costs(link_bytes_per_s=5e9)
    assert hiding_tokens(SPARSE, slow) > saturating_tokens(SPARSE, slow.ffn)
    short = Workload(cached_tokens=3)
    found = planned(device=500_000_000, host=PLENTY, workload=short, found=slow)
    assert hiding_tokens(SPARSE, slow) == found.target.saturated_tokens
    assert found.search.best.plan.parameter_buffers is not None
    assert found.search.best.plan.gate_tokens > saturating_tokens(SPARSE, slow.ffn)


def test_memory_for_no_token_is_an_error():
    with pytest.raises(ConfigError, match="memory holds none of"):
        planned(device=1000)
