import time

import pyarrow as pa
import pytest

from raybatch.durable.run_log import beat
from raybatch.durable.sink import check_partitions, check_place, output_files, prepare_sink
from raybatch.durable.storage import open_store, store_of
from raybatch.errors import ConfigError
from raybatch.inputs.source import scan_source
from tests.stages.support import write_parquet


def test_a_relative_sink_is_another_folder_after_a_change_of_folder(tmp_path, monkeypatch):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        assert store_of("out").size("a") is None
        store_of("out").replace("a", name.encode())


def test_sink_that_is_a_file_is_refused(tmp_path):
    write_parquet(tmp_path / "a.parquet", pa.table({"x": [1]}))
    with pytest.raises(ConfigError, match="is a file; name a folder"):
        prepare_sink(str(tmp_path / "a.parquet"), is_overwrite=False)


def test_sink_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used; choose a writable folder"):
        prepare_sink(str(tmp_path / "file" / "out"), is_overwrite=False)


def test_sink_with_foreign_files_is_refused(tmp_path):
    write_parquet(tmp_path / "part-000000.parquet", pa.table({"x": [1]}))
    for is_overwrite in (False, True):
        with pytest.raises(ConfigError, match=r"no _raybatch/run\.json of an earlier run"):
            prepare_sink(str(tmp_path), is_overwrite=is_overwrite)
    assert files_below(tmp_path) == ["part-000000.parquet"]


@pytest.mark.parametrize("sink", ["memory://x/out", "out::in", "simplecache::s3://x/out"])
def test_a_place_where_no_worker_can_write_is_refused(sink):
    with pytest.raises(ConfigError, match=f"sink '{sink}' .* choose a"):
        check_place(sink)


def test_names_with_a_dot_may_lie_in_a_new_sink(tmp_path):
    (tmp_path / ".gitkeep").write_text("")
    prepare_sink(str(tmp_path), is_overwrite=False)
    prepare_sink(str(tmp_path), is_overwrite=True)
    assert files_below(tmp_path) == [".gitkeep", "_raybatch/run.json"]


@pytest.mark.parametrize("name", ["data/.gitkeep", ".git/config"])
def test_names_with_a_dot_further_below_are_foreign(tmp_path, name):
    (tmp_path / name).parent.mkdir()
    (tmp_path / name).write_text("")
    with pytest.raises(ConfigError, match=f"for example {name}"):
        prepare_sink(str(tmp_path), is_overwrite=False)


def test_what_an_earlier_probe_left_is_not_foreign(tmp_path):
    (tmp_path / "_raybatch").mkdir()
    (tmp_path / "_raybatch" / "probe-0123").write_bytes(b"")
    prepare_sink(str(tmp_path), is_overwrite=False)
    assert "_raybatch/run.json" in files_below(tmp_path)


def files_below(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def write_run(sink):
    """Leave what a run and one of its killed tasks leave."""
    prepare_sink(str(sink), is_overwrite=False)
    write_parquet(sink / "data" / "part-000000.parquet", pa.table({"x": [1]}))
    for name in ("_SUCCESS", "_raybatch/report.json", "_raybatch/plan.json"):
        (sink / name).write_text("{}")
    for name in ("staging/half", "plan/abc/units.arrow", "frag/000001/000000-3-a.arrow"):
        path = sink / "_raybatch" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"half")


def test_a_second_run_takes_the_folder_as_it_is(tmp_path):
    write_run(tmp_path)
    before = files_below(tmp_path)
    prepare_sink(str(tmp_path), is_overwrite=False)
    assert files_below(tmp_path) == before


def test_overwrite_removes_what_a_run_and_its_killed_tasks_left(tmp_path):
    write_run(tmp_path)
    prepare_sink(str(tmp_path), is_overwrite=True)
    assert files_below(tmp_path) == ["_raybatch/run.json"]


def test_overwrite_leaves_foreign_files_alone(tmp_path):
    write_run(tmp_path)
    foreign = ["a.json", "mine.parquet", "sub/part-000000.parquet"]
    for name in foreign:
        write_parquet(tmp_path / name, pa.table({"y": [1]}))
    prepare_sink(str(tmp_path), is_overwrite=True)
    assert files_below(tmp_path) == sorted([*foreign, "_raybatch/run.json"])


@pytest.mark.parametrize("folder", ["", "_plan_order/", "_units/"])
def test_overwrite_removes_nothing_where_a_foreign_file_lies_among_the_parts(tmp_path, folder):
    write_run(tmp_path)
    write_parquet(tmp_path / folder / "data" / "part-0-c000.parquet", pa.table({"y": [1]}))
    before = files_below(tmp_path)
    with pytest.raises(ConfigError, match=rf"such as {folder}data/part-0-c000.*; move them away"):
        prepare_sink(str(tmp_path), is_overwrite=True)
    assert before == files_below(tmp_path)


@pytest.mark.parametrize(
    ("marker", "message"),
    [("xx", "not written by a run"), ('{"layout": 1}', r"layout 1, .* overwrite=True")],
)
def test_folder_of_another_version_is_refused(tmp_path, marker, message):
    write_run(tmp_path)
    (tmp_path / "_raybatch" / "run.json").write_text(marker)
    with pytest.raises(ConfigError, match=message):
        prepare_sink(str(tmp_path), is_overwrite=False)


@pytest.mark.parametrize("is_overwrite", [False, True])
def test_a_file_for_the_folder_of_the_parts_is_refused(tmp_path, is_overwrite):
    prepare_sink(str(tmp_path), is_overwrite=False)
    (tmp_path / "data").write_text("mine")
    with pytest.raises(ConfigError, match=r"data is a file, .* move it away"):
        prepare_sink(str(tmp_path), is_overwrite=is_overwrite)
    assert files_below(tmp_path) == ["_raybatch/run.json", "data"]


def test_foreign_parquet_is_no_output(tmp_path):
    write_run(tmp_path)
    write_parquet(tmp_path / "mine.parquet", pa.table({"y": [1]}))
    assert [path.removeprefix(f"file://{tmp_path}/") for path in output_files(str(tmp_path))] == [
        "data/part-000000.parquet"
    ]


def test_sink_around_the_source_is_refused(tmp_path):
    write_parquet(tmp_path / "in" / "a.parquet", pa.table({"x": [1]}))
    paths = {part.path for part in scan_source(str(tmp_path / "in")).slices}
    with pytest.raises(ConfigError, match="is below"):
        prepare_sink(str(tmp_path), is_overwrite=True, source_paths=paths)


def test_a_link_to_the_folder_of_the_source_is_refused(tmp_path):
    write_run(tmp_path / "out")
    (tmp_path / "link").symlink_to(tmp_path / "out")
    paths = {part.path for part in scan_source(str(tmp_path / "out" / "data")).slices}
    with pytest.raises(ConfigError, match="is below"):
        prepare_sink(str(tmp_path / "link"), is_overwrite=True, source_paths=paths)
    assert (tmp_path / "out" / "data" / "part-000000.parquet").exists()


def test_a_sink_with_the_name_of_a_folder_below_outputs_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"_units.*choose another"):
        check_place(str(tmp_path / "_units") + "/")


@pytest.mark.parametrize("below", ["inside", "data/inside", "_units"])
def test_a_sink_inside_another_output_is_refused(tmp_path, below):
    prepare_sink(str(tmp_path / "out"), is_overwrite=False)
    with pytest.raises(ConfigError, match=f"inside the output {tmp_path}/out"):
        check_place(str(tmp_path / "out" / below))
    (tmp_path / "link").symlink_to(tmp_path / "out")
    with pytest.raises(ConfigError, match="inside the output"):
        check_place(str(tmp_path / "link" / below))
    check_place(str(tmp_path / "out"))
    check_place(str(tmp_path / "outside"))


def write_beat(sink, age_s):
    store = open_store(str(sink))
    beat(store, "run-a", time.time() - age_s)


@pytest.mark.parametrize("folder", ["", "_plan_order", "_units"])
def test_an_output_that_somebody_writes_is_not_removed(tmp_path, folder):
    prepare_sink(str(tmp_path / "out"), is_overwrite=False)
    write_beat(tmp_path / "out" / folder, age_s=10)
    with pytest.raises(ConfigError, match=r"is in use: run run-a .*wait until .*or remove .*alive"):
        prepare_sink(str(tmp_path / "out"), is_overwrite=True)


def test_the_heartbeat_of_a_dead_run_does_not_hinder(tmp_path):
    prepare_sink(str(tmp_path / "out"), is_overwrite=False)
    write_beat(tmp_path / "out", age_s=1000)
    prepare_sink(str(tmp_path / "out"), is_overwrite=True)
    assert not (tmp_path / "out/_raybatch/runs/run-a.alive").exists()


def test_a_fresh_heartbeat_does_not_hinder_a_run_that_goes_on(tmp_path):
    prepare_sink(str(tmp_path / "out"), is_overwrite=False)
    write_beat(tmp_path / "out", age_s=10)
    prepare_sink(str(tmp_path / "out"), is_overwrite=False)
    assert (tmp_path / "out/_raybatch/runs/run-a.alive").exists()


@pytest.mark.parametrize("name", ["_date", ".lang"])
def test_folders_that_readers_skip_are_refused(name):
    with pytest.raises(ConfigError, match="readers skip folders"):
        check_partitions(pa.schema([(name, pa.string())]), [name])
