"""Parquet and JSONL files as a Ray dataset whose rows know their file and position."""

import glob
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as paj
import pyarrow.parquet as pq
import ray
from ray.data import Datasource, ReadTask
from ray.data.block import BlockMetadata

from raybatch.errors import ConfigError

PARQUET_SUFFIXES = (".parquet", ".pq")
JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
# Ray's type for pickled Python objects: reading its values runs code from the file.
_PICKLED_TYPE = "ray.data.arrow_pickled_object"
_ROWS_PER_SLICE = 1024
_SLICES_PER_ROW_GROUP = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class FileSlice:
    """Consecutive rows of one file, the work of one read task.

    Args:
        path: with its protocol.
        name: relative to the root of the source; part of the row ids.
        row_group: of a Parquet file; None reads a whole JSONL file.
        group_first_row: position in the file of the row group's first row.
        first_row: position in the file of the slice's first row.
        num_rows: of the slice.
        num_bytes: estimate of its size in memory.
    """

    path: str
    name: str
    row_group: int | None
    group_first_row: int
    first_row: int
    num_rows: int
    num_bytes: int


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
        """Return the rows as a Ray dataset, with "<file>:<position>" in a column if asked."""
        return ray.data.read_datasource(
            _SliceDatasource(self, row_id_column), override_num_blocks=len(self.slices)
        )


def scan_source(source: str) -> Source:
    """List the files of `source` and read their footers.

    Args:
        source: a file, a folder (searched through; names with a leading "_" or "." are left out)
            or a glob, local or with a protocol that fsspec knows.

    Raises:
        ConfigError: no file, files whose schemas differ, a broken file, or a column of pickled
            Python objects.
    """
    files = _list_files(source)
    scanned = [_scan_file(path, name) for path, name in files]
    schema = _common_schema([(path, s) for (path, _), (s, _) in zip(files, scanned, strict=True)])
    slices = tuple(s for _, parts in scanned for s in parts if s.num_rows)
    return Source(schema=schema, slices=slices, num_rows=sum(s.num_rows for s in slices))


def check_unique_ids(source: Source, column: str) -> None:
    """Raise ConfigError that names the first ids that are null or repeated.

    Memory: the ids of all rows.
    """
    if column not in source.schema.names:
        raise ConfigError(f"id_column {column!r} is not in the source: {source.schema.names}")
    parts = [read_slice(s, columns=[column]).column(0).combine_chunks() for s in source.slices]
    ids = pa.chunked_array(parts, source.schema.field(column).type)
    if ids.null_count:
        raise ConfigError(f"id_column {column!r} is null in {ids.null_count} rows of the source")
    counts = pc.value_counts(ids)
    repeated = counts.filter(pc.greater(counts.field(1), 1)).field(0)
    if len(repeated):
        raise ConfigError(
            f"id_column {column!r} has {len(repeated)} ids on more than one row, for example "
            f"{', '.join(str(value) for value in repeated[:3])}; leave id_column out to use file "
            "and position"
        )


def read_slice(part: FileSlice, *, columns: list[str] | None = None) -> pa.Table:
    """Return the rows of one slice."""
    with fsspec.open(part.path, "rb") as file:
        if part.row_group is None:
            table = _read_json(file)
            return table if columns is None else table.select(columns)
        table = pq.ParquetFile(file).read_row_group(part.row_group, columns=columns)
        return table.slice(part.first_row - part.group_first_row, part.num_rows)


def _read_json(file: Any) -> pa.Table:  # noqa: ANN401 - fsspec has no types
    """Read JSON lines; a text that looks like a date stays the text that it is."""
    table = paj.read_json(file)
    schema = pa.schema([f.with_type(_without_dates(f.type)) for f in table.schema])
    if schema.equals(table.schema):
        return table
    file.seek(0)
    return paj.read_json(file, parse_options=paj.ParseOptions(explicit_schema=schema))


def _without_dates(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_temporal(kind):
        return pa.string()
    if pa.types.is_list(kind):
        return pa.list_(_without_dates(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([f.with_type(_without_dates(f.type)) for f in kind])
    return kind


class _SliceDatasource(Datasource):  # type: ignore[misc]
    """One read task per slice."""

    def __init__(self, source: Source, row_id_column: str | None) -> None:
        super().__init__()
        self._source = source
        self._row_id_column = row_id_column

    def get_name(self) -> str:
        return "raybatch"

    def estimate_inmemory_data_size(self) -> int:
        return sum(s.num_bytes for s in self._source.slices)

    def get_read_tasks(
        self,
        parallelism: int,
        per_task_row_limit: int | None = None,
        data_context: object = None,
    ) -> list[ReadTask]:
        schema = self._source.schema
        return [
            ReadTask(
                partial(_read_blocks, part, schema, self._row_id_column),
                BlockMetadata(
                    num_rows=part.num_rows,
                    size_bytes=part.num_bytes,
                    exec_stats=None,
                    input_files=(part.path,),
                ),
                per_task_row_limit=per_task_row_limit,
            )
            for part in self._source.slices
        ]


def _read_blocks(
    part: FileSlice, schema: pa.Schema, row_id_column: str | None
) -> Iterator[pa.Table]:
    table = _with_schema(read_slice(part), schema)
    if row_id_column is not None:
        positions = range(part.first_row, part.first_row + part.num_rows)
        ids = pa.array([f"{part.name}:{position}" for position in positions], pa.string())
        table = table.add_column(0, row_id_column, ids)
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
        if name.lower().endswith(suffixes)
        and not any(part.startswith(("_", ".")) for part in name.split("/"))
    )
    if not files:
        raise ConfigError(f"source {source!r} holds no file that ends in {', '.join(suffixes)}")
    return [(fs.unstrip_protocol(path), name) for name, path in files]


def _scan_file(path: str, name: str) -> tuple[pa.Schema, list[FileSlice]]:
    try:
        with fsspec.open(path, "rb") as file:
            if path.lower().endswith(JSON_SUFFIXES):
                table = _read_json(file)
                return table.schema, [
                    FileSlice(
                        path=path,
                        name=name,
                        row_group=None,
                        group_first_row=0,
                        first_row=0,
                        num_rows=table.num_rows,
                        num_bytes=table.nbytes,
                    )
                ]
            parquet = pq.ParquetFile(file)
            return parquet.schema_arrow, list(_parquet_slices(path, name, parquet.metadata))
    except (pa.ArrowInvalid, OSError) as error:
        raise ConfigError(f"source file {path} cannot be read: {error}") from error


def _parquet_slices(path: str, name: str, footer: pq.FileMetaData) -> Iterator[FileSlice]:
    """Cut large row groups: what one read task yields is fed through one call of a feeder."""
    group_first_row = 0
    for index in range(footer.num_row_groups):
        group = footer.row_group(index)
        pieces = max(1, min(_SLICES_PER_ROW_GROUP, group.num_rows // _ROWS_PER_SLICE))
        bounds = [group.num_rows * piece // pieces for piece in range(pieces + 1)]
        for start, end in pairwise(bounds):
            yield FileSlice(
                path=path,
                name=name,
                row_group=index,
                group_first_row=group_first_row,
                first_row=group_first_row + start,
                num_rows=end - start,
                num_bytes=max(1, group.total_byte_size // pieces),
            )
        group_first_row += group.num_rows


def _common_schema(schemas: list[tuple[str, pa.Schema]]) -> pa.Schema:
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
