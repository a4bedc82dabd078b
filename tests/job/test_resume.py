"""Jobs that stop half way and are run again, and jobs that run twice at once."""

import errno
import io
import json
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raybatch.durable import storage as local_module
from raybatch.durable.run_log import live_runs, read_events, run_ids
from raybatch.durable.storage import open_store
from raybatch.errors import ConfigError
from raybatch.job.job import Job
from raybatch.report import RunReport, report_of
from raybatch.text.tokenizer import Tokenizer
from tests.jobs import LARGE, Hold, local_job, press_ctrl_c
from tests.stages.support import fake_stage, write_ipc, write_parquet

NUM_ROWS = 96
PLANS = {
    "small": {"unit_rows": 8, "max_unit_rows": 8},
    "large": {"unit_rows": 8, "max_unit_rows": 8, **LARGE},
    "off": {"mode": "off", "unit_rows": 8},
}
EACH_PLAN = [
    pytest.param(plan, id=name, marks=[pytest.mark.ray] if name == "large" else [])
    for name, plan in PLANS.items()
]

pytestmark = pytest.mark.usefixtures("locally", "cluster_where_marked")


def write_source(folder: Path, *, num_rows: int = NUM_ROWS, lengths: list[int] | None = None):
    table = pa.table(
        {
            "text": [
                f"document {i * 10 // num_rows} " * 13 + f"question {i}" for i in range(num_rows)
            ],
            "number": pa.array(range(num_rows)),
            "most": lengths or [4] * num_rows,
        }
    )
    for start in range(0, num_rows, 40):
        write_parquet(folder / "in" / f"{start:04d}.parquet", table.slice(start, 40))


def make_job(
    folder: Path,
    model: Path,
    plan: dict[str, Any],
    *,
    num_seqs: int = 8,
    fake: Mapping[str, Any] | None = None,
    **options: Any,
) -> Job:
    stage = fake_stage(
        model,
        prompt="{text}",
        overrides={"max_tokens": "most"},
        engine={"block_size_tokens": 8},
        replicas=1,
        fake={"max_num_seqs": num_seqs, **(fake or {})},
    )
    return local_job(folder / "in", folder / "out", stage, plan=plan, **options)


def parts_of(sink: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sink.glob("data/*.parquet")}


def num_kept(sink: Path) -> int:
    """Return how many finished rows of open units are in the journal."""
    return sum(int(path.name.split("-")[1]) for path in sink.glob("_raybatch/frag/*/*.arrow"))


def run_until(job: Job, is_enough: Callable[[], bool]) -> None:
    """Run a job as if somebody pressed Ctrl-C as soon as `is_enough` says so."""
    is_over = threading.Event()

    def interrupt() -> None:
        try:
            while not is_over.wait(0.01) and not is_enough():
                pass
        finally:
            if not is_over.is_set():
                press_ctrl_c()

    watch = threading.Thread(target=interrupt, daemon=True)
    watch.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            job.run(progress=lambda *_: None)
    finally:
        is_over.set()
        watch.join()


def check_output(sink: Path, report: RunReport, num_rows: int = NUM_ROWS) -> None:
    """Every row is there once, with its own text, and the report says so."""
    table = pq.read_table(sink)
    assert sorted(table.column("number").to_pylist()) == list(range(num_rows))
    assert len(set(table.column("row_id").to_pylist())) == num_rows
    assert (report.rows_in, report.rows_out) == (num_rows, num_rows)
    assert (report.rows_lost, report.rows_duplicated, report.exit_code()) == (0, 0, 0)
    assert (sink / "_SUCCESS").exists()


@pytest.mark.parametrize("plan", EACH_PLAN)
def test_second_run_goes_on_where_the_first_stopped(model, tmp_path, plan):
    write_source(tmp_path)
    sink, hold = tmp_path / "out", Hold(tmp_path, NUM_ROWS - 8)
    run_until(make_job(tmp_path, model, plan, fake=hold.options), lambda: len(parts_of(sink)) >= 2)
    hold.release()
    before = parts_of(sink)
    assert 2 <= len(before)
    assert not (sink / "_SUCCESS").exists()
    report = make_job(tmp_path, model, plan, fake=hold.options).run(progress=lambda *_: None)
    check_output(sink, report)
    after = parts_of(sink)
    # an engine may have finished more rows before it was stopped
    assert {name: after[name] for name in before} == before
    num_before = sum(pq.read_metadata(io.BytesIO(part)).num_rows for part in before.values())
    assert report.rows_resumed >= num_before
    assert [run.end for run in report.history.runs] == ["interrupted", "finished"]
    made = report_of(str(sink))
    assert made.history == report.history
    assert (made.rows_out, made.prompt_tokens) == (NUM_ROWS, report.prompt_tokens)


def test_a_second_run_keeps_the_order_of_an_output_that_was_begun(model, tmp_path):
    """Also where the order of the first run is gone, and the plan's options name it."""
    write_source(tmp_path)
    sink, hold = tmp_path / "out", Hold(tmp_path, NUM_ROWS - 8)
    first = make_job(tmp_path, model, PLANS["small"] | {"order": "ratio"}, fake=hold.options)
    run_until(first, lambda: len(parts_of(sink)) >= 2)
    hold.release()
    path, before = sink / "_raybatch" / "plan.json", parts_of(sink)
    stored = json.loads(path.read_text())
    stored["options"]["order"] = "dual_scan"
    path.write_text(json.dumps(stored))
    report = make_job(tmp_path, model, PLANS["small"], fake=hold.options).run()
    check_output(sink, report)
    assert before.items() <= parts_of(sink).items()
    assert stored == json.loads(path.read_text())


def test_the_log_of_a_run_has_every_unit_and_no_text_of_a_row(model, tmp_path):
    write_source(tmp_path)
    make_job(tmp_path, model, PLANS["small"]).run(progress=lambda *_: None)
    store = open_store(str(tmp_path / "out"))
    (run_id,) = run_ids(store)
    events = list(read_events(store, run_id))
    assert ("run_started", "run_ended") == (events[0]["event"], events[-1]["event"])
    done = [event for event in events if event["event"] == "unit_done"]
    assert sorted(event["unit"] for event in done) == list(range(len(done)))
    assert NUM_ROWS == sum(event["rows"] for event in done)
    assert all(event["won"] and event["generated_tokens"] for event in done)
    assert "document" not in json.dumps(events)
    assert [] == live_runs(store, time.time())


def test_rows_of_an_open_unit_are_kept_and_not_generated_again(model, tmp_path):
    # short rows and long ones share every call of the pool
    write_source(tmp_path, num_rows=600, lengths=[2, 200] * 300)
    plan = {"mode": "off", "unit_rows": 600, "max_unit_rows": 600}
    sink, hold = tmp_path / "out", Hold(tmp_path, 300)
    job = make_job(tmp_path, model, plan, num_seqs=600, fake=hold.options, flush_every_s=0.2)
    run_until(job, lambda: num_kept(sink) >= 100)
    hold.release()
    kept = num_kept(sink)
    assert not parts_of(sink)
    received = []
    job = make_job(tmp_path, model, plan, num_seqs=600, fake=hold.options, flush_every_s=60)
    report = job.run(progress=lambda stats, _: received.append(stats.rows_received))
    check_output(sink, report, 600)
    # a feeder may have kept more rows before it was stopped
    assert 0 < received[-1] <= 600 - kept
    assert not list(sink.glob("_raybatch/frag/*/*.arrow"))


def test_results_of_a_probe_are_kept(model, tmp_path):
    write_source(tmp_path)
    plan = {"lengths": "probe", "probe_fraction": 0.25, "unit_rows": 8, "max_unit_rows": 8}
    received = []
    job = make_job(tmp_path, model, plan)
    report = job.run(progress=lambda stats, _: received.append(stats.rows_received))
    check_output(tmp_path / "out", report)
    assert received[-1] == NUM_ROWS


# Ray Data forgets to close a log file when two datasets run at once
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_two_drivers_at_once_write_every_row_once(model, tmp_path):
    write_source(tmp_path)
    # transformers cannot be imported by two threads at once
    Tokenizer.load(model)
    plan = PLANS["small"]
    jobs = [make_job(tmp_path, model, plan, fake={"step_s": 0.02}) for _ in range(2)]
    reports: list[RunReport] = []
    threads = [
        threading.Thread(target=lambda job=job: reports.append(job.run(progress=lambda *_: None)))
        for job in jobs
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(reports) == 2
    for report in reports:
        check_output(tmp_path / "out", report)


def test_output_is_laid_out_by_columns_of_the_source(model, tmp_path):
    write_source(tmp_path, lengths=[2 + i % 3 for i in range(NUM_ROWS)])
    sink, hold = tmp_path / "out", Hold(tmp_path, NUM_ROWS - 8)
    options = {"partition_by": ["most"], "fake": hold.options}
    job = make_job(tmp_path, model, PLANS["small"], **options)
    run_until(job, lambda: any(sink.glob("_raybatch/done/*.json")))
    hold.release()
    report = make_job(tmp_path, model, PLANS["small"], **options).run()
    check_output(sink, report)
    assert {path.name for path in (sink / "data").iterdir()} == {"most=2", "most=3", "most=4"}
    for path in sink.glob("data/most=3/*"):
        numbers = pq.ParquetFile(path).read().column("number").to_pylist()
        assert {number % 3 for number in numbers} == {1}


def test_views_of_text_in_units_of_several_calls_are_written(model, tmp_path):
    write_source(tmp_path, num_rows=600)
    (tmp_path / "views").mkdir()
    table = pq.read_table(tmp_path / "in")
    views = pa.schema([("text", pa.string_view()), *list(table.schema)[1:]])
    write_ipc(tmp_path / "views" / "a.arrow", table.cast(views))
    stage = fake_stage(model, prompt="{text}", replicas=1, fake={"max_num_seqs": 64})
    plan = {"unit_rows": 600, "max_unit_rows": 600}
    sink = tmp_path / "out"
    report = local_job(tmp_path / "views", sink, stage, plan=plan, flush_every_s=0.01).run()
    check_output(sink, report, 600)


def test_a_run_that_finds_a_foreign_file_at_its_end_has_not_finished(model, tmp_path):
    write_source(tmp_path)
    sink = tmp_path / "out"
    make_job(tmp_path, model, PLANS["off"], partition_by=["most"]).run()
    (sink / "_SUCCESS").unlink()
    (sink / "data" / "most=9").mkdir()
    (sink / "data" / "most=9" / "part-000000.parquet").write_bytes(b"somebody's")
    report = make_job(tmp_path, model, PLANS["off"], partition_by=["most"]).run()
    assert (NUM_ROWS, 1) == (report.rows_out, report.exit_code())
    assert "most=9/part-000000.parquet is not a part of" in report.problems[0]
    assert not (sink / "_SUCCESS").exists()


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (["mots"], r"no column 'mots' \(did you mean 'most'\?\)"),
        (["generated_text"], "only columns of the source"),
        ([3], "must be a list of names"),
        (["text"], r"0000\.parquet:0: the partition text=document.* is longer than 200 bytes"),
    ],
)
def test_columns_that_cannot_lay_out_the_output_are_refused(model, tmp_path, columns, message):
    write_source(tmp_path)
    with pytest.raises(ConfigError, match=message):
        make_job(tmp_path, model, PLANS["off"], partition_by=columns).run()


def test_a_run_that_meets_its_limit_ends_between_units_and_goes_on_later(model, tmp_path, caplog):
    write_source(tmp_path, lengths=[20] * NUM_ROWS)
    sink = tmp_path / "out"
    plan = {"unit_rows": 8, "max_unit_rows": 8, "min_saved_fraction": 1}
    slow = {"step_s": 0.02}
    limits = {"max_error_rate": 0, "max_tokens": 1}
    job = make_job(tmp_path, model, plan, fake=slow, limits=limits)
    report = job.run(progress=lambda *_: None)
    assert "limits.max_tokens" in caplog.text
    assert report.rows_out < NUM_ROWS
    assert report.exit_code() == 1
    assert report.stopped.startswith("limits.max_tokens reached")
    assert f"stopped: {report.stopped}" in report.to_text().splitlines()
    (run,) = report.history.runs
    assert f"stopped by {report.stopped}" == run.end
    assert report.stopped == report_of(str(sink)).stopped
    assert not (sink / "_SUCCESS").exists()
    check_output(sink, make_job(tmp_path, model, plan, fake=slow).run(progress=lambda *_: None))


def test_limits_are_kept_where_the_progress_callback_fails(model, tmp_path, caplog):
    write_source(tmp_path, lengths=[20] * NUM_ROWS)
    plan = {"unit_rows": 8, "max_unit_rows": 8, "min_saved_fraction": 1}

    def fail(stats, num_rows):
        raise BrokenPipeError("no reader")

    # the callback has been called before a token is done
    slow, limits = {"step_s": 0.02}, {"max_tokens": 200}
    report = make_job(tmp_path, model, plan, fake=slow, limits=limits).run(progress=fail)
    assert 1 == caplog.text.count("the progress callback failed: BrokenPipeError: no reader")
    assert (report.exit_code(), report.rows_out < NUM_ROWS) == (1, True)


def test_cut_rows_are_asked_again_with_more_tokens(model, tmp_path):
    write_source(tmp_path, lengths=[2 + i % 3 for i in range(NUM_ROWS)])
    waves = [
        {"on": "truncated", "sampling": {"max_tokens": 5}},
        {"on": ["truncated", "error"], "sampling": {"max_tokens": 6}},
    ]
    report = make_job(tmp_path, model, PLANS["small"], waves=waves).run(progress=lambda *_: None)
    check_output(tmp_path / "out", report)
    table = pq.read_table(tmp_path / "out")
    # the fake engine always generates as many as it may
    assert set(table.column("num_generated_tokens").to_pylist()) == {6}
    assert set(table.column("attempts").to_pylist()) == {3}


def test_a_row_whose_own_options_do_not_fit_a_wave_keeps_its_answer(model, tmp_path):
    write_source(tmp_path, lengths=[2 + i % 3 for i in range(NUM_ROWS)])
    # rows of 4 tokens must have 4, and the wave allows 3
    waves = [{"on": "truncated", "sampling": {"max_tokens": 3}}]
    overrides = {"max_tokens": "most", "min_tokens": "most"}
    stage = fake_stage(model, prompt="{text}", overrides=overrides, replicas=1)
    job = local_job(tmp_path / "in", tmp_path / "out", stage, plan=PLANS["small"], waves=waves)
    check_output(tmp_path / "out", job.run(progress=lambda *_: None))
    table = pq.read_table(tmp_path / "out", columns=["most", "num_generated_tokens"])
    assert {(2, 3), (3, 3), (4, 4)} == {tuple(row.values()) for row in table.to_pylist()}


@pytest.mark.parametrize(
    ("waves", "message"),
    [
        (
            [{"on": "truncated", "sampling": {"min_tokens": 99}}],
            "stage's sampling options: .*min_tokens",
        ),
        ([{"on": "tired", "sampling": {"max_tokens": 5}}], "must name statuses of truncated"),
        ([{"on": "truncated", "sampling": {"n": 2}}], "other than n and logprobs"),
        ([{"on": "truncated", "sampling": {"max_tokens": 0}}], "max_tokens"),
        ([{"on": "truncated", "samplng": {}}], r"rule 0: unknown option 'samplng'"),
        ("truncated", "must be a list of rules"),
    ],
)
def test_wrong_waves_are_refused_by_name(model, tmp_path, waves, message):
    with pytest.raises(ConfigError, match=message):
        make_job(tmp_path, model, PLANS["off"], waves=waves)


def test_a_plan_that_never_repeats_is_refused_where_files_may_be_replaced(
    model, tmp_path, monkeypatch, caplog
):
    def refuse(source, target):
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(local_module.os, "link", refuse)
    write_source(tmp_path)
    job = make_job(tmp_path, model, {"lengths": "probe"})
    with pytest.raises(ConfigError, match=r"set plan\.lengths='auto', or choose a sink"):
        job.run(progress=lambda *_: None)
    assert 1 == caplog.text.count("run only one job at a time here")
    assert not (tmp_path / "out" / "_raybatch" / "plan.json").exists()


def test_a_job_that_goes_on_scans_and_checks_no_row_again(model, tmp_path, monkeypatch):
    write_source(tmp_path)
    stage = fake_stage(model, prompt="{text}", id_column="number", replicas=1)
    job = local_job(tmp_path / "in", tmp_path / "out", stage)
    assert job.run(progress=lambda *_: None).exit_code() == 0
    for name in ("inputs.source.scan_file", "job.job.check_unique_ids"):
        monkeypatch.setattr(f"raybatch.{name}", lambda *_, **__: pytest.fail("the source is read"))
    assert job.run(progress=lambda *_: None).rows_out == NUM_ROWS
