"""Jobs whose output has the order of the input."""

import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import raybatch
from raybatch.cli.app import app
from raybatch.errors import ConfigError
from raybatch.job.job import Job
from raybatch.report import RunReport
from raybatch.report import current_report as report_of
from tests.job.test_resume import run_until
from tests.jobs import local_job
from tests.stages.support import fake_stage, write_parquet

NUM_ROWS = 60
# neighbours in the input share no prefix, so that the plan brings them into another order
TEXTS = [f"document {i % 5} " * 12 + f"question {i}" for i in range(NUM_ROWS)]
TEXTS[7] += " <|eos|><|user|>"
PLAN = {"unit_rows": 8, "max_unit_rows": 8}

pytestmark = pytest.mark.usefixtures("locally", "cluster_where_marked")


@pytest.fixture(scope="module")
def finished(model, tmp_path_factory) -> tuple[Path, RunReport]:
    """A job that is done; its folder is read only."""
    folder = tmp_path_factory.mktemp("finished")
    write_source(folder)
    return folder, run(make_job(folder, model))


@pytest.fixture(scope="module")
def in_plan_order(model, tmp_path_factory) -> Path:
    """A job with the default order that is done; its folder is read only."""
    folder = tmp_path_factory.mktemp("plan-order")
    write_source(folder)
    run(make_job(folder, model, output_order="plan"))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the source of a job."""
    write_source(tmp_path)
    return tmp_path


@pytest.fixture
def copied(finished, tmp_path: Path) -> Path:
    """The job that is done, in a folder that may be changed."""
    shutil.copytree(finished[0], tmp_path, dirs_exist_ok=True)
    return tmp_path


def write_source(folder: Path) -> None:
    table = pa.table({"text": TEXTS, "kind": [f"k{i % 3}" for i in range(NUM_ROWS)]})
    write_parquet(folder / "in" / "a.parquet", table.slice(0, 40))
    write_parquet(folder / "in" / "b.parquet", table.slice(40))


def make_job(folder: Path, model: Path, **options) -> Job:
    stage = fake_stage(model, prompt="{text}", engine={"block_size_tokens": 8}, replicas=1)
    options = {"output_order": "input", "plan": PLAN, **options}
    return local_job(folder / "in", folder / "out", stage, **options)


def run(job: Job) -> RunReport:
    return job.run(progress=lambda *_: None)


def texts_of(sink: Path) -> list[str]:
    return pq.read_table(sink).column("text").to_pylist()


def test_readers_of_the_sink_see_every_row_once_in_the_order_of_the_input(finished):
    folder, report = finished
    assert (NUM_ROWS, NUM_ROWS, 0) == (report.rows_in, report.rows_out, report.exit_code())
    assert TEXTS == texts_of(folder / "out")
    written = texts_of(folder / "out" / "_plan_order")
    assert written != TEXTS
    assert sorted(written) == sorted(TEXTS)


@pytest.mark.ray
def test_a_run_on_ray_and_its_readers_see_the_same_order(folder, model):
    import ray

    run(make_job(folder, model, executor="ray"))
    assert TEXTS == texts_of(folder / "out")
    assert NUM_ROWS == ray.data.read_parquet(str(folder / "out")).count()


def test_the_ordered_output_is_verified_and_reported(finished):
    folder, _ = finished
    assert raybatch.verify(folder / "out", deep=True).is_complete
    report = report_of(str(folder / "out"))
    assert not report.is_rebuilt
    assert all(name.startswith("data/part-") for name in report.output_files)
    assert 8 == len(report.output_files)


def test_a_report_that_is_made_again_knows_the_runs(copied):
    before = report_of(str(copied / "out"))
    (copied / "out" / "_raybatch" / "report.json").unlink()
    made = report_of(str(copied / "out"))
    assert made.is_rebuilt
    assert (before.history, before.output_files) == (made.history, made.output_files)
    assert (1, 2) == (before.special_rows, before.special_tokens)
    assert (1, 2) == (made.special_rows, made.special_tokens)


def test_a_second_run_does_nothing(finished, model):
    folder, _ = finished
    before = times_of(folder / "out")
    assert 0 == run(make_job(folder, model)).exit_code()
    assert before == times_of(folder / "out")


def times_of(sink: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in sink.rglob("*.parquet")}


def test_a_run_that_was_interrupted_goes_on(folder, model):
    units = folder / "out" / "_plan_order" / "data"
    run_until(make_job(folder, model), lambda: any(units.glob("*.parquet")))
    assert not (folder / "out" / "data").exists()
    partial_results = raybatch.verify(folder / "out")
    assert (True, False) == (partial_results.is_clean, partial_results.is_complete)
    assert NUM_ROWS == report_of(str(folder / "out")).rows_in
    run(make_job(folder, model))
    assert TEXTS == texts_of(folder / "out")


def test_a_run_that_died_while_it_ordered_goes_on(copied, model):
    for name in ("_SUCCESS", "data/part-000003.parquet"):
        (copied / "out" / name).unlink()
    partial_results = raybatch.verify(copied / "out")
    assert (8, False) == (partial_results.rows_to_do, partial_results.is_complete)
    run(make_job(copied, model))
    assert TEXTS == texts_of(copied / "out")
    assert raybatch.verify(copied / "out", deep=True).is_complete


def test_partitions_hold_their_rows_in_the_order_of_the_input(folder, model):
    run(make_job(folder, model, partition_by=["kind"]))
    for kind in ("k0", "k1", "k2"):
        files = sorted((folder / "out" / "data" / f"kind={kind}").glob("*.parquet"))
        tables = [pq.read_table(file, partitioning=None) for file in files]
        texts = pa.concat_tables(tables).column("text").to_pylist()
        assert [t for i, t in enumerate(TEXTS) if f"k{i % 3}" == kind] == texts
    assert raybatch.verify(folder / "out", deep=True).is_complete


def test_new_files_follow_the_old_ones(copied, model):
    new = [f"document 9 question {i}" for i in range(12)]
    table = pa.table({"text": new, "kind": ["k"] * 12})
    write_parquet(copied / "in" / "aa.parquet", table)
    with pytest.raises(ConfigError, match="is new"):
        run(make_job(copied, model))
    run(make_job(copied, model, extend=True))
    assert TEXTS + new == texts_of(copied / "out")
    assert raybatch.verify(copied / "out", deep=True).is_complete


def test_new_files_without_the_record_of_the_old_ones_are_refused(copied, model):
    shutil.rmtree(copied / "out" / "_plan_order")
    assert 0 == run(make_job(copied, model)).exit_code()
    table = pa.table({"text": ["a"], "kind": ["k"]})
    write_parquet(copied / "in" / "c.parquet", table)
    with pytest.raises(ConfigError, match="that folder was removed"):
        run(make_job(copied, model, extend=True))


def test_an_output_begun_in_one_order_is_not_gone_on_with_in_the_other(finished, model):
    with pytest.raises(ConfigError, match="was started with output_order=input"):
        run(make_job(finished[0], model, output_order="plan"))


def test_an_output_in_the_order_of_the_plan_is_not_taken_for_one_of_the_input(in_plan_order, model):
    with pytest.raises(ConfigError, match="raybatch ordered"):
        run(make_job(in_plan_order, model))


def test_overwrite_changes_the_order(copied, model):
    run(make_job(copied, model, output_order="plan", overwrite=True))
    assert not list((copied / "out" / "_plan_order").rglob("*.parquet"))
    assert 0 == run(make_job(copied, model, output_order="plan")).exit_code()


def test_the_command_copies_an_output_into_the_order_of_the_input(in_plan_order, tmp_path):
    command = ["ordered", str(in_plan_order / "out"), str(tmp_path / "copy")]
    result = CliRunner().invoke(app, command)
    assert 0 == result.exit_code, result.output
    assert TEXTS == texts_of(tmp_path / "copy")


def test_an_unknown_order_is_refused(tmp_path, model):
    with pytest.raises(ConfigError, match="output_order must be one of plan, input"):
        make_job(tmp_path, model, output_order="random")
