"""Files of a batch, local or at a URI: read in pieces, and never seen half written."""

import os
import posixpath
import re
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any

import fsspec
import fsspec.compression
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.implementations.local import LocalFileSystem

from raybatch.durable.storage import error_context
from raybatch.errors import ConfigError
from raybatch.inputs.source import Source
from raybatch.openai_batch.requests import CODECS
from raybatch.rows.prepare import column_row_ids
from raybatch.rows.prompt_inputs import column_of

_ROWS_AT_ONCE = 256
_ROW_ID = "__rb_custom_id__"


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
