"""Parquet and JSONL files as a Ray dataset whose rows know their file and position."""

import glob
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import ray

from raybatch.errors import ConfigError
from raybatch.stages.batches import python_values
from raybatch.stages.json_lines import read_json_lines
from raybatch.stages.storage import told_as

PARQUET_SUFFIXES = (".parquet", ".pq")
JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
# Ray's type for pickled Python objects: reading its values runs code from the file.
_PICKLED_TYPE = "ray.data.arrow_pickled_object"
_ROWS_PER_BLOCK = 1024
_READ_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class FileSlice:
    """Consecutive rows of one file, the work of one read task.

    Args:
        path: with its protocol.
        name: relative to the root of the source; part of the row ids.
        row_group: of a Parquet file; None reads a whole JSONL file.
        first_row: position in the file of the slice's first row.
        num_rows: of the slice.
    """

    path: str
    name: str
    row_group: int | None
    first_row: int
    num_rows: int


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

    def dataset(self, *, row_id_column: str | None) -> Any:  # noqa: ANN401 - Ray has no types
        """Return the rows as a Ray dataset, with "<file>:<position>" in a column if asked.

        A slice is decoded once, by one task that hands over small blocks while it reads: what is
        in one block is fed through one call of a feeder.
        """

        def read(batch: pa.Table) -> Iterator[pa.Table]:
            for index in batch.column("slice").to_pylist():
                yield from _read_blocks(self.slices[index], self.schema, row_id_column)

        slices = ray.data.from_items(
            [{"slice": index} for index in range(len(self.slices))],
            override_num_blocks=len(self.slices),
        )
        blocks = slices.map_batches(read, batch_size=1, batch_format="pyarrow")
        return blocks.repartition(target_num_rows_per_block=_ROWS_PER_BLOCK)


def scan_source(source: str) -> Source:
    """List the files of `source` and read their footers.

    Args:
        source: a file, a folder (searched through; names with a leading "_" or "." are left out)
            or a glob, local or with a protocol that fsspec knows.

    Raises:
        ConfigError: no file, files whose schemas differ, a broken file, or a column of pickled
            Python objects.
    """
    with told_as(f"source {source!r} cannot be listed"):
        files = _list_files(source)
    scanned = [_scan_file(path, name) for path, name in files]
    schema = _common_schema([(path, s) for (path, _), (s, _) in zip(files, scanned, strict=True)])
    slices = tuple(s for _, parts in scanned for s in parts if s.num_rows)
    return Source(schema=schema, slices=slices, num_rows=sum(s.num_rows for s in slices))


def check_outside(sink: str, source: str) -> None:
    """Raise ConfigError if `sink` lies in the folder `source`, where the next run would read it."""
    with told_as(f"source {source!r} cannot be listed"):
        fs, root = fsspec.core.url_to_fs(source)
        is_folder = not glob.has_magic(root) and fs.isdir(root)
        root = fs.unstrip_protocol(root).rstrip("/") + "/"
    if not is_folder:
        return
    with told_as(f"sink {sink!r} cannot be used"):
        fs, path = fsspec.core.url_to_fs(sink)
        path = fs.unstrip_protocol(path)
    if path.startswith(root) and not _is_hidden(path.removeprefix(root)):
        raise ConfigError(
            f"the sink {sink!r} lies in the source folder {source!r}, where the next run would "
            "take it for input; choose a folder beside it, or one whose name begins with '_'"
        )


def check_unique_ids(source: Source, column: str) -> None:
    """Raise ConfigError that names the first ids that are null or repeated.

    Memory: the ids of all rows.
    """
    if column not in source.schema.names:
        raise ConfigError(f"id_column {column!r} is not in the source: {source.schema.names}")
    schema = pa.schema([source.schema.field(column)])
    tables = [t for part in source.slices for t in read_slice(part, columns=[column])]
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


def read_slice(part: FileSlice, *, columns: list[str] | None = None) -> Iterator[pa.Table]:
    """Yield the rows of one slice in order, a small table at a time.

    Memory: of Parquet, one table and a buffer per column; of JSONL, the whole file.
    """
    if part.row_group is None:
        rows = read_json_lines(part.path)
        if columns is not None:
            rows = rows.select([name for name in columns if name in rows.column_names])
        for start in range(0, rows.num_rows, _ROWS_PER_BLOCK):
            # a table without columns does not know where it ends
            yield rows.slice(start, min(_ROWS_PER_BLOCK, rows.num_rows - start))
        return
    with fsspec.open(part.path, "rb") as file:
        parquet = pq.ParquetFile(file, buffer_size=_READ_BUFFER_BYTES)
        for batch in parquet.iter_batches(
            _ROWS_PER_BLOCK, row_groups=[part.row_group], columns=columns, use_threads=False
        ):
            yield pa.Table.from_batches([batch])


def _read_blocks(
    part: FileSlice, schema: pa.Schema, row_id_column: str | None
) -> Iterator[pa.Table]:
    position = part.first_row
    for rows in read_slice(part):
        table = _with_schema(rows, schema)
        if row_id_column is not None:
            positions = range(position, position + rows.num_rows)
            ids = pa.array([f"{part.name}:{i}" for i in positions], pa.string())
            table = table.add_column(0, row_id_column, ids)
        position += rows.num_rows
        yield table


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
        fixed = root[: min(root.index(c) for c in "*?[" if c in root)]
        root = fixed.rpartition("/")[0]
    elif fs.isdir(root):
        paths = fs.find(root)
    elif fs.exists(root):
        paths, root = [root], root.rpartition("/")[0]
    else:
        raise ConfigError(f"source {source!r} does not exist")
    names = {path: path.removeprefix(root).lstrip("/") for path in paths}
    suffixes = PARQUET_SUFFIXES + JSON_SUFFIXES
    files = sorted(
        (name, path)
        for path, name in names.items()
        if name.lower().endswith(suffixes) and not _is_hidden(name)
    )
    if not files:
        raise ConfigError(f"source {source!r} holds no file that ends in {', '.join(suffixes)}")
    return [(fs.unstrip_protocol(path), name) for name, path in files]


def _is_hidden(name: str) -> bool:
    return any(part.startswith(("_", ".")) for part in name.split("/"))


def _scan_file(path: str, name: str) -> tuple[pa.Schema, list[FileSlice]]:
    with told_as(f"source file {path} cannot be read; write it again, or leave it out"):
        if path.lower().endswith(JSON_SUFFIXES):
            table = read_json_lines(path)
            whole = FileSlice(
                path=path, name=name, row_group=None, first_row=0, num_rows=table.num_rows
            )
            return table.schema, [whole]
        with fsspec.open(path, "rb") as file:
            parquet = pq.ParquetFile(file)
            return parquet.schema_arrow, list(_parquet_slices(path, name, parquet.metadata))


def _parquet_slices(path: str, name: str, footer: pq.FileMetaData) -> Iterator[FileSlice]:
    first_row = 0
    for index in range(footer.num_row_groups):
        num_rows = footer.row_group(index).num_rows
        yield FileSlice(
            path=path, name=name, row_group=index, first_row=first_row, num_rows=num_rows
        )
        first_row += num_rows


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
