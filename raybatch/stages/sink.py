"""Parquet part files with one fixed schema, written by Ray's write tasks."""

import posixpath
from collections.abc import Collection, Iterable
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
from ray.data import Datasink

from raybatch.errors import ConfigError


def prepare_sink(
    sink: str, *, is_overwrite: bool, source_paths: Collection[str] = frozenset()
) -> None:
    """Make the folder; refuse one with data, or empty it where the user asked for it.

    Args:
        sink: folder, local or with a protocol.
        is_overwrite: remove what an earlier run has written.
        source_paths: files that are read, with their protocols.

    Raises:
        ConfigError: there are files in it and `is_overwrite` is not set, files of somebody else,
            or files that are read.
    """
    fs, root = fsspec.core.url_to_fs(sink)
    below = fs.unstrip_protocol(root).rstrip("/") + "/"
    for path in source_paths:
        if path.startswith(below):
            raise ConfigError(
                f"the source file {path} lies below the sink {sink!r}; choose another"
            )
    files = fs.find(root) if fs.exists(root) else []
    if files and not is_overwrite:
        raise ConfigError(
            f"sink {sink!r} already holds {len(files)} files, for example {files[0]}; choose "
            "another folder or set overwrite=True"
        )
    for path in files:
        if not path.endswith((".parquet", ".json", ".html")):
            raise ConfigError(f"sink {sink!r} holds {path}, which no run has written; remove it")
    for path in files:
        fs.rm_file(path)
    fs.makedirs(root, exist_ok=True)


def output_files(sink: str) -> list[str]:
    """Return the paths of the part files, sorted."""
    fs, root = fsspec.core.url_to_fs(sink)
    names = sorted(path for path in fs.find(root) if path.endswith(".parquet"))
    return [fs.unstrip_protocol(path) for path in names]


class PartSink(Datasink):  # type: ignore[misc]
    """Writes what one write task gets as one file named by the task.

    A task that Ray runs again writes the same name again. A driver that dies leaves the parts
    written so far.
    """

    def __init__(self, sink: str, schema: pa.Schema) -> None:
        self._sink = sink
        self._schema = schema

    def write(self, blocks: Iterable[pa.Table], ctx: Any) -> int:  # noqa: ANN401
        tables = [in_schema(block, self._schema) for block in blocks if block.num_rows]
        table = pa.concat_tables(tables) if tables else self._schema.empty_table()
        if table.num_rows:
            write_part(self._sink, f"part-{ctx.task_idx:06d}.parquet", table)
        return int(table.num_rows)


def write_part(sink: str, name: str, table: pa.Table) -> None:
    """Write one file; it appears under its name only when it is complete."""
    fs, root = fsspec.core.url_to_fs(sink)
    staged = posixpath.join(root, f".{name}.staged")
    with fs.open(staged, "wb") as file:
        pq.write_table(table, file)
    fs.mv(staged, posixpath.join(root, name))


def in_schema(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return the table in exactly `schema`; a missing column or another type raises."""
    return table.select(schema.names).cast(schema)
