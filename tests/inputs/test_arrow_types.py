"""Types that run code when they are read, in every place of a file where one can stand."""

import base64
import os
import pickle
import struct

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray.data  # noqa: F401 - registers the type

from raybatch.errors import ConfigError
from raybatch.inputs.source import scan_source
from tests.stages.support import rows_of, write_parquet

PICKLES = "ray.data.arrow_pickled_object"


class Payload:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def pickled(marker, num_rows=2):
    storage = pa.array([pickle.dumps(Payload(f"{marker}{i}")) for i in range(num_rows)])
    return pa.ExtensionArray.from_storage(type_of_pickles(), storage.cast(pa.large_binary()))


def type_of_pickles():
    field = pa.field("x", pa.large_binary(), metadata={"ARROW:extension:name": PICKLES})
    return pa.ipc.read_schema(pa.schema([field]).serialize()).field("x").type


def write_ipc(path, table):
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as out:
        out.write_table(table)


def write_stream(path, table):
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as out:
        out.write_table(table)


WRITERS = {
    "parquet": lambda folder, table: write_parquet(folder / "a.parquet", table),
    "file": lambda folder, table: write_ipc(folder / "a.arrow", table),
    "stream": lambda folder, table: write_stream(folder / "a.arrow", table),
}


@pytest.fixture(params=WRITERS)
def write(request):
    return WRITERS[request.param]


def refusal(folder, **options):
    with pytest.raises(ConfigError) as caught:
        scan_source(str(folder), **options)
    return str(caught.value)


def test_the_payload_runs_where_nobody_takes_care(tmp_path):
    write_parquet(tmp_path / "a.parquet", pa.table({"x": pickled(tmp_path / "marker")}))
    pq.read_table(tmp_path / "a.parquet").to_pylist()
    assert (tmp_path / "marker0").exists()


def test_pickled_objects_that_are_not_read_are_never_run(tmp_path, write):
    (tmp_path / "in").mkdir()
    write(tmp_path / "in", pa.table({"y": pickled(tmp_path / "marker"), "x": [1, 2]}))
    assert rows_of(scan_source(str(tmp_path / "in"), columns=["x"])) == [1, 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


@pytest.mark.parametrize("options", [{}, {"columns": ["x"]}, {"skip_bad_files": True}], ids=str)
def test_pickled_objects_are_refused_and_never_run(tmp_path, write, options):
    (tmp_path / "in").mkdir()
    write(tmp_path / "in", pa.table({"x": pickled(tmp_path / "marker"), "y": [1, 2]}))
    message = refusal(tmp_path / "in", **options)
    assert "/a." in message
    assert f"column 'x' has the extension type '{PICKLES}'" in message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


NESTINGS = {
    "struct": lambda values: pa.StructArray.from_arrays([values], ["f"]),
    "list": lambda values: pa.ListArray.from_arrays([0, 1, 2], values),
    "large list": lambda values: pa.LargeListArray.from_arrays([0, 1, 2], values),
    "fixed list": lambda values: pa.FixedSizeListArray.from_arrays(values, 1),
    "map": lambda values: pa.MapArray.from_arrays([0, 1, 2], pa.array(["k", "k"]), values),
    "deep": lambda values: NESTINGS["list"](NESTINGS["struct"](NESTINGS["map"](values))),
}


@pytest.mark.parametrize("nesting", NESTINGS)
def test_pickled_objects_inside_of_other_types_are_refused(tmp_path, write, nesting):
    write(tmp_path, pa.table({"outer": NESTINGS[nesting](pickled(tmp_path / "marker"))}))
    message = refusal(tmp_path)
    assert "column 'outer." in message
    assert PICKLES in message


def test_union_of_pickled_objects_is_refused(tmp_path):
    values = pa.UnionArray.from_sparse(
        pa.array([0, 1], pa.int8()), [pickled(tmp_path / "marker"), pa.array([1, 2])]
    )
    write_ipc(tmp_path / "a.arrow", pa.table({"u": values}))
    assert PICKLES in refusal(tmp_path)


@pytest.mark.parametrize("name", ["ray.data.arrow_tensor_v2", "some.unknown", "arrow.opaque"])
def test_other_extension_types_are_refused_whether_registered_or_not(tmp_path, write, name):
    metadata = {"ARROW:extension:name": name, "ARROW:extension:metadata": "[1]"}
    field = pa.field("t", pa.list_(pa.int64()), metadata=metadata)
    write(tmp_path, pa.table([pa.array([[1]])], schema=pa.schema([field])))
    assert f"column 't' has the extension type '{name}'" in refusal(tmp_path)


class Loud(pa.ExtensionType):
    """Says when Arrow makes it from what a file says of it."""

    made: list[bytes] = []  # noqa: RUF012

    def __init__(self):
        super().__init__(pa.binary(), "tests.loud")

    def __arrow_ext_serialize__(self):
        return b"said"

    @classmethod
    def __arrow_ext_deserialize__(cls, storage_type, serialized):
        cls.made.append(serialized)
        return cls()


@pytest.fixture
def loud():
    pa.register_extension_type(Loud())
    Loud.made.clear()
    yield
    pa.unregister_extension_type("tests.loud")


def test_not_even_the_type_comes_alive(tmp_path, write, loud):
    values = pa.ExtensionArray.from_storage(Loud(), pa.array([b"x"]))
    write(tmp_path, pa.table({"x": values}))
    assert "'tests.loud'" in refusal(tmp_path)
    assert Loud.made == []


def test_second_arrow_schema_in_a_footer_is_refused(tmp_path):
    """A reader takes one of them, a check might take the other."""
    write_parquet(tmp_path / "a.parquet", pa.table({"x": [b"1"]}))
    data = (tmp_path / "a.parquet").read_bytes()
    size = struct.unpack("<I", data[-8:-4])[0]
    body, footer = data[: -8 - size], data[-8 - size : -8]
    key = b"ARROW:schema"
    assert footer.count(key) == 1
    table = pa.table({"x": [b"1"]}).replace_schema_metadata({"ARROW.schema": "x" * 8})
    write_parquet(tmp_path / "a.parquet", table)
    data = (tmp_path / "a.parquet").read_bytes()
    size = struct.unpack("<I", data[-8:-4])[0]
    body, footer = data[: -8 - size], data[-8 - size : -8].replace(b"ARROW.schema", key)
    assert footer.count(key) == 2
    (tmp_path / "a.parquet").write_bytes(body + footer + data[-8:])
    assert "two Arrow schemas" in refusal(tmp_path)


def test_arrow_schema_of_a_footer_is_looked_into_although_it_is_base64(tmp_path):
    write_parquet(tmp_path / "a.parquet", pa.table({"x": pickled(tmp_path / "marker")}))
    stored = pq.read_metadata(tmp_path / "a.parquet").metadata[b"ARROW:schema"]
    assert PICKLES.encode() not in (tmp_path / "a.parquet").read_bytes()
    assert PICKLES.encode() in base64.b64decode(stored)
    assert PICKLES in refusal(tmp_path)


def nested(depth):
    kind = pa.int8()
    for _ in range(depth):
        kind = pa.struct([("a", kind)])
    return pa.table({"x": pa.nulls(1, kind)})


def test_types_that_are_nested_too_deep_are_refused(tmp_path):
    write_parquet(tmp_path / "a.parquet", nested(60))
    assert scan_source(str(tmp_path)).num_rows == 1
    write_parquet(tmp_path / "a.parquet", nested(61))
    assert "column 'x' is nested deeper than 60 levels" in refusal(tmp_path)


ALLOWED = {
    "json": pa.array(['{"a": 1}', None], pa.json_()),
    "uuid": pa.array([b"0" * 16, None], pa.uuid()),
    "bool8": pa.ExtensionArray.from_storage(pa.bool8(), pa.array([1, None], pa.int8())),
    "tensor": pa.ExtensionArray.from_storage(
        pa.fixed_shape_tensor(pa.int32(), [2]), pa.array([[1, 2], [3, 4]], pa.list_(pa.int32(), 2))
    ),
}


@pytest.mark.parametrize("kind", ALLOWED)
def test_types_of_arrow_itself_are_read(tmp_path, write, kind):
    table = pa.table({"x": ALLOWED[kind], "s": NESTINGS["struct"](ALLOWED[kind])})
    write(tmp_path, table)
    source = scan_source(str(tmp_path))
    (found,) = source.read(range(1))
    assert found.equals(table)
    assert source.schema.field("x").type == table.schema.field("x").type
