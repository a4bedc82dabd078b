"""Jobs with a deadline: what fits is run, the rest stays open, and the next run does it."""

import logging

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raybatch.errors import ConfigError
from raybatch.outputs.verify import verify
from raybatch.report import report_of
from tests.explanation.inputs import keep_costs
from tests.jobs import LARGE, Hold, local_job
from tests.stages.support import fake_stage, write_parquet

pytestmark = pytest.mark.usefixtures("locally", "cluster_where_marked")

NUM_ROWS, UNIT_ROWS, TOKENS = 64, 8, 4
PLAN = {"unit_rows": UNIT_ROWS, "max_unit_rows": UNIT_ROWS, "min_saved_fraction": 1}
# of the fake engine's one row at a time a token takes a day, as the cost model has it
DAY_S = 86400.0
UNIT_S = UNIT_ROWS * TOKENS * DAY_S


@pytest.fixture
def job_of(model, tmp_path, monkeypatch):
    """Makes a job of rows that are alike, with options; `token_s` keeps a cost model for it."""
    monkeypatch.setenv("RAYBATCH_CACHE_DIR", str(tmp_path / "cache"))
    texts = [f"row {i:03d}" for i in range(NUM_ROWS)]
    write_parquet(tmp_path / "in" / "a.parquet", pa.table({"text": texts}))

    def job_of(*, token_s=None, fake=None, plan=PLAN, sink="out", **options):
        stage = fake_stage(
            model,
            prompt="{text}",
            sampling={"max_tokens": TOKENS},
            replicas=1,
            fake={"max_num_seqs": 8, **(fake or {})},
        )
        job = local_job(tmp_path / "in", tmp_path / sink, stage, plan=plan, **options)
        if token_s is not None:
            keep_costs(stage.pool.spec, row_s=token_s, max_num_seqs=1)
        return job

    return job_of


def run(job):
    return job.run(progress=lambda *_: None)


@pytest.mark.parametrize("units", [1, 3, 5])
def test_the_units_that_are_predicted_to_fit_are_run_and_the_rest_later(
    job_of, tmp_path, caplog, units
):
    # of the next unit a half would fit, and no more than the likely error of a forecast of one
    deadline_s = UNIT_S * (units + 0.05)
    report = run(job_of(token_s=DAY_S, deadline_s=deadline_s))
    assert units * UNIT_ROWS <= report.rows_out < NUM_ROWS
    assert (NUM_ROWS - report.rows_out, 0) == (report.rows_todo, report.rows_lost)
    message = f"{units * UNIT_ROWS} of {NUM_ROWS} rows are predicted to be done"
    assert message in caplog.text
    assert report.stopped.startswith(f"deadline_s: {report.rows_out} rows were done in ")
    assert f"{report.rows_todo} stay open" in report.stopped
    assert report.stopped == report_of(str(tmp_path / "out")).stopped
    assert 1 == report.exit_code()
    assert 0 == run(job_of()).exit_code()
    assert 0 == verify(str(tmp_path / "out")).exit_code()


def test_runs_with_deadlines_come_to_the_answers_of_one_run(job_of, tmp_path):
    for units in (3.05, 2.05, 100):
        report = run(job_of(token_s=DAY_S, deadline_s=UNIT_S * units))
    run(job_of(sink="at-once"))
    by_parts, at_once = (
        pq.read_table(tmp_path / sink / "data").sort_by("row_id") for sink in ("out", "at-once")
    )
    assert 0 == report.exit_code()
    assert at_once == by_parts


def test_more_units_than_predicted_are_run_where_the_run_is_quicker(job_of):
    # five units are predicted, and six at the quick end of what is likely
    report = run(job_of(token_s=DAY_S, deadline_s=UNIT_S * 5.5))
    assert 6 * UNIT_ROWS == report.rows_out


def test_a_deadline_that_all_rows_meet_changes_nothing(job_of, caplog):
    caplog.set_level(logging.INFO)
    report = run(job_of(token_s=1e-9, deadline_s=DAY_S))
    assert (0, "") == (report.exit_code(), report.stopped)
    assert f"all {NUM_ROWS} rows are predicted to be done" in caplog.text


def test_a_deadline_in_which_no_unit_fits_is_refused_before_any_row_runs(job_of, tmp_path):
    log = tmp_path / "finished"
    job = job_of(token_s=DAY_S, deadline_s=UNIT_S * 0.9, fake={"finished_log": str(log)})
    with pytest.raises(ConfigError, match=r"deadline_s=.* first unit of 8 rows .*deadline_s="):
        run(job)
    assert not log.exists()


@pytest.mark.parametrize("plan", [PLAN, {"mode": "off", "unit_rows": UNIT_ROWS}])
def test_without_a_cost_model_a_run_ends_at_its_deadline_and_goes_on_later(
    job_of, tmp_path, caplog, plan
):
    caplog.set_level(logging.INFO)
    hold = Hold(tmp_path, 16)
    report = run(job_of(deadline_s=2.0, fake=hold.options, plan=plan))
    assert "cannot be predicted (" in caplog.text
    assert report.stopped.startswith(f"deadline_s: {report.rows_out} rows were done in ")
    assert report.rows_out < NUM_ROWS
    assert not report.rows_lost
    hold.release()
    assert 0 == run(job_of(deadline_s=DAY_S, fake=hold.options, plan=plan)).exit_code()
    assert 0 == verify(str(tmp_path / "out")).exit_code()


def test_what_is_left_is_predicted_for_the_units_that_are_left(job_of, caplog):
    first = run(job_of(token_s=DAY_S, deadline_s=UNIT_S * 3.05))
    caplog.clear()
    second = run(job_of(token_s=DAY_S, deadline_s=UNIT_S * 2.05))
    assert f"{2 * UNIT_ROWS} of {first.rows_todo} rows are predicted to be done" in caplog.text
    assert first.rows_out + 2 * UNIT_ROWS == second.rows_out


@pytest.mark.ray
def test_units_of_a_large_plan_are_held_to_a_deadline_on_ray(job_of, tmp_path):
    options = {"token_s": DAY_S, "plan": PLAN | LARGE}
    report = run(job_of(deadline_s=UNIT_S * 3.05, **options))
    assert 3 * UNIT_ROWS == report.rows_out
    assert f"{NUM_ROWS - report.rows_out} stay open" in report.stopped
    assert 0 == run(job_of(**options)).exit_code()
    assert 0 == verify(str(tmp_path / "out")).exit_code()


@pytest.mark.parametrize("deadline_s", [0, -1, float("nan"), "soon"])
def test_a_deadline_that_cannot_be_is_refused(job_of, deadline_s):
    with pytest.raises(ConfigError, match="deadline_s must be"):
        job_of(deadline_s=deadline_s)
