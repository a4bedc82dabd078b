"""Parquet and JSONL files as a Ray dataset whose rows know their file and position."""

import glob
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.compute as pc
import ray
from fsspec.utils import glob_translate

from raybatch.durable.layout import part_name
from raybatch.errors import ConfigError
from raybatch.stages.batches import python_values
from raybatch.stages.file_slices import (
    JSON_SUFFIXES,
    ROWS_PER_TABLE,
    FileSlice,
    Size,
    joined,
    pack,
    read_slice,
    scan_file,
)
from raybatch.stages.row_sizes import sample_row_bytes
from raybatch.stages.storage import told_as

PARQUET_SUFFIXES = (".parquet", ".pq")
# Ray's type for pickled Python objects: reading its values runs code from the file.
_PICKLED_TYPE = "ray.data.arrow_pickled_object"
# The driver holds a block per read task, so a large source has larger tasks, not more of them.
_MANY_TASKS = 1024
_TASK_LIMIT = Size(num_rows=16 << 10, num_bytes=64 << 20, num_pieces=64)
# As many names of parts as tell what the last two digits in a pattern let through.
_PARTS_TRIED = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """What a listing and the footers tell about the input.

    Args:
        schema: of every file.
        slices: in the order of files and positions.
        num_rows: of all of them.
    """

    schema: pa.Schema
    slices: tuple[FileSlice, ...]
    num_rows: int

    def tasks(self) -> list[range]:
        """Return the slices of each read task: neighbours, few to a task where they are large."""
        sizes = [part.size for part in self.slices]
        totals = [sum(column) for column in zip(Size(0, 0, 0), *sizes, strict=True)]
        limit = [
            max(least, total // _MANY_TASKS)
            for least, total in zip(_TASK_LIMIT, totals, strict=True)
        ]
        return list(pack(sizes, Size(*limit)))

    def read(self, task: range, *, row_id_column: str | None = None) -> Iterator[pa.Table]:
        """Yield the rows of some neighbouring slices, a small table at a time.

        Args:
            task: positions of the slices.
            row_id_column: holds "<file>:<position>"; None adds none.
        """
        for part in joined(self.slices[task.start : task.stop]):
            position = part.first_row
            for rows in read_slice(part):
                table = _with_schema(rows, self.schema)
                if row_id_column is not None:
                    positions = range(position, position + rows.num_rows)
                    ids = pa.array([f"{part.name}:{i}" for i in positions], pa.string())
                    table = table.add_column(0, row_id_column, ids)
                position += rows.num_rows
                yield table

    def dataset(self, *, row_id_column: str | None) -> Any:  # noqa: ANN401 - Ray has no types
        """Return the rows as a Ray dataset, with "<file>:<position>" in a column if asked.

        A slice is decoded once, by one task that hands over small blocks while it reads: what is
        in one block is fed through one call of a feeder.
        """

        def read(batch: pa.Table) -> Iterator[pa.Table]:
            for task in batch.to_pylist():
                slices = range(task["start"], task["stop"])
                yield from self.read(slices, row_id_column=row_id_column)

        tasks = [{"start": task.start, "stop": task.stop} for task in self.tasks()]
        items = ray.data.from_items(tasks, override_num_blocks=len(tasks))
        blocks = items.map_batches(read, batch_size=1, batch_format="pyarrow")
        return blocks.repartition(target_num_rows_per_block=ROWS_PER_TABLE)


def scan_source(source: str) -> Source:
    """List the files of `source` and read their footers, and a few rows of a few Parquet files.

    The rows tell what takes more memory than the file says; files of which none was read count as
    large as the largest of the others.

    Args:
        source: a file, a folder (searched through; names with a leading "_" or "." are left out)
            or a glob, local or with a protocol that fsspec knows.

    Raises:
        ConfigError: no file, files whose schemas differ, a broken file, or a column of pickled
            Python objects.
    """
    with told_as(f"source {source!r} cannot be listed"):
        files = _list_files(source)
    of_parquet = [path for path, _ in files if path.lower().endswith(PARQUET_SUFFIXES)]
    row_bytes = sample_row_bytes(of_parquet)
    largest = max(row_bytes.values(), default=0.0)
    scanned = [
        scan_file(path, name, row_bytes=row_bytes.get(path, largest)) for path, name in files
    ]
    schema = _common_schema([(path, s) for (path, _), (s, _) in zip(files, scanned, strict=True)])
    slices = tuple(s for _, parts in scanned for s in parts if s.num_rows)
    return Source(schema=schema, slices=slices, num_rows=sum(s.num_rows for s in slices))


def check_outside(sink: str, source: str) -> None:
    """Raise ConfigError if the next run on `source` would read what is written to `sink`."""
    with told_as(f"source {source!r} cannot be listed"):
        fs, root = fsspec.core.url_to_fs(source)
        is_folder = not glob.has_magic(root) and fs.isdir(root)
    with told_as(f"sink {sink!r} cannot be used"):
        sink_fs, path = fsspec.core.url_to_fs(sink)
        path = path.rstrip("/")
    if sink_fs != fs or _is_hidden(_name_below(_fixed_folder(root), path)):
        return
    if is_folder:
        is_read = path.startswith(root.rstrip("/") + "/")
    else:
        pattern = re.compile(glob_translate(root))
        is_read = any(pattern.match(f"{path}/{part_name(index)}") for index in range(_PARTS_TRIED))
    if is_read:
        raise ConfigError(
            f"the sink {sink!r} lies where the source {source!r} is read, and the next run would "
            "take it for input; choose a folder beside it, or one whose name begins with '_'"
        )


def check_unique_ids(source: Source, column: str) -> None:
    """Raise ConfigError that names the first ids that are null or repeated.

    Memory: the ids of all rows.
    """
    if column not in source.schema.names:
        raise ConfigError(f"id_column {column!r} is not in the source: {source.schema.names}")
    schema = pa.schema([source.schema.field(column)])
    tables = [t for part in joined(source.slices) for t in read_slice(part, columns=[column])]
    tables = [schema.empty_table(), *(_with_schema(t, schema) for t in tables)]
    ids = pa.concat_tables(tables).column(0)
    if ids.null_count:
        raise ConfigError(f"id_column {column!r} is null in {ids.null_count} rows of the source")
    try:
        counts = pc.value_counts(ids)
    except pa.ArrowNotImplementedError as error:
        raise ConfigError(
            f"id_column {column!r} is a column of {ids.type}, which cannot be compared; take one "
            "of texts or whole numbers"
        ) from error
    repeated = counts.filter(pc.greater(counts.field(1), 1)).field(0)
    if len(repeated):
        raise ConfigError(
            f"id_column {column!r} has {len(repeated)} ids on more than one row, for example "
            f"{', '.join(map(str, python_values(repeated[:3])))}; leave id_column out to use file "
            "and position"
        )


def _with_schema(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Order and cast the columns as `schema` has them; one that a JSON file lacks is null."""
    if table.schema.equals(schema):
        return table
    columns = [
        table.column(field.name).cast(field.type)
        if field.name in table.column_names
        else pa.nulls(table.num_rows, field.type)
        for field in schema
    ]
    return pa.table(columns, schema=schema)


def _list_files(source: str) -> list[tuple[str, str]]:
    """Return the paths with protocol and the names below the root, sorted by name."""
    fs, root = fsspec.core.url_to_fs(source)
    if glob.has_magic(root):
        paths = [path for path in fs.glob(root) if not fs.isdir(path)]
    elif fs.isdir(root):
        paths = fs.find(root)
    elif fs.exists(root):
        paths, root = [root], root.rpartition("/")[0]
    else:
        raise ConfigError(f"source {source!r} does not exist")
    folder = _fixed_folder(root)
    names = {path: _name_below(folder, path) for path in paths}
    suffixes = PARQUET_SUFFIXES + JSON_SUFFIXES
    files = sorted(
        (name, path)
        for path, name in names.items()
        if name.lower().endswith(suffixes) and not _is_hidden(name)
    )
    if not files:
        raise ConfigError(f"source {source!r} holds no file that ends in {', '.join(suffixes)}")
    return [(fs.unstrip_protocol(path), name) for name, path in files]


def _fixed_folder(root: str) -> str:
    """Return the folder itself, or the one in front of the first wildcard of a glob."""
    if not glob.has_magic(root):
        return root
    return root[: min(root.index(c) for c in "*?[" if c in root)].rpartition("/")[0]


def _name_below(folder: str, path: str) -> str:
    return path.removeprefix(folder).lstrip("/")


def _is_hidden(name: str) -> bool:
    return any(part.startswith(("_", ".")) for part in name.split("/"))


def _common_schema(schemas: list[tuple[str, pa.Schema]]) -> pa.Schema:
    for path, schema in schemas:
        if twice := sorted({n for n in schema.names if schema.names.count(n) > 1}):
            raise ConfigError(
                f"source file {path} has several columns named {', '.join(map(repr, twice))}; "
                "rename them, so that a name stands for one column"
            )
    first_path, first = schemas[0]
    for field in first:
        metadata = field.metadata or {}
        name = metadata.get(b"ARROW:extension:name", b"").decode()
        name = getattr(field.type, "extension_name", name)
        if name == _PICKLED_TYPE:
            raise ConfigError(
                f"{first_path}: column {field.name!r} holds pickled Python objects, which run "
                "code when they are read; write it as plain Arrow types"
            )
    if all(path.lower().endswith(JSON_SUFFIXES) for path, _ in schemas):
        try:
            return pa.unify_schemas([s for _, s in schemas], promote_options="permissive")
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise ConfigError(f"the JSON files do not fit together: {error}") from error
    for path, schema in schemas[1:]:
        if not schema.equals(first):
            different = sorted(
                {f"{f.name}: {f.type}" for f in first} ^ {f"{f.name}: {f.type}" for f in schema}
            )
            raise ConfigError(
                f"{path} has another schema than {first_path}: "
                f"{', '.join(different) or 'the columns have another order'}"
            )
    return first
