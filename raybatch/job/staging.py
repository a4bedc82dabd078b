"""Reads a dataset that is no folder of files once, into Parquet files below the sink of a job.

Runs that resume the job read these files, so a dataset need not give the same rows twice. The
record `_source/source.json` names the folder whose files are complete; of two drivers at once the
first to create the record decides which rows the job has. `raybatch clean` removes other folders.
"""

import hashlib
import json
import logging
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import pyarrow as pa
import pyarrow.parquet as pq

from raybatch.durable.layout import SOURCE, SOURCE_RECORD, source_folder, source_name
from raybatch.durable.sink import (
    check_not_in_use,
    check_place,
    is_marked,
    prepare_sink,
    source_record,
)
from raybatch.durable.storage import Store, error_context, store_of
from raybatch.errors import ConfigError, error_text
from raybatch.inputs.tables import TableRows
from raybatch.rows.batches import as_movable, to_table

logger = logging.getLogger(__name__)

_FILE_BYTES = 64 << 20
_BATCH_ROWS = 1024
_ROW_GROUP_ROWS = 16 << 10
_LOG_EVERY_S = 10.0
# files that tasks of Ray write at once
_MAX_TASKS = 64

_Dataset = Any  # of Ray or Hugging Face, which have no types
_T = TypeVar("_T")


@runtime_checkable
class _ArrowStream(Protocol):
    def __arrow_c_stream__(self, requested_schema: object = None) -> object: ...


def check_dataset(source: object) -> None:
    """Raise ConfigError unless `source` is a dataset or table that `stage_dataset` can read."""
    if isinstance(source, Mapping) and hasattr(source, "with_format"):
        raise ConfigError(
            f"source is a {type(source).__name__}; choose one of its splits, such as "
            f"source[{next(iter(source), 'train')!r}]"
        )
    if not (_is_of_ray(source) or _is_of_hub(source) or isinstance(source, _ArrowStream)):
        raise ConfigError(
            "source must be a path, a dataset of Ray Data or Hugging Face, or a table of PyArrow, "
            f"pandas or Polars; got {type(source).__module__}.{type(source).__name__}"
        )


def stage_dataset(dataset: _Dataset, sink: str, *, is_overwrite: bool) -> str:
    """Write the rows of a dataset as Parquet files below `sink`; return their folder.

    A later call for the same sink returns the folder without writing. With `is_overwrite` it reads
    the dataset again, into another folder. The output and the rows of an earlier run stay.

    Raises:
        ConfigError: the sink cannot be used, is in use or has other rows; the dataset has no rows,
            or has columns that Parquet cannot hold.
    """
    check_place(sink)
    with error_context(f"sink {sink!r} cannot be used"):
        store = store_of(sink)
        if not is_marked(store):
            prepare_sink(sink, is_overwrite=False)
        if is_overwrite:
            check_not_in_use(sink)
        record = source_record(store)
    if record is None or is_overwrite:
        record = _stage(dataset, store, is_overwrite=is_overwrite)
    elif _differs(dataset, record):
        raise ConfigError(
            f"{sink} holds the rows of another dataset; choose another folder, or run the job with "
            "overwrite=True"
        )
    else:
        named = f"{record['table']}, version {record['version']}" if "table" in record else ""
        logger.info(
            "using the %d rows of %s that are stored in %s/%s",
            record["num_rows"],
            named or "the dataset",
            store.uri,
            SOURCE,
        )
    folder = source_folder(record["token"])
    if len(store.names(folder)) != record["num_files"]:
        raise ConfigError(
            f"{store.uri}/{folder} has lost files, {record['num_files']} were written; run the job "
            "with overwrite=True"
        )
    return f"{store.uri}/{folder}"


def _stage(dataset: _Dataset, store: Store, *, is_overwrite: bool) -> dict[str, Any]:
    """Write the rows under a new token; return the record that holds then."""
    token = uuid.uuid4().hex[:12]
    where = f"{store.uri}/{source_folder(token)}"
    logger.info("writing the rows of the dataset to %s, where the job reads them", where)
    record = _write(dataset, store, token)
    logger.info("read %d rows into %d files", record["num_rows"], record["num_files"])
    if is_overwrite:
        store.remove(SOURCE_RECORD)
    if store.create(SOURCE_RECORD, json.dumps(record).encode()):
        return record
    for name in store.names(source_folder(token)):
        store.remove(name)
    return source_record(store) or record


def _write(dataset: _Dataset, store: Store, token: str) -> dict[str, Any]:
    digest = _new_digest()
    if _is_of_ray(dataset):
        written = _written_by_tasks(dataset, store.uri, token)
    else:
        written = (
            write_file(store, source_name(token, number), table)
            for number, table in enumerate(
                map(
                    pa.concat_tables,
                    _grouped(_hashed(_tables(dataset), digest), lambda table: table.nbytes),
                )
            )
        )
    sizes, logged_s = list[int](), time.monotonic()
    for num_rows in written:
        sizes.append(num_rows)
        if time.monotonic() - logged_s > _LOG_EVERY_S:
            logged_s = time.monotonic()
            logger.info("read %d rows", sum(sizes))
    if not sum(sizes):
        raise ConfigError("source: the dataset has no rows")
    record = {
        "token": token,
        "num_files": len(sizes),
        "num_rows": sum(sizes),
        "digest": digest.hexdigest(),
    }
    if isinstance(dataset, TableRows):
        record |= {"table": dataset.table, "version": dataset.version}
        logger.info("the rows are those of %s, version %s", dataset.table, dataset.version)
    return record


def _written_by_tasks(dataset: _Dataset, uri: str, token: str) -> Iterator[int]:
    """Write the blocks of a Ray dataset as they come, by tasks; yield the rows of each file."""
    import ray  # slow to load, and other datasets do without

    from raybatch.planning.large import get_results
    from raybatch.planning.ray_source import blocks_of

    write = ray.remote(num_cpus=1)(_write_blocks)
    waiting: list[Any] = []
    for number, group in enumerate(_grouped(blocks_of(dataset), lambda block: block[2])):
        if len(waiting) >= _MAX_TASKS:
            yield from get_results([waiting.pop(0)])
        rows = [of_block for _, of_block, _ in group]
        refs = [ref for ref, _, _ in group]
        waiting.append(write.remote(uri, source_name(token, number), rows, *refs))
    yield from get_results(waiting)


def _grouped(pieces: Iterable[_T], num_bytes_of: Callable[[_T], int]) -> Iterator[list[_T]]:
    """Yield neighbouring pieces, as many together as make a file."""
    group, num_bytes = list[_T](), 0
    for piece in pieces:
        group.append(piece)
        num_bytes += num_bytes_of(piece)
        if num_bytes >= _FILE_BYTES:
            yield group
            group, num_bytes = [], 0
    if group:
        yield group


def _write_blocks(uri: str, name: str, rows: Sequence[range], *blocks: Any) -> int:  # noqa: ANN401
    tables = [
        to_table(block).slice(some.start, len(some))
        for block, some in zip(blocks, rows, strict=True)
    ]
    # a block without rows may have no columns
    tables = [table for table in tables if table.num_columns] or tables
    return write_file(store_of(uri), name, pa.concat_tables(tables, promote_options="permissive"))


def write_file(store: Store, name: str, table: pa.Table) -> int:
    """Write a table as the Parquet file `name`, unless it exists; return the number of rows."""
    sink = pa.BufferOutputStream()
    try:
        # a read task reads whole row groups
        pq.write_table(as_movable(table), sink, compression="zstd", row_group_size=_ROW_GROUP_ROWS)
    except (pa.ArrowException, ValueError, KeyError) as error:
        raise ConfigError(
            f"source: the dataset cannot be written as Parquet ({error_text(error)}); convert or "
            "drop the column that the error is about"
        ) from error
    store.create(name, sink.getvalue().to_pybytes())
    return int(table.num_rows)


def _tables(dataset: _Dataset) -> Iterator[pa.Table]:
    if _is_of_hub(dataset):
        for batch in dataset.with_format("arrow").iter(batch_size=_BATCH_ROWS):
            yield batch if isinstance(batch, pa.Table) else pa.table(batch)
    else:
        with error_context("source: the rows cannot be read"):
            yield from _of_equal_size(pa.RecordBatchReader.from_stream(dataset))


def _of_equal_size(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Yield rows in tables of one size, so that equal rows have one digest."""
    held: list[pa.Table] = []
    for batch in batches:
        held.append(pa.table(batch))
        num_rows = sum(table.num_rows for table in held)
        if num_rows >= _BATCH_ROWS:
            whole, full = pa.concat_tables(held), num_rows - num_rows % _BATCH_ROWS
            for start in range(0, full, _BATCH_ROWS):
                yield whole.slice(start, _BATCH_ROWS)
            held = [whole.slice(full)]
    if any(table.num_rows for table in held):
        yield pa.concat_tables(held)


def _hashed(tables: Iterable[pa.Table], digest: Any) -> Iterator[pa.Table]:  # noqa: ANN401
    """Yield tables, and update a digest with their rows."""
    for table in tables:
        sink = pa.BufferOutputStream()
        plain = table.replace_schema_metadata().combine_chunks()  # pandas writes versions there
        with pa.ipc.new_stream(sink, plain.schema) as writer:
            writer.write_table(plain)
        digest.update(sink.getvalue())
        yield table


def _differs(dataset: _Dataset, record: Mapping[str, Any]) -> bool:
    """Return whether a dataset is known to have other rows than those of a record."""
    if isinstance(dataset, TableRows):
        is_other = dataset.table != record.get("table")
        return is_other or dataset.pinned_version not in (None, record.get("version"))
    is_stream = _is_of_hub(dataset) and not hasattr(dataset, "__len__")
    if is_stream or _is_of_ray(dataset) or isinstance(dataset, pa.RecordBatchReader):
        return False  # reading it again would run it, or download it, again
    digest = _new_digest()
    for _ in _hashed(_tables(dataset), digest):
        pass
    return bool(digest.hexdigest() != record["digest"])


def _new_digest() -> Any:  # noqa: ANN401 - hashlib names no type
    return hashlib.blake2b(digest_size=16)


def _is_of_ray(source: object) -> bool:
    return hasattr(source, "iter_internal_ref_bundles")


def _is_of_hub(source: object) -> bool:
    return hasattr(source, "with_format") and hasattr(source, "iter")
