"""Large inputs whose first rows run while the others are planned; on a small Ray cluster."""

import threading
from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import raybatch
from raybatch.config import PlanConfig
from raybatch.durable.run_log import read_events, run_ids
from raybatch.durable.storage import open_store
from raybatch.errors import ConfigError, ReplicaError, RunStopped
from raybatch.inputs.source import scan_source
from raybatch.planning import head, large
from raybatch.planning.head import head_rows, split_head
from raybatch.planning.planned import RunSpec
from raybatch.planning.store import read_plans
from raybatch.report import current_report
from tests.actors.pools import wait_until
from tests.stages.support import fake_stage, write_parquet
from tests.tiers import some

NUM_ROWS, NUM_FIRST = 240, 30
# of a file; the head ends in the middle of one
ROWS_OF_FILE = 80
PLAN = {"unit_rows": 10, "max_unit_rows": 20, "max_driver_bytes": 6000}
TEXTS = [f"document {row % 30} " * 8 + f"question {row}" for row in range(NUM_ROWS)]

pytestmark = [pytest.mark.usefixtures("cluster", "small_heads"), pytest.mark.ray]


@pytest.fixture
def small_heads(monkeypatch):
    monkeypatch.setattr(head, "_SHARE", NUM_FIRST / NUM_ROWS)
    monkeypatch.setattr(head, "_LEAST_ROWS", 1)


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "in"
    for start in range(0, NUM_ROWS, ROWS_OF_FILE):
        rows = range(start, start + ROWS_OF_FILE)
        table = pa.table({"text": [TEXTS[row] for row in rows], "number": list(rows)})
        write_parquet(folder / f"{start:03d}.parquet", table)
    return folder


class Planning:
    """Holds the plan of the rest until `release`; raises `error` in its place."""

    def __init__(self, monkeypatch, error=None):
        self._released, self._error = threading.Event(), error
        self._plan = large.plan_large
        monkeypatch.setattr(large, "plan_large", self)

    def __call__(self, job, **options):
        assert self._released.wait(60)
        if self._error is not None:
            raise self._error
        return self._plan(job, **options)

    def release(self):
        """Let it continue; return once the rest has a plan and has run, or is left."""
        self._released.set()
        for thread in threading.enumerate():
            if thread.name == "raybatch-rest":
                thread.join(60)


def make_job(source, sink, model, *, fake=None, plan=PLAN, **options):
    stage = fake_stage(
        model, prompt="{text}", replicas=1, engine={"block_size_tokens": 8}, fake=fake or {}
    )
    return raybatch.Job(source, sink, stage, plan=plan, executor="ray", **options)


def run(job):
    return job.run(progress=lambda *_: None)


def running(job):
    """Run a job in a thread; return that and what it returns or raises."""
    ended = []

    def call():
        try:
            ended.append(run(job))
        except Exception as error:
            ended.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread, ended


def numbers(sink):
    return sorted(pq.read_table(sink)["number"].to_pylist()) if list(sink.glob("data/*")) else []


def spans_of_units(sink):
    """Return when units of the one run began and ended, in seconds, by their numbers in a plan."""
    store = open_store(str(sink))
    (run_id,) = run_ids(store)
    done = [event for event in read_events(store, run_id) if event["event"] == "unit_done"]
    return [(one["unit"], one["start_s"], one["start_s"] + one["seconds"]) for one in done]


def answers(sink):
    return pq.read_table(sink).select(["row_id", "number", "text", "generated_text"])


def check_whole(source, sink, model):
    """Check that an output is complete, and has the rows that one plan of all of them gives."""
    found = raybatch.verify(sink, deep=True)
    assert (True, NUM_ROWS, 0) == (found.is_complete, found.written_rows, found.rows_to_do)
    other = sink.parent / "other"
    run(make_job(source, other, model, plan={"max_driver_bytes": 1 << 20}))
    assert [NUM_ROWS] == [stored.num_rows for stored in read_plans(str(other))]
    assert answers(other).sort_by("number").equals(answers(sink).sort_by("number"))


def test_first_rows_are_written_while_the_rest_is_planned(
    source, model, tmp_path, monkeypatch, caplog
):
    planning, sink = Planning(monkeypatch), tmp_path / "out"
    thread, ended = running(make_job(source, sink, model))
    wait_until(lambda: numbers(sink) == list(range(NUM_FIRST)), 60)
    found = raybatch.verify(sink, deep=True)
    assert (True, False) == (found.is_clean, found.is_complete)
    left = NUM_ROWS - NUM_FIRST
    report = current_report(str(sink))
    assert left == found.rows_to_do == report.rows_todo
    assert f"{left} rows not planned yet; run the job again to resume" in report.problems
    assert [NUM_FIRST] == [stored.num_rows for stored in read_plans(str(sink))]
    planning.release()
    thread.join()
    (report,) = ended
    assert (NUM_ROWS, NUM_ROWS, 0) == (report.rows_in, report.rows_out, report.exit_code())
    first, rest = read_plans(str(sink))
    assert (NUM_FIRST, left) == (first.num_rows, rest.num_rows)
    assert (rest.files, ()) == (first.files_left, rest.files_left)
    assert [("000.parquet", NUM_FIRST)] == [file[:2] for file in first.files]
    assert [("000.parquet", 50), ("080.parquet", 80), ("160.parquet", 80)] == [
        file[:2] for file in rest.files
    ]
    assert rest.is_reordered
    check_whole(source, sink, model)


@pytest.mark.parametrize("digits", some([3, 1]))
def test_rows_of_both_plans_run_at_once_with_the_answers_of_one_plan(
    model, tmp_path, monkeypatch, digits
):
    """Units and groups of both have the same numbers, and prompts the same lengths, or others."""
    numbers = [f"{row * 7919 % NUM_ROWS:0{digits}d}" for row in range(NUM_ROWS)]
    table = pa.table({"text": [f"{n} {n} {n}" for n in numbers], "number": range(NUM_ROWS)})
    source, sink = tmp_path / "in", tmp_path / "out"
    write_parquet(source / "a.parquet", table)
    plan = {**PLAN, "max_driver_bytes": 1000}
    monkeypatch.setattr(head, "_SHARE", 60 / NUM_ROWS)
    slow = {"step_s": 0.05, "max_num_seqs": 2}
    report = run(make_job(source, sink, model, fake=slow, plan=plan, limits={"max_wall_s": 100.0}))
    assert (NUM_ROWS, 0) == (report.rows_out, report.exit_code())
    first, _ = read_plans(str(sink))
    spans = spans_of_units(sink)
    of_head = [end for unit, _, end in spans if unit < first.num_units]
    of_rest = [start for unit, start, _ in spans if unit >= first.num_units]
    assert min(of_rest) < max(of_head)
    check_whole(source, sink, model)


@pytest.mark.parametrize("options", [{"output_order": "input"}, {"output_file_bytes": 8000}])
def test_outputs_made_of_units_have_all_rows(source, model, tmp_path, options):
    sink = tmp_path / "out"
    run(make_job(source, sink, model, **options))
    if "output_order" in options:
        assert list(range(NUM_ROWS)) == pq.read_table(sink)["number"].to_pylist()
    check_whole(source, sink, model)


def test_an_error_of_the_rest_ends_the_run_and_the_next_one_plans_it(
    source, model, tmp_path, monkeypatch
):
    planning, sink = Planning(monkeypatch, ConfigError("a row is wrong")), tmp_path / "out"
    thread, ended = running(make_job(source, sink, model))
    wait_until(lambda: len(numbers(sink)) == NUM_FIRST, 60)
    planning.release()
    thread.join()
    assert ["a row is wrong"] == list(map(str, ended))
    monkeypatch.undo()
    write_parquet(source / "000.parquet", pa.table({"text": TEXTS[:80], "number": [0] * 80}))
    with pytest.raises(ConfigError, match=r"000\.parquet has changed"):
        run(make_job(source, sink, model))
    table = pa.table({"text": TEXTS[:80], "number": list(range(80))})
    write_parquet(source / "000.parquet", table)
    report = run(make_job(source, sink, model))
    assert (NUM_ROWS, NUM_FIRST, 0) == (report.rows_out, report.rows_resumed, report.exit_code())
    check_whole(source, sink, model)


def test_an_error_of_the_head_ends_the_run_while_the_rest_is_planned(
    source, model, tmp_path, monkeypatch
):
    planning, sink = Planning(monkeypatch), tmp_path / "out"
    broken = make_job(source, sink, model, fake={"fail_start": True})
    thread, ended = running(broken)
    thread.join(60)
    assert not thread.is_alive()
    assert isinstance(ended[0], ReplicaError)
    planning.release()
    # it was not planned for nothing
    assert [NUM_FIRST] == [stored.num_rows for stored in read_plans(str(sink))]


def test_a_run_that_is_stopped_does_not_wait_for_the_plan_of_the_rest(
    source, model, tmp_path, monkeypatch
):
    planning, sink = Planning(monkeypatch), tmp_path / "out"
    job = make_job(source, sink, model, limits={"max_wall_s": 4.0})
    thread, ended = running(job)
    thread.join(60)
    assert not thread.is_alive()
    (report,) = ended
    assert report.rows_in == NUM_ROWS
    assert "max_wall_s" in report.stopped
    assert report.rows_todo >= NUM_ROWS - NUM_FIRST
    assert not (sink / "_SUCCESS").exists()
    planning.release()
    assert [NUM_FIRST] == [stored.num_rows for stored in read_plans(str(sink))]
    monkeypatch.undo()
    # as a run may be that began an output of another size
    plan = {**PLAN, "max_driver_bytes": 1 << 20}
    assert run(make_job(source, sink, model, plan=plan)).rows_out == NUM_ROWS
    check_whole(source, sink, model)


@pytest.fixture
def begun(source, model, tmp_path, monkeypatch):
    """An output that has the rows of the head alone."""
    with monkeypatch.context() as patch:
        patch.setattr(large, "plan_large", fails)
        with pytest.raises(ConfigError, match="no plan"):
            run(make_job(source, tmp_path / "out", model))
    assert numbers(tmp_path / "out") == list(range(NUM_FIRST))
    return tmp_path / "out"


def fails(*_, **__):
    raise ConfigError("no plan")


def test_a_file_of_the_rest_that_is_gone_or_has_changed_is_refused(begun, source, model):
    path = source / "160.parquet"
    content = path.read_bytes()
    path.unlink()
    with pytest.raises(ConfigError, match=r"160\.parquet is missing"):
        run(make_job(source, begun, model))
    write_parquet(path, pa.table({"text": TEXTS[:80], "number": range(80)}))
    with pytest.raises(ConfigError, match=r"160\.parquet has changed"):
        run(make_job(source, begun, model))
    path.write_bytes(content)
    assert run(make_job(source, begun, model)).rows_out == NUM_ROWS


def test_a_file_that_is_added_before_the_rest_is_planned_extends_the_input(begun, source, model):
    # its name comes between those of files with a plan and without
    table = pa.table({"text": TEXTS[:9], "number": range(NUM_ROWS, NUM_ROWS + 9)})
    write_parquet(source / "000-.parquet", table)
    with pytest.raises(ConfigError, match=r"000-\.parquet is new.*set extend=True"):
        run(make_job(source, begun, model))
    assert run(make_job(source, begun, model, extend=True)).rows_out == NUM_ROWS + 9
    found = raybatch.verify(begun, deep=True)
    assert (True, NUM_ROWS + 9) == (found.is_complete, found.written_rows)
    # the output has these files now
    assert run(make_job(source, begun, model)).rows_out == NUM_ROWS + 9


@pytest.mark.parametrize("num_more", [9, NUM_ROWS])
def test_a_head_whose_rest_is_written_runs_beside_no_other_part(source, model, tmp_path, num_more):
    """Other parts of an output that is extended have numbers of units after the rest."""
    sink = tmp_path / "out"
    run(make_job(source, sink, model))
    part_of_head = sorted((sink / "data").rglob("*.parquet"))[1]
    part_of_head.unlink()
    (sink / "_SUCCESS").unlink()
    rows = range(NUM_ROWS, NUM_ROWS + num_more)
    texts = [f"document {row} " * 8 for row in rows]
    write_parquet(source / "more.parquet", pa.table({"text": texts, "number": rows}))
    report = run(make_job(source, sink, model, extend=True))
    assert (NUM_ROWS + num_more, 0) == (report.rows_out, report.exit_code())
    assert numbers(sink) == list(range(NUM_ROWS + num_more))
    assert raybatch.verify(sink, deep=True).is_complete


@pytest.mark.parametrize("plan", [{"lengths": "probe"}, {"mode": "off"}])
def test_a_head_runs_before_a_rest_that_takes_another_kind_of_plan(
    source, begun, model, monkeypatch, plan
):
    """Such a rest runs rows while it is planned, or takes no plan."""
    sorted((begun / "data").rglob("*.parquet"))[0].unlink()
    monkeypatch.setattr(head.HeadRun, "run", fails)
    report = run(make_job(source, begun, model, plan={**PLAN, **plan}))
    assert (NUM_ROWS, 0) == (report.rows_out, report.exit_code())
    check_whole(source, begun, model)


def test_planning_stops_when_it_is_told_to(source, model, monkeypatch):
    monkeypatch.setattr(large, "_POLL_S", 0.01)
    stage = fake_stage(model, prompt="{text}").config
    spec = RunSpec(
        source=scan_source(str(source)), config=stage, plan=PlanConfig(), sink="", row_id_column="i"
    )

    def raise_if_over():
        raise RunStopped("over")

    cancelled = []
    monkeypatch.setattr(large.ray, "cancel", cancelled.append)
    with pytest.raises(RunStopped):
        large.plan_large(spec, raise_if_over=raise_if_over)
    assert 1 == len(cancelled)  # the task of the only piece


def test_an_input_that_is_small_or_whose_plan_needs_all_rows_has_no_head(source):
    scanned = scan_source(str(source))
    stage = fake_stage(".", prompt="{text}").config
    spec = partial(RunSpec, source=scanned, config=stage, sink="", row_id_column=None)

    def number(**plan):
        return head_rows(spec(plan=PlanConfig(**plan)))

    assert NUM_FIRST == number(max_driver_bytes=6000)
    assert 0 == number()
    assert 0 == number(max_driver_bytes=6000, mode="off")
    assert 0 == number(max_driver_bytes=6000, lengths="probe")
    # what the driver plans alone is limited
    assert 0 < number(max_driver_bytes=1000) < NUM_FIRST


def test_first_rows_and_the_others_are_all_rows_once(source, monkeypatch):
    scanned = scan_source(str(source))
    whole = {part.name: range(part.num_rows) for part in scanned.slices}
    spec = RunSpec(
        source=scanned,
        config=fake_stage(".", prompt="{text}").config,
        plan=PlanConfig(max_driver_bytes=6000),
        sink="",
        row_id_column=None,
    )
    for number in (1, 79, 80, 81, 200):
        monkeypatch.setattr(head, "head_rows", lambda _, number=number: number)
        first, rest = split_head(spec, whole)
        for name, rows in whole.items():
            assert [*first.get(name, ()), *rest.get(name, ())] == list(rows)
        assert number == sum(map(len, first.values()))
    monkeypatch.setattr(head, "head_rows", lambda _: 0)
    assert [whole] == split_head(spec, whole)
