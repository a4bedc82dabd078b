"""What a job reads: columns, kinds of files, and what it says about files that it leaves out."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from raybatch.cli.app import app
from raybatch.cli.flags import JOB_OPTIONS, parse_settings, read_job_flags
from raybatch.errors import ConfigError
from raybatch.job.job import Job
from raybatch.report import current_report as report_of
from tests.jobs import LARGE, local_job
from tests.stages.support import fake_stage, write_ipc

pytestmark = pytest.mark.usefixtures("locally", "cluster_where_marked")


def job_of(model, **options):
    stage = {"model": str(model), "prompt": "{text}", "backend": "fake"}
    stage |= options.pop("stage", {})
    return Job.from_mapping({"source": "in", "sink": "out", "stage": stage, **options})


@pytest.mark.parametrize("columns", [["text", "id"], ("text", "id"), "text,id"], ids=type)
def test_columns_are_a_list_or_a_text_with_commas(model, columns):
    assert job_of(model, columns=columns).config.columns == ("text", "id")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"columns": 3}, "columns must be a list of names, got 3"),
        ({"columns": ["text", 3]}, "columns must be a list of names"),
        ({"columns": "id,,text"}, "columns holds an empty name, got 'id,,text'"),
        ({"columns": ["id", ""]}, "columns holds an empty name"),
        ({"columns": []}, "columns must name each column once, and at least one"),
        ({"columns": ["text", "text"]}, "columns must name each column once"),
        ({"schema_policy": "casts"}, r"schema_policy must be one of strict, cast.*mean 'cast'"),
        ({"skip_bad_files": "yes"}, "skip_bad_files must be true or false, got 'yes'"),
        ({"max_row_group_bytes": 0}, "max_row_group_bytes must be a whole number of at least 1"),
        (
            {"max_decompressed_bytes": 0},
            "max_decompressed_bytes must be a whole number of at least 1",
        ),
    ],
    ids=str,
)
def test_bad_option_is_refused(model, option, message):
    with pytest.raises(ConfigError, match=message):
        job_of(model, **option)


NEEDED = {
    "prompt": {"prompt": "{text} {label}"},
    "messages": {"prompt": None, "messages": [{"role": "user", "content": "{text} {label}"}]},
    "messages column": {"prompt": None, "messages": "label"},
    "token ids": {"prompt": None, "tokenized_prompt": "label"},
    "id": {"id_column": "label"},
    "overrides": {"overrides": {"max_tokens": "label"}},
    "sampling": {"sampling_column": "label"},
}


@pytest.fixture
def labelled(tmp_path):
    pq.write_table(pa.table({"text": ["a"], "label": ["b"]}), tmp_path / "in.parquet")
    return tmp_path


@pytest.mark.parametrize("option", NEEDED)
def test_column_that_the_job_reads_must_be_chosen(model, labelled, option):
    job = job_of(model, stage=NEEDED[option], columns=["text"], source=str(labelled))
    with pytest.raises(ConfigError, match=r"columns leaves out 'label', which the job reads; add"):
        job.explain(measure=False)


def test_column_of_expected_tokens_must_be_chosen(model, labelled):
    plan = {"expected_tokens_column": "label"}
    job = job_of(model, plan=plan, columns=["text"], source=str(labelled))
    with pytest.raises(ConfigError, match="columns leaves out 'label'"):
        job.explain(measure=False)


@pytest.mark.parametrize(("name", "hint"), [("nope", ""), ("txet", " .did you mean 'text'..")])
def test_a_chosen_column_that_is_not_there_is_told_before_those_left_out(
    model, labelled, name, hint
):
    where = f"columns: the source has no column '{name}'{hint}; it has text, label"
    with pytest.raises(ConfigError, match=where):
        job_of(model, columns=[name], source=str(labelled)).explain(measure=False)


def test_columns_are_a_flag_and_the_rest_are_settings_of_the_job():
    settings = ["schema_policy=cast", "skip_bad_files=true", "max_row_group_bytes=7"]
    assert parse_settings(settings) == {
        "schema_policy": "cast",
        "skip_bad_files": True,
        "max_row_group_bytes": 7,
    }
    assert read_job_flags(source="in", columns="text,id")["columns"] == "text,id"


def test_every_option_of_a_job_is_known_to_the_flags(model):
    assert set(JOB_OPTIONS) == set(job_of(model).config.__slots__)


def test_command_line_names_a_column_that_is_left_out(tmp_path, model):
    pq.write_table(pa.table({"text": ["a"], "id": ["b"]}), tmp_path / "in.parquet")
    flags = ["--input", str(tmp_path), "--model", str(model), "--prompt", "{text}"]
    result = CliRunner().invoke(app, ["explain", *flags, "--columns", "id", "--no-measure"])
    assert isinstance(result.exception, ConfigError)
    assert "columns leaves out 'text'" in str(result.exception)


def typed_rows(num_rows):
    return pa.table(
        {
            "unused": ["y" * 100] * num_rows,
            "text": [f"text {i}" for i in range(num_rows)],
            "uuid": pa.array([i.to_bytes(16, "big") for i in range(num_rows)], pa.uuid()),
            "json": pa.array([f'{{"i": {i}}}' for i in range(num_rows)], pa.json_()),
        }
    )


def save_to_disk(folder, tables):
    folder.mkdir()
    names = [f"data-{i:05d}-of-{len(tables):05d}.arrow" for i in range(len(tables))]
    for name, table in zip(names, tables, strict=True):
        write_ipc(folder / name, table, "stream", batch_rows=40)
    files = [{"filename": name} for name in names]
    (folder / "state.json").write_text(json.dumps({"_data_files": files}))
    (folder / "dataset_info.json").write_text("{}")


@pytest.mark.parametrize(
    "plan", ["off", {}, pytest.param(LARGE, marks=pytest.mark.ray)], ids=["off", "small", "large"]
)
def test_rows_of_a_saved_dataset_come_out_once_with_the_chosen_columns(model, tmp_path, plan):
    table = typed_rows(200)
    save_to_disk(tmp_path / "in", [table.slice(0, 130), table.slice(130)])
    stage = fake_stage(model, prompt="{text}")
    options = {"plan": plan, "columns": ["json", "text", "uuid"]}
    report = local_job(tmp_path / "in", tmp_path / "out", stage, **options).run(
        progress=print_nothing
    )
    out = pq.read_table(tmp_path / "out").sort_by("text")
    chosen = table.select(["json", "text", "uuid"]).sort_by("text")
    assert (report.rows_lost, report.rows_duplicated) == (0, 0)
    assert out.column_names[:4] == ["json", "text", "uuid", "row_id"]
    assert out.select(["json", "text", "uuid"]).equals(chosen)
    assert sorted(out.column("row_id").to_pylist())[:1] == ["data-00000-of-00002.arrow:0"]


@pytest.mark.parametrize(
    "plan", [{}, pytest.param(LARGE, marks=pytest.mark.ray)], ids=["small", "large"]
)
def test_files_of_several_widths_and_a_bad_one_make_one_output(model, tmp_path, plan):
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"text": ["a"], "n": pa.array([1], pa.int8())}), tmp_path / "in/a.pq")
    pq.write_table(pa.table({"text": pa.array(["b"], pa.large_string())}), tmp_path / "in/b.pq")
    (tmp_path / "in" / "c.pq").write_bytes(b"PAR1")
    options = {"plan": plan, "schema_policy": "cast", "skip_bad_files": True}
    stage = fake_stage(model, prompt="{text}")
    report = local_job(tmp_path / "in", tmp_path / "out", stage, **options).run(
        progress=print_nothing
    )
    out = pq.read_table(tmp_path / "out").sort_by("text")
    assert (report.rows_in, report.rows_out) == (2, 2)
    ((name, reason),) = report.skipped
    assert ("c.pq", True) == (name, bool(reason))
    assert "skipped: 1 file that cannot be read" in report.to_text().splitlines()
    (tmp_path / "out" / "_raybatch" / "report.json").unlink()
    assert report.skipped == report_of(str(tmp_path / "out")).skipped
    assert out.select(["text", "n"]).to_pylist() == [
        {"text": "a", "n": 1},
        {"text": "b", "n": None},
    ]


def print_nothing(stats, num_rows):
    """Take the place of the log lines."""


def test_a_bad_file_that_is_mended_later_is_no_more_left_out(model, tmp_path):
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "in" / "a.pq")
    (tmp_path / "in" / "b.pq").write_bytes(b"PAR1")
    stage = fake_stage(model, prompt="{text}")
    job = {"source": tmp_path / "in", "sink": tmp_path / "out", "stage": stage}
    assert local_job(**job, skip_bad_files=True).run(progress=print_nothing).skipped
    pq.write_table(pa.table({"text": ["b"]}), tmp_path / "in" / "b.pq")
    report = local_job(**job, skip_bad_files=True, extend=True).run(progress=print_nothing)
    assert ((), 2) == (report.skipped, report.rows_out)


def test_a_column_by_which_the_output_is_laid_out_twice_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="partition_by must name each column once"):
        Job(source="in", sink="out", stage=fake_stage(tmp_path), partition_by=["p", "p"])


def table_of(folder):
    return pq.read_table(folder / "data").sort_by("text")


def test_output_in_folders_is_the_source_of_another_job_with_all_its_columns(model, tmp_path):
    """Also without `output_prefix`: columns of the first job stay beside those of the second."""
    rows = pa.table({"text": ["a", "b"], "lang": ["en", "é/ü"], "year": [7, None]})
    pq.write_table(rows, tmp_path / "in.parquet")
    first, again = tmp_path / "first", tmp_path / "again"
    local_job(
        tmp_path / "in.parquet",
        first,
        fake_stage(model, prompt="{text}"),
        partition_by=["lang", "year"],
    ).run()
    for source in (first, first / "data"):
        stage = fake_stage(model, prompt="{lang}: {generated_text}")
        local_job(source, again, stage, overwrite=True).run()
        table = table_of(again)
        assert table["lang"].to_pylist() == ["en", "é/ü"]
        assert table["year"].to_pylist() == ["7", None]
        before = pq.read_table(first / "data", columns=["generated_text"])["generated_text"]
        assert sorted(table["generated_text"].to_pylist()) == sorted(before.to_pylist())
        assert table["stage2_row_id"].null_count == 0
    third = tmp_path / "third"
    local_job(again, third, fake_stage(model, prompt="{stage2_generated_text}")).run()
    assert "stage3_generated_text" in table_of(third).column_names


@pytest.mark.parametrize("kind", ["interval", "run end"])
def test_types_that_the_output_cannot_hold_are_refused_before_it_is_begun(model, tmp_path, kind):
    odd = {
        "interval": pa.array([pa.MonthDayNano([1, 2, 3])]),
        "run end": pa.RunEndEncodedArray.from_arrays(pa.array([1], pa.int32()), ["a"]),
    }[kind]
    write_ipc(tmp_path / "in.arrow", pa.table({"text": ["a"], "odd": odd}))
    stage = fake_stage(model, prompt="{text}")
    with pytest.raises(ConfigError, match="column 'odd' has type"):
        local_job(tmp_path / "in.arrow", tmp_path / "out", stage).run()
    assert not (tmp_path / "out").exists()
    report = local_job(tmp_path / "in.arrow", tmp_path / "out", stage, columns=["text"]).run()
    assert report.rows_out == 1


def test_tensors_of_any_layout_go_through(model, tmp_path):
    values = np.arange(8.0).reshape(2, 2, 2)
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(values)
    pq.write_table(pa.table({"text": ["a", "b"], "x": tensors}), tmp_path / "in.parquet")
    stage = fake_stage(str(model), prompt="{text}")
    local_job(tmp_path / "in.parquet", tmp_path / "out", stage).run()
    found = table_of(tmp_path / "out").column("x").combine_chunks().to_numpy_ndarray()
    assert (found == values).all()


def test_names_of_folders_are_prompts_only_where_that_is_asked_for(model, tmp_path):
    folder = tmp_path / "in" / "prompt=v1"
    folder.mkdir(parents=True)
    write_ipc(folder / "a.arrow", pa.table({"text": ["a"]}))
    places = tmp_path / "in", tmp_path / "out"
    with pytest.raises(ConfigError, match=r"'prompt' comes from folders named prompt=\.\.\."):
        local_job(*places, fake_stage(model)).run()
    assert not (tmp_path / "out").exists()
    assert local_job(*places, fake_stage(model, prompt="{prompt}")).run().rows_out == 1
