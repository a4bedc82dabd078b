"""Parquet part files with one fixed schema, written by Ray's write tasks."""

import json
import posixpath
import re
from collections.abc import Collection, Iterable
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
from ray.data import Datasink

from raybatch.durable.store import open_store
from raybatch.errors import ConfigError
from raybatch.stages.ray_errors import message_kept
from raybatch.stages.storage import told_as

# Its presence says that a run of this library has written the folder.
_MARKER = "_raybatch/run.json"
_PART = re.compile(r"part-\d{6,}\.parquet")
_NUMBER = re.compile(r"part-(\d+)\.parquet")
_OURS = r"_raybatch/(?:plan/[^/]+/)?[^/]+"
_WRITTEN = re.compile(rf"{_PART.pattern}|\.{_PART.pattern}\.staged|{_OURS}")


def prepare_sink(
    sink: str, *, is_overwrite: bool, source_paths: Collection[str] = frozenset()
) -> None:
    """Make the folder and mark it; refuse one with files, or empty it where the user asked for it.

    Only what a run writes is removed: parts, parts that a killed task left unfinished, and the
    files about the run. Other files in a marked folder stay.

    Args:
        sink: folder, local or with a protocol.
        is_overwrite: remove what an earlier run has written.
        source_paths: files that are read, with their protocols.

    Raises:
        ConfigError: there are files in it and `is_overwrite` is not set, files but no mark of an
            earlier run, or files that are read; or the folder cannot be written.
    """
    with told_as(f"sink {sink!r} cannot be used; choose a folder that can be written"):
        _prepare(sink, is_overwrite, source_paths)


def _prepare(sink: str, is_overwrite: bool, source_paths: Collection[str]) -> None:
    fs, root = fsspec.core.url_to_fs(sink)
    root = root.rstrip("/")
    if fs.isfile(root):
        raise ConfigError(f"sink {sink!r} is a file; name a folder for the output")
    below = fs.unstrip_protocol(root).rstrip("/") + "/"
    for path in source_paths:
        if path.startswith(below):
            raise ConfigError(
                f"the source file {path} lies below the sink {sink!r}; choose another"
            )
    files = {path: _name_below(root, path) for path in (fs.find(root) if fs.exists(root) else [])}
    if files and not is_overwrite:
        raise ConfigError(
            f"sink {sink!r} already holds {len(files)} files, for example {next(iter(files))}; "
            "choose another folder, or set overwrite=True (--overwrite in a shell)"
        )
    if files and _MARKER not in files.values():
        raise ConfigError(
            f"sink {sink!r} holds {len(files)} files, for example {next(iter(files))}, and no "
            f"{_MARKER} of an earlier run, so nothing is overwritten; remove them yourself or "
            "choose another folder"
        )
    # plan.json goes before its shards: a plan without them could not be followed
    for path, name in sorted(files.items()):
        if _WRITTEN.fullmatch(name) and name != _MARKER:
            fs.rm_file(path)
    said = json.dumps({"writer": "raybatch", "layout": 1}).encode()
    store = open_store(sink)
    if is_overwrite:
        store.replace(_MARKER, said)
    elif not store.create(_MARKER, said):
        raise ConfigError(f"another run has begun to write to the sink {sink!r}; choose another")


def output_files(sink: str) -> list[str]:
    """Return the paths of the part files, sorted."""
    fs, root = fsspec.core.url_to_fs(sink)
    root = root.rstrip("/")
    paths = sorted(path for path in fs.find(root) if _PART.fullmatch(_name_below(root, path)))
    return [fs.unstrip_protocol(path) for path in paths]


def _name_below(root: str, path: str) -> str:
    return path.removeprefix(root).lstrip("/")


class PartSink(Datasink):  # type: ignore[misc]
    """Writes what one write task gets as one file named by the task.

    A task that Ray runs again writes the same name again. A driver that dies leaves the parts
    written so far.

    Args:
        sink: folder, local or with a protocol.
        schema: of every file.
        first_part: number of the first file.
    """

    def __init__(self, sink: str, schema: pa.Schema, *, first_part: int = 0) -> None:
        self._sink = sink
        self._schema = schema
        self._first_part = first_part

    def after_existing(self) -> "PartSink":
        """Return the same sink for another dataset, whose files come after those there are."""
        numbers = [int(_NUMBER.findall(path)[-1]) for path in output_files(self._sink)]
        return PartSink(self._sink, self._schema, first_part=max(numbers, default=-1) + 1)

    def write(self, blocks: Iterable[pa.Table], ctx: Any) -> int:  # noqa: ANN401
        tables = [in_schema(block, self._schema) for block in blocks if block.num_rows]
        table = pa.concat_tables(tables) if tables else self._schema.empty_table()
        if table.num_rows:
            what = f"sink {self._sink!r} cannot be written any more, so the job ends"
            with message_kept(), told_as(what):
                write_part(self._sink, part_name(self._first_part + ctx.task_idx), table)
        return int(table.num_rows)


def part_name(task_idx: int) -> str:
    """Return the name of the file that a write task writes."""
    return f"part-{task_idx:06d}.parquet"


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
