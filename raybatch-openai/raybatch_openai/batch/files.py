"""Reads and writes files of a batch, local or at a URI; a written file appears as a whole."""

import codecs
import hashlib
import os
import posixpath
import re
import shutil
import sqlite3
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from typing import IO, Any, NamedTuple

import fsspec
import fsspec.compression
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.implementations.local import LocalFileSystem

from raybatch.durable.storage import error_context
from raybatch.errors import ConfigError
from raybatch.inputs.file_errors import safe_text
from raybatch.inputs.source import Source
from raybatch.inputs.text_blocks import not_lines
from raybatch.rows.prepare import column_row_ids
from raybatch.rows.prompt_inputs import column_of

MAX_LINE_BYTES = 64 << 20
_CHUNK_BYTES = 8 << 20
# page cache of a temporary table
_CACHE_KIB = 64 << 10
# extensions of compressed files: codec and magic bytes
CODECS = {".gz": ("gzip", b"\x1f\x8b"), ".bz2": ("bz2", b"BZh"), ".xz": ("xz", b"\xfd7zXZ\0")}
_ROWS_AT_ONCE = 256
_ROW_ID = "__rb_custom_id__"


class Line(NamedTuple):
    """A line that is not blank, without its line break."""

    number: int  # from 1, blank lines counted
    data: bytes | None  # None if the line is too long


class InputId(NamedTuple):
    """Identifies the content of an input file."""

    num_bytes: int
    digest: str


def input_id(path: str) -> InputId:
    """Return the size and digest of a file; raise ConfigError if it cannot be read."""
    digest, num_bytes = hashlib.blake2b(digest_size=16), 0
    with error_context(f"{safe_text(path)} cannot be read"), fsspec.open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            num_bytes += len(chunk)
    return InputId(num_bytes, digest.hexdigest())


def read_lines(path: str, *, max_bytes: int = MAX_LINE_BYTES) -> Iterator[Line]:
    """Yield the lines of a batch file, which may be compressed; memory is one line.

    Args:
        max_bytes: most bytes in a line; the data of a longer line is None.

    Raises:
        ConfigError: the file cannot be read, or its first line shows that it is no batch file.
    """
    with (
        error_context(f"{safe_text(path)} cannot be read"),
        fsspec.open(path, "rb") as raw,
        _decompressed(raw) as file,
    ):
        is_checked = False
        for number, data in enumerate(iter(lambda: file.readline(max_bytes + 1), b""), 1):
            if number == 1:
                data = data.removeprefix(codecs.BOM_UTF8)
            if not is_checked and (is_checked := bool(data.strip())):
                _check_first(data, path)
            if len(data) > max_bytes and not data.endswith(b"\n"):
                while (rest := file.readline(_CHUNK_BYTES)) and not rest.endswith(b"\n"):
                    pass
                yield Line(number, None)
                continue
            if stripped := data.strip():
                yield Line(number, stripped)


def _decompressed(file: Any) -> Any:  # noqa: ANN401 - those of fsspec
    """Return a reader of the unpacked file, by magic bytes: uploads have other names."""
    head = file.read(6)
    file.seek(0)
    for codec, magic in CODECS.values():
        if head.startswith(magic):
            return fsspec.compression.compr[codec](file, mode="rb")
    if head.startswith((b"\x28\xb5\x2f\xfd", b"PK\3\4")):
        raise ConfigError(f"its compression is not supported; use {', '.join(CODECS)} or none")
    return nullcontext(file)


@contextmanager
def seekable(path: str) -> Iterator[IO[bytes]]:
    """Open a file for random access; a compressed one is unpacked into a temporary file."""
    with fsspec.open(path, "rb") as raw, _decompressed(raw) as file:
        if file is raw:
            yield raw
            return
        with tempfile.TemporaryFile() as unpacked:
            shutil.copyfileobj(file, unpacked)
            unpacked.seek(0)
            yield unpacked


def _check_first(data: bytes, path: str) -> None:
    """Raise ConfigError if the first line shows that the file is not a batch file."""
    reason = not_lines(data)
    # a list in one line may be one wrong request among valid ones
    if reason is not None and not (data.lstrip().startswith(b"[") and data.rstrip().endswith(b"]")):
        raise ConfigError(f"{safe_text(path)} is not a batch file: {reason}")


def check_output(path: str) -> None:
    """Raise ConfigError if a file cannot be written, by writing another one next to it."""
    with error_context(f"{path} cannot be written"):
        fs, name = fsspec.core.url_to_fs(path)
        if fs.isdir(name):
            raise ConfigError(f"{path} is a folder; name a file")
        if isinstance(fs, LocalFileSystem):
            os.makedirs(os.path.dirname(name), exist_ok=True)
        probe = f"{name}.{uuid.uuid4().hex}.partial"
        fs.pipe_file(probe, b"")
        with suppress(Exception):  # the right to add files is enough
            fs.rm_file(probe)


def check_free(path: str, way_out: str) -> None:
    """Raise ConfigError if a file exists; `way_out` ends the message and says what to do."""
    with error_context(f"{path} cannot be written"):
        fs, name = fsspec.core.url_to_fs(path)
        if fs.exists(name):
            raise ConfigError(f"{path} exists; {way_out}")


def split_ending(path: str) -> tuple[str, str]:
    """Return a path without its extension, and the extension, such as ".jsonl.gz"."""
    root, ending = posixpath.splitext(path)
    inner, other = posixpath.splitext(root) if ending.lower() in CODECS else (root, "")
    return inner, other + ending


def check_none_numbered(first: str, way_out: str) -> None:
    """Raise ConfigError if a file of an earlier export exists, such as "a.jsonl" or "a.2.jsonl".

    `first` is the path of the first file. `way_out` ends the message and says what to do.
    """
    check_free(first, way_out)
    root, ending = split_ending(posixpath.basename(first))
    numbered = re.compile(rf"{re.escape(root)}\.[1-9]\d*{re.escape(ending)}")
    fs, name = fsspec.core.url_to_fs(first)
    # a bucket has no empty folders
    with error_context(f"{first} cannot be written"), suppress(FileNotFoundError):
        for path in sorted(fs.ls(posixpath.dirname(name), detail=False, refresh=True)):
            if numbered.fullmatch(posixpath.basename(path)):
                raise ConfigError(f"{path} exists; {way_out}")


@contextmanager
def published(path: str) -> Iterator[IO[bytes]]:
    """Open a file for writing, which appears at `path` when the context ends without an exception.

    So it is complete or does not exist. The extension decides the compression. Raises ConfigError
    if the file cannot be written.
    """
    ending = posixpath.splitext(path)[1].lower()
    if ending not in CODECS and fsspec.utils.infer_compression(path) is not None:
        supported = ", ".join(CODECS)
        raise ConfigError(
            f"{path} cannot be written: its compression is not supported; use {supported} or none"
        )
    with _published(path) as file:
        if ending not in CODECS:
            yield file
            return
        codec, _ = CODECS[ending]
        # equal content gives equal files
        options = {"filename": "", "mtime": 0} if codec == "gzip" else {}
        with fsspec.compression.compr[codec](file, mode="wb", **options) as packed:
            yield packed


@contextmanager
def _published(path: str) -> Iterator[IO[bytes]]:
    with error_context(f"{path} cannot be written"):
        fs, name = fsspec.core.url_to_fs(path)
        if isinstance(fs, LocalFileSystem):
            with _moved_to(name) as local:
                yield local
            return
        # a bucket shows a file once it is closed
        file = fs.open(name, "wb")
        try:
            yield file
        except BaseException:
            with suppress(Exception):  # the bucket itself may have failed
                file.discard()
            raise
        file.close()


@contextmanager
def _moved_to(path: str) -> Iterator[IO[bytes]]:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    staged = f"{path}.{uuid.uuid4().hex}.partial"
    try:
        with open(staged, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(staged, path)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(staged)


@contextmanager
def parquet_writer(path: str, schema: Any) -> Iterator[pq.ParquetWriter]:  # noqa: ANN401
    """Open a Parquet file for writing, which appears when the context ends; see `published`."""
    with published(path) as file, pq.ParquetWriter(file, schema, compression="zstd") as writer:
        yield writer


def parquet_schema(path: str) -> pa.Schema:
    """Return the schema of a Parquet file."""
    with error_context(f"{path} cannot be read"), fsspec.open(path, "rb") as file:
        return pq.read_schema(file)


def parquet_rows(path: str, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a Parquet file, with those of `columns` that it has; 256 in memory."""
    with error_context(f"{path} cannot be read"), fsspec.open(path, "rb") as file:
        parquet = pq.ParquetFile(file)
        wanted = [name for name in columns if name in parquet.schema_arrow.names]
        for batch in parquet.iter_batches(_ROWS_AT_ONCE, columns=wanted, use_threads=False):
            yield from batch.to_pylist()


def remove_folder(path: str) -> None:
    """Remove a folder and its content, if it exists."""
    with error_context(f"{path} cannot be removed"):
        fs, name = fsspec.core.url_to_fs(path)
        if fs.exists(name):
            fs.rm(name, recursive=True)


def rows_with_ids(
    source: Source, id_column: str | None
) -> Iterator[tuple[pa.Table, list[str], list[str]]]:
    """Yield (table, ids, errors) for a source: the id and the error of each row of the table.

    Without `id_column` ids are made of file and position. An error is "" if the id is valid.
    """
    made = _ROW_ID if id_column is None else None
    for table in source.read(range(len(source.slices)), row_id_column=made):
        ids, errors = column_row_ids(column_of(table, id_column or _ROW_ID))
        rows = table if made is None else table.drop_columns([made])
        yield rows, [row_id or "" for row_id in ids], errors


@contextmanager
def temporary_table(columns: str) -> Iterator[sqlite3.Connection]:
    """Open a temporary SQLite database with an empty table `rows`, kept on disk if it is large.

    Args:
        columns: SQL declarations of the columns, with a primary key.
    """
    with closing(sqlite3.connect("")) as database:
        database.execute("PRAGMA journal_mode = OFF")
        database.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
        database.execute(f"CREATE TABLE rows ({columns}) WITHOUT ROWID")
        yield database
