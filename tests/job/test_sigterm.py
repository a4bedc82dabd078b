"""A job that gets SIGTERM keeps its finished rows, and the same job resumes from there."""

import os
import signal

import pytest

from raybatch.errors import RunStopped
from raybatch.planning import run as plan_run
from tests.job.test_resume import check_output, make_job, num_kept, parts_of, write_source
from tests.jobs import Hold

PLAN = {"unit_rows": 600, "max_unit_rows": 600, "min_saved_fraction": 0}
NUM_SHORT = 300

pytestmark = pytest.mark.usefixtures("locally", "cluster_where_marked")


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(
    "executor", ["local", pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.slow])]
)
def test_finished_rows_of_an_open_unit_are_kept_and_the_exit_code_is_1(
    model, tmp_path, caplog, executor
):
    write_source(tmp_path, num_rows=600, lengths=[2] * NUM_SHORT + [400] * 300)
    signals = iter([terminate])

    def stop_when_short_rows_are_done(stats, num_rows):
        if stats.rows_done >= NUM_SHORT:
            next(signals, lambda: None)()

    hold = Hold(tmp_path, NUM_SHORT)
    options = {"num_seqs": 600, "fake": hold.options, "flush_every_s": 600, "executor": executor}
    report = make_job(tmp_path, model, PLAN, **options).run(progress=stop_when_short_rows_are_done)
    assert (1, 600, 0) == (report.exit_code(), report.rows_todo, report.rows_lost)
    assert "SIGTERM: no further unit starts" in caplog.text
    assert not parts_of(tmp_path / "out")
    kept = num_kept(tmp_path / "out")
    assert 0 < kept < 600
    hold.release()
    received = []
    job = make_job(tmp_path, model, PLAN, **options)
    report = job.run(progress=lambda stats, _: received.append(stats.rows_received))
    check_output(tmp_path / "out", report, 600)
    assert 600 - kept == received[-1]


def test_a_job_that_is_stopped_before_it_has_a_plan_says_so(model, tmp_path, monkeypatch):
    write_source(tmp_path)

    def plan(*args):
        terminate()
        raise AssertionError("the signal did not end the plan")

    monkeypatch.setattr(plan_run, "run_small", plan)
    with pytest.raises(RunStopped, match="before any row was running"):
        make_job(tmp_path, model, PLAN).run(progress=lambda *_: None)
    assert not (tmp_path / "out" / "_raybatch" / "plan.json").exists()
