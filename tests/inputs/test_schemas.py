"""One schema for all files: chosen columns, and types that are widened without loss."""

import pyarrow as pa
import pytest

from raybatch.errors import ConfigError
from raybatch.inputs.schemas import widened
from raybatch.inputs.source import scan_source
from raybatch.planning.source_checks import check_unique_ids
from tests.stages.support import rows_of, write_ipc, write_parquet


def refusal(folder, **options):
    with pytest.raises(ConfigError) as caught:
        scan_source(str(folder), **options)
    return str(caught.value)


def table_of(source):
    return pa.concat_tables([t for task in source.tasks() for t in source.read(task)])


DICTIONARY = pa.dictionary(pa.int8(), pa.string())
WIDENED = [
    (pa.int32(), pa.int64(), pa.int64()),
    (pa.int8(), pa.uint8(), pa.int16()),
    (pa.int32(), pa.uint32(), pa.int64()),
    (pa.uint8(), pa.uint32(), pa.uint32()),
    (pa.int64(), pa.uint64(), None),
    (pa.int16(), pa.float32(), pa.float32()),
    (pa.int32(), pa.float32(), pa.float64()),
    (pa.uint32(), pa.float64(), pa.float64()),
    (pa.int64(), pa.float64(), None),
    (pa.float16(), pa.float32(), pa.float32()),
    (pa.float32(), pa.float64(), pa.float64()),
    (pa.string(), pa.large_string(), pa.large_string()),
    (pa.string_view(), pa.string(), pa.large_string()),
    (pa.binary(), pa.large_binary(), pa.large_binary()),
    (pa.string(), pa.binary(), None),
    (pa.string(), pa.int64(), None),
    (pa.bool_(), pa.int8(), None),
    (pa.null(), pa.list_(pa.int8()), pa.list_(pa.int8())),
    (DICTIONARY, pa.string(), pa.string()),
    (DICTIONARY, pa.dictionary(pa.int32(), pa.large_string()), pa.large_string()),
    (pa.date32(), pa.timestamp("s"), None),
    (pa.timestamp("s"), pa.timestamp("ms"), None),
    (pa.timestamp("s", "UTC"), pa.timestamp("s"), None),
    (pa.decimal128(5, 2), pa.decimal128(6, 2), None),
    (pa.list_(pa.int8()), pa.large_list(pa.int64()), pa.large_list(pa.int64())),
    (pa.list_(pa.int8()), pa.list_(pa.string()), None),
    (pa.list_(pa.null()), pa.list_(pa.string()), pa.list_(pa.string())),
    (pa.list_(pa.int8()), pa.int8(), None),
    (
        pa.struct([("a", pa.int8())]),
        pa.struct([("b", pa.string()), ("a", pa.int16())]),
        pa.struct([("a", pa.int16()), ("b", pa.string())]),
    ),
    (pa.struct([("a", pa.int8())]), pa.struct([("a", pa.string())]), None),
    (pa.struct([("a", pa.int8()), ("a", pa.int8())]), pa.struct([("a", pa.int16())]), None),
]


@pytest.mark.parametrize(("one", "other", "both"), WIDENED, ids=str)
def test_type_of_both_is_the_narrowest_that_holds_every_value(one, other, both):
    assert widened(one, other) == both


@pytest.mark.parametrize(("one", "other", "both"), WIDENED, ids=str)
def test_type_of_both_does_not_depend_on_the_order_of_the_files(one, other, both):
    found = widened(other, one)
    if both is not None and pa.types.is_struct(both):
        found, both = (sorted(kind, key=lambda field: field.name) for kind in (found, both))
    assert found == both


def extremes(kind):
    """Return the values of a type that a wrong cast would change."""
    if pa.types.is_integer(kind):
        bits = kind.bit_width - pa.types.is_signed_integer(kind)
        low = -(1 << bits) if pa.types.is_signed_integer(kind) else 0
        return pa.array([low, (1 << bits) - 1, None], kind)
    if pa.types.is_floating(kind):
        return pa.array([0.1, 65504.0, None], pa.float64()).cast(kind, safe=False)
    if pa.types.is_dictionary(kind):
        return pa.array(["a", None]).dictionary_encode().cast(kind)
    if pa.types.is_null(kind):
        return pa.nulls(2)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.array([[v] for v in extremes(kind.value_type).to_pylist()], kind)
    if pa.types.is_struct(kind):
        return pa.array([{f.name: extremes(f.type)[0].as_py() for f in kind}, None], kind)
    return pa.array(["text", None]).cast(pa.binary()).cast(kind)


KEPT = [(one, other) for one, other, both in WIDENED if both is not None]


@pytest.mark.parametrize(("one", "other"), KEPT, ids=str)
def test_no_value_changes_when_files_are_brought_together(tmp_path, one, other):
    values = [extremes(one), extremes(other)]
    for name, column in zip("ab", values, strict=True):
        write_ipc(tmp_path / f"{name}.arrow", pa.table({"x": column}))
    found = table_of(scan_source(str(tmp_path), schema_policy="cast"))
    expected = [value for column in values for value in column.to_pylist()]
    if pa.types.is_struct(one):
        names = [field.name for field in found.schema.field("x").type]
        expected = [None if row is None else {n: row.get(n) for n in names} for row in expected]
    assert found.column("x").to_pylist() == expected


def test_column_that_a_file_lacks_is_null_there(tmp_path):
    schema = pa.schema([pa.field("x", pa.int64(), nullable=False), ("y", pa.string())])
    write_parquet(tmp_path / "a.parquet", pa.table({"x": [1], "y": ["a"]}, schema=schema))
    write_parquet(tmp_path / "b.parquet", pa.table({"z": [True], "y": ["b"]}))
    source = scan_source(str(tmp_path), schema_policy="cast")
    assert table_of(source).to_pylist() == [
        {"x": 1, "y": "a", "z": None},
        {"x": None, "y": "b", "z": True},
    ]
    assert all(field.nullable for field in source.schema)


def test_what_cannot_be_cast_is_refused_with_files_column_and_types(tmp_path):
    write_parquet(tmp_path / "a.parquet", pa.table({"x": [1], "y": [1]}))
    write_parquet(tmp_path / "b.parquet", pa.table({"x": [1], "y": ["1"]}))
    message = refusal(tmp_path, schema_policy="cast")
    assert "column 'y' is int64 in file://" in message
    assert "a.parquet and string in file://" in message


def test_strict_lists_every_file_that_differs_and_the_columns(tmp_path):
    write_parquet(tmp_path / "0.parquet", pa.table({"x": [1], "y": ["a"]}))
    for i in range(1, 9):
        write_parquet(tmp_path / f"{i}.parquet", pa.table({"x": [1], f"z{i}": [i]}))
    message = refusal(tmp_path)
    assert "1.parquet has another schema than file://" in message
    assert "y: string, z1: int64" in message
    assert "5.parquet" in message
    assert "and 3 more files" in message
    assert "schema_policy: cast" in message


@pytest.mark.parametrize("order", [(True, False), (False, True)])
def test_strict_tells_a_difference_in_nulls_that_a_cast_brings_together(tmp_path, order):
    fields = [pa.field("x", pa.int64(), nullable=nullable) for nullable in order]
    for i, field in enumerate(fields):
        write_parquet(tmp_path / f"{i}.parquet", pa.table({"x": [1]}, schema=pa.schema([field])))
    assert "x: int64, x: int64 not null" in refusal(tmp_path)
    source = scan_source(str(tmp_path), schema_policy="cast")
    assert source.schema.field("x").nullable
    assert rows_of(source) == [1, 1]


def test_files_of_several_kinds_are_one_source(tmp_path):
    table = pa.table({"x": [1]})
    write_parquet(tmp_path / "a.parquet", table)
    write_ipc(tmp_path / "b.arrow", table)
    (tmp_path / "c.jsonl").write_text('{"x": 1}\n')
    assert rows_of(scan_source(str(tmp_path))) == [1, 1, 1]


def test_ids_of_files_that_are_cast_are_compared(tmp_path):
    write_parquet(tmp_path / "a.parquet", pa.table({"id": pa.array([1], pa.int8())}))
    write_parquet(tmp_path / "b.parquet", pa.table({"id": pa.array([1], pa.int64())}))
    source = scan_source(str(tmp_path), schema_policy="cast")
    with pytest.raises(ConfigError, match="has 1 ids on more than one row"):
        check_unique_ids(source, "id")


KINDS = {
    "parquet": lambda path, table: write_parquet(path.with_suffix(".parquet"), table),
    "file": lambda path, table: write_ipc(path.with_suffix(".arrow"), table),
    "stream": lambda path, table: write_ipc(path.with_suffix(".arrow"), table, "stream"),
    "jsonl": lambda path, table: path.with_suffix(".jsonl").write_text(
        "".join(f'{{"a": "{a}", "b": {b}, "c": {c}}}\n' for a, b, c in zip(*table, strict=True))
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_chosen_columns_alone_are_read_in_the_order_of_the_choice(tmp_path, kind):
    KINDS[kind](tmp_path / "x", pa.table({"a": ["u", "v"], "b": [1, 2], "c": [3, 4]}))
    source = scan_source(str(tmp_path), columns=["c", "a"])
    (table,) = source.read(range(1))
    assert table.to_pydict() == {"c": [3, 4], "a": ["u", "v"]}
    assert source.schema == table.schema


@pytest.mark.parametrize("kind", KINDS)
def test_row_ids_do_not_depend_on_the_columns(tmp_path, kind):
    KINDS[kind](tmp_path / "x", pa.table({"a": ["u", "v"], "b": [1, 2], "c": [3, 4]}))
    ids = [
        table.column("id").to_pylist()
        for columns in (None, ["b"])
        for table in scan_source(str(tmp_path), columns=columns).read(range(1), row_id_column="id")
    ]
    assert ids[0] == ids[1]


def test_column_that_is_not_there_is_named(tmp_path):
    write_parquet(tmp_path / "a.parquet", pa.table({"text": [1], "label": [1]}))
    message = refusal(tmp_path, columns=["text", "lable"])
    assert "columns: the source has no column 'lable' (did you mean 'label'?)" in (message)
    assert "it has text, label" in message


def test_files_may_differ_in_columns_that_are_not_chosen(tmp_path):
    write_parquet(tmp_path / "a.parquet", pa.table({"x": [1], "y": [1]}))
    write_parquet(tmp_path / "b.parquet", pa.table({"x": [2], "y": ["1"]}))
    assert rows_of(scan_source(str(tmp_path), columns=["x"])) == [1, 2]


def test_rows_of_files_that_lack_every_chosen_column_are_null(tmp_path):
    write_parquet(tmp_path / "a.parquet", pa.table({"x": [1]}))
    write_parquet(tmp_path / "b.parquet", pa.table({"y": [1, 2]}))
    write_ipc(tmp_path / "c.arrow", pa.table({"y": [1, 2]}))
    write_ipc(tmp_path / "d.arrow", pa.table({"y": [1, 2]}), "stream")
    source = scan_source(str(tmp_path), columns=["x"], schema_policy="cast")
    assert rows_of(source) == [1] + [None] * 6


def test_column_whose_name_has_a_dot_is_no_field_of_a_struct(tmp_path):
    table = pa.table({"a": [{"b": 1}], "a.b": ["text"], "c": [2]})
    write_parquet(tmp_path / "x.parquet", table)
    for name in ("a", "a.b"):
        (found,) = scan_source(str(tmp_path), columns=[name]).read(range(1))
        assert found.to_pydict() == table.select([name]).to_pydict()


def test_memory_of_columns_that_are_not_chosen_does_not_count(tmp_path):
    wide = [f"{i}" * 2000 for i in range(1000)]
    write_parquet(tmp_path / "a.parquet", pa.table({"x": range(1000), "wide": wide}))
    (part,) = scan_source(str(tmp_path), columns=["x"]).slices
    assert part.num_bytes < 100_000


def test_memory_of_json_columns_that_are_not_chosen_does_not_count(tmp_path):
    (tmp_path / "a.jsonl").write_text(f'{{"x": 1, "wide": "{"y" * 5000}"}}\n')
    (part,) = scan_source(str(tmp_path), columns=["x"]).slices
    assert part.num_bytes < 100


@pytest.mark.parametrize("kind", ["parquet", "file", "stream"])
def test_columns_of_one_name_are_refused_in_every_kind(tmp_path, kind):
    KINDS[kind](tmp_path / "x", pa.table([pa.array([1]), pa.array([2])], names=["x", "x"]))
    assert "has several columns named 'x'; rename" in refusal(tmp_path)


@pytest.mark.parametrize("kind", ["parquet", "file", "stream"])
def test_nul_in_the_name_of_a_column_is_refused(tmp_path, kind):
    KINDS[kind](tmp_path / "x", pa.table({"a\0b": [1]}))
    assert r"has a column 'a\x00b' with a NUL character in its name" in refusal(tmp_path)
