import pyarrow as pa
import pytest

from raybatch.errors import ConfigError
from raybatch.inputs.source import check_outside, scan_source
from raybatch.planning.source_checks import check_unique_ids
from tests.stages.support import write_parquet


def test_names_are_relative_to_the_source(tmp_path):
    table = pa.table({"x": [1]})
    write_parquet(tmp_path / "sub" / "b.parquet", table)
    write_parquet(tmp_path / "a.parquet", table)
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
    write_parquet(tmp_path / "a.parquet", pa.table({"x": [1]}))
    write_parquet(tmp_path / "_raybatch" / "b.parquet", pa.table({"y": [1]}))
    write_parquet(tmp_path / ".c.parquet", pa.table({"y": [1]}))
    assert scan_source(str(tmp_path)).num_rows == 1


def test_files_with_different_schemas_are_named(tmp_path):
    write_parquet(tmp_path / "a.parquet", pa.table({"x": [1]}))
    write_parquet(tmp_path / "b.parquet", pa.table({"x": ["1"]}))
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


def test_columns_of_one_name_are_refused(tmp_path):
    table = pa.table([pa.array([1]), pa.array([2])], names=["x", "x"])
    write_parquet(tmp_path / "a.parquet", table)
    with pytest.raises(ConfigError, match=r"a\.parquet has several columns named 'x'; rename"):
        scan_source(str(tmp_path))


def test_id_column_that_cannot_be_compared_is_refused(tmp_path):
    write_parquet(tmp_path / "a.parquet", pa.table({"id": [[1], [2]]}))
    with pytest.raises(ConfigError, match=r"'id' has type list.*texts or whole numbers"):
        check_unique_ids(scan_source(str(tmp_path)), "id")


def test_id_column_that_one_json_file_lacks_is_null_there(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"x": 1}\n')
    (tmp_path / "b.jsonl").write_text('{"x": 1, "id": "b"}\n')
    with pytest.raises(ConfigError, match="is null in 1 rows of the source, for example in a"):
        check_unique_ids(scan_source(str(tmp_path)), "id")


def test_pickled_objects_are_refused(tmp_path):
    field = pa.field(
        "x", pa.binary(), metadata={"ARROW:extension:name": "ray.data.arrow_pickled_object"}
    )
    write_parquet(tmp_path / "a.parquet", pa.table([pa.array([b"x"])], schema=pa.schema([field])))
    with pytest.raises(
        ConfigError, match=r"column 'x' has the extension type 'ray\.data\.arrow_pick"
    ):
        scan_source(str(tmp_path))


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (["a", None], "is null in 1 rows of the source, for example in a.*:1;"),
        (["a", "a"], "has 1 ids on more than one row.* 'a' in a"),
    ],
)
def test_bad_ids_are_refused(tmp_path, ids, message):
    write_parquet(tmp_path / "a.parquet", pa.table({"id": ids}))
    with pytest.raises(ConfigError, match=message):
        check_unique_ids(scan_source(str(tmp_path)), "id")


@pytest.mark.parametrize(
    ("ids", "value"),
    [
        (pa.array([*"abcdefgc"]), "'c'"),
        (pa.array([*"abcdefgc"]).dictionary_encode(), "'c'"),
        (pa.array([1, 2, 3, 4, 5, 6, 7, 3]), "3"),
        (pa.array([b"\x1b[1m" if i in (2, 7) else bytes([i]) for i in range(8)]), r"b'\x1b[1m'"),
        (pa.array([f"{i} " + "x" * 99 for i in (0, 1, 2, 3, 4, 5, 6, 2)]), f"'2 {'x' * 37}..."),
    ],
    ids=["text", "dictionary", "number", "bytes", "long"],
)
def test_a_repeated_id_is_told_with_its_first_two_rows(tmp_path, ids, value):
    table = pa.table({"id": ids})
    write_parquet(tmp_path / "a.parquet", table.slice(0, 4), row_group_size=2)
    write_parquet(tmp_path / "b.parquet", table.slice(4))
    with pytest.raises(ConfigError) as caught:
        check_unique_ids(scan_source(str(tmp_path)), "id")
    where = f"for example {value} in a.parquet:2 and b.parquet:3"
    assert where in str(caught.value)


def test_sink_in_the_source_folder_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"is inside the source .*choose a folder outside"):
        check_outside(str(tmp_path / "out"), str(tmp_path))


@pytest.mark.parametrize(
    ("sink", "source"),
    [
        ("in/out", "link"),
        ("link/out", "in"),
        ("in/out", "link/**/*.parquet"),
        ("in/elsewhere/out", "in"),
        ("beside/out", "in"),
        ("beside/out", "in/**/*.parquet"),
        ("beside/out", "link"),
    ],
)
def test_a_link_hides_no_sink_in_the_source(tmp_path, sink, source):
    for name in ("in", "beside"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "in")
    (tmp_path / "in" / "elsewhere").symlink_to(tmp_path / "beside")
    with pytest.raises(ConfigError, match=r"is inside the source .* would read it"):
        check_outside(str(tmp_path / sink), str(tmp_path / source))


def test_links_in_circles_and_to_hidden_names_do_not_hinder(tmp_path):
    for name in ("in", "beside"):
        (tmp_path / name).mkdir()
    (tmp_path / "in" / "circle").symlink_to(tmp_path / "in")
    (tmp_path / "in" / "elsewhere").symlink_to(tmp_path / "beside")
    check_outside(str(tmp_path / "beside" / "_out"), str(tmp_path / "in"))


@pytest.mark.parametrize(
    "pattern",
    ["**/*.parquet", "**", "out/*/*.parquet", "*/data/part-*.parquet", "o?t/d*/*[1-9].parquet"],
)
def test_sink_that_the_glob_of_the_source_matches_is_refused(tmp_path, pattern):
    with pytest.raises(ConfigError, match=r"is inside the source .* the next run would read it"):
        check_outside(f"{tmp_path}/out/", str(tmp_path / pattern))


@pytest.mark.parametrize(
    ("sink", "source"),
    [
        ("_out", ""),
        ("_out", "**/*.parquet"),
        ("out", "*.parquet"),
        ("out", "**/in-*.parquet"),
        ("out", "**/*.jsonl"),
        ("out", "in/**/*.parquet"),
        ("in2", "in"),
    ],
)
def test_sink_that_the_next_run_does_not_read_may_lie_beside_or_in_the_source(
    tmp_path, sink, source
):
    (tmp_path / "in").mkdir()
    check_outside(str(tmp_path / sink), str(tmp_path / source))


def test_sink_in_another_file_system_lies_outside(tmp_path):
    check_outside(f"memory:/{tmp_path}/out", str(tmp_path))


def test_small_files_share_tasks_and_large_ones_are_read_in_small_tables(tmp_path):
    for i in range(100):
        write_parquet(tmp_path / f"{i:03d}.parquet", pa.table({"x": [i] * 10}))
    write_parquet(tmp_path / "large.parquet", pa.table({"x": [0] * 20_000}))
    source = scan_source(str(tmp_path))
    tasks = [list(source.read(task, row_id_column="id")) for task in source.tasks()]
    assert [64 * 10, 36 * 10, 20_000] == [sum(t.num_rows for t in tables) for tables in tasks]
    assert max(table.num_rows for tables in tasks for table in tables) == 1024
    ids = pa.concat_tables(t for tables in tasks for t in tables).column("id").to_pylist()
    assert len(set(ids)) == len(ids) == 21_000
