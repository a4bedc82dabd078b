import datetime
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raybatch.durable.sink import prepare_sink
from raybatch.errors import ConfigError, RowError
from raybatch.job.job import Job
from raybatch.records.pool_stats import PoolStats
from raybatch.report import RunReport, read_report
from raybatch.rows.schema import OutputSchema
from raybatch.stages.feeder import LLMStage
from tests.jobs import local_job, press_ctrl_c
from tests.stages.support import LocalPool, fake_stage

NUM_ROWS = 1500

pytestmark = pytest.mark.usefixtures("locally", "cluster_where_marked")


def demo_rows(num_rows: int) -> pa.Table:
    texts = [f"t{i}".encode() for i in range(num_rows)]
    texts[3], texts[5] = b"\xff\xfe", None
    moment = datetime.datetime(2024, 2, 29, 1, 2, 3, 456)
    return pa.table(
        {
            "text": pa.array(texts, pa.binary()).view(pa.string()),
            "whole": pa.array([None if i % 3 else i for i in range(num_rows)], pa.int16()),
            "nested": pa.array([[[i, None], []] for i in range(num_rows)]),
            "moment": pa.array([moment] * num_rows, pa.timestamp("us", "Asia/Tokyo")),
            "nowhere": pa.array(range(num_rows), pa.timestamp("us", "Nowhere/City")),
            "label": pa.array([f"l{i % 3}" for i in range(num_rows)]).dictionary_encode(),
            "blob": pa.array([bytes([i % 256]) for i in range(num_rows)]),
        }
    )


class Run(NamedTuple):
    source: pa.Table
    sink: Path
    report: RunReport
    progress: list[tuple[PoolStats, int]]

    def output(self) -> pa.Table:
        """Return the rows in the order of the source, with their positions."""
        table = pq.read_table(self.sink)
        ids = table.column("row_id").to_pylist()
        order = sorted(range(len(ids)), key=lambda i: int(ids[i].rpartition(":")[2]))
        return table.take(order)


@pytest.fixture(scope="module", params=["local", pytest.param("ray", marks=pytest.mark.ray)])
def run(request, model, tmp_path_factory) -> Run:
    if request.param == "ray":
        request.getfixturevalue("cluster")
    folder = tmp_path_factory.mktemp("job")
    table = demo_rows(NUM_ROWS)
    (folder / "in" / "part").mkdir(parents=True)
    pq.write_table(table, folder / "in" / "part" / "a.parquet", row_group_size=600)
    stage = fake_stage(model, prompt="{text}", fake={"step_s": 0.01})
    progress: list[tuple[PoolStats, int]] = []
    job = Job(folder / "in", folder / "out", stage, executor=request.param)
    report = job.run(progress=lambda stats, num_rows: progress.append((stats, num_rows)))
    return Run(table, folder / "out", report, progress)


def test_every_row_comes_out_once_and_is_counted_from_the_files(run):
    assert "rows: 1500 in, 1500 out, 0 lost" in run.report.to_text().splitlines()
    assert run.report.rows_duplicated == 0
    assert pq.read_table(run.sink).num_rows == NUM_ROWS


def test_row_ids_are_file_and_position(run):
    ids = run.output().column("row_id").to_pylist()
    assert ids == [f"part/a.parquet:{i}" for i in range(NUM_ROWS)]


def test_user_columns_are_bit_identical_in_the_files(run):
    assert run.output().select(run.source.column_names).equals(run.source)


def test_every_file_has_the_one_schema(run):
    expected = pa.schema([*run.source.schema, *OutputSchema().arrow()])
    schemas = [pq.read_schema(path) for path in sorted(run.sink.glob("data/*.parquet"))]
    assert schemas
    assert all(schema.equals(expected) for schema in schemas)


def test_bad_rows_are_counted_by_class(run):
    errors = [(e.error_class, e.rows, set(e.row_ids)) for e in run.report.errors]
    assert errors == [("InvalidPrompt", 2, {"part/a.parquet:3", "part/a.parquet:5"})]
    assert run.report.exit_code() == 2


def test_tokens_are_summed_over_the_files(run):
    prompt = sum(len(f"t{i}") for i in range(NUM_ROWS) if i not in (3, 5))
    assert (run.report.prompt_tokens, run.report.generated_tokens) == (prompt, 4 * (NUM_ROWS - 2))


def test_report_lies_below_the_sink(run):
    assert read_report(str(run.sink)) == run.report


def test_progress_is_called_with_the_number_of_rows(run):
    assert {num_rows for _, num_rows in run.progress} == {NUM_ROWS}


def test_last_progress_is_of_the_finished_run(run):
    stats, _ = run.progress[-1]
    assert (stats.rows_received, stats.rows_done) == (NUM_ROWS, NUM_ROWS)


def test_progress_of_a_second_run_counts_that_run_alone(model, tmp_path):
    pq.write_table(pa.table({"text": ["a", "b", "c"]}), tmp_path / "a.parquet")
    stage = fake_stage(model, prompt="{text}", replicas=1)
    progress: list[tuple[PoolStats, int]] = []
    for sink in ("first", "second"):
        job = local_job(tmp_path / "a.parquet", tmp_path / sink, stage)
        job.run(progress=lambda *logged: progress.append(logged))
    stats, num_rows = progress[-1]
    assert (stats.rows_received, stats.rows_done, num_rows) == (3, 3, 3)


def test_errors_of_the_last_progress_are_those_of_the_report(run):
    # the two bad rows never reach the pool
    assert run.progress[-1][0].errors == {e.error_class: e.rows for e in run.report.errors}


def test_run_after_success_generates_nothing_and_reports_the_same(run, model):
    stage = fake_stage(model, prompt="{text}", fake={"step_s": 0.01})
    job = local_job(run.sink.parent / "in", run.sink, stage)
    before = [(p, p.stat().st_mtime_ns) for p in sorted(run.sink.rglob("*")) if p.is_file()]
    assert job.run() == run.report
    after = [(p, p.stat().st_mtime_ns) for p in sorted(run.sink.rglob("*")) if p.is_file()]
    assert after == before


def test_another_job_into_the_same_sink_is_refused_with_what_differs(run, model):
    stage = fake_stage(model, prompt="{text}!", seed=7, fake={"step_s": 0.01})
    message = r"prompt is .*!.* and was .*; sampling\.seed is 7 and was 0"
    with pytest.raises(ConfigError, match=message):
        local_job(run.sink.parent / "in", run.sink, stage).run()


def test_job_in_which_all_rows_fail_has_the_same_schema(model, tmp_path):
    table = demo_rows(8).set_column(0, "text", pa.nulls(8, pa.string()))
    pq.write_table(table, tmp_path / "a.parquet")
    stage = fake_stage(model, prompt="{text}")
    report = local_job(tmp_path / "a.parquet", tmp_path / "out", stage).run(
        progress=lambda *_: None
    )
    expected = pa.schema([*table.schema, *OutputSchema().arrow()])
    assert pq.read_schema(next((tmp_path / "out").glob("data/*.parquet"))).equals(expected)
    assert (report.rows_failed, report.rows_lost) == (8, 0)


@pytest.mark.parametrize("executor", ["local", pytest.param("ray", marks=pytest.mark.ray)])
def test_on_error_raise_ends_the_job_with_the_row(model, tmp_path, executor):
    pq.write_table(demo_rows(8), tmp_path / "a.parquet")
    stage = fake_stage(model, prompt="{text}", on_error="raise")
    job = Job(tmp_path / "a.parquet", tmp_path / "out", stage, executor=executor)
    with pytest.raises(RowError) as caught:
        job.run(progress=lambda *_: None)
    # and without the advice that Ray adds
    expected = "row 'a.parquet:3': InvalidPrompt: column 'text' is not valid UTF-8"
    assert str(caught.value) == expected


@pytest.mark.ray
def test_error_that_ends_a_job_is_left_to_its_exception(cluster, model, tmp_path, capfd):
    pq.write_table(demo_rows(8), tmp_path / "a.parquet")
    stage = fake_stage(model, prompt="{text}", on_error="raise")
    with pytest.raises(RowError):
        Job(tmp_path / "a.parquet", tmp_path / "out", stage).run(progress=lambda *_: None)
    logged = capfd.readouterr().err
    assert "Traceback" not in logged
    assert "issue" not in logged


def test_sink_that_vanishes_during_the_run_is_named(model, tmp_path):
    pq.write_table(demo_rows(8), tmp_path / "a.parquet")
    sink = tmp_path / "out"

    def replace_sink(stats: PoolStats, num_rows: int) -> None:
        if sink.is_dir():
            shutil.rmtree(sink)
            sink.touch()

    job = local_job(
        tmp_path / "a.parquet", sink, fake_stage(model, prompt="{text}", fake={"step_s": 1})
    )
    with pytest.raises(ConfigError) as caught:
        job.run(progress=replace_sink)
    message = str(caught.value)
    assert str(sink) in message
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize("executor", ["local", pytest.param("ray", marks=pytest.mark.ray)])
def test_interrupted_job_says_how_far_it_came_and_what_to_do(model, tmp_path, caplog, executor):
    pq.write_table(demo_rows(8), tmp_path / "a.parquet")
    stage = fake_stage(model, prompt="{text}", fake={"step_s": 1})
    interrupts = iter([press_ctrl_c])

    def interrupt(stats: PoolStats, num_rows: int) -> None:
        if stats.rows_received:
            next(interrupts, lambda: None)()

    job = Job(tmp_path / "a.parquet", tmp_path / "out", stage, executor=executor)
    with pytest.raises(KeyboardInterrupt):
        job.run(progress=interrupt)
    logged = [m for m in caplog.messages if m.startswith("interrupted: ")]
    assert len(logged) == 1
    assert " of 8 rows were done" in logged[0]
    assert "run the same job again to resume" in logged[0]


def test_hub_id_that_cannot_be_had_ends_the_job_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    pq.write_table(demo_rows(8), tmp_path / "a.parquet")
    stage = LLMStage("no-such-owner/no-such-model", prompt="{text}")
    with pytest.raises(ConfigError, match="hf download no-such-owner/no-such-model"):
        local_job(tmp_path / "a.parquet", tmp_path / "out", stage).run()
    assert not (tmp_path / "out").exists()


def test_source_without_rows_leaves_one_empty_file(model, tmp_path):
    table = pa.table({"text": pa.array([], pa.string())})
    pq.write_table(table, tmp_path / "a.parquet")
    stage = fake_stage(model, prompt="{text}")
    report = local_job(tmp_path / "a.parquet", tmp_path / "out", stage).run(
        progress=lambda *_: None
    )
    written = pq.read_table(tmp_path / "out")
    assert (report.rows_in, written.num_rows, written.schema.names[0]) == (0, 0, "text")


def test_collision_with_a_source_column_is_found_before_any_work(model, tmp_path):
    pq.write_table(pa.table({"text": ["a"], "finish_reason": ["b"]}), tmp_path / "a.parquet")
    job = Job(tmp_path / "a.parquet", tmp_path / "out", fake_stage(model, prompt="{text}"))
    with pytest.raises(ConfigError, match="already has a column 'finish_reason'"):
        job.run()


@pytest.mark.parametrize(
    ("column", "options", "message"),
    [
        (pa.array([b"a"]), {"prompt": "{x}"}, "column 'x' has type binary, .* to string"),
        (pa.array([[1]]), {"prompt": "{x}"}, "'x' has type list.* set tokenized_prompt"),
        (pa.array([{"a": 1}]), {"prompt": "{x}"}, "'x' has type struct"),
        (pa.array(["a"]), {"tokenized_prompt": "x"}, "'x' has type string, .* whole numbers"),
        (pa.array([1]), {"messages": "x"}, "'x' has type int64, but messages need a list"),
    ],
)
def test_column_that_can_be_no_prompt_is_refused_before_any_work(
    model, tmp_path, column, options, message
):
    pq.write_table(pa.table({"x": column}), tmp_path / "a.parquet")
    job = Job(tmp_path / "a.parquet", tmp_path / "out", fake_stage(model, **options))
    with pytest.raises(ConfigError, match=message):
        job.run()
    assert not (tmp_path / "out").exists()


def test_template_field_that_is_no_column_is_found_before_any_work(model, tmp_path):
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "a.parquet")
    job = Job(tmp_path / "a.parquet", tmp_path / "out", fake_stage(model, prompt="{txt}"))
    with pytest.raises(ConfigError, match=r"column 'txt' \(did you mean 'text'\?\)"):
        job.run()


@pytest.mark.parametrize("name", ["nothing", "empty"])
def test_old_output_survives_a_model_that_cannot_be_run(tmp_path, name):
    (tmp_path / "empty").mkdir()
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "a.parquet")
    prepare_sink(str(tmp_path / "out"), is_overwrite=False)
    old = tmp_path / "out" / "data" / "part-000000.parquet"
    old.parent.mkdir()
    old.write_bytes(b"old")
    stage = LLMStage(str(tmp_path / name), prompt="{text}")
    with pytest.raises(ConfigError, match=r"does not exist|has no config\.json"):
        Job(tmp_path / "a.parquet", tmp_path / "out", stage, overwrite=True).run()
    assert old.read_bytes() == b"old"


class RestartedPool(LocalPool):
    """A warm pool whose replicas were started again in an earlier run."""

    def stats(self, client: str = "default") -> PoolStats:
        return PoolStats(restarts=3)


def test_restarts_of_earlier_runs_are_not_counted(model, tmp_path):
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "a.parquet")
    stage = fake_stage(model, prompt="{text}")
    stage.pool = RestartedPool(stage.pool.spec)
    # that of another executor would take its place
    report = Job(tmp_path / "a.parquet", tmp_path / "out", stage, executor="ray").run()
    assert report.restarts == 0


def job_options(**changes: Any) -> dict[str, Any]:
    stage = {
        "model": "m",
        "prompt": "{text}",
        "sampling": {"max_tokens": 3},
        "pool": {"replicas": 2},
    }
    return {"source": "in", "sink": "out", "stage": stage, **changes}


def test_mapping_builds_the_same_config_as_the_api():
    stage = LLMStage("m", prompt="{text}", sampling={"max_tokens": 3}, pool={"replicas": 2})
    assert Job.from_mapping(job_options()).config == Job("in", "out", stage).config


def test_yaml_file_builds_a_job(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text("source: in\nsink: out\nstage:\n  model: m\n  prompt: '{text}'\n")
    assert Job.from_yaml(path).config.stage.prompt == "{text}"


def test_a_wave_in_a_job_file_is_on_what_it_says(tmp_path):
    """YAML reads a bare `on` as true."""
    path = tmp_path / "job.yaml"
    path.write_text(
        "source: in\nsink: out\nstage: {model: m, prompt: '{text}'}\n"
        "waves: [{on: truncated, sampling: {max_tokens: 9}}]\n"
    )
    (wave,) = Job.from_yaml(path).config.waves
    assert wave.on == ("truncated",)


@pytest.mark.parametrize("source", [["a.parquet", "b.parquet"], "", None])
def test_source_that_is_no_path_is_refused_with_the_way_out(source):
    with pytest.raises(ConfigError, match="source must be a path"):
        Job(source, "out", LLMStage("m", prompt="{text}"))


def test_missing_job_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="job file not found"):
        Job.from_yaml(tmp_path / "job.yaml")


def test_folder_in_place_of_a_job_file_is_refused_with_the_way_out(tmp_path):
    with pytest.raises(ConfigError, match="is a folder, not a job file; for a dataset use --input"):
        Job.from_yaml(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (job_options(sourc="x"), r"unknown option 'sourc' \(did you mean 'source'\?\)"),
        (job_options(prompt="x"), "option 'prompt' belongs below 'stage'"),
        (job_options(stage={"prompt": "x"}), "'stage' must be a mapping .* 'model'"),
        (job_options(stage={"model": "m", "promt": "x"}), r"stage: unknown option 'promt'"),
        ({"stage": {"model": "m"}}, "job: 'source' is missing; set it, or pass --input on the"),
        ({"source": "a", "stage": {"model": "m"}}, "'sink' is missing; set it, or pass --output"),
        (job_options(limits={"max_cost": 3}), "max_cost needs limits.price_per_engine_hour"),
    ],
)
def test_wrong_job_option_is_refused_with_the_way_out(options, message):
    with pytest.raises(ConfigError, match=message):
        Job.from_mapping(options)


def test_stage_that_is_no_stage_is_refused():
    with pytest.raises(ConfigError, match="what LLMStage"):
        Job("in", "out", "stage")  # type: ignore[arg-type]
