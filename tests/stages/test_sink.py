import pyarrow as pa
import pytest

from raybatch.errors import ConfigError
from raybatch.stages.sink import output_files, prepare_sink
from raybatch.stages.source import scan_source
from tests.stages.support import write_parquet


def test_sink_that_is_a_file_is_refused(tmp_path):
    write_parquet(tmp_path / "a.parquet", pa.table({"x": [1]}))
    with pytest.raises(ConfigError, match="is a file; name a folder"):
        prepare_sink(str(tmp_path / "a.parquet"), is_overwrite=False)


def test_sink_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used; choose a folder that can be written"):
        prepare_sink(str(tmp_path / "file" / "out"), is_overwrite=False)


def test_sink_with_files_is_refused(tmp_path):
    write_parquet(tmp_path / "part-000000.parquet", pa.table({"x": [1]}))
    with pytest.raises(ConfigError, match=r"already holds 1 files.*overwrite=True"):
        prepare_sink(str(tmp_path), is_overwrite=False)


def files_below(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def write_run(sink):
    """Leave what a run and one of its killed tasks leave."""
    prepare_sink(str(sink), is_overwrite=False)
    write_parquet(sink / "part-000000.parquet", pa.table({"x": [1]}))
    (sink / ".part-000001.parquet.staged").write_bytes(b"half")
    (sink / "_raybatch" / "report.json").write_text("{}")


def test_overwrite_removes_what_a_run_and_its_killed_tasks_left(tmp_path):
    write_run(tmp_path)
    prepare_sink(str(tmp_path), is_overwrite=True)
    assert files_below(tmp_path) == ["_raybatch/run.json"]


def test_overwrite_leaves_foreign_files_alone(tmp_path):
    write_run(tmp_path)
    foreign = ["sub/part-000000.parquet", "part-0-c000.snappy.parquet", "mine.parquet", "a.json"]
    for name in foreign:
        write_parquet(tmp_path / name, pa.table({"y": [1]}))
    prepare_sink(str(tmp_path), is_overwrite=True)
    assert files_below(tmp_path) == sorted([*foreign, "_raybatch/run.json"])


def test_foreign_parquet_is_no_output(tmp_path):
    write_run(tmp_path)
    write_parquet(tmp_path / "mine.parquet", pa.table({"y": [1]}))
    assert [path.rpartition("/")[2] for path in output_files(str(tmp_path))] == [
        "part-000000.parquet"
    ]


def test_overwrite_of_a_folder_that_no_run_has_marked_is_refused(tmp_path):
    write_parquet(tmp_path / "part-000000.parquet", pa.table({"x": [1]}))
    with pytest.raises(ConfigError, match=r"no _raybatch/run\.json of an earlier run"):
        prepare_sink(str(tmp_path), is_overwrite=True)
    assert files_below(tmp_path) == ["part-000000.parquet"]


def test_sink_around_the_source_is_refused(tmp_path):
    write_parquet(tmp_path / "in" / "a.parquet", pa.table({"x": [1]}))
    paths = {part.path for part in scan_source(str(tmp_path / "in")).slices}
    with pytest.raises(ConfigError, match="lies below the sink"):
        prepare_sink(str(tmp_path), is_overwrite=True, source_paths=paths)
