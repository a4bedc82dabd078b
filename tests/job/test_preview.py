"""A first look at a job: some rows, answered as a run would, and nothing written."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.cells import cell_len

from raybatch.errors import ConfigError
from raybatch.explanation.outlook import Extrapolation
from raybatch.job.job import Job
from raybatch.job.preview import Preview
from raybatch.planning.dataset import spread_rows
from raybatch.policy.cost.estimate import Band
from raybatch.rows.schema import OutputSchema
from tests.cli.test_cli import run_main
from tests.jobs import LARGE, local_job
from tests.stages.support import fake_stage, write_parquet

NUM_ROWS = 200
FAKE = {"error_on": ord("7"), "lengths": "hash"}

pytestmark = pytest.mark.usefixtures("locally")


@pytest.fixture
def source(tmp_path):
    for file in range(4):
        numbers = range(file * 50, file * 50 + 50)
        texts = ["" if i == 199 else f"question {i}" for i in numbers]
        write_parquet(tmp_path / "in" / f"{file}.parquet", pa.table({"text": texts}))
    return tmp_path / "in"


def stage_of(model, **options):
    return fake_stage(model, prompt="{text}", fake=FAKE, **options)


def files_below(folder):
    return sorted(path.relative_to(folder) for path in folder.rglob("*"))


def test_rows_are_those_that_a_run_writes_and_nothing_else_is_written(tmp_path, model, source):
    job = local_job(source, tmp_path / "out", stage_of(model))
    before = files_below(tmp_path)
    preview = job.preview(20)
    assert files_below(tmp_path) == before
    job.run()
    written = {row["row_id"]: row for row in pq.read_table(tmp_path / "out").to_pylist()}
    ids = [f"{n // 50}.parquet:{n % 50}" for n in spread_rows(NUM_ROWS, 20)]
    assert preview.rows.column("row_id").to_pylist() == ids
    names = ("text", "generated_text", "finish_reason", "__inference_error__")
    assert [{n: row[n] for n in names} for row in preview.rows.to_pylist()] == [
        {n: written[row_id][n] for n in names} for row_id in ids
    ]
    assert preview.prompts == tuple(preview.rows.column("text").to_pylist())


def test_a_second_look_shows_the_same_and_leaves_a_started_output_alone(tmp_path, model, source):
    job = local_job(source, tmp_path / "out", stage_of(model))
    first = job.preview(5)
    job.run()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    again = local_job(source, tmp_path / "out", stage_of(model), overwrite=True).preview(5)
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    assert again.rows.drop_columns(["group_id"]).equals(first.rows.drop_columns(["group_id"]))


def test_fewer_rows_than_the_limit_are_all_shown_with_their_errors(tmp_path, model, source):
    stage = stage_of(model, on_error="raise")
    preview = local_job(source, tmp_path / "out", stage).preview(1000)
    assert preview.rows.num_rows == NUM_ROWS
    errors = preview.rows.column("__inference_error__").to_pylist()
    assert errors[199].startswith("InvalidPrompt")
    assert preview.num_failed == 1 + sum("7" in str(n) for n in range(NUM_ROWS))
    assert preview.exit_code() == 2
    assert "failed: InvalidPrompt: " in str(preview)
    assert preview.rest.prompt_tokens.low == preview.rest.prompt_tokens.high
    assert preview.rest.generated_tokens.expected == sum(
        n or 0 for n in preview.rows.column("num_generated_tokens").to_pylist()
    )


def test_waves_and_samples_are_those_of_the_job(tmp_path, model, source):
    stage = stage_of(model, sampling={"max_tokens": 2, "n": 2, "temperature": 1.0})
    waves = [{"on": ["truncated"], "sampling": {"max_tokens": 300}}]
    job = local_job(source, tmp_path / "out", stage, waves=waves, plan="off")
    preview = job.preview(4)
    assert [len(texts) for texts in preview.rows.column("generated_text").to_pylist()] == [2] * 4
    assert max(preview.rows.column("attempts").to_pylist()) == 2
    assert "(2) " in preview.to_text()


def test_values_of_rows_that_are_not_shown_are_not_read(tmp_path, model):
    ids = ["same"] * 2 + [str(n) for n in range(NUM_ROWS)]
    texts = ["x"] * len(ids)
    write_parquet(tmp_path / "in" / "a.parquet", pa.table({"id": ids, "text": texts}))
    job = local_job(tmp_path / "in", tmp_path / "out", stage_of(model, id_column="id"))
    assert job.preview(3).rows.num_rows == 3
    with pytest.raises(ConfigError, match="same"):
        job.run()


def test_rows_that_a_plan_reorders_are_shown_in_the_order_of_the_input(tmp_path, model):
    texts = [f"{'abc'[n % 3] * 64} question {n}" for n in range(30)]
    write_parquet(tmp_path / "in" / "a.parquet", pa.table({"text": texts}))
    plan = {"unit_rows": 4, "max_unit_rows": 4}
    preview = local_job(tmp_path / "in", tmp_path / "out", stage_of(model), plan=plan).preview(12)
    assert len(set(preview.rows.column("group_id").to_pylist())) == 3
    assert preview.prompts == tuple(texts[n] for n in spread_rows(30, 12))
    assert preview.rows.column("text").to_pylist() == list(preview.prompts)


def test_a_source_without_rows_has_nothing_to_show(tmp_path, model):
    write_parquet(tmp_path / "in" / "a.parquet", pa.table({"text": pa.array([], pa.string())}))
    preview = local_job(tmp_path / "in", tmp_path / "out", stage_of(model)).preview()
    assert (preview.rows.num_rows, preview.rest, preview.exit_code()) == (0, None, 0)
    assert "the source has no rows" in str(preview)
    assert "generated_text" in preview.rows.column_names


@pytest.mark.parametrize("limit", [0, -1, 2.5, True, "3"])
def test_a_limit_that_is_no_number_of_rows_is_refused(tmp_path, model, limit):
    job = local_job(tmp_path / "in", tmp_path / "out", stage_of(model))
    with pytest.raises(ConfigError, match="limit must be a whole number of rows of at least 1"):
        job.preview(limit)


def test_a_limit_as_an_option_names_the_preview(tmp_path, model):
    with pytest.raises(ConfigError, match=r"preview\(20\).*--limit 20"):
        Job(tmp_path / "in", tmp_path / "out", stage_of(model), limit=20)


@pytest.mark.ray
def test_rows_on_ray_are_those_without(tmp_path, model, source, cluster):
    local = local_job(source, tmp_path / "out", stage_of(model)).preview(6)
    job = Job(source, tmp_path / "out", stage_of(model), plan=LARGE, executor="ray")
    assert job.preview(6).rows.equals(local.rows)
    assert not (tmp_path / "out").exists()


def test_the_command_shows_rows_without_an_output(monkeypatch, capsys, model, source):
    command = ["run", "--input", str(source), "--prompt", "{text}", "--model", str(model)]
    command += ["--local", "--set", "backend.kind=fake", "--max-tokens", "3"]
    assert run_main(monkeypatch, *command, "--limit", "3") == 0
    shown = capsys.readouterr()
    first, *lines = shown.out.splitlines()
    assert first == f"raybatch preview: 3 rows of 200 in {source} with {model}"
    assert max(cell_len(line) for line in lines if line.startswith("|")) <= 100
    assert [f"question {n}" in shown.out for n in spread_rows(NUM_ROWS, 3)] == [True] * 3
    assert "all rows  200; prompts have about" in shown.out
    assert "nothing was written" in shown.out
    assert run_main(monkeypatch, *command, "--limit", "0") == 1
    assert "error: limit must be" in capsys.readouterr().err


def test_a_batch_file_is_not_looked_at(monkeypatch, capsys):
    assert run_main(monkeypatch, "run", "in.jsonl", "--openai", "-o", "x", "--limit", "3") == 1
    assert "--limit" in capsys.readouterr().err


def shown(prompt, answer, *, width=60, reason="stop", error="", rest=None):
    columns = {
        "row_id": ["a:1"],
        "generated_text": [answer],
        "finish_reason": [reason],
        "__inference_error__": [error],
    }
    preview = Preview(
        source="in",
        model="m",
        rows=pa.table(columns),
        prompts=(prompt,),
        output=OutputSchema(),
        rest=rest,
    )
    return preview.to_text(width)


def test_the_speed_of_few_rows_is_told_as_a_least_one():
    rest = Extrapolation(
        num_rows=4000,
        num_sampled=20,
        num_replicas=2,
        prompt_tokens=Band(expected=1e6, low=1e6, high=1e6),
        generated_tokens=Band(expected=1e4, low=1e4, high=1e4),
        no_time="not measured",
        slowest_s=100.0,
        sampled_tokens=5000.0,
        sampled_s=0.5,
    )
    text = shown("a", "b", rest=rest)
    few = "; 20 rows may not fill an engine"
    assert f"at least 10,000 tokens/s a replica: 5,000 of prompts and answers in 0.5 s{few}" in text
    assert "at most about 1 min 40 s on 2 replicas, at that speed" in text
    assert few not in shown("a", "b", rest=replace(rest, num_sampled=4000))


def test_long_prompts_lose_their_middle():
    text = shown("begin " + "x" * 5000 + " end", "short", width=120)
    assert "begin" in text
    assert "x end" in text
    assert "[... 4,530 characters ...]" in text


def test_wide_characters_stay_in_their_column_and_controls_are_shown_as_text():
    text = shown("\u6f22" * 100 + "[bold]\x1b[31m", "\u202eevil\tx", width=40)
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "[bold]" in text
    assert {cell_len(line) for line in text.splitlines() if line.startswith("|a:1")} == {40}


def test_an_answer_that_was_cut_says_so():
    assert "[ended by max_tokens]" in shown("p", "some text", width=120, reason="length")


def test_rows_of_vectors_show_their_size():
    rows = pa.table(
        {"row_id": ["a"], "embeddings": [np.zeros(8, np.float32)], "__inference_error__": [""]}
    )
    preview = Preview(
        source="in",
        model="m",
        rows=rows,
        prompts=("p",),
        output=OutputSchema(task="embed"),
        rest=None,
    )
    assert "8 numbers" in preview.to_text()
    assert "8 numbers" in preview._repr_html_()
