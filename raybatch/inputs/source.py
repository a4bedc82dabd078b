"""Scans input files into a source whose rows have ids of file and position."""

import base64
import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Self, TypeVar

import fsspec
import pyarrow as pa

from raybatch.durable.layout import SCAN, part_name
from raybatch.durable.storage import Store, error_context, real_path
from raybatch.errors import ConfigError
from raybatch.inputs.file_errors import BadFileError, safe_text
from raybatch.inputs.file_slices import FileSlice, Size, joined, pack, read_slices, scan_file
from raybatch.inputs.json_lines import JSON_TEXT
from raybatch.inputs.listing import ListedFile, Root, list_files, names_by_links
from raybatch.inputs.parquet_files import row_bytes_of, sampled
from raybatch.inputs.schemas import (
    FileSchema,
    SchemaPolicy,
    common_schema,
    in_common_schema,
    with_common_text,
)

logger = logging.getLogger(__name__)

MAX_ROW_GROUP_BYTES = 2 << 30
# the driver holds a block per read task, so a large source has larger tasks, not more
_MANY_TASKS = 1024
_TASK_LIMIT = Size(num_rows=16 << 10, num_bytes=64 << 20, num_pieces=64)
# part names tried against a glob: all values of the last two digits
_PARTS_TRIED = 100
# files opened at once, since object stores have high latency
_THREADS = 32
# tags and times of a file, by which its versions differ
_TAGS = ("ETag", "etag", "md5Hash", "content_md5")
_TIMES = ("mtime", "LastModified", "last_modified", "updated", "ino")
# fields of a slice that a kept scan has as numbers
_NUMBERS = ("first_row", "num_rows", "num_bytes", "offset")
_Found = TypeVar("_Found")
_Scan = tuple[pa.Schema, list[FileSlice]]


class _Known(NamedTuple):
    version: str
    scan: _Scan


class KnownScans:
    """Scans of the files of a source; `options` are all options that decide what a scan tells.

    They are kept below the sink of a job, so that a resumed run repeats none. A file is known by
    its path, its size, and its entity tag or times; if its store tells neither, it is
    scanned again.
    """

    def __init__(self, *options: object) -> None:
        self._options = _digest(options)
        self._files: dict[str, _Known] = {}
        self._versions: dict[str, str] = {}
        # digest of the files whose rows were checked, and of how
        self._checked = ""
        self._is_changed = False

    def load(self, store: Store) -> None:
        """Read what an earlier run has kept; nothing if there is none, or if it is damaged."""
        try:
            kept = json.loads(store.read(SCAN))
            if kept["options"] != self._options:
                return
            schemas = [_schema_of(text) for text in kept["schemas"]]
            self._files = {
                file["path"]: _Known(file["version"], _scan_of(file, schemas))
                for file in kept["files"]
            }
            self._checked = str(kept["checked"])
        except (FileNotFoundError, ValueError, KeyError, TypeError, IndexError, pa.ArrowException):
            self._files = {}

    def save(self, store: Store) -> None:
        """Keep the scans, if this run has made any."""
        if self._is_changed:
            schemas: dict[str, int] = {}
            files = [_to_json(path, known, schemas) for path, known in self._files.items()]
            kept = {"options": self._options, "checked": self._checked, "files": files}
            text = json.dumps({**kept, "schemas": list(schemas)}, separators=(",", ":"))
            store.replace(SCAN, text.encode())
            self._is_changed = False

    def unknown(self, files: Sequence[ListedFile]) -> list[ListedFile]:
        """Ask for the versions of files; forget scans of other ones, and return what to scan."""
        with ThreadPoolExecutor(_THREADS) as threads:
            found = list(threads.map(_version_of, files))
        self._versions = {file.path: version for file, version in zip(files, found, strict=True)}
        kept = {p: one for p, one in self._files.items() if one.version == self._versions.get(p)}
        self._is_changed, self._files = kept != self._files, kept
        return [file for file in files if file.path not in kept]

    def scanned(self, file: ListedFile, scan: Callable[[], _Scan]) -> _Scan:
        """Return the scan of a file, which is made if it is not known."""
        if known := self._files.get(file.path):
            return known.scan
        made, version = scan(), self._versions[file.path]
        if version:
            self._files[file.path], self._is_changed = _Known(version, made), True
        return made

    def is_checked(self, *how: object) -> bool:
        """Return whether rows of these files were checked so in a run whose scans were kept."""
        return self._checked == self._digest_of(how)

    def note_checked(self, *how: object) -> None:
        if all(self._versions.values()):
            self._checked, self._is_changed = self._digest_of(how), True

    def _digest_of(self, how: object) -> str:
        return _digest((self._options, sorted(self._versions.items()), how))


def _version_of(file: ListedFile) -> str:
    """Return what changes if a file is replaced; "" if its store does not tell."""
    try:
        fs, path = fsspec.core.url_to_fs(file.path)
        info = fs.info(path)
    except Exception:  # file systems raise various classes; scanning the file raises the error
        return ""
    tags = [str(info[key]) for key in _TAGS if info.get(key)]
    known = tags or [str(info[key]) for key in _TIMES if info.get(key)]
    return _digest((info.get("size"), *known)) if known else ""


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _schema_of(text: str) -> pa.Schema:
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text)))


def _to_json(path: str, known: _Known, schemas: dict[str, int]) -> dict[str, Any]:
    def number(schema: pa.Schema | None) -> int | None:
        if schema is None:
            return None
        text = base64.b64encode(schema.serialize().to_pybytes()).decode()
        return schemas.setdefault(text, len(schemas))

    schema, slices = known.scan
    groups = [part.row_groups and (part.row_groups.start, part.row_groups.stop) for part in slices]
    return {
        "path": path,
        "version": known.version,
        "schema": number(schema),
        "of_file": slices
        and {name: getattr(slices[0], name) for name in ("name", "kind", "folder_columns")},
        "slices": [
            [*(getattr(part, name) for name in _NUMBERS), of_part, number(part.schema)]
            for part, of_part in zip(slices, groups, strict=True)
        ],
    }


def _scan_of(file: dict[str, Any], schemas: Sequence[pa.Schema]) -> _Scan:
    slices = []
    for *numbers, groups, schema in file["slices"]:
        of_file = file["of_file"]
        slices.append(
            FileSlice(
                path=file["path"],
                name=of_file["name"],
                kind=of_file["kind"],
                folder_columns=tuple((name, value) for name, value in of_file["folder_columns"]),
                row_groups=None if groups is None else range(*groups),
                schema=None if schema is None else schemas[schema],
                **dict(zip(_NUMBERS, numbers, strict=True)),
            )
        )
    return schemas[file["schema"]], slices


class SkippedFile(NamedTuple):
    """A file that is skipped because it cannot be read."""

    name: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """The input of a job, from a listing and the footers of its files.

    `schema` has the columns to read, of all files; `is_projected`: files may have other columns.
    """

    schema: pa.Schema
    slices: tuple[FileSlice, ...]
    num_rows: int
    skipped: tuple[SkippedFile, ...] = ()
    is_projected: bool = False

    @property
    def root(self) -> str:
        """Return the folder that file names are relative to, "" if unknown."""
        for part in self.slices:
            if part.path.endswith(f"/{part.name}"):
                return part.path.removesuffix(f"/{part.name}")
        return ""

    @property
    def folder_columns(self) -> set[str]:
        return {name for part in self.slices for name, _ in part.folder_columns}

    @property
    def choice(self) -> Mapping[str, str]:
        """The criteria that select rows of the files, by name; empty if all rows are read.

        They are part of the job's fingerprint.
        """
        return {}

    def within(self, portions: Mapping[str, range]) -> Self:
        """Return the rows at these positions in each file, by its name."""
        known = [part for part in self.slices if part.name in portions]
        slices = tuple(cut for part in known if (cut := part.within(portions[part.name])))
        return replace(self, slices=slices, num_rows=sum(part.num_rows for part in slices))

    def tasks(self) -> list[range]:
        """Return for each read task the range of indices of its slices, of limited total size."""
        sizes = [Size(part.num_rows, part.num_bytes) for part in self.slices]
        totals = [sum(column) // _MANY_TASKS for column in zip(Size(0, 0, 0), *sizes, strict=True)]
        return list(pack(sizes, Size(*map(max, _TASK_LIMIT, totals))))

    def read(self, task: range, *, row_id_column: str | None = None) -> Iterator[pa.Table]:
        """Yield the rows of the slices with the indices `task`, a small table at a time.

        `row_id_column` holds "<file>:<position>"; None adds none.
        """
        columns = self.schema.names if self.is_projected else None
        parts = list(joined(self.slices[task.start : task.stop]))
        for part, tables in read_slices(parts, columns=columns):
            position = part.first_row
            for rows in tables:
                with error_context(
                    f"source file {safe_text(part.path)} does not match the other files"
                ):
                    table = in_common_schema(rows, self.schema)
                if row_id_column is not None:
                    positions = range(position, position + rows.num_rows)
                    ids = pa.array([f"{part.name}:{i}" for i in positions], pa.string())
                    table = table.add_column(0, row_id_column, ids)
                position += rows.num_rows
                yield table


def scan_source(
    source: str,
    *,
    columns: Sequence[str] | None = None,
    schema_policy: SchemaPolicy = "strict",
    skip_bad_files: bool = False,
    max_row_group_bytes: int = MAX_ROW_GROUP_BYTES,
    max_decompressed_bytes: int | None = None,
    known: KnownScans | None = None,
) -> Source:
    """List the files of `source`; read their footers, and a few rows of a few Parquet files.

    The sampled rows give the memory size of rows; files without samples get the largest of them.

    Args:
        source: a file, a folder (recursive; names with a leading "_" or "." are skipped) or a
            glob, local or with an fsspec protocol.
        schema_policy: "strict" refuses files whose schemas differ, "cast" widens types without
            loss.
        skip_bad_files: skip files that cannot be read, instead of refusing the source.
        max_row_group_bytes: limit for a row group or record batch in memory.
        max_decompressed_bytes: limit for a decompressed JSONL or CSV file; see `read_blocks`.
        known: scans of an earlier run with these options, to which those of this one are added.

    Raises:
        ConfigError: there is no file, files are incompatible, corrupt or too large, or a type may
            run code when it is read.
    """
    with error_context(f"source {source!r} cannot be listed"):
        files = list_files(source, has_columns=columns is not None)
    bad: dict[ListedFile, str] = {}
    noted = partial(_noted, bad=bad if skip_bad_files else None)
    new = files if known is None else known.unknown(files)
    row_bytes = _row_bytes(new, columns, noted)
    largest = max(row_bytes.values(), default=0.0)

    def scan(file: ListedFile) -> tuple[pa.Schema, list[FileSlice]]:
        scan_it = partial(
            scan_file,
            file,
            row_bytes=row_bytes.get(file, largest),
            columns=columns,
            max_row_group_bytes=max_row_group_bytes,
            max_decompressed_bytes=max_decompressed_bytes,
        )
        return scan_it() if known is None else known.scanned(file, scan_it)

    schemas: list[FileSchema] = []
    slices: list[FileSlice] = []
    with _read_ahead([file for file in files if file not in bad], scan) as scanned:
        for file, result in scanned:
            with noted(file):
                schema, parts = result()
                schemas.append(FileSchema(file.path, schema, kind=file.kind))
                slices.extend(part for part in parts if part.num_rows)
    if not schemas:
        reasons = "; ".join(f"{file.name}: {reason}" for file, reason in list(bad.items())[:3])
        raise ConfigError(f"source {source!r} has no readable file: {reasons}")
    schemas, of_text = with_common_text(schemas, columns)
    _warn_of_json_texts(source, of_text["json"])
    return Source(
        schema=common_schema(schemas, columns=columns, policy=schema_policy),
        slices=tuple(
            replace(part, schema=of_text[part.kind]) if part.kind in of_text else part
            for part in slices
        ),
        num_rows=sum(part.num_rows for part in slices),
        skipped=tuple(SkippedFile(file.name, bad[file]) for file in files if file in bad),
        is_projected=columns is not None,
    )


def _row_bytes(
    files: Sequence[ListedFile],
    columns: Sequence[str] | None,
    noted: Callable[[ListedFile], AbstractContextManager[None]],
) -> dict[ListedFile, float]:
    """Return the memory size of a row, in bytes, for a few of the Parquet files."""
    row_bytes: dict[ListedFile, float] = {}
    some = sampled([file for file in files if file.kind == "parquet"])
    with _read_ahead(some, lambda file: row_bytes_of(file.path, columns=columns)) as found:
        for file, of_file in found:
            with noted(file):
                row_bytes[file] = of_file()
    return row_bytes


def _warn_of_json_texts(source: str, of_lines: pa.Schema) -> None:
    if texts := [field.name for field in of_lines if field.type == JSON_TEXT]:
        logger.warning(
            "source %s: values of %s have no common Arrow type, so they are read as JSON texts",
            safe_text(source),
            ", ".join(map(repr, texts)),
        )


@contextmanager
def _read_ahead(
    files: Sequence[ListedFile], read: Callable[[ListedFile], _Found]
) -> Iterator[Iterator[tuple[ListedFile, Callable[[], _Found]]]]:
    """Yield the files in order, each with a function that returns the result of `read`.

    Files are read in parallel, except JSONL and CSV, which are read whole.
    """
    pool = ThreadPoolExecutor(_THREADS)
    try:
        started = [
            partial(read, file) if file.kind in ("json", "csv") else pool.submit(read, file).result
            for file in files
        ]
        yield zip(files, started, strict=True)
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _noted(file: ListedFile, bad: dict[ListedFile, str] | None) -> Iterator[None]:
    """Record in `bad` and log that a file cannot be read; without `bad`, raise the error."""
    try:
        yield
    except BadFileError as error:
        if bad is None:
            raise
        bad[file] = error.reason
        logger.warning("skipped %s: %s", safe_text(file.path), error.reason)


def check_outside(sink: str, source: str) -> None:
    """Raise ConfigError if the next run on `source` would read files written to `sink`."""
    with error_context(f"source {source!r} cannot be listed"):
        root = Root.of(source)
        is_folder = not root.is_glob and root.fs.isdir(root.path)
    with error_context(f"sink {sink!r} cannot be used"):
        sink_fs, path = fsspec.core.url_to_fs(sink)
        path = path.rstrip("/")
    if sink_fs != root.fs or not (root.is_glob or is_folder):
        return
    # symlinks may lead from the source to the sink
    real, real_root = real_path(root.fs, path), root.without_links()
    named = ((root, path), (real_root, real), *((root, n) for n in names_by_links(root, real)))
    if any(_is_read(where, name) for where, name in named):
        raise ConfigError(
            f"the sink {sink!r} is inside the source {source!r}, and the next run would read it "
            "as input; choose a folder outside, or one whose name begins with '_'"
        )


def _is_read(root: Root, path: str) -> bool:
    """Return whether a folder or a glob includes the parts of an output in the folder `path`."""
    if root.is_hidden(path):
        return False
    if root.is_glob:
        parts = (f"{path}/{part_name(index)}" for index in range(_PARTS_TRIED))
        return bool(root.matching(parts))
    return path.startswith(root.path.rstrip("/") + "/")
