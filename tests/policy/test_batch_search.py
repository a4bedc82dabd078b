"""The chosen plan is the best of all that memory holds, and moves with memory and bandwidth."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raybatch.errors import ConfigError
from raybatch.policy.batches.forward_dag import critical_path, forward_dag
from raybatch.policy.batches.layer_plan import BatchPlan, MemoryBudget, Workload, memory_need
from raybatch.policy.batches.search import PlanGrid, price_plan, search_plans
from raybatch.policy.cost.roofline import Roofline
from tests.policy.layers import MODEL, costs

DECODE = Workload(cached_tokens=500)
GRID = PlanGrid(
    attention_tokens=(8, 64),
    gate_tokens=(8, 64, 512),
    parameter_buffers=(None, 2, 4),
    max_attention_runs=64,
)
# parameters are 2.0 GB, KV of one sequence 12 MB
PARAMETERS = 12 * (MODEL.layer.ffn_bytes + MODEL.layer.attention_bytes) + MODEL.other_bytes
SEQUENCE = 501 * 12 * MODEL.layer.kv_bytes_per_token
PLENTY = 10**12


def brute_force(found_costs, workload, device_bytes, host_bytes, grid=GRID):
    """Seconds per token of every plan that fits, by all layers laid out one after the other."""
    fitting = {}
    for gate, attention, buffers, on_host in product(
        grid.gate_tokens, grid.attention_tokens, grid.parameter_buffers, grid.kv_on_host
    ):
        waiting = workload.waiting_sequences
        if attention > gate or (waiting is not None and gate > waiting):
            continue
        plan = BatchPlan(
            attention_tokens=attention,
            gate_tokens=gate,
            parameter_buffers=buffers,
            has_kv_on_host=on_host,
        )
        need = memory_need(MODEL, plan, workload)
        if need.device_bytes > device_bytes or need.host_bytes > host_bytes:
            continue
        nodes = forward_dag(MODEL, found_costs, plan, workload, num_layers=MODEL.num_layers)
        fitting[plan] = critical_path(nodes).seconds / gate
    return fitting


@given(
    device=st.sampled_from((PARAMETERS // 4, PARAMETERS + 70 * SEQUENCE, PLENTY)),
    host=st.sampled_from((0, PARAMETERS, PLENTY)),
    bandwidth=st.sampled_from((1e9, 1e10, 1e11, 1e12)),
    waiting=st.sampled_from((None, 8, 600)),
)
@settings(max_examples=40, deadline=None)
def test_the_search_finds_what_trying_everything_finds(device, host, bandwidth, waiting):
    found_costs = costs(link_bytes_per_s=bandwidth)
    workload = replace(DECODE, waiting_sequences=waiting)
    every = brute_force(found_costs, workload, device, host)
    memory = MemoryBudget(device_bytes=device, host_bytes=host)
    if not every:
        with pytest.raises(ConfigError, match="memory holds none of"):
            search_plans(MODEL, found_costs, workload, memory, GRID)
        return
    result = search_plans(MODEL, found_costs, workload, memory, GRID)
    assert pytest.approx(min(every.values()), rel=0.01) == every[result.best.plan]
    assert len(every) == result.num_considered - result.num_infeasible


def best_plan(*, device_bytes, host_bytes=PLENTY, bandwidth=1e11):
    found_costs = costs(link_bytes_per_s=bandwidth)
    memory = MemoryBudget(device_bytes=device_bytes, host_bytes=host_bytes)
    best = search_plans(MODEL, found_costs, DECODE, memory, GRID).best.plan
    every = brute_force(found_costs, DECODE, device_bytes, host_bytes)
    assert pytest.approx(min(every.values()), rel=0.01) == every[best]
    return best


SCARCE = PARAMETERS + 100 * SEQUENCE


def test_kv_goes_to_the_host_where_the_link_pays_for_a_larger_batch():
    assert best_plan(device_bytes=SCARCE, bandwidth=1e13).has_kv_on_host


def test_kv_stays_on_the_device_where_the_link_is_slow():
    plan = best_plan(device_bytes=SCARCE, bandwidth=1e9)
    assert not plan.has_kv_on_host
    assert 64 == plan.gate_tokens


def test_kv_stays_on_the_device_where_its_memory_is_large():
    plan = best_plan(device_bytes=PLENTY, bandwidth=1e13)
    assert not plan.has_kv_on_host
    assert 512 == plan.gate_tokens


def test_kv_stays_on_the_device_where_the_host_has_no_room():
    assert not best_plan(device_bytes=SCARCE, bandwidth=1e13, host_bytes=0).has_kv_on_host


def test_experts_are_streamed_where_the_device_does_not_hold_them():
    assert best_plan(device_bytes=PARAMETERS // 2).parameter_buffers is not None
    assert best_plan(device_bytes=PLENTY).parameter_buffers is None


def test_the_best_plan_is_not_the_shortest_pass():
    found_costs = costs()
    memory = MemoryBudget(device_bytes=PLENTY)
    best = search_plans(MODEL, found_costs, DECODE, memory, GRID).best
    shortest = min(
        (price_plan(MODEL, found_costs, plan, DECODE) for plan in GRID.plans()),
        key=lambda priced: priced.time.seconds,
    )
    assert 8 == shortest.plan.gate_tokens
    assert 512 == best.plan.gate_tokens
    assert best.token_s < shortest.token_s


def test_no_plan_is_larger_than_the_sequences_there_are():
    workload = replace(DECODE, waiting_sequences=100)
    memory = MemoryBudget(device_bytes=PLENTY)
    result = search_plans(MODEL, costs(), workload, memory, GRID)
    assert 64 == result.best.plan.gate_tokens
    with pytest.raises(ConfigError, match="3 waiting sequences"):
        search_plans(MODEL, costs(), replace(DECODE, waiting_sequences=3), memory, GRID)


def test_the_best_of_every_other_residence_comes_along():
    memory = MemoryBudget(device_bytes=PLENTY, host_bytes=PLENTY)
    result = search_plans(MODEL, costs(), DECODE, memory, GRID)
    priced = [result.best, *result.runners_up]
    kinds = {(p.plan.parameter_buffers is None, p.plan.has_kv_on_host) for p in priced}
    assert (4, 4) == (len(kinds), len(priced))
    assert [p.token_s for p in priced] == sorted(p.token_s for p in priced)


def test_memory_for_no_plan_is_an_error_with_the_bytes():
    memory = MemoryBudget(device_bytes=1000, host_bytes=7)
    with pytest.raises(ConfigError, match="there are 1000 and 7"):
        search_plans(MODEL, costs(), DECODE, memory, GRID)


def test_memory_for_kv_bounds_plans_of_its_own():
    needs = [memory_need(MODEL, plan, DECODE) for plan in GRID.plans()]
    kv_bytes = sorted({need.kv_bytes for need in needs})[1]
    memory = MemoryBudget(device_bytes=PLENTY, host_bytes=PLENTY, kv_bytes=kv_bytes)
    found = search_plans(MODEL, costs(), DECODE, memory, GRID)
    assert kv_bytes == max(p.memory.kv_bytes for p in (found.best, *found.runners_up))
    assert sum(need.kv_bytes > kv_bytes for need in needs) == found.num_infeasible
    with pytest.raises(ConfigError, match=r"are for KV, which may have 9$"):
        search_plans(MODEL, costs(), DECODE, replace(memory, kv_bytes=9), GRID)
    with pytest.raises(ConfigError, match="-1 bytes for KV"):
        replace(memory, kv_bytes=-1)


def test_among_plans_alike_the_one_with_the_fewest_runs_of_attention_wins():
    # without a fixed time and without bytes, runs of any size cost as much per token
    flat = Roofline(fixed_s=0.0, operation_s=1e-13, byte_s=0.0)
    found = search_plans(
        MODEL,
        costs(attention=flat, ffn=flat),
        Workload(),
        MemoryBudget(device_bytes=PLENTY),
        PlanGrid(attention_tokens=(3, 7, 64), gate_tokens=(64,)),
    )
    assert 64 == found.best.plan.attention_tokens


def test_the_order_of_a_grid_and_its_repetitions_change_nothing():
    memory = MemoryBudget(device_bytes=PLENTY, host_bytes=PLENTY)
    backwards = PlanGrid(
        attention_tokens=GRID.attention_tokens[::-1],
        gate_tokens=(*GRID.gate_tokens[::-1], 64),
        parameter_buffers=GRID.parameter_buffers,
        max_attention_runs=64,
    )
    first, second = (search_plans(MODEL, costs(), DECODE, memory, g) for g in (GRID, backwards))
    assert first == second


def test_a_grid_up_to_a_size_has_that_size_and_two_layers_of_buffers():
    grid = PlanGrid.up_to(100, num_pieces=6)
    assert (1, 2, 4, 8, 16, 32, 64, 100) == grid.gate_tokens == grid.attention_tokens
    assert (None, 1, 2, 4, 6, 8, 12) == grid.parameter_buffers


def test_a_grid_gives_every_plan_once_and_none_that_attends_to_more_than_it_gates():
    plans = list(GRID.plans())
    assert len(plans) == len(set(plans)) == (1 + 2 + 2) * 3 * 2
    assert all(p.attention_tokens <= p.gate_tokens for p in plans)


def test_attention_in_too_many_runs_is_left_out():
    few = replace(GRID, max_attention_runs=8)
    pairs = {(p.gate_tokens, p.attention_tokens) for p in few.plans()}
    assert {(8, 8), (64, 8), (64, 64), (512, 64)} == pairs


def test_an_empty_grid_is_refused():
    with pytest.raises(ConfigError, match="no gate_tokens"):
        replace(GRID, gate_tokens=())
