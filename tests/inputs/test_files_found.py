"""Folders of Hive, files of any name, timestamps of Spark, types that are not read or written."""

import io
import json
import logging
import random

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from raybatch.errors import ConfigError
from raybatch.inputs.source import scan_source
from raybatch.rows.batches import as_movable, check_parquet_types
from tests.stages.support import rows_of, write_parquet

GOOD = pa.table({"x": [1, 2]})
VALUES = [None, "en", "a b", "x=y", "07", "é/ü", "%41", "", "1e5", "true", "__"]


def read(source, **options):
    scanned = scan_source(str(source), **options)
    return [
        row for task in scanned.tasks() for rows in scanned.read(task) for row in rows.to_pylist()
    ]


def by_all(rows):
    return sorted(json.dumps(row, sort_keys=True) for row in rows)


@pytest.mark.parametrize("seed", range(20))
def test_folders_are_the_columns_that_pyarrow_makes_of_them(tmp_path, seed):
    rng = random.Random(seed)
    names = rng.sample(["lang", "year", "a b"], rng.randrange(1, 4))
    rows = [{"x": i, **{name: rng.choice(VALUES) for name in names}} for i in range(20)]
    fields = pa.schema([(name, pa.string()) for name in names])
    by = ds.partitioning(fields, flavor="hive")
    table = pa.Table.from_pylist(rows, pa.schema([("x", pa.int64()), *fields]))
    kind = rng.choice(["parquet", "feather"])
    ds.write_dataset(table, tmp_path, format=kind, partitioning=by)
    theirs = ds.dataset(tmp_path, format=kind, partitioning=by).to_table().to_pylist()
    assert by_all(read(tmp_path)) == by_all(theirs)
    few = [{name: row[name] for name in names[::-1]} for row in theirs]
    assert by_all(read(tmp_path, columns=names[::-1])) == by_all(few)


def test_folders_are_columns_of_json_lines_as_well(tmp_path):
    for lang, line in (("en", '{"x": 1}'), ("de", '{"x": 0.5, "y": []}')):
        (tmp_path / f"lang={lang}").mkdir()
        (tmp_path / f"lang={lang}" / "a.jsonl").write_text(line)
    assert read(tmp_path, columns=["lang", "x"]) == [
        {"lang": "de", "x": 0.5},
        {"lang": "en", "x": 1},
    ]
    assert read(tmp_path)[0] == {"x": 0.5, "y": [], "lang": "de"}


def test_folders_that_differ_are_schemas_that_differ(tmp_path):
    write_parquet(tmp_path / "a.parquet", GOOD)
    write_parquet(tmp_path / "lang=en" / "a.parquet", GOOD)
    with pytest.raises(ConfigError, match=r"has another schema than .*: lang: string"):
        scan_source(str(tmp_path))
    rows = read(tmp_path, schema_policy="cast")
    assert [row["lang"] for row in rows] == [None, None, "en", "en"]


@pytest.mark.parametrize("kind", [pa.int64(), pa.string(), pa.date32()])
def test_column_that_is_a_folder_too_must_say_the_same(tmp_path, kind):
    text = {pa.int64(): "7", pa.string(): "07", pa.date32(): "2024-01-02"}[kind]
    table = pa.table({"x": [1], "y": pa.array([text]).cast(kind)})
    write_parquet(tmp_path / "in" / f"y={text}" / "a.parquet", table)
    assert scan_source(str(tmp_path / "in")).schema.field("y").type == kind
    for other in ("8", "__HIVE_DEFAULT_PARTITION__", "no day"):
        write_parquet(tmp_path / other / f"y={other}" / "a.parquet", table)
        with pytest.raises(ConfigError, match="column 'y' whose values differ"):
            scan_source(str(tmp_path / other))
        assert rows_of(scan_source(str(tmp_path / other), columns=["x"])) == [1]


@pytest.mark.parametrize("kind", ["json", "ipc file", "ipc stream"])
def test_files_of_all_kinds_must_say_what_their_folder_says(tmp_path, kind):
    table = pa.table({"x": [1], "y": ["en"]})
    for folder in ("good/y=en", "bad/y=de"):
        (tmp_path / folder).mkdir(parents=True)
        path = tmp_path / folder / ("a.jsonl" if kind == "json" else "a.arrow")
        if kind == "json":
            path.write_text('{"x": 1, "y": "en"}')
            continue
        new = pa.ipc.new_file if kind == "ipc file" else pa.ipc.new_stream
        with new(str(path), table.schema) as writer:
            writer.write_table(table)
    assert [row["y"] for row in read(tmp_path / "good")] == ["en"]
    with pytest.raises(ConfigError, match="column 'y' whose values differ"):
        scan_source(str(tmp_path / "bad"))


def contents():
    def ipc(new):
        sink = io.BytesIO()
        with new(sink, GOOD.schema) as writer:
            writer.write_table(GOOD)
        return sink.getvalue()

    parquet = io.BytesIO()
    pq.write_table(GOOD, parquet)
    lines = b'{"x": 1}\n{"x": 2}\n'
    return {
        "parquet": parquet.getvalue(),
        "ipc file": ipc(pa.ipc.new_file),
        "ipc stream": ipc(pa.ipc.new_stream),
        "lines": b"\n " + lines,
        "gzip": pa.Codec("gzip").compress(lines, asbytes=True),
        "zstd": pa.Codec("zstd").compress(lines, asbytes=True),
    }


@pytest.mark.parametrize("name", ["20250101_abc", "a.parq", "a.parquet.gz", "_a.jsonl", "a.arrow"])
@pytest.mark.parametrize("kind", contents())
def test_file_that_is_named_is_read_by_its_content(tmp_path, name, kind):
    (tmp_path / name).write_bytes(contents()[kind])
    assert rows_of(scan_source(str(tmp_path / name))) == [1, 2]


def test_file_that_is_named_and_nothing_known_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("hello")
    with pytest.raises(ConfigError, match="is not Parquet, JSON lines, CSV or Arrow IPC"):
        scan_source(str(tmp_path / "a.txt"))


def test_pattern_names_its_files_unless_it_ends_in_a_star(tmp_path, caplog):
    for name in ("a.parq", "b.parq", "c.parquet", "_d.parq"):
        write_parquet(tmp_path / name, GOOD)
    assert rows_of(scan_source(str(tmp_path / "*.parq"))) == [1, 2, 1, 2]
    assert rows_of(scan_source(str(tmp_path / "**/*.parq"))) == [1, 2, 1, 2]
    assert rows_of(scan_source(str(tmp_path / "*"))) == [1, 2]
    assert "left out 2 files named *.parq (a.parq, b.parq)" in caplog.text


def test_what_a_folder_holds_and_is_left_out_is_told_with_counts(tmp_path, caplog):
    for name in ("a.parquet", "part-0", "b.txt", "c.txt", "d.TXT", "e.txt", ".f.crc", "_g/h"):
        write_parquet(tmp_path / name, GOOD)
    assert rows_of(scan_source(str(tmp_path))) == [1, 2]
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "left out 1 file without a suffix (part-0), " in record.message
    assert "4 files named *.txt (b.txt, c.txt, d.TXT, ...)" in record.message
    assert "2 files and folders with a leading '_' or '.'" in record.message
    assert "name it as the source" in record.message


def test_hidden_files_alone_are_no_warning(tmp_path, caplog):
    for name in ("a.parquet", "_SUCCESS"):
        write_parquet(tmp_path / name, GOOD)
    with caplog.at_level(logging.INFO):
        scan_source(str(tmp_path))
    assert [record.levelno for record in caplog.records] == [logging.INFO]


def test_timestamps_of_int96_are_exact_in_microseconds(tmp_path):
    """From year 1 to 9999, at any depth; Spark writes no others."""
    rng = np.random.default_rng(0)
    micros = rng.integers(-62_135_596_800_000_000, 253_402_300_800_000_000, 3000)
    stamps = pa.array(micros, pa.timestamp("us"), mask=rng.random(3000) < 0.1)
    rows = pa.array([[{"a": stamp}] for stamp in stamps], pa.list_(pa.struct([("a", stamps.type)])))
    table = pa.table({"x": stamps, "y": rows})
    path = tmp_path / "a.parquet"
    pq.write_table(table, path, use_deprecated_int96_timestamps=True, row_group_size=700)
    assert "INT96" in {pq.ParquetFile(path).schema.column(i).physical_type for i in range(2)}
    source = scan_source(str(path))
    read = pa.concat_tables([rows for task in source.tasks() for rows in source.read(task)])
    assert read.column("x").to_pylist() == table.column("x").to_pylist()
    assert read.column("y").to_pylist() == table.column("y").to_pylist()


@pytest.mark.parametrize("is_nested", [False, True])
def test_timestamps_of_int96_with_nanoseconds_are_refused(tmp_path, is_nested):
    stamps = pa.array([1_577_836_800_123_456_000, None, 1_577_836_800_123_456_789])
    stamps = stamps.cast(pa.timestamp("ns"))
    column = pa.array([[s] for s in stamps], pa.list_(stamps.type)) if is_nested else stamps
    table = pa.table({"x": [1, 2, 3], "y": column})
    pq.write_table(table, tmp_path / "a.parquet", use_deprecated_int96_timestamps=True)
    with pytest.raises(
        ConfigError, match=r"a\.parquet: column 'y' has an INT96 timestamp with fractions"
    ):
        scan_source(str(tmp_path))
    assert rows_of(scan_source(str(tmp_path), columns=["x"])) == [1, 2, 3]


class Alive(pa.ExtensionType):
    """A type whose class runs code when it is met in a schema."""

    calls = 0

    def __init__(self):
        super().__init__(pa.string(), "raybatch.test_alive")

    def __arrow_ext_serialize__(self):
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage, serialized):
        cls.calls += 1
        return cls()


@pytest.fixture
def alive():
    pa.register_extension_type(Alive())
    yield Alive
    pa.unregister_extension_type("raybatch.test_alive")


def write_ipc_with(new):
    def write(table, path):
        with new(path, table.schema) as writer:
            writer.write_table(table, 2)

    return write


WRITERS = {
    "a.parquet": pq.write_table,
    "a.arrow": write_ipc_with(pa.ipc.new_file),
    "a.ipc": write_ipc_with(pa.ipc.new_stream),
}


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("has_dictionary", [False, True])
def test_extension_types_of_columns_that_are_not_read_do_not_matter(
    tmp_path, alive, name, has_dictionary
):
    odd = pa.array(["a", None, "c", "d"]).cast(pa.string())
    uuids = pa.array([bytes([i] * 16) for i in range(4)], pa.binary(16))
    table = pa.table(
        {
            "odd": pa.ExtensionArray.from_storage(Alive(), odd),
            "u": pa.ExtensionArray.from_storage(pa.uuid(), uuids),
            "nested": pa.StructArray.from_arrays(
                [pa.ExtensionArray.from_storage(Alive(), odd)], names=["a"]
            ),
            "x": pa.array(["a", "b", "a", None]).dictionary_encode() if has_dictionary else odd,
        }
    )
    WRITERS[name](table, tmp_path / name)
    Alive.calls = 0
    with pytest.raises(ConfigError, match=r"type 'raybatch\.test_alive'.*leave the column"):
        scan_source(str(tmp_path))
    source = scan_source(str(tmp_path), columns=["u", "x"])
    read = pa.concat_tables([rows for task in source.tasks() for rows in source.read(task)])
    assert read.combine_chunks().equals(table.select(["u", "x"]).combine_chunks())
    assert Alive.calls == 0


ARRAYS = {
    "interval": lambda: pa.array([pa.MonthDayNano([1, 2, 3])]),
    "dense union": lambda: pa.UnionArray.from_dense(
        pa.array([0], pa.int8()), pa.array([0], pa.int32()), [pa.array([1])]
    ),
    "sparse union": lambda: pa.UnionArray.from_sparse(pa.array([0], pa.int8()), [pa.array([1])]),
    "run end": lambda: pa.RunEndEncodedArray.from_arrays(
        pa.array([1], pa.int32()), pa.array(["a"])
    ),
    "no fields": lambda: pa.array([{}], pa.struct([])),
    "no fields inside": lambda: pa.array([[{}]], pa.list_(pa.struct([]))),
    "uuid": lambda: pa.ExtensionArray.from_storage(pa.uuid(), pa.array([b"a" * 16], pa.binary(16))),
    "json": lambda: pa.ExtensionArray.from_storage(pa.json_(), pa.array(["{}"])),
    **{
        str(kind): lambda kind=kind: pa.nulls(1, kind)
        for kind in (
            *(pa.null(), pa.bool_(), pa.int8(), pa.uint64(), pa.float16(), pa.float64()),
            *(pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.binary_view()),
            *(pa.binary(3), pa.decimal128(5, 2), pa.decimal256(60, 2), pa.duration("ns")),
            *(pa.date32(), pa.date64(), pa.time32("s"), pa.time64("ns"), pa.timestamp("s", "UTC")),
            *(pa.list_(pa.int8()), pa.large_list(pa.int8()), pa.list_(pa.int8(), 2)),
            *(pa.list_view(pa.string()), pa.large_list_view(pa.int8())),
            *(pa.map_(pa.string(), pa.int8()), pa.struct([("a", pa.string_view())])),
            pa.dictionary(pa.int8(), pa.string()),
        )
    },
}


@pytest.mark.parametrize("kind", ARRAYS)
def test_types_are_refused_exactly_where_rows_cannot_be_picked_and_written(kind):
    table = pa.table({"x": ARRAYS[kind]()})
    try:
        pq.write_table(as_movable(table).take([0]), io.BytesIO())
        is_written = True
    except pa.ArrowException:
        is_written = False
    if is_written:
        check_parquet_types(table.schema)
    else:
        with pytest.raises(ConfigError, match=r"column 'x' has type .*leave it out \(columns\)"):
            check_parquet_types(table.schema)
