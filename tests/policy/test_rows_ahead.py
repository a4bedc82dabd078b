"""Rows of groups as they are forecast: what a plan, an engine and the forecast of steps say."""

from dataclasses import replace

import numpy as np
import pytest

from raybatch.engine.phases import RowsSeen
from raybatch.explanation.explain import rows_of
from raybatch.policy import choose_engine
from raybatch.policy.cost.layers import RowsAhead, RowShape, StepCounts
from raybatch.policy.cost.step_forecast import _mean_group
from raybatch.policy.cost.work import work_totals
from raybatch.records.types import Completion
from tests.engine.fakes import make_request
from tests.policy.test_choose_engine import inputs

PREFIX, OWN, OUTPUT, GROUPS = 64, 30, 16, 5


def totals(members):
    num_rows = GROUPS * members
    return work_totals(
        np.full(num_rows, PREFIX + OWN),
        np.full(num_rows, float(OUTPUT)),
        cached_tokens=np.where(np.arange(num_rows) % members, PREFIX, 0),
        shared_tokens=np.full(num_rows, PREFIX),
        num_members=np.full(num_rows, members),
    )


def seen(members):
    rows = RowsSeen(4096)
    prompt = list(range(PREFIX + OWN))
    requests = [make_request(i, prompt, max_tokens=OUTPUT) for i in range(GROUPS * members)]
    rows.add(replace(r, group_id=r.request_id // members, prefix_len=PREFIX) for r in requests)
    return rows.ahead()


def test_rows_are_as_long_as_those_that_ended_elsewhere_until_some_end_here():
    rows = RowsSeen(4096)
    requests = (make_request(i, [i, 1, 2], max_tokens=500) for i in range(4))
    rows.add(replace(r, likely_output_lens=(10, 30)) for r in requests)
    assert rows.ahead().shape.output_tokens == 20
    rows.note([Completion(request_id=i, token_ids=np.zeros(70, np.int32)) for i in range(32)])
    assert rows.ahead().shape.output_tokens == 70


@pytest.mark.parametrize("members", [2, 3, 7, 16])
@pytest.mark.parametrize("kind", ["plan", "engine"])
def test_rows_of_groups_are_what_their_work_says(kind, members):
    work = totals(members)
    rows = rows_of(work, 1, 0.0) if kind == "plan" else seen(members)
    assert rows.group_rows == pytest.approx(members)
    # whole prompt tokens
    assert rows.shape.prompt_tokens == round(OWN + PREFIX / members)
    assert rows.prefix_tokens == pytest.approx(PREFIX)
    assert rows.own_tokens == pytest.approx(OWN, abs=0.5)
    pairs = work.pairs + work.past_pairs
    assert rows.prompt_reads == pytest.approx(pairs / work.computed_tokens)
    counts = StepCounts.of(rows, np.ones(1), np.zeros(1))
    assert counts.shared_tokens == pytest.approx(PREFIX)
    assert counts.context_tokens == pytest.approx(OWN + OUTPUT / 2, abs=0.5)
    # without the pairs of a plan they follow from the lengths
    counts = StepCounts.of(replace(rows, prompt_reads=0.0), np.ones(1), np.zeros(1))
    assert counts.prompt_reads == pytest.approx(pairs / work.computed_tokens, rel=0.03)


@pytest.mark.parametrize("members", range(2, 65))
@pytest.mark.parametrize("prefix", [64, 512, 1024])
def test_the_forecast_of_steps_has_the_whole_prefix(prefix, members):
    rows = RowsAhead(
        shape=RowShape(prompt_tokens=round(OWN + prefix / members), output_tokens=OUTPUT),
        num_rows=members * GROUPS,
        shared_tokens=float(np.mean([0, *[prefix] * (members - 1)] * GROUPS)),
        group_rows=float(members),
    )
    work = choose_engine._work(replace(inputs(device_rows=8, host_rows=64), rows=rows))
    assert _mean_group(work, 64) == (prefix, pytest.approx(members))


def test_a_prefix_is_no_longer_than_a_prompt():
    shape = RowShape(prompt_tokens=150, output_tokens=OUTPUT)
    rows = RowsAhead(shape=shape, shared_tokens=550.0, group_rows=2.0)
    assert (700.0, 0.0) == (rows.prefix_tokens, rows.own_tokens)
