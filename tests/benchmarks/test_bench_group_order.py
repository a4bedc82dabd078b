import numpy as np
import pytest
from group_order import WORKLOADS, classes, run, w1, w2
from hypothesis import given, settings
from hypothesis import strategies as st
from step_simulator import Device, StepSimulator


def simulate(rows, device):
    return StepSimulator(rows, np.arange(len(rows.group)), device, block_size=1).run()


def test_a_row_alone_takes_its_chunks_and_one_step_per_further_token():
    rows, _ = classes([(1, 1, 0, 100, 5)])
    outcome = simulate(rows, Device(token_budget=32, kv_tokens=200))
    assert [32, 32, 32, 4, 1, 1, 1, 1] == outcome.step_tokens.tolist()


def test_a_prefix_is_computed_once_per_group():
    outcome = run(w1(0), "shuffle", "-", 0)
    assert 64 * 256 + 1024 * 32 == outcome.prefill_tokens


def test_every_token_is_counted_once_without_preemption():
    workload = w2(0)
    outcome = run(workload, "ratio", "max", 0)
    # the first token of a row comes with its prefill
    generated = workload.rows.output.sum() - len(workload.rows.output)
    assert outcome.preemptions == 0
    assert outcome.prefill_tokens + generated == outcome.step_tokens.sum()


@settings(deadline=None, max_examples=50)
@given(
    st.lists(
        st.tuples(
            *(st.integers(low, high) for low, high in ((1, 3), (1, 4), (0, 9), (1, 9), (1, 9)))
        ),
        min_size=1,
        max_size=4,
    ),
    st.integers(4, 20),
    st.integers(0, 60),
)
def test_every_row_ends_and_gives_its_cache_back(groups, budget, more):
    rows, _ = classes(groups)
    largest = np.bincount(rows.group, rows.distinct + rows.output).max() + rows.prefix.max() + 3
    simulator = StepSimulator(
        rows,
        np.arange(len(rows.group)),
        Device(token_budget=budget, kv_tokens=int(largest) + more),
        block_size=1,
    )
    outcome = simulator.run()
    simulator.engine.scheduler.check()
    assert simulator.engine.scheduler.kv_used_fraction == 0
    assert rows.output.sum() == simulator.engine.num_generated
    assert outcome.step_tokens.max() <= budget


def test_a_full_cache_preempts_the_youngest_row_and_computes_it_again():
    rows, _ = classes([(1, 2, 0, 10, 20)])
    outcome = simulate(rows, Device(token_budget=64, kv_tokens=40))
    assert outcome.preemptions > 0
    assert outcome.prefill_tokens > 20


def test_no_order_beats_the_bound():
    outcome = run(w2(0), "ratio", "true", 0)
    assert outcome.bound_s <= outcome.overlap_s <= outcome.sum_s


def test_a_row_above_the_cache_is_an_error():
    rows, _ = classes([(1, 1, 0, 100, 5)])
    with pytest.raises(RuntimeError, match="do not fit 50 tokens"):
        simulate(rows, Device(token_budget=32, kv_tokens=50))


def test_workloads_repeat_for_a_seed():
    first, again = (WORKLOADS["W4"](3).rows.output.tolist() for _ in range(2))
    assert first == again
