import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raybatch.errors import ConfigError
from raybatch.stages.sink import output_files, prepare_sink
from raybatch.stages.source import check_outside, check_unique_ids, read_slice, scan_source


def write(path, table, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, **options)


def rows_of(source):
    tables = [table for part in source.slices for table in read_slice(part)]
    return [value for table in tables for value in table.column("x").to_pylist()]


def test_slices_cover_every_row_once_and_know_their_positions(tmp_path):
    table = pa.table({"x": list(range(5000))})
    write(tmp_path / "a.parquet", table, row_group_size=3000)
    source = scan_source(str(tmp_path))
    assert rows_of(source) == list(range(5000))
    assert [part.first_row for part in source.slices] == [0, 3000]


def test_names_are_relative_to_the_source(tmp_path):
    table = pa.table({"x": [1]})
    write(tmp_path / "sub" / "b.parquet", table)
    write(tmp_path / "a.parquet", table)
    names = [
        [part.name for part in scan_source(str(tmp_path / path)).slices]
        for path in ("", "sub/b.parquet", "*.parquet", "*/*.parquet")
    ]
    assert names == [
        ["a.parquet", "sub/b.parquet"],
        ["b.parquet"],
        ["a.parquet"],
        ["sub/b.parquet"],
    ]


def test_hidden_files_and_folders_are_left_out(tmp_path):
    write(tmp_path / "a.parquet", pa.table({"x": [1]}))
    write(tmp_path / "_raybatch" / "b.parquet", pa.table({"y": [1]}))
    write(tmp_path / ".c.parquet", pa.table({"y": [1]}))
    assert scan_source(str(tmp_path)).num_rows == 1


def test_json_lines_of_several_files_get_one_schema(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"x": 1}\n{"x": 2}\n')
    (tmp_path / "b.jsonl").write_text(json.dumps({"x": 3, "y": "only here"}) + "\n")
    source = scan_source(str(tmp_path))
    assert (source.num_rows, source.schema.names) == (3, ["x", "y"])


def test_json_texts_that_look_like_dates_stay_texts(tmp_path):
    row = {"x": "2024-01-01", "y": {"z": ["2024-01-01 10:00:00", None]}, "n": 1}
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    source = scan_source(str(tmp_path))
    assert source.schema.field("x").type == pa.string()
    (table,) = read_slice(source.slices[0])
    assert table.to_pylist() == [row]


def test_files_with_different_schemas_are_named(tmp_path):
    write(tmp_path / "a.parquet", pa.table({"x": [1]}))
    write(tmp_path / "b.parquet", pa.table({"x": ["1"]}))
    with pytest.raises(ConfigError, match=r"b\.parquet has another schema.*x: int64, x: string"):
        scan_source(str(tmp_path))


def test_broken_file_is_named(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"no parquet")
    with pytest.raises(ConfigError, match=r"a\.parquet cannot be read"):
        scan_source(str(tmp_path))


def test_source_that_no_file_system_knows_is_named():
    with pytest.raises(ConfigError, match="source 'nope://x/in' cannot be listed: ValueError"):
        scan_source("nope://x/in")


def test_missing_source_is_named(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        scan_source(str(tmp_path / "nothing"))


def failing_json(tmp_path, text):
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(ConfigError) as caught:
        scan_source(str(tmp_path))
    return str(caught.value)


@pytest.mark.parametrize(
    "line",
    ['{"x": ', '{"x": "text"}', '{"x": 1, "x": 2}', "[1]", "no json", '{"x": {"y": 1}}'],
    ids=["cut", "other type", "twice", "list", "text", "struct"],
)
def test_broken_json_line_is_named_with_file_and_number(tmp_path, line):
    good = '{"x": 1}\n'
    message = failing_json(tmp_path, good * 700 + line + "\n" + good * 700)
    assert "a.jsonl, line 701: " in message
    assert line in message
    assert message.endswith("mend or remove the line")


def test_json_line_longer_than_a_block_of_arrow_is_read(tmp_path):
    text = "y" * (3 << 20)
    (tmp_path / "a.jsonl").write_text('{"x": "a"}\n' + json.dumps({"x": text}) + "\n")
    assert rows_of(scan_source(str(tmp_path))) == ["a", text]


def test_json_file_without_a_line_has_no_rows(tmp_path):
    (tmp_path / "a.jsonl").write_text("")
    (tmp_path / "b.jsonl").write_text('{"x": 1}\n')
    source = scan_source(str(tmp_path))
    assert (source.num_rows, source.schema.names, rows_of(source)) == (1, ["x"], [1])


def test_parquet_file_without_rows_is_no_slice(tmp_path):
    write(tmp_path / "a.parquet", pa.table({"x": pa.array([], pa.int64())}))
    write(tmp_path / "b.parquet", pa.table({"x": [1]}))
    assert [part.name for part in scan_source(str(tmp_path)).slices] == ["b.parquet"]


def test_row_group_is_read_in_small_tables(tmp_path):
    write(tmp_path / "a.parquet", pa.table({"x": list(range(5000))}))
    (part,) = scan_source(str(tmp_path)).slices
    assert [table.num_rows for table in read_slice(part)] == [1024] * 4 + [904]


def test_columns_of_one_name_are_refused(tmp_path):
    table = pa.table([pa.array([1]), pa.array([2])], names=["x", "x"])
    write(tmp_path / "a.parquet", table)
    with pytest.raises(ConfigError, match=r"a\.parquet has several columns named 'x'; rename"):
        scan_source(str(tmp_path))


def test_id_column_that_cannot_be_compared_is_refused(tmp_path):
    write(tmp_path / "a.parquet", pa.table({"id": [[1], [2]]}))
    with pytest.raises(ConfigError, match=r"'id' is a column of list.*texts or whole numbers"):
        check_unique_ids(scan_source(str(tmp_path)), "id")


def test_id_column_that_one_json_file_lacks_is_null_there(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"x": 1}\n')
    (tmp_path / "b.jsonl").write_text('{"x": 1, "id": "b"}\n')
    with pytest.raises(ConfigError, match="is null in 1 rows"):
        check_unique_ids(scan_source(str(tmp_path)), "id")


def test_pickled_objects_are_refused(tmp_path):
    field = pa.field(
        "x", pa.binary(), metadata={"ARROW:extension:name": "ray.data.arrow_pickled_object"}
    )
    write(tmp_path / "a.parquet", pa.table([pa.array([b"x"])], schema=pa.schema([field])))
    with pytest.raises(ConfigError, match="column 'x' holds pickled Python objects"):
        scan_source(str(tmp_path))


@pytest.mark.parametrize(
    ("ids", "message"),
    [(["a", None], "is null in 1 rows"), (["a", "a"], "has 1 ids on more than one row.* a;")],
)
def test_bad_ids_are_refused(tmp_path, ids, message):
    write(tmp_path / "a.parquet", pa.table({"id": ids}))
    with pytest.raises(ConfigError, match=message):
        check_unique_ids(scan_source(str(tmp_path)), "id")


def test_sink_in_the_source_folder_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"lies in the source folder.*choose a folder beside it"):
        check_outside(str(tmp_path / "out"), str(tmp_path))


def test_sink_that_the_next_run_does_not_read_may_lie_in_the_source_folder(tmp_path):
    check_outside(str(tmp_path / "_out"), str(tmp_path))
    check_outside(str(tmp_path / "out"), str(tmp_path / "*.parquet"))


def test_sink_that_is_a_file_is_refused(tmp_path):
    write(tmp_path / "a.parquet", pa.table({"x": [1]}))
    with pytest.raises(ConfigError, match="is a file; name a folder"):
        prepare_sink(str(tmp_path / "a.parquet"), is_overwrite=False)


def test_sink_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used; choose a folder that can be written"):
        prepare_sink(str(tmp_path / "file" / "out"), is_overwrite=False)


def test_sink_with_files_is_refused(tmp_path):
    write(tmp_path / "part-000000.parquet", pa.table({"x": [1]}))
    with pytest.raises(ConfigError, match=r"already holds 1 files.*overwrite=True"):
        prepare_sink(str(tmp_path), is_overwrite=False)


def files_below(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def write_run(sink):
    """Leave what a run and one of its killed tasks leave."""
    prepare_sink(str(sink), is_overwrite=False)
    write(sink / "part-000000.parquet", pa.table({"x": [1]}))
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
        write(tmp_path / name, pa.table({"y": [1]}))
    prepare_sink(str(tmp_path), is_overwrite=True)
    assert files_below(tmp_path) == sorted([*foreign, "_raybatch/run.json"])


def test_foreign_parquet_is_no_output(tmp_path):
    write_run(tmp_path)
    write(tmp_path / "mine.parquet", pa.table({"y": [1]}))
    assert [path.rpartition("/")[2] for path in output_files(str(tmp_path))] == [
        "part-000000.parquet"
    ]


def test_overwrite_of_a_folder_that_no_run_has_marked_is_refused(tmp_path):
    write(tmp_path / "part-000000.parquet", pa.table({"x": [1]}))
    with pytest.raises(ConfigError, match=r"no _raybatch/run\.json of an earlier run"):
        prepare_sink(str(tmp_path), is_overwrite=True)
    assert files_below(tmp_path) == ["part-000000.parquet"]


def test_sink_around_the_source_is_refused(tmp_path):
    write(tmp_path / "in" / "a.parquet", pa.table({"x": [1]}))
    paths = {part.path for part in scan_source(str(tmp_path / "in")).slices}
    with pytest.raises(ConfigError, match="lies below the sink"):
        prepare_sink(str(tmp_path), is_overwrite=True, source_paths=paths)
