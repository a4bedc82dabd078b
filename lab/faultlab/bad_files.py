"""Writes files that are broken, hostile or merely odd."""

import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

# a payload that runs makes a file of this name in the folder of the case
MARKER = "marker"
GOOD = pa.table({"text": ["a", "b", "c"], "id": ["1", "2", "3"]})

Write = Callable[[Path], None]


class _Payload:
    """Makes a folder where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._path),)


def parquet_bytes(table: pa.Table = GOOD) -> bytes:
    """Return a Parquet file."""
    buffer = pa.BufferOutputStream()
    pq.write_table(table, buffer)
    return bytes(buffer.getvalue())


def arrow_bytes(table: pa.Table = GOOD, *, is_stream: bool = False) -> bytes:
    """Return an Arrow IPC file, or a stream."""
    buffer = pa.BufferOutputStream()
    new = pa.ipc.new_stream if is_stream else pa.ipc.new_file
    with new(buffer, table.schema) as out:
        out.write_table(table)
    return bytes(buffer.getvalue())


def file_of(name: str, data: bytes) -> Write:
    """Return a function that writes one file next to a good one."""

    def write(folder: Path) -> None:
        if not name.endswith(".jsonl"):  # would make another schema
            pq.write_table(GOOD, folder / "in" / "good.parquet")
        (folder / "in" / name).write_bytes(data)

    return write


def rows_of(table: pa.Table) -> Write:
    """Return what writes one file with these rows."""

    def write(folder: Path) -> None:
        pq.write_table(table, folder / "in" / "a.parquet")

    return write


def columns_of(**columns: Any) -> Write:  # noqa: ANN401 - whatever a column can be made of
    """Return what writes one file with these columns."""
    return rows_of(pa.table(columns))


def texts_of(*texts: str | None) -> Write:
    """Return what writes one file with these prompts."""
    return columns_of(text=pa.array(texts, pa.string()))


def _typed(name: str) -> pa.Field:
    """Return a column that says it is of an extension type."""
    return pa.field("x", pa.large_binary(), metadata={"ARROW:extension:name": name})


def pickles(folder: Path, *, is_nested: bool) -> None:
    """Write a file whose values run a payload where they are looked at."""
    kind = _typed("ray.data.arrow_pickled_object")
    values = pa.array([pickle.dumps(_Payload(folder / MARKER))], pa.large_binary())
    if is_nested:
        kind = pa.field("outer", pa.struct([kind]))
        values = pa.StructArray.from_arrays([values], fields=list(kind.type))
    table = pa.table([values, pa.array(["a"])], schema=pa.schema([kind, ("text", pa.string())]))
    (folder / "in" / "a.arrow").write_bytes(arrow_bytes(table))


def unknown_type(folder: Path) -> None:
    """Write a file with a type that no reader knows."""
    table = pa.table([pa.array([b"a"], pa.large_binary())], schema=pa.schema([_typed("some.type")]))
    (folder / "in" / "a.arrow").write_bytes(arrow_bytes(table))


def noisy_pages() -> bytes:
    """Return a Parquet file with a good footer and pages that do not decode."""
    data = bytearray(parquet_bytes(pa.table({"text": ["some text"] * 1000, "id": ["1"] * 1000})))
    data[4:40] = b"\xee" * 36
    return bytes(data)


def wild_offsets() -> bytes:
    """Return an Arrow file whose texts would begin and end outside of it."""
    offsets = pa.py_buffer(struct.pack("<4i", 0, 1 << 29, 2, 3))
    texts = pa.Array.from_buffers(pa.string(), 3, [None, offsets, pa.py_buffer(b"abc")])
    return arrow_bytes(pa.table({"text": texts, "id": ["1", "2", "3"]}))


def hostile_names(folder: Path) -> None:
    """Write files whose names disturb terminals, shells and paths."""
    for name in ("\x1b[31m red", "two\nlines", "%2e%2e%2fup", "x" * 200, "'; drop"):
        pq.write_table(GOOD, folder / "in" / f"{name}.parquet")


def two_schemas(folder: Path) -> None:
    """Write two files whose columns have different types."""
    pq.write_table(GOOD, folder / "in" / "a.parquet")
    pq.write_table(pa.table({"text": [1], "id": ["4"]}), folder / "in" / "b.parquet")


def link_to_nowhere(folder: Path) -> None:
    """Write a good file and a link without a target."""
    pq.write_table(GOOD, folder / "in" / "a.parquet")
    (folder / "in" / "b.parquet").symlink_to("nowhere.parquet")


def foreign_output(folder: Path) -> None:
    """Write a good file, and another where the output is to go."""
    pq.write_table(GOOD, folder / "in" / "a.parquet")
    (folder / "out" / "data").mkdir(parents=True)
    pq.write_table(GOOD, folder / "out" / "data" / "theirs.parquet")


def message(role: str | None, content: str | None) -> list[dict[str, str | None]]:
    """Return a chat of one message."""
    return [{"role": role, "content": content}]
