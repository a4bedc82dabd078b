"""Files of a batch, local or at a URI: read in pieces, and never seen half written."""

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
# of a temporary table in memory
_CACHE_KIB = 64 << 10
# endings of compressed files: the codec, and how they begin
CODECS = {".gz": ("gzip", b"\x1f\x8b"), ".bz2": ("bz2", b"BZh"), ".xz": ("xz", b"\xfd7zXZ\0")}
_ROWS_AT_ONCE = 256
_ROW_ID = "__rb_custom_id__"


class Line(NamedTuple):
    """A line that is not blank, without its end."""

    number: int  # from 1, blank lines counted
    data: bytes | None  # None where it is longer than a line may be


class InputId(NamedTuple):
    """What tells one input from another."""

    num_bytes: int
    digest: str


def input_id(path: str) -> InputId:
    """Return the size and the digest of a file; raise ConfigError where it cannot be read."""
    digest, num_bytes = hashlib.blake2b(digest_size=16), 0
    with error_context(f"{safe_text(path)} cannot be read"), fsspec.open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            num_bytes += len(chunk)
    return InputId(num_bytes, digest.hexdigest())


def read_lines(path: str, *, max_bytes: int = MAX_LINE_BYTES) -> Iterator[Line]:
    """Yield the lines of a file, which may be compressed; memory is one line.

    Raises:
        ConfigError: it cannot be read, or is no file of lines in UTF-8 as it begins.
    """
    with (
        error_context(f"{safe_text(path)} cannot be read"),
        fsspec.open(path, "rb") as raw,
        _decompressed(raw) as file,
    ):
        is_begun = False
        for number, data in enumerate(iter(lambda: file.readline(max_bytes + 1), b""), 1):
            if number == 1:
                data = data.removeprefix(codecs.BOM_UTF8)
            if not is_begun and (is_begun := bool(data.strip())):
                _check_first(data, path)
            if len(data) > max_bytes and not data.endswith(b"\n"):
                while (rest := file.readline(_CHUNK_BYTES)) and not rest.endswith(b"\n"):
                    pass
                yield Line(number, None)
                continue
            if stripped := data.strip():
                yield Line(number, stripped)


def _decompressed(file: Any) -> Any:  # noqa: ANN401 - those of fsspec
    """Return what a file holds, as its first bytes say; one that is uploaded has another name."""
    head = file.read(6)
    file.seek(0)
    for codec, magic in CODECS.values():
        if head.startswith(magic):
            return fsspec.compression.compr[codec](file, mode="rb")
    if head.startswith((b"\x28\xb5\x2f\xfd", b"PK\3\4")):
        raise ConfigError(f"it is compressed; take {', '.join(CODECS)} or none")
    return nullcontext(file)


@contextmanager
def seekable(path: str) -> Iterator[IO[bytes]]:
    """Open a file to read at any place; one that is compressed is unpacked into a temporary one."""
    with fsspec.open(path, "rb") as raw, _decompressed(raw) as file:
        if file is raw:
            yield raw
            return
        with tempfile.TemporaryFile() as unpacked:
            shutil.copyfileobj(file, unpacked)
            unpacked.seek(0)
            yield unpacked


def _check_first(data: bytes, path: str) -> None:
    """Raise ConfigError where the first line shows that the whole file is something else."""
    reason = not_lines(data)
    # a list in one line may be a wrong request among others
    if reason is not None and not (data.lstrip().startswith(b"[") and data.rstrip().endswith(b"]")):
        raise ConfigError(f"{safe_text(path)} is no batch file: {reason}")


def check_output(path: str) -> None:
    """Refuse a file that could not be written, before any work."""
    with error_context(f"{path} cannot be written"):
        fs, name = fsspec.core.url_to_fs(path)
        if fs.isdir(name):
            raise ConfigError(f"{path} is a folder; name a file")
        if isinstance(fs, LocalFileSystem):
            os.makedirs(os.path.dirname(name), exist_ok=True)
        probe = f"{name}.{uuid.uuid4().hex}.partial"
        fs.pipe_file(probe, b"")
        with suppress(Exception):  # who may only add files can work all the same
            fs.rm_file(probe)


def check_free(path: str, way_out: str) -> None:
    """Refuse a file that is there already; `way_out` says what to do then."""
    with error_context(f"{path} cannot be written"):
        fs, name = fsspec.core.url_to_fs(path)
        if fs.exists(name):
            raise ConfigError(f"{path} exists; {way_out}")


def split_ending(path: str) -> tuple[str, str]:
    """Return a path without its ending, and that, such as ".jsonl.gz"."""
    root, ending = posixpath.splitext(path)
    inner, other = posixpath.splitext(root) if ending.lower() in CODECS else (root, "")
    return inner, other + ending


def check_none_numbered(first: str, way_out: str) -> None:
    """Refuse a file that is there, and later ones of an earlier export, such as "first.2.jsonl"."""
    check_free(first, way_out)
    root, ending = split_ending(posixpath.basename(first))
    numbered = re.compile(rf"{re.escape(root)}\.[1-9]\d*{re.escape(ending)}")
    fs, name = fsspec.core.url_to_fs(first)
    # a bucket has no folders without files
    with error_context(f"{first} cannot be written"), suppress(FileNotFoundError):
        for path in sorted(fs.ls(posixpath.dirname(name), detail=False, refresh=True)):
            if numbered.fullmatch(posixpath.basename(path)):
                raise ConfigError(f"{path} exists; {way_out}")


@contextmanager
def published(path: str) -> Iterator[IO[bytes]]:
    """Hand out a file that has its name, whole, when the context ends without an exception.

    What is written is compressed as the name says. Raises ConfigError where it cannot be written.
    """
    ending = posixpath.splitext(path)[1].lower()
    if ending not in CODECS and fsspec.utils.infer_compression(path) is not None:
        raise ConfigError(f"{path} cannot be written: of compressed files, {', '.join(CODECS)} are")
    with _published(path) as file:
        if ending not in CODECS:
            yield file
            return
        codec, _ = CODECS[ending]
        # equal content makes equal files
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
        # a bucket shows a file when it is closed
        file = fs.open(name, "wb")
        try:
            yield file
        except BaseException:
            with suppress(Exception):  # the bucket is what has failed, perhaps
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
    """Hand out a writer of a Parquet file, which is there when the context has ended."""
    with published(path) as file, pq.ParquetWriter(file, schema, compression="zstd") as writer:
        yield writer


def parquet_schema(path: str) -> pa.Schema:
    """Return the schema of a Parquet file."""
    with error_context(f"{path} cannot be read"), fsspec.open(path, "rb") as file:
        return pq.read_schema(file)


def parquet_rows(path: str, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a Parquet file, some columns alone; memory is a few hundred rows."""
    with error_context(f"{path} cannot be read"), fsspec.open(path, "rb") as file:
        parquet = pq.ParquetFile(file)
        wanted = [name for name in columns if name in parquet.schema_arrow.names]
        for batch in parquet.iter_batches(_ROWS_AT_ONCE, columns=wanted, use_threads=False):
            yield from batch.to_pylist()


def remove_folder(path: str) -> None:
    """Remove a folder with all that is in it; one that is not there is fine."""
    with error_context(f"{path} cannot be removed"):
        fs, name = fsspec.core.url_to_fs(path)
        if fs.exists(name):
            fs.rm(name, recursive=True)


def rows_with_ids(
    source: Source, id_column: str | None
) -> Iterator[tuple[pa.Table, list[str], list[str]]]:
    """Yield the rows of a dataset, their ids by a column or by file and position, and id errors."""
    made = _ROW_ID if id_column is None else None
    for table in source.read(range(len(source.slices)), row_id_column=made):
        ids, errors = column_row_ids(column_of(table, id_column or _ROW_ID))
        rows = table if made is None else table.drop_columns([made])
        yield rows, [row_id or "" for row_id in ids], errors


@contextmanager
def temporary_table(columns: str) -> Iterator[sqlite3.Connection]:
    """Hand out a database with a table `rows`; what memory does not hold is a file without a name.

    Args:
        columns: as SQL declares them, one of them the primary key.
    """
    with closing(sqlite3.connect("")) as database:
        database.execute("PRAGMA journal_mode = OFF")
        database.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
        database.execute(f"CREATE TABLE rows ({columns}) WITHOUT ROWID")
        yield database
