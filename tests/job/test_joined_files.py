"""Jobs whose parts are joined into larger files while they run, and copies made by `compact`."""

import shutil
import time
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import raybatch
from raybatch.cli.app import app
from raybatch.durable import commit as commit_module
from raybatch.durable import joins as joins_module
from raybatch.durable.commit import committed, publish, stored_footer
from raybatch.durable.layout import part_name
from raybatch.durable.run_log import beat
from raybatch.durable.sink import prepare_sink
from raybatch.durable.storage import LocalStore, store_of
from raybatch.errors import CommitError, ConfigError
from raybatch.job import job as job_module
from raybatch.job.job import Job
from raybatch.outputs import joined
from raybatch.outputs.cleaning import clean
from raybatch.outputs.joined import compact
from raybatch.outputs.ordered import ordered
from raybatch.planning.store import read_all_units, read_plans
from raybatch.report import current_report
from tests.actors.pools import wait_until
from tests.job import test_output_order
from tests.job.test_output_order import NUM_ROWS, PLAN, TEXTS, run, texts_of, write_source
from tests.job.test_resume import run_until
from tests.jobs import Hold, local_job
from tests.stages.support import fake_stage, write_parquet

# a part has 8 rows and about 3,500 bytes
FILE_BYTES = 10_000
NUM_UNITS = 10

pytestmark = pytest.mark.usefixtures("locally", "cluster_where_marked")


def make_job(folder: Path, model: Path, **options) -> Job:
    options = {"output_order": "plan", "output_file_bytes": FILE_BYTES, **options}
    return test_output_order.make_job(folder, model, **options)


@pytest.fixture(scope="module")
def made(model, tmp_path_factory):
    """Makes finished jobs with some options; their folders are read only."""

    def make(name: str, **options) -> Path:
        folder = tmp_path_factory.mktemp(name)
        write_source(folder)
        run(make_job(folder, model, **options))
        return folder

    return make


@pytest.fixture(scope="module")
def plain(made) -> Path:
    """A job with a part per unit."""
    return made("plain", output_file_bytes=None)


@pytest.fixture(scope="module")
def finished(made) -> Path:
    """A job whose parts were joined."""
    return made("joined")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_source(tmp_path)
    return tmp_path


@pytest.fixture
def copied(finished, tmp_path: Path) -> Path:
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    return tmp_path


def rows_of(sink: Path) -> list[dict]:
    """Return the rows in their order, without what depends on the state of a cache."""
    return pq.read_table(sink).drop_columns(["num_cached_tokens"]).to_pylist()


def files_of(sink: Path) -> list[Path]:
    return sorted((sink / "data").rglob("*.parquet"))


def test_joined_files_hold_the_same_rows_in_the_same_order(plain, finished):
    assert rows_of(plain / "out") == rows_of(finished / "out")
    assert len(files_of(plain / "out")) == NUM_UNITS
    assert 1 < len(files_of(finished / "out")) <= NUM_UNITS // 2
    assert not files_of(finished / "out" / "_units")


def test_files_have_the_schema_of_parts_and_groups_of_whole_units(plain, finished):
    part = pq.ParquetFile(files_of(plain / "out")[0])
    for path in files_of(finished / "out"):
        file = pq.ParquetFile(path)
        assert file.schema_arrow.equals(part.schema_arrow, check_metadata=True)
        assert file.num_row_groups == 1


def test_a_joined_output_is_verified_and_reported(finished):
    sink = finished / "out"
    for deep in (False, True):
        assert raybatch.verify(sink, deep=deep).is_complete
    report = current_report(str(sink))
    assert (NUM_ROWS, 0) == (report.rows_out, report.exit_code())
    assert not report.is_rebuilt
    assert set(report.output_files) == {f"data/{path.name}" for path in files_of(sink)}


def test_a_report_that_is_made_again_has_the_same_counts(copied):
    before = current_report(str(copied / "out"))
    (copied / "out" / "_raybatch" / "report.json").unlink()
    after = current_report(str(copied / "out"))
    assert after.is_rebuilt
    assert (before.history, before.statuses, before.special_rows) == (
        *(after.history, after.statuses),
        after.special_rows,
    )


def test_a_second_run_does_nothing(copied, model):
    times = {path: path.stat().st_mtime_ns for path in copied.rglob("*.parquet")}
    assert 0 == run(make_job(copied, model)).exit_code()
    assert times == {path: path.stat().st_mtime_ns for path in copied.rglob("*.parquet")}


@pytest.fixture
def looking_often(monkeypatch):
    """Parts of short jobs are joined while they run."""
    monkeypatch.setattr(joined, "_SAMPLED_UNITS", 1)
    monkeypatch.setattr(joined, "_LOOK_EVERY_S", 0.001)


def slow_job(folder: Path, model: Path, *, fake=None, **options) -> Job:
    stage = fake_stage(
        model,
        prompt="{text}",
        engine={"block_size_tokens": 8},
        replicas=1,
        fake={"step_s": 0.02, "max_num_seqs": 4, **(fake or {})},
    )
    sizes = {"plan": PLAN, "output_file_bytes": FILE_BYTES, **options}
    return local_job(folder / "in", folder / "out", stage, **sizes)


@pytest.mark.usefixtures("looking_often")
def test_readers_see_no_row_twice_while_the_job_runs(folder, model, monkeypatch):
    seen = {"before_join": [], "after_join": [], "after_join_record": []}

    def reach(point, **_):
        seen[point].append(sorted(texts_of(folder / "out")) if files_of(folder / "out") else [])

    monkeypatch.setattr(joins_module, "reach", reach)
    run(slow_job(folder, model))
    for of_point in seen.values():
        assert len(of_point) == len(files_of(folder / "out"))
        assert all(len(texts) == len(set(texts)) for texts in of_point)
    assert seen["after_join"][-1] == sorted(TEXTS)


@pytest.mark.usefixtures("looking_often")
def test_parts_are_joined_before_the_last_unit_is_written(folder, model, monkeypatch):
    units, is_done = folder / "out" / "_units", []
    hold = Hold(folder, NUM_ROWS - 4)

    def reach(_point, **_):
        whole = read_all_units(str(units), read_plans(str(units)))
        is_done.append(committed(store_of(str(units)), whole).all())
        if len(is_done) == 1:
            hold.release()

    monkeypatch.setattr(joins_module, "reach", reach)
    run(slow_job(folder, model, fake=hold.options))
    assert not is_done[0]


@pytest.mark.usefixtures("looking_often")
def test_a_run_that_was_stopped_goes_on(folder, model, plain):
    sink = folder / "out"
    run_until(make_job(folder, model), lambda: any((sink / "_units").rglob("part-*.parquet")))
    partial = raybatch.verify(sink, deep=True)
    assert (partial.is_clean, partial.is_complete, partial.expected_rows) == (True, False, NUM_ROWS)
    assert current_report(str(sink)).rows_in == NUM_ROWS
    # without the option, a started output keeps its layout
    run(make_job(folder, model, output_file_bytes="auto"))
    assert rows_of(sink) == rows_of(plain / "out")
    assert raybatch.verify(sink, deep=True).is_complete


@pytest.mark.parametrize("point", ["before_join", "after_join", "after_join_record"])
def test_a_join_that_failed_at_any_point_is_done_again(folder, model, plain, monkeypatch, point):
    def reach(name, **_):
        if name == point:
            raise OSError("the disk is full")

    monkeypatch.setattr(joins_module, "reach", reach)
    with pytest.raises(OSError, match="full"):
        run(make_job(folder, model))
    assert raybatch.verify(folder / "out").is_clean
    assert not (folder / "out" / "_SUCCESS").exists()
    monkeypatch.undo()
    run(make_job(folder, model))
    assert rows_of(folder / "out") == rows_of(plain / "out")
    assert raybatch.verify(folder / "out", deep=True).is_complete
    assert not files_of(folder / "out" / "_units")


def test_rows_of_a_joined_file_that_was_removed_are_generated_again(copied, model, plain):
    # as `verify` says
    (copied / "out" / "_SUCCESS").unlink()
    lost = files_of(copied / "out")[1]
    num_lost = pq.read_metadata(lost).num_rows
    lost.unlink()
    found = raybatch.verify(copied / "out")
    assert (found.written_rows, found.rows_to_do) == (NUM_ROWS - num_lost, num_lost)
    report = current_report(str(copied / "out"))
    assert (report.rows_out, report.rows_todo) == (NUM_ROWS - num_lost, num_lost)
    run(make_job(copied, model))
    assert rows_of(copied / "out") == rows_of(plain / "out")
    assert raybatch.verify(copied / "out", deep=True).is_complete


def test_a_part_that_was_removed_before_it_was_joined_is_generated_again(
    folder, model, plain, monkeypatch
):
    with monkeypatch.context() as patch:
        patch.setattr(joined, "join_parts", fail_to_join)
        with pytest.raises(OSError, match="full"):
            run(make_job(folder, model))
    units = folder / "out" / "_units"
    assert (units / "_SUCCESS").exists()
    lost = files_of(units)[3]
    num_lost = pq.read_metadata(lost).num_rows
    lost.unlink()
    found = raybatch.verify(folder / "out")
    assert (found.written_rows, found.rows_to_do) == (NUM_ROWS - num_lost, num_lost)
    assert any("_units" in note for note in found.notes)
    run(make_job(folder, model))
    assert rows_of(folder / "out") == rows_of(plain / "out")
    assert raybatch.verify(folder / "out", deep=True).is_complete


@pytest.mark.parametrize("left", ["foreign", "no plan"])
def test_files_that_would_fail_the_end_are_refused_at_the_start(copied, model, left, monkeypatch):
    (copied / "out" / "_SUCCESS").unlink()
    if left == "foreign":
        shutil.copy(files_of(copied / "out")[0], copied / "out" / "data" / "part-000099.parquet")
    else:
        shutil.rmtree(copied / "out" / "_units")
        (copied / "out" / "_raybatch" / "plan.json").unlink()
    monkeypatch.setattr(job_module, "_execute_below", lambda *_: pytest.fail("the job began"))
    with pytest.raises(CommitError, match="move them away"):
        run(make_job(copied, model))


def test_a_part_that_a_late_attempt_writes_again_is_not_read(copied, model, plain):
    late = copied / "out" / "_units" / "data" / "part-000002.parquet"
    late.parent.mkdir(exist_ok=True)
    shutil.copy(files_of(plain / "out")[2], late)
    (copied / "out" / "_SUCCESS").unlink()
    found = raybatch.verify(copied / "out")
    assert found.is_clean
    # all parts are joined
    assert not any("_units" in note for note in found.notes)
    run(make_job(copied, model))
    assert rows_of(copied / "out") == rows_of(plain / "out")
    assert not late.exists()


def add_file(folder: Path) -> None:
    table = pq.read_table(folder / "in" / "a.parquet")
    texts = [[f"new {number}" for number in range(table.num_rows)]]
    pq.write_table(table.set_column(0, "text", texts), folder / "in" / "c.parquet")


def test_files_added_to_the_source_are_joined_too(copied, model):
    add_file(copied)
    run(make_job(copied, model, extend=True))
    assert len(rows_of(copied / "out")) == NUM_ROWS + 40
    assert raybatch.verify(copied / "out", deep=True).is_complete


def fail_to_join(*_, **__):
    raise OSError("the disk is full")


def test_added_files_that_are_not_joined_yet_are_known_and_joined_later(copied, model, monkeypatch):
    add_file(copied)
    monkeypatch.setattr(joined, "write_joined_plan", fail_to_join)
    with pytest.raises(OSError, match="full"):
        run(make_job(copied, model, extend=True))
    monkeypatch.undo()
    sink = copied / "out"
    partial = raybatch.verify(sink)
    assert (partial.is_clean, partial.is_complete, partial.expected_rows) == (True, False, 100)
    assert any("_units" in note for note in partial.notes)
    assert current_report(str(sink)).rows_in == 100
    # the plan of the added files is there, so the run needs no flag
    run(make_job(copied, model))
    assert raybatch.verify(sink, deep=True).is_complete
    assert len(rows_of(sink)) == 100


def test_a_later_plan_is_never_joined_before_the_first(folder, model, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(joined, "write_joined_plan", fail_to_join)
        with pytest.raises(OSError, match="full"):
            run(make_job(folder, model))
    add_file(folder)
    monkeypatch.setattr(joined, "_SAMPLED_UNITS", 1)
    monkeypatch.setattr(joined, "_LOOK_EVERY_S", 0.001)
    run(make_job(folder, model, extend=True))
    assert raybatch.verify(folder / "out", deep=True).is_complete
    assert len(rows_of(folder / "out")) == 100


def test_the_end_of_a_run_removes_no_parts_that_are_not_joined(copied, model, plain):
    """Another run has added files, and its parts are not joined yet."""
    late = copied / "out" / "_units" / "data" / "part-000010.parquet"
    late.parent.mkdir(exist_ok=True)
    shutil.copy(files_of(plain / "out")[2], late)
    joined._remove_joined(store_of(str(copied / "out" / "_units")))
    assert late.exists()


@pytest.mark.parametrize(
    "plan", [{**PLAN, "mode": "off"}, {**PLAN, "lengths": "probe", "probe_fraction": 0.3}]
)
def test_any_plan_can_be_joined(folder, model, plan):
    run(make_job(folder, model, plan=plan))
    assert sorted(texts_of(folder / "out")) == sorted(TEXTS)
    assert raybatch.verify(folder / "out", deep=True).is_complete
    assert len(files_of(folder / "out")) < NUM_UNITS


def test_an_input_without_rows_has_one_file(folder, model):
    for path in (folder / "in").iterdir():
        pq.write_table(pq.read_table(path).slice(0, 0), path)
    run(make_job(folder, model))
    assert len(files_of(folder / "out")) == 1
    assert raybatch.verify(folder / "out", deep=True).is_complete


def test_records_of_an_overwrite_that_did_not_end_are_not_taken_for_rows(copied, model, plain):
    # killed when the sink was empty
    for name in ("_SUCCESS", "_raybatch/plan.json"):
        (copied / "out" / name).unlink()
    shutil.rmtree(copied / "out" / "data")
    (copied / "out" / "_units" / "_raybatch" / "plan.json").unlink()
    run(make_job(copied, model))
    assert rows_of(copied / "out") == rows_of(plain / "out")
    assert raybatch.verify(copied / "out", deep=True).is_complete


def test_records_are_removed_before_the_plan(copied, monkeypatch):
    removed = []
    monkeypatch.setattr(LocalStore, "remove", lambda _, name: removed.append(name))
    prepare_sink(str(copied / "out"), is_overwrite=True)
    in_units = [name.removeprefix("_units/") for name in removed if name.startswith("_units/")]
    records = [in_units.index(name) for name in in_units if name.startswith("_raybatch/joined/")]
    assert records
    assert max(records) < in_units.index("_raybatch/plan.json")


def test_clean_knows_the_runs_and_journals_of_units(copied):
    units = copied / "out" / "_units"
    journal = units / "_raybatch" / "frag" / "000001" / "0-1-a.arrow"
    journal.parent.mkdir(parents=True)
    journal.write_bytes(b"old")
    assert f"_units/{journal.relative_to(units)}" in clean(copied / "out", is_dry_run=True).names
    beat(store_of(str(units)), "run-a", time.time())
    assert clean(copied / "out", older_than_s=0.0, is_dry_run=True).live_runs


def test_a_job_of_another_prompt_removes_no_plan_of_units(folder, model, monkeypatch):
    monkeypatch.setattr(joined, "write_joined_plan", fail_to_join)
    with pytest.raises(OSError, match="full"):
        run(make_job(folder, model))
    stage = fake_stage(model, prompt="another {text}", replicas=1)
    other = local_job(folder / "in", folder / "out", stage, plan=PLAN)
    with pytest.raises(ConfigError, match="prompt"):
        run(other)
    assert (folder / "out" / "_units" / "_raybatch" / "plan.json").exists()


def test_joined_and_sorted_outputs_can_be_compacted(finished, folder, model, tmp_path):
    compact(str(finished / "out"), str(tmp_path / "new"))
    assert rows_of(tmp_path / "new") == rows_of(finished / "out")
    run(make_job(folder, model, output_order="input", output_file_bytes=None))
    compact(str(folder / "out"), str(tmp_path / "sorted"))
    assert texts_of(tmp_path / "sorted") == TEXTS
    assert raybatch.verify(tmp_path / "sorted", deep=True).is_complete


def test_a_finished_job_needs_no_units_below_it(copied, model):
    shutil.rmtree(copied / "out" / "_units")
    assert run(make_job(copied, model)).exit_code() == 0


def test_a_copy_in_input_order_is_made_of_joined_files(finished, tmp_path):
    ordered(str(finished / "out"), str(tmp_path / "in-order"))
    assert TEXTS == texts_of(tmp_path / "in-order")


def test_overwrite_starts_over(copied, model, plain):
    run(make_job(copied, model, overwrite=True, output_file_bytes=None))
    assert rows_of(copied / "out") == rows_of(plain / "out")
    assert len(files_of(copied / "out")) == NUM_UNITS
    assert not files_of(copied / "out" / "_units")


@pytest.mark.parametrize("partition_by", [(), "kind"])
def test_a_sorted_output_has_files_of_that_size(folder, model, partition_by):
    options = {"output_order": "input", "partition_by": partition_by}
    run(make_job(folder, model, output_file_bytes=1 << 20, **options))
    assert sorted(texts_of(folder / "out")) == sorted(TEXTS)
    assert len(files_of(folder / "out")) == (3 if partition_by else 1)
    assert raybatch.verify(folder / "out", deep=True).is_complete


def test_auto_joins_outputs_of_many_units(folder, model, monkeypatch):
    monkeypatch.setattr(job_module, "FEW_UNITS", 4)
    run(make_job(folder, model, output_file_bytes="auto"))
    assert len(files_of(folder / "out")) == 1


def test_auto_keeps_the_parts_of_few_units(folder, model):
    run(make_job(folder, model, output_file_bytes="auto"))
    assert len(files_of(folder / "out")) == NUM_UNITS
    assert not (folder / "out" / "_units").exists()


# a partitioned output: a joined part has a file per folder, of which each is a third


def by_kind(folder: Path, model: Path, **options) -> Job:
    return make_job(folder, model, partition_by="kind", **options)


def of_kinds(sink: Path) -> dict[str, list[dict]]:
    """Return the rows of each folder, in the order of its files."""
    return {
        folder.name: pq.read_table(folder, partitioning=None)
        .drop_columns(["num_cached_tokens"])
        .to_pylist()
        for folder in sorted((sink / "data").iterdir())
    }


@pytest.fixture(scope="module")
def plain_by_kind(made) -> Path:
    """A partitioned job with files per unit."""
    return made("plain-by-kind", partition_by="kind", output_file_bytes=None)


@pytest.fixture(scope="module")
def joined_by_kind(made) -> Path:
    """A partitioned job whose parts were joined."""
    return made("joined-by-kind", partition_by="kind")


def test_joined_folders_hold_the_rows_of_partitioned_units(plain_by_kind, joined_by_kind):
    expected, found = plain_by_kind / "out", joined_by_kind / "out"
    assert list(of_kinds(found)) == ["kind=k0", "kind=k1", "kind=k2"]
    assert of_kinds(found) == of_kinds(expected)
    assert len(files_of(expected)) == 3 * NUM_UNITS
    assert len(files_of(found)) == 9
    assert not files_of(found / "_units")
    schema = pq.read_schema(files_of(expected)[0])
    for file in files_of(found):
        assert pq.read_schema(file).equals(schema, check_metadata=True)
    for deep in (False, True):
        assert raybatch.verify(found, deep=deep).is_complete
    assert current_report(str(found)).rows_out == NUM_ROWS


@pytest.mark.parametrize(
    ("point", "after"), [("before_join", 0), ("before_join", 2), ("before_done", 0)]
)
def test_a_join_into_folders_that_failed_is_done_again(
    folder, model, plain_by_kind, monkeypatch, point, after
):
    calls = []

    def reach(name, **_):
        calls.append(name)
        if calls.count(point) > after:
            raise OSError("the disk is full")

    monkeypatch.setattr(joins_module, "reach", reach)
    monkeypatch.setattr(commit_module, "reach", lambda n, **k: reach(n) if n == point else None)
    with pytest.raises(OSError, match="full"):
        run(by_kind(folder, model))
    monkeypatch.undo()
    sink = folder / "out"
    assert len(files_of(sink)) == (3 if point == "before_done" else after)
    assert raybatch.verify(sink).is_clean
    run(by_kind(folder, model))
    assert of_kinds(sink) == of_kinds(plain_by_kind / "out")
    assert raybatch.verify(sink, deep=True).is_complete


def test_rows_of_a_lost_file_of_a_folder_are_generated_again(
    joined_by_kind, plain_by_kind, model, tmp_path
):
    shutil.copytree(joined_by_kind, tmp_path, dirs_exist_ok=True)
    sink = tmp_path / "out"
    (sink / "_SUCCESS").unlink()
    files_of(sink)[2].unlink()
    found = raybatch.verify(sink)
    assert not found.is_clean
    assert found.lost_rows > 0
    run(by_kind(tmp_path, model))
    assert of_kinds(sink) == of_kinds(plain_by_kind / "out")
    assert raybatch.verify(sink, deep=True).is_complete


def test_a_file_that_was_lost_before_the_record_of_a_join_is_written_from_its_parts(
    folder, model, plain_by_kind, monkeypatch
):
    """The parts are still there, so no row is generated again."""

    def reach(name, **_):
        if name == "after_join":
            raise OSError("the disk is full")

    monkeypatch.setattr(joins_module, "reach", reach)
    with pytest.raises(OSError, match="full"):
        run(by_kind(folder, model))
    monkeypatch.undo()
    sink = folder / "out"
    files_of(sink)[0].unlink()
    of_units = "raybatch.job.run.JobExecution._execute"
    monkeypatch.setattr(of_units, lambda *_: pytest.fail("rows were generated again"))
    run(by_kind(folder, model))
    assert of_kinds(sink) == of_kinds(plain_by_kind / "out")
    assert raybatch.verify(sink, deep=True).is_complete


def test_a_partitioned_input_without_rows_has_no_file(tmp_path, model):
    table = pa.table({"text": pa.array([], pa.string()), "kind": pa.array([], pa.string())})
    write_parquet(tmp_path / "in" / "a.parquet", table)
    run(by_kind(tmp_path, model))
    assert raybatch.verify(tmp_path / "out", deep=True).is_complete
    compact(str(tmp_path / "out"), str(tmp_path / "new"))
    assert raybatch.verify(tmp_path / "new", deep=True).is_complete


def test_values_of_any_kind_name_the_same_folders(tmp_path, model):
    values = ["a/b", None, "", " ", "%2F", "ü", "x=y", "."] * 8
    numbers = [None, 1, -2, 3] * 16
    table = pa.table({"text": TEXTS + TEXTS[:4], "kind": values, "n": numbers})
    write_parquet(tmp_path / "in" / "a.parquet", table)
    options = {"partition_by": ["kind", "n"]}
    run(make_job(tmp_path, model, output_file_bytes=None, **options))
    expected = {f.parent.relative_to(tmp_path / "out") for f in files_of(tmp_path / "out")}
    run(make_job(tmp_path, model, overwrite=True, **options))
    found = [f.parent.relative_to(tmp_path / "out") for f in files_of(tmp_path / "out")]
    assert expected == set(found)
    assert len(found) < 3 * len(expected)
    assert raybatch.verify(tmp_path / "out", deep=True).is_complete


def test_a_partitioned_output_that_was_begun_without_joins_keeps_its_files(
    plain_by_kind, model, tmp_path, monkeypatch
):
    monkeypatch.setattr(job_module, "FEW_UNITS", 4)
    shutil.copytree(plain_by_kind, tmp_path, dirs_exist_ok=True)
    sink = tmp_path / "out"
    (sink / "_SUCCESS").unlink()
    record = sorted((sink / "_raybatch" / "done").iterdir())[3]
    record.unlink()
    run(by_kind(tmp_path, model, output_file_bytes="auto"))
    assert not (sink / "_units").exists()
    assert of_kinds(sink) == of_kinds(plain_by_kind / "out")
    assert raybatch.verify(sink, deep=True).is_complete


@pytest.mark.parametrize("layout", ["plain_by_kind", "joined_by_kind"])
def test_a_file_that_was_moved_to_another_folder_is_found(layout, request, model, tmp_path):
    shutil.copytree(request.getfixturevalue(layout), tmp_path, dirs_exist_ok=True)
    data = tmp_path / "out" / "data"
    first, other = (data / f"kind=k{k}" / "part-000000.parquet" for k in (0, 1))
    content = first.read_bytes()
    first.write_bytes(other.read_bytes())
    other.write_bytes(content)
    found = raybatch.verify(tmp_path / "out")
    assert not found.is_clean
    assert any("has the rows of kind=k1; move it there" in text for text in found.problems)


def test_a_foreign_file_in_a_folder_is_refused_at_the_start(joined_by_kind, model, tmp_path):
    shutil.copytree(joined_by_kind, tmp_path, dirs_exist_ok=True)
    (tmp_path / "out" / "_SUCCESS").unlink()
    first = files_of(tmp_path / "out")[0]
    shutil.copy(first, first.with_name("part-000099.parquet"))
    with pytest.raises(CommitError, match=r"kind=k0/part-000099.*move them away"):
        run(by_kind(tmp_path, model))


def test_rows_that_are_not_those_of_the_footer_are_never_joined(folder, model, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(joined, "join_parts", fail_to_join)
        with pytest.raises(OSError, match="full"):
            run(by_kind(folder, model))
    part = files_of(folder / "out" / "_units")[4]
    footer, table = pq.read_metadata(part).metadata, pq.read_table(part, partitioning=None)
    kinds = table.column("kind").to_pylist()
    table = table.set_column(table.column_names.index("kind"), "kind", [["k9", *kinds[1:]]])
    with pq.ParquetWriter(part, table.schema) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({b"raybatch": footer[b"raybatch"]})
    with pytest.raises(CommitError, match=r"part-000004.* is corrupt.*folders"):
        run(by_kind(folder, model))


@pytest.mark.ray
def test_ray_tasks_join_folders_and_the_source_may_grow(folder, model):
    run(by_kind(folder, model, executor="ray"))
    assert len(files_of(folder / "out")) == 9
    add_file(folder)
    run(by_kind(folder, model, extend=True))
    assert sum(map(len, of_kinds(folder / "out").values())) == NUM_ROWS + 40
    assert raybatch.verify(folder / "out", deep=True).is_complete


def test_auto_joins_the_folders_of_many_units(folder, model, monkeypatch):
    monkeypatch.setattr(job_module, "FEW_UNITS", 4)
    run(by_kind(folder, model, output_file_bytes="auto"))
    assert len(files_of(folder / "out")) == 3


def test_a_partitioned_output_can_be_compacted(plain_by_kind, joined_by_kind, tmp_path):
    for number, source in enumerate((plain_by_kind, joined_by_kind)):
        new = tmp_path / str(number)
        compact(str(source / "out"), str(new))
        assert len(files_of(new)) == 3
        assert of_kinds(new) == of_kinds(plain_by_kind / "out")
        assert raybatch.verify(new, deep=True).is_complete


def test_a_size_that_an_output_cannot_have_is_refused(plain, copied, model, tmp_path):
    with pytest.raises(ConfigError, match=r"output_file_bytes.*compact"):
        run(make_job_started(plain, tmp_path, model))
    with pytest.raises(ConfigError, match="raybatch ordered"):
        run(make_job(copied, model, output_order="input"))


@pytest.mark.usefixtures("looking_often")
def test_a_join_that_fails_while_the_job_runs_is_logged_once_and_tried_again(
    folder, model, monkeypatch, caplog
):
    outcomes = []

    def join(task):
        if len(outcomes) < 3:
            outcomes.append("failed")
            raise OSError("the disk is full")
        joins_module.join_parts(task)
        outcomes.append("joined")

    def finish(joiner, num_rows):
        outcomes.append("finish")
        return real(joiner, num_rows)

    real = joined.PartJoiner.finish
    monkeypatch.setattr(joined, "join_parts", join)
    monkeypatch.setattr(joined.PartJoiner, "finish", finish)
    run(slow_job(folder, model))
    assert outcomes.index("joined") < outcomes.index("finish")
    assert caplog.text.count("could not join parts: OSError: the disk is full") == 1
    assert raybatch.verify(folder / "out", deep=True).is_complete


def test_a_stretch_that_cannot_be_joined_keeps_no_other_from_it(folder, model, monkeypatch):
    def join(task):
        if task.unit.number == 0:
            raise OSError("the disk is full")
        joins_module.join_parts(task)

    monkeypatch.setattr(joined, "join_parts", join)
    with pytest.raises(OSError, match="full"):
        run(make_job(folder, model))
    monkeypatch.undo()
    names = [path.name for path in files_of(folder / "out")]
    assert len(names) > 1
    assert "part-000000.parquet" not in names


def test_no_part_is_removed_before_its_record_exists(folder, model, plain, monkeypatch):
    real = LocalStore.create

    def create(store, name, data):
        if name.startswith("_raybatch/joined/"):
            raise OSError("the disk is full")
        return real(store, name, data)

    monkeypatch.setattr(LocalStore, "create", create)
    with pytest.raises(OSError, match="full"):
        run(make_job(folder, model))
    monkeypatch.undo()
    assert len(files_of(folder / "out" / "_units")) == NUM_UNITS
    run(make_job(folder, model))
    assert rows_of(folder / "out") == rows_of(plain / "out")


def test_parts_that_cannot_be_removed_fail_no_job(folder, model, plain, monkeypatch, caplog):
    real = LocalStore.remove

    def remove(store, name):
        if name.startswith("data/"):
            raise PermissionError("it may only add files")
        real(store, name)

    monkeypatch.setattr(LocalStore, "remove", remove)
    assert run(make_job(folder, model)).exit_code() == 0
    assert "it may only add files" in caplog.text
    assert rows_of(folder / "out") == rows_of(plain / "out")
    assert raybatch.verify(folder / "out", deep=True).is_complete


@pytest.mark.parametrize("is_complete", [False, True])
def test_a_run_that_another_one_extends_leaves_the_end_to_that_run(
    copied, model, monkeypatch, is_complete
):
    """The other run begins its plan when this one has found that all its units are there."""
    sink, units = copied / "out", copied / "out" / "_units"
    for name in ("_SUCCESS", "_units/_SUCCESS"):
        (sink / name).unlink()
    options = {"file_bytes": FILE_BYTES, "is_local": True}
    first = joined.PartJoiner(str(units), str(sink), **options)
    real = joined.finish_copy

    def finish(into):
        monkeypatch.setattr(joined, "finish_copy", real)
        add_file(copied)
        job = make_job(copied, model, extend=True)
        if is_complete:
            run(job)
        else:
            with monkeypatch.context() as patch:
                patch.setattr(joined.PartJoiner, "finish", fail_to_join)
                with pytest.raises(OSError, match="full"):
                    run(job)
            joined.PartJoiner(str(units), str(sink), **options)._join_committed()
            files_of(sink)[-1].unlink()
        return real(into)

    monkeypatch.setattr(joined, "finish_copy", finish)
    first.finish(NUM_ROWS)
    assert (sink / "_SUCCESS").exists() == is_complete
    run(make_job(copied, model))
    assert raybatch.verify(sink, deep=True).is_complete
    assert len(rows_of(sink)) == NUM_ROWS + 40


def test_units_that_vanish_before_the_end_are_named(copied, monkeypatch):
    sink, units = copied / "out", copied / "out" / "_units"
    shutil.rmtree(units / "_raybatch" / "joined")
    monkeypatch.setattr(joined, "_LOOK_EVERY_S", 60.0)
    joiner = joined.PartJoiner(str(units), str(sink), file_bytes=FILE_BYTES, is_local=True)
    with pytest.raises(CommitError, match=r"_units were removed"):
        joiner.finish(NUM_ROWS)


def test_an_attempt_that_is_late_finds_its_unit_joined(plain, finished, monkeypatch):
    """Its part is there when it writes one, and joined and removed when it reads that."""
    sink = str(finished / "out" / "_units")
    stored, store = read_plans(sink)[0], store_of(sink)
    unit = read_all_units(sink, [stored]).unit(2)
    mine = replace(stored_footer(store, 2, part_name(2)), attempt="late")
    monkeypatch.setattr(LocalStore, "create", lambda *_: False)
    found = publish(store, part_name(2), files_of(plain / "out")[2].read_bytes(), mine)
    assert (found.unit, found.attempt == "late") == (unit, False)


def test_no_join_begins_before_ray_runs(copied, monkeypatch):
    sink, units = copied / "out", copied / "out" / "_units"
    looks = []
    monkeypatch.setattr(joined, "_LOOK_EVERY_S", 0.001)
    monkeypatch.setattr(joined, "_has_ray", lambda: bool(looks.append("ray") or len(looks) > 9))
    monkeypatch.setattr(joined.PartJoiner, "_join_committed", lambda _: looks.append("join"))
    joiner = joined.PartJoiner(str(units), str(sink), file_bytes=1, is_local=False)
    wait_until(lambda: "join" in looks)
    joiner.close()
    assert looks.index("join") == 10


@pytest.mark.ray
def test_ray_tasks_join_parts(folder, model, plain):
    run(make_job(folder, model, executor="ray"))
    assert sorted(texts_of(folder / "out")) == sorted(TEXTS)
    assert len(files_of(folder / "out")) < NUM_UNITS
    assert raybatch.verify(folder / "out", deep=True).is_complete


def test_compact_copies_an_output_into_larger_files(plain, tmp_path):
    result = CliRunner().invoke(app, ["compact", str(plain / "out"), str(tmp_path / "new")])
    assert result.exit_code == 0, result.output
    assert rows_of(tmp_path / "new") == rows_of(plain / "out")
    assert len(files_of(tmp_path / "new")) == 1
    assert raybatch.verify(tmp_path / "new", deep=True).is_complete
    assert len(files_of(plain / "out")) == NUM_UNITS


def test_a_copy_that_was_interrupted_goes_on(plain, tmp_path, monkeypatch):
    def reach(name, *, unit):
        if unit == 1:
            raise OSError("the disk is full")

    monkeypatch.setattr(joins_module, "reach", reach)
    source, into = str(plain / "out"), str(tmp_path / "new")
    with pytest.raises(OSError, match="full"):
        compact(source, into, file_bytes=FILE_BYTES)
    assert not (tmp_path / "new" / "_SUCCESS").exists()
    monkeypatch.undo()
    # with the files that the first call chose
    compact(source, into)
    assert rows_of(tmp_path / "new") == rows_of(plain / "out")
    assert len(files_of(tmp_path / "new")) > 1


def test_a_copy_is_of_one_output(plain, finished, folder, tmp_path, model):
    new = tmp_path / "new"
    compact(str(plain / "out"), str(new))
    shutil.copytree(plain / "out", tmp_path / "other")
    with pytest.raises(ConfigError, match=rf"{new} has a copy of .*plain.*compact"):
        compact(str(tmp_path / "other"), str(new))
    with pytest.raises(ConfigError, match=r"has a copy of .*plain.*compact.*ordered"):
        ordered(str(plain / "out"), str(new))
    with pytest.raises(ConfigError, match="rows of another output"):
        compact(str(plain / "out"), str(tmp_path / "other"))
    shutil.copytree(finished, tmp_path / "joined")
    with pytest.raises(ConfigError, match="rows of another output"):
        compact(str(plain / "out"), str(tmp_path / "joined" / "out"))
    # a job whose first parts are not joined yet
    prepare_sink(str(tmp_path / "started"), is_overwrite=False)
    (tmp_path / "started" / "_units" / "_raybatch").mkdir(parents=True)
    (tmp_path / "started" / "_units" / "_raybatch" / "plan.json").write_text("{}")
    with pytest.raises(ConfigError, match="rows of another output"):
        compact(str(plain / "out"), str(tmp_path / "started"))
    # the same again
    compact(str(plain / "out"), str(new))
    assert rows_of(new) == rows_of(plain / "out")


def test_the_way_to_complete_a_copy_is_named(plain, tmp_path, monkeypatch):
    source, new = plain / "out", tmp_path / "new"
    monkeypatch.setattr(joined, "finish_copy", fail_to_join)
    with pytest.raises(OSError, match="full"):
        compact(str(source), str(new))
    files_of(new)[0].unlink()
    command = f"run `raybatch compact {source} {new}` again to resume"
    assert command in str(raybatch.verify(new))
    assert any(command in problem for problem in current_report(str(new)).problems)
    monkeypatch.undo()
    compact(str(source), str(new))
    assert raybatch.verify(new, deep=True).is_complete


@pytest.mark.parametrize("break_it", ["columns", "rows", "bytes", "page", "file"])
def test_a_damaged_part_is_never_joined(plain, tmp_path, break_it):
    shutil.copytree(plain, tmp_path, dirs_exist_ok=True)
    first, second, *_ = files_of(tmp_path / "out")
    if break_it == "rows":
        shutil.copy(first, second)
    elif break_it == "file":
        second.unlink()
    elif break_it == "page":
        data = bytearray(second.read_bytes())
        data[4:300] = bytes(296)
        second.write_bytes(data)
    elif break_it == "bytes":
        second.write_bytes(second.read_bytes()[:-20])
    else:
        metadata = pq.read_metadata(second).metadata
        table = pq.read_table(second, partitioning=None)
        with pq.ParquetWriter(second, table.drop_columns(["kind"]).schema) as writer:
            writer.write_table(table.drop_columns(["kind"]))
            writer.add_key_value_metadata({b"raybatch": metadata[b"raybatch"]})
    with pytest.raises(CommitError, match=r"out/data/part-000001") as error:
        compact(str(tmp_path / "out"), str(tmp_path / "new"))
    assert not files_of(tmp_path / "new")
    if break_it in ("bytes", "page"):
        assert f"with file://{tmp_path}/out/_SUCCESS if it exists" in str(error.value)


def test_compact_refuses_what_it_cannot_copy(plain, folder, model, tmp_path):
    with pytest.raises(ConfigError, match="not the output"):
        compact(str(folder / "in"), str(tmp_path / "new"))
    with pytest.raises(ConfigError, match="every row twice"):
        compact(str(plain / "out"), str(plain / "out" / "new"))
    with pytest.raises(ConfigError, match="not finished"):
        compact(str(make_job_started(plain, tmp_path, model).config.sink), str(tmp_path / "new"))


def make_job_started(plain: Path, folder: Path, model: Path) -> Job:
    shutil.copytree(plain, folder / "started", dirs_exist_ok=True)
    (folder / "started" / "out" / "_SUCCESS").unlink()
    return make_job(folder / "started", model)
