"""Error rows of a finished job run again, into a separate folder."""

from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

import raybatch
from raybatch.errors import ConfigError
from raybatch.job.job import Job
from tests.jobs import LARGE, local_job
from tests.outputs.support import contents
from tests.stages.support import fake_stage, make_tokenizer, write_parquet

NUM_ROWS = 30
LONG = [4, 11, 29]

pytestmark = pytest.mark.usefixtures("locally", "cluster_where_marked")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A finished job whose long prompts are error rows."""
    folder = tmp_path_factory.mktemp("retry")
    make_tokenizer(folder / "model", has_chat_template=False)
    texts = ["x" * 60 if i in LONG else f"t{i}" for i in range(NUM_ROWS)]
    write_parquet(folder / "in" / "a.parquet", pa.table({"text": texts}))
    assert make_job(folder, "error").run(progress=lambda *_: None).exit_code() == 2
    return folder


def make_job(
    folder: Path,
    on_too_long: str,
    plan: dict[str, object] | str | None = None,
    *,
    prompt: str = "{text}",
    **options: object,
) -> Job:
    stage = fake_stage(
        folder / "model",
        prompt=prompt,
        on_too_long=on_too_long,
        engine={"max_model_len": 40},
        replicas=1,
    )
    return local_job(folder / "in", folder / "out", stage, plan=plan or {"unit_rows": 8}, **options)


PLANS = [
    pytest.param({"unit_rows": 8}, id="small"),
    pytest.param({"unit_rows": 8, **LARGE}, id="large", marks=pytest.mark.ray),
    pytest.param("off", id="off"),
]


@pytest.mark.parametrize("plan", PLANS)
def test_error_rows_get_answers_under_their_ids_and_nothing_else_changes(folder, tmp_path, plan):
    before = contents(folder / "out")
    job = make_job(folder, "truncate_left", plan)
    report = job.retry_errors(tmp_path / "new", progress=lambda *_: None)
    assert (3, 3, 0) == (report.rows_in, report.rows_out, report.exit_code())
    assert before == contents(folder / "out")
    old, new = pq.read_table(folder / "out"), pq.read_table(tmp_path / "new")
    assert old.schema == new.schema
    # as docs/how-to/resume-and-retry.md has it
    is_replaced = pc.is_in(old["row_id"], value_set=new["row_id"])
    ids = pa.concat_tables([old.filter(pc.invert(is_replaced)), new])["row_id"].to_pylist()
    assert sorted(ids) == sorted(f"a.parquet:{i}" for i in range(NUM_ROWS))
    assert sorted(new.column("row_id").to_pylist()) == sorted(f"a.parquet:{i}" for i in LONG)
    assert raybatch.verify(tmp_path / "new", deep=True).is_complete


def test_a_second_retry_of_the_same_rows_does_nothing(folder, tmp_path):
    job = make_job(folder, "truncate_left")
    job.retry_errors(tmp_path / "new", progress=lambda *_: None)
    before = contents(tmp_path / "new")
    job.retry_errors(tmp_path / "new", progress=lambda *_: None)
    assert before == contents(tmp_path / "new")


def test_a_retry_of_other_statuses_is_another_job(folder, tmp_path):
    job = make_job(folder, "truncate_left")
    job.retry_errors(tmp_path / "new", statuses=["too_long"], progress=lambda *_: None)
    before = contents(tmp_path / "new")
    with pytest.raises(ConfigError, match="statuses is too_long,truncated and was too_long"):
        job.retry_errors(tmp_path / "new", statuses=["truncated", "too_long"])
    assert before == contents(tmp_path / "new")


def test_a_retry_of_no_rows_is_a_finished_output(folder, tmp_path):
    job = make_job(folder, "error")
    report = job.retry_errors(tmp_path / "new", statuses=["crashed"], progress=lambda *_: None)
    assert (0, 0) == (report.rows_in, report.exit_code())
    assert "row_id" in pq.read_table(tmp_path / "new").column_names


@pytest.mark.parametrize("name", ["", "data", "retried", "_retried"])
def test_a_folder_of_the_output_itself_is_refused(folder, name):
    before = contents(folder / "out")
    with pytest.raises(ConfigError, match="inside"):
        make_job(folder, "error").retry_errors(folder / "out" / name)
    assert before == contents(folder / "out")


def test_a_folder_that_the_job_itself_would_read_is_refused(folder):
    with pytest.raises(ConfigError, match="is inside the source"):
        make_job(folder, "error").retry_errors(folder / "in" / "retried")
    assert ["a.parquet"] == [path.name for path in (folder / "in").iterdir()]


def test_a_link_into_the_output_is_refused(folder, tmp_path):
    before = contents(folder / "out")
    (tmp_path / "link").symlink_to(folder / "out")
    with pytest.raises(ConfigError, match="is inside the output"):
        make_job(folder, "error", overwrite=True).retry_errors(tmp_path / "link")
    assert before == contents(folder / "out")


KINDS = pa.array(["a/b", None, "", "é x"] * 8)
YEARS = pa.array([2024, 2025, None] * 10, pa.int16())


@pytest.mark.parametrize("order", ["plan", "input"])
def test_error_rows_of_a_partitioned_output_get_the_values_that_its_folders_say(tmp_path, order):
    make_tokenizer(tmp_path / "model", has_chat_template=False)
    table = pa.table(
        {
            "kind": KINDS.slice(0, NUM_ROWS),
            "text": ["x" * 60 if i in LONG else f"t{i}" for i in range(NUM_ROWS)],
            "year": YEARS,
            "is_new": [i % 2 == 0 for i in range(NUM_ROWS)],
        }
    )
    write_parquet(tmp_path / "in" / "a.parquet", table)

    options = {"partition_by": ["kind", "year", "is_new"], "output_order": order}
    options["prompt"] = "{text} {is_new}"
    assert 2 == make_job(tmp_path, "error", **options).run(progress=lambda *_: None).exit_code()
    job = make_job(tmp_path, "truncate_left", **options)
    report = job.retry_errors(tmp_path / "new", progress=lambda *_: None)
    assert (3, 3, 0) == (report.rows_in, report.rows_out, report.exit_code())
    assert folders_of(tmp_path / "new") <= folders_of(tmp_path / "out")
    files = list((tmp_path / "new" / "data").rglob("*.parquet"))
    ids = [i for f in files for i in pq.read_table(f, partitioning=None)["row_id"].to_pylist()]
    assert sorted(f"a.parquet:{i}" for i in LONG) == sorted(ids)
    assert raybatch.verify(tmp_path / "new", deep=True).is_complete


def folders_of(sink: Path) -> set[str]:
    return {str(path.parent.relative_to(sink)) for path in (sink / "data").rglob("*.parquet")}
