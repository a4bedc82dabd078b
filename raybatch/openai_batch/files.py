"""Files of a batch, local or at a URI: read in pieces, and never seen half written."""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.implementations.local import LocalFileSystem

from raybatch.durable.storage import error_context

_ROWS_AT_ONCE = 256


@contextmanager
def published(path: str) -> Iterator[IO[bytes]]:
    """Hand out a file that has its name, whole, when the context ends without an exception.

    Raises:
        ConfigError: it cannot be written.
    """
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


def parquet_rows(path: str, columns: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a Parquet file, some columns alone.

    Memory: a few hundred rows.
    """
    with error_context(f"{path} cannot be read"), fsspec.open(path, "rb") as file:
        known = set(pq.ParquetFile(file).schema_arrow.names)
        wanted = [name for name in columns if name in known]
        for batch in pq.ParquetFile(file).iter_batches(
            _ROWS_AT_ONCE, columns=wanted, use_threads=False
        ):
            yield from batch.to_pylist()


def remove_folder(path: str) -> None:
    """Remove a folder with all that is in it; one that is not there is fine."""
    with error_context(f"{path} cannot be removed"):
        fs, name = fsspec.core.url_to_fs(path)
        if fs.exists(name):
            fs.rm(name, recursive=True)
