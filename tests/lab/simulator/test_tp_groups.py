"""Simulated replicas that take part in the steps of another one."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raybatch_lab.simulator.events import Death, Policies
from raybatch_lab.simulator.rows import SimulatedRows
from tests.lab.simulator.pools import engine_spec, run_pool
from tests.tiers import examples

KV_BYTES = 1000.0
# one row that runs for 60 s when all others have ended
OUTPUTS = np.array([20] * 60 + [6000])
ROWS = SimulatedRows.of(np.full(len(OUTPUTS), 8), OUTPUTS)


def spec_of(ratios, *, switch_s=0.5, **prices):
    spec = replace(engine_spec(token_s=0.0, **prices), kv_bytes_per_token=KV_BYTES)
    return replace(spec, tp_ratios=ratios, tp_switch_s=switch_s)


def run(ratios, *, rows=ROWS, **options):
    return run_pool(rows, 4, spec=spec_of(ratios), **options)


def test_a_last_row_ends_sooner_by_what_a_step_of_the_tp_group_takes():
    alone, together = run({}), run({2: 0.5})
    assert 60.0 == pytest.approx(alone.completion_s, rel=0.02)
    # some seconds until its pace is known, and the switch
    assert 32.0 == pytest.approx(together.completion_s, abs=3.0)
    assert (0, 1) == (alone.num_tp_groups, together.num_tp_groups)
    assert together.finished.tolist() == [1] * len(OUTPUTS)


def test_the_size_that_saves_most_is_taken_once_both_were_seen():
    assert run({2: 0.6, 4: 0.3}).completion_s < run({2: 0.6}).completion_s


@pytest.mark.parametrize("is_first", [False, True])
def test_a_tp_group_that_is_slower_ends_and_forms_no_more(is_first):
    rows = ROWS.take(np.arange(len(OUTPUTS))[:: -1 if is_first else 1])
    alone, together = run({}, rows=rows), run({2: 1.4}, rows=rows)
    assert 1 == together.num_tp_groups
    assert together.completion_s < alone.completion_s + 4.0


def test_nothing_forms_where_the_policy_is_off():
    assert 0 == run({2: 0.5}, policies=Policies(forms_tp_groups=False)).num_tp_groups


def test_workers_are_not_idle():
    def idle_s(outcome):
        busy = sum(stop - start for r in outcome.replicas for start, stop in r.busy)
        return 4 * outcome.completion_s - busy

    assert idle_s(run({4: 0.5})) < 0.5 * idle_s(run({}))


@given(
    st.lists(st.integers(1, 400), min_size=1, max_size=20),
    st.lists(st.builds(Death, rank=st.integers(0, 2), at_s=st.floats(0, 20)), max_size=3),
    st.floats(0.3, 1.5),
)
@settings(max_examples=examples(30, full=1000), deadline=None)
def test_every_row_finishes_once_whatever_dies_in_a_tp_group(outputs, deaths, ratio):
    rows = SimulatedRows.of(np.full(len(outputs), 8), 10 * np.array(outputs))
    outcome = run_pool(rows, 3, spec=spec_of({2: ratio}), deaths=tuple(deaths), start_s=0.5)
    assert outcome.finished.tolist() == [1] * len(outputs)
