"""What is known of a deadline before a job runs, from a cost model that the test keeps."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from raybatch.config import PlanConfig
from raybatch.explanation.outlook import work_of_units
from raybatch.explanation.query import work_of_plan
from raybatch.explanation.record import Explanation
from raybatch.job.job import Job
from raybatch.policy.cost.estimate import estimate
from tests.clusters import local_ray
from tests.explanation.inputs import costs_of, grouped_prompts, keep_costs, plan_prompts
from tests.stages.support import fake_stage, make_tokenizer, write_parquet

NUM_ROWS, UNIT_ROWS, TOKENS = 64, 8, 4
# where a token takes a second and an engine has one row at a time
ALL_S = NUM_ROWS * TOKENS


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("model") / "plain", has_chat_template=False)


@pytest.fixture
def explain(model, tmp_path, monkeypatch):
    """Explains a job of rows that are alike, on two engines, with options of the job."""
    monkeypatch.setenv("RAYBATCH_CACHE_DIR", str(tmp_path / "cache"))
    texts = [f"row {i:03d}" for i in range(NUM_ROWS)]
    write_parquet(tmp_path / "in" / "a.parquet", pa.table({"text": texts}))

    def explain(*, row_s=1.0, start_s=0.0, max_num_seqs=1, plan=None, **options):
        stage = fake_stage(model, prompt="{text}", sampling={"max_tokens": TOKENS})
        units = {"unit_rows": UNIT_ROWS, "max_unit_rows": UNIT_ROWS, "min_saved_fraction": 1}
        job = Job(tmp_path / "in", tmp_path / "out", stage, plan=units | (plan or {}), **options)
        if row_s is not None:
            costs = {"row_s": row_s, "start_s": start_s}
            keep_costs(stage.pool.spec, max_num_seqs=max_num_seqs, **costs)
        return job.explain(measure=False)

    return explain


@pytest.mark.parametrize("units", [1, 3, 7])
def test_rows_in_time_are_whole_units_on_the_engines_of_the_job(explain, units):
    found = explain(deadline_s=ALL_S / 2 * units / 8 + 1, start_s=0.5)
    rows = found.deadline.rows
    assert (units * UNIT_ROWS, NUM_ROWS) == (rows.rows_in_time, rows.num_rows)
    assert rows.done_after_s == pytest.approx(0.5 + ALL_S / 2 * units / 8, rel=0.01)
    message = f"{units * UNIT_ROWS} of {NUM_ROWS} rows are predicted to be done"
    assert message in str(found)
    assert "are left to the next run" in str(found)


def test_where_all_rows_are_in_time_that_is_said(explain):
    assert f"all {NUM_ROWS} rows are predicted" in str(explain(deadline_s=ALL_S))


def test_where_no_row_is_in_time_the_least_that_would_do_is_said(explain):
    found = explain(deadline_s=3.0)
    assert 0 == found.deadline.rows.rows_in_time
    assert "no row is predicted to be done within 3.0 s: the first unit of 8 rows needs 16 s" in (
        str(found)
    )


@pytest.mark.parametrize(("share", "replicas"), [(1.1, 1), (0.6, 2)])
def test_the_fewest_engines_that_meet_the_deadline_are_marked(explain, share, replicas):
    found = explain(deadline_s=ALL_S * share)
    assert replicas == found.deadline.chosen.num_replicas
    (line,) = (line for line in str(found).splitlines() if "the cheapest in time" in line)
    assert str(replicas) == line.split()[0]
    numbers = {one.num_replicas for one in found.deadline.choices}
    assert {1, 2} <= numbers


def test_a_deadline_that_no_engines_meet_says_what_the_quickest_take(explain):
    found = explain(deadline_s=1.0)
    assert found.deadline.chosen is None
    quickest = min(one.done_after_s for one in found.deadline.choices)
    assert "None meets the deadline: the fastest needs" in str(found)
    assert quickest > 1.0


def test_fewer_rows_at_once_are_compared_and_of_equals_the_most_are_taken(explain):
    found = explain(deadline_s=1e6, max_num_seqs=8)
    assert {8, 4, 2} == {one.max_num_seqs for one in found.deadline.choices}
    assert 8 == found.deadline.chosen.max_num_seqs


def test_without_a_cost_model_nothing_is_predicted(explain):
    found = explain(deadline_s=60.0, row_s=None)
    assert found.deadline.rows is None
    assert "no prediction: this model has not been measured" in str(found)


def test_without_a_deadline_nothing_is_said_of_one(explain):
    assert explain().deadline is None


@pytest.mark.parametrize("row_s", [1.0, None])
def test_an_explanation_with_a_deadline_is_read_back(explain, row_s):
    found = explain(deadline_s=100.0, row_s=row_s)
    assert found == Explanation.from_mapping(found.to_mapping(), where="file")
    assert "Deadline" in found.to_html()


def test_rows_of_an_earlier_deadline_are_in_time_for_a_later_one(explain):
    predicted = [
        explain(deadline_s=t).deadline.rows.rows_in_time for t in (5, 20, 40, 77, 130, 200)
    ]
    assert sorted(predicted) == predicted


@pytest.mark.ray
def test_units_of_a_large_plan_are_taken_for_alike(explain):
    with local_ray():
        found = explain(deadline_s=ALL_S / 4 + 1, plan={"max_driver_bytes": 0})
    assert NUM_ROWS // 2 == found.deadline.rows.rows_in_time


@pytest.fixture
def planned(rng):
    sizes = {"unit_rows": UNIT_ROWS, "max_unit_rows": UNIT_ROWS}
    return plan_prompts(grouped_prompts(rng), **sizes)


def test_all_units_are_the_work_of_the_plan(planned):
    work, plan = work_of_units(PlanConfig(), planned), PlanConfig()
    assert work_of_plan(plan, planned) == work.of_first(work.num_units)
    assert planned.num_rows == work.rows_of_first(work.num_units)


def test_the_work_of_units_grows_by_the_rows_of_each(planned):
    work = work_of_units(PlanConfig(), planned)
    rows = [work.of_first(n).num_rows for n in range(1, work.num_units + 1)]
    assert np.cumsum(work.unit_rows).tolist() == rows


def test_units_that_are_done_are_no_work(planned):
    whole = work_of_units(PlanConfig(), planned)
    todo = np.arange(whole.num_units) >= 2
    left = work_of_units(PlanConfig(), planned, todo=todo)
    rows = planned.num_rows - whole.rows_of_first(2)
    assert rows == left.of_first(left.num_units).num_rows


def test_units_below_a_sink_may_be_others_than_those_of_a_plan_made_now(planned):
    # all rows but the last are one unit
    unit_of_row = np.zeros(planned.num_rows, np.int64)
    unit_of_row[-1] = 1
    stored = {"unit_rows": np.array([planned.num_rows - 1, 1]), "unit_of_row": unit_of_row}
    work = work_of_units(PlanConfig(), planned, **stored)
    assert planned.num_rows - 1 == work.of_first(1).num_rows
    first = work_of_units(PlanConfig(), planned, **stored, todo=np.array([False, True]))
    assert 1 == first.of_first(1).num_rows


def test_a_unit_of_rows_that_no_engine_sees_is_no_work(planned):
    # three rows more, which are last
    more = replace(planned, num_rows=planned.num_rows + 3, skipped={"error": 3})
    unit_of_row = np.concatenate([np.ones(planned.num_rows, np.int64), np.zeros(3, np.int64)])
    sizes = np.array([3, planned.num_rows])
    work = work_of_units(PlanConfig(), more, unit_rows=sizes, unit_of_row=unit_of_row)
    assert 0 == work.of_first(1).num_rows
    assert 0.0 == estimate(costs_of(row_s=1.0), work.of_first(1)).wall_s
