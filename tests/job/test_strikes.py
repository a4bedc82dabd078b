"""Jobs with rows that end every engine, over several drivers."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raybatch.actors.pool import release_pools
from raybatch.actors.wire.columns import crash_error
from raybatch.durable.journal import CrashCounts, read_crash_counts, write_crash_counts
from raybatch.durable.storage import open_store
from raybatch.job.job import Job
from raybatch.planning.store import read_all_units, read_plans
from tests.job.test_resume import run_until
from tests.jobs import store_plan
from tests.stages.support import fake_stage, write_parquet

POISON = "~"
PLAN = {"mode": "off", "unit_rows": 4, "max_unit_rows": 4}

pytestmark = pytest.mark.usefixtures("locally", "cluster_where_marked")


def make_job(folder, model, texts, *, executor="local", **options):
    write_parquet(folder / "in" / "0.parquet", pa.table({"text": texts}))
    stage = fake_stage(model, prompt="{text}", replicas=1, fake={"crash_on": ord(POISON)})
    return Job(folder / "in", folder / "out", stage, plan=PLAN, executor=executor, **options)


def plan_of(folder):
    return read_all_units(str(folder / "out"), read_plans(str(folder / "out")))


def crash_counts_of(folder, unit):
    store, plan = open_store(str(folder / "out")), plan_of(folder)
    return read_crash_counts(store, plan.unit(unit), plan_hash=plan.hash)


def leave(folder, unit, crash_counts):
    store, plan = open_store(str(folder / "out")), plan_of(folder)
    write_crash_counts(store, plan.unit(unit), crash_counts, plan_hash=plan.hash)


def errors_of(folder):
    rows = pq.read_table(folder / "out").to_pylist()
    return {row["text"]: row["__inference_error__"] for row in rows}


def cut_at_first_death(folder, model, texts, **options):
    """Run a job until a death is written down, and end its driver and its engines then."""
    job = make_job(folder, model, texts, **options)
    run_until(job, lambda: any(Path(job.config.sink, "_raybatch").glob("attempts/*/*.json")))
    release_pools()


@pytest.mark.parametrize(
    "executor", ["local", pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.slow])]
)
def test_a_death_is_written_down_while_the_run_goes_on(model, tmp_path, executor):
    cut_at_first_death(tmp_path, model, ["a", "b", POISON, "c"], executor=executor)
    assert 1 <= crash_counts_of(tmp_path, 0).crashes[2]


def test_a_row_that_ended_engines_of_earlier_drivers_is_given_up_at_its_third_death(
    model, tmp_path
):
    texts = ["a", "b", POISON, "c"]
    store_plan(make_job(tmp_path, model, texts))
    leave(tmp_path, 0, CrashCounts(crashes={2: 2}))
    report = make_job(tmp_path, model, texts).run(progress=lambda *_: None)
    # it went alone at once: more deaths would have been counted
    errors = {"a": "", "b": "", "c": "", POISON: crash_error(3)}
    assert errors == errors_of(tmp_path)
    assert (2, 1) == (report.exit_code(), report.rows_failed)


def test_a_row_that_was_given_up_is_not_asked_by_the_next_driver(model, tmp_path):
    texts, waves = ["a", "b", POISON, "c"], [{"on": "crashed", "sampling": {"max_tokens": 2}}]
    store_plan(make_job(tmp_path, model, texts, waves=waves))
    leave(tmp_path, 0, CrashCounts(crashes={2: 7}, given_up=frozenset({2})))
    report = make_job(tmp_path, model, texts, waves=waves).run(progress=lambda *_: None)
    assert (crash_error(7), 2) == (errors_of(tmp_path)[POISON], report.exit_code())


def test_crashes_go_when_the_output_is_complete(model, tmp_path):
    cut_at_first_death(tmp_path, model, ["a", POISON])
    make_job(tmp_path, model, ["a", POISON]).run(progress=lambda *_: None)
    assert not list((tmp_path / "out" / "_raybatch" / "attempts").rglob("*.json"))
