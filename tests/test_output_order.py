"""Jobs whose output has the order of the input."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
from typer.testing import CliRunner

import raybatch
from raybatch.cli import app
from raybatch.errors import ConfigError
from raybatch.job import Job
from raybatch.outputs.rebuilt import report_of
from tests.stages.support import fake_stage, local_ray, make_tokenizer, write_parquet
from tests.test_resume import run_until

NUM_ROWS = 60
# neighbours in the input share no prefix, so that the plan brings them into another order
TEXTS = [f"document {i % 5} " * 12 + f"question {i}" for i in range(NUM_ROWS)]
PLAN = {"unit_rows": 8, "max_unit_rows": 8}

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module", autouse=True)
def cluster():
    with local_ray():
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("model") / "plain", has_chat_template=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    table = pa.table({"text": TEXTS, "kind": [f"k{i % 3}" for i in range(NUM_ROWS)]})
    write_parquet(tmp_path / "in" / "a.parquet", table.slice(0, 40))
    write_parquet(tmp_path / "in" / "b.parquet", table.slice(40))
    return tmp_path


def make_job(folder: Path, model: Path, **options) -> Job:
    stage = fake_stage(model, prompt="{text}", engine={"block_size_tokens": 8}, replicas=1)
    options = {"output_order": "input", "plan": PLAN, **options}
    return Job(folder / "in", folder / "out", stage, **options)


def run(job: Job):
    return job.run(progress=lambda *_: None)


def test_readers_of_the_sink_see_every_row_once_in_the_order_of_the_input(folder, model):
    report = run(make_job(folder, model))
    assert (NUM_ROWS, NUM_ROWS, 0) == (report.rows_in, report.rows_out, report.exit_code())
    assert TEXTS == pq.read_table(folder / "out").column("text").to_pylist()
    assert NUM_ROWS == ray.data.read_parquet(str(folder / "out")).count()
    in_plan_order = pq.read_table(folder / "out" / "_plan_order").column("text").to_pylist()
    assert in_plan_order != TEXTS
    assert sorted(in_plan_order) == sorted(TEXTS)


def test_the_ordered_output_is_verified_and_reported(folder, model):
    run(make_job(folder, model))
    assert raybatch.verify(folder / "out", deep=True).is_complete
    report = report_of(str(folder / "out"))
    assert not report.is_rebuilt
    assert all(name.startswith("data/part-") for name in report.output_files)
    assert 8 == len(report.output_files)


def test_a_second_run_does_nothing(folder, model):
    run(make_job(folder, model))
    before = {path: path.stat().st_mtime_ns for path in (folder / "out").rglob("*.parquet")}
    assert 0 == run(make_job(folder, model)).exit_code()
    assert before == {path: path.stat().st_mtime_ns for path in (folder / "out").rglob("*.parquet")}


def test_a_run_that_was_interrupted_goes_on(folder, model):
    units = folder / "out" / "_plan_order" / "data"
    run_until(make_job(folder, model), lambda: any(units.glob("*.parquet")))
    assert not (folder / "out" / "data").exists()
    so_far = raybatch.verify(folder / "out")
    assert (True, False) == (so_far.is_clean, so_far.is_complete)
    assert NUM_ROWS == report_of(str(folder / "out")).rows_in
    run(make_job(folder, model))
    assert TEXTS == pq.read_table(folder / "out").column("text").to_pylist()


def test_a_run_that_died_while_it_ordered_goes_on(folder, model):
    run(make_job(folder, model))
    for name in ("_SUCCESS", "data/part-000003.parquet"):
        (folder / "out" / name).unlink()
    so_far = raybatch.verify(folder / "out")
    assert (8, False) == (so_far.rows_to_do, so_far.is_complete)
    run(make_job(folder, model))
    assert TEXTS == pq.read_table(folder / "out").column("text").to_pylist()
    assert raybatch.verify(folder / "out", deep=True).is_complete


def test_partitions_hold_their_rows_in_the_order_of_the_input(folder, model):
    run(make_job(folder, model, partition_by=["kind"]))
    for kind in ("k0", "k1", "k2"):
        files = sorted((folder / "out" / "data" / f"kind={kind}").glob("*.parquet"))
        texts = [
            t for f in files for t in pq.read_table(f, partitioning=None).column("text").to_pylist()
        ]
        assert [t for i, t in enumerate(TEXTS) if f"k{i % 3}" == kind] == texts
    assert raybatch.verify(folder / "out", deep=True).is_complete


def test_new_files_follow_the_old_ones(folder, model):
    run(make_job(folder, model))
    new = [f"document 9 question {i}" for i in range(12)]
    table = pa.table({"text": new, "kind": ["k"] * 12})
    write_parquet(folder / "in" / "aa.parquet", table)
    with pytest.raises(ConfigError, match="is new"):
        run(make_job(folder, model))
    run(make_job(folder, model, extend=True))
    assert TEXTS + new == pq.read_table(folder / "out").column("text").to_pylist()
    assert raybatch.verify(folder / "out", deep=True).is_complete


def test_an_output_begun_in_one_order_is_not_gone_on_with_in_the_other(folder, model):
    run(make_job(folder, model))
    with pytest.raises(ConfigError, match="was begun with output_order=input"):
        run(make_job(folder, model, output_order="plan"))


def test_an_output_in_the_order_of_the_plan_is_not_taken_for_one_of_the_input(folder, model):
    run(make_job(folder, model, output_order="plan"))
    with pytest.raises(ConfigError, match="raybatch ordered"):
        run(make_job(folder, model))


def test_overwrite_changes_the_order(folder, model):
    run(make_job(folder, model))
    run(make_job(folder, model, output_order="plan", overwrite=True))
    assert not list((folder / "out" / "_plan_order").rglob("*.parquet"))
    assert 0 == run(make_job(folder, model, output_order="plan")).exit_code()


def test_the_command_copies_an_output_into_the_order_of_the_input(folder, model):
    run(make_job(folder, model, output_order="plan"))
    result = CliRunner().invoke(app, ["ordered", str(folder / "out"), str(folder / "copy")])
    assert 0 == result.exit_code, result.output
    assert TEXTS == pq.read_table(folder / "copy").column("text").to_pylist()


def test_an_unknown_order_is_refused(folder, model):
    with pytest.raises(ConfigError, match="output_order must be one of plan, input"):
        make_job(folder, model, output_order="random")
