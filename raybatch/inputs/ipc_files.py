"""Arrow IPC, files (Feather 2) and streams: what they hold, and reading it batch by batch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from raybatch.inputs.arrow_types import check_types, inert
from raybatch.inputs.file_errors import content_of, safe_text
from raybatch.inputs.ipc_messages import (
    CONTINUATION,
    FILE_END,
    FILE_HEAD,
    RECORDS,
    file_footer,
    is_stream,
    listed_messages,
    schema_header,
    stream_messages,
)
from raybatch.inputs.size_limits import check_num_rows, check_size, size_of


@dataclass(frozen=True, kw_only=True, slots=True)
class IpcFile:
    """What the headers of a file or stream tell.

    Args:
        schema: of every batch.
        num_rows: of each batch.
        num_bytes: that each batch takes in memory.
        offsets: where each batch of a stream begins. None where one cannot be read alone: in a
            stream with dictionaries, and in a file, whose footer says it.
        is_whole: batches can only be read from the first one on.
    """

    schema: pa.Schema
    num_rows: tuple[int, ...]
    num_bytes: tuple[int, ...]
    offsets: tuple[int, ...] | None
    is_whole: bool


def open_ipc(file: Any, path: str, *, max_batch_bytes: int) -> IpcFile:  # noqa: ANN401
    """Return what a file or stream holds; nothing is decompressed or decoded for it.

    Args:
        file: open for reading bytes.
        path: for messages.
        max_batch_bytes: of one batch, decompressed.

    Raises:
        BadFileError: it is empty, cut, or neither.
        ConfigError: a column has an extension type that is not allowed, or a batch is too large.
    """
    size, streamed = size_of(file, path), is_stream(file, path)
    schema = _checked_schema(file, path, size, streamed)
    list_messages = stream_messages if streamed else listed_messages
    messages = list(list_messages(file, path, size))
    for index, message in enumerate(messages):
        kind = "record batch" if message.kind == RECORDS else "the dictionary in message"
        where = f"source file {safe_text(path)}: {kind} {index}"
        check_num_rows(message.num_rows, where)
        stored = message.stop - message.start
        check_size(message.num_bytes, stored, where, max_bytes=max_batch_bytes)
    batches = [message for message in messages if message.kind == RECORDS]
    is_whole = streamed and len(batches) < len(messages)
    return IpcFile(
        schema=schema,
        num_rows=tuple(message.num_rows for message in batches),
        num_bytes=tuple(message.num_bytes for message in batches),
        offsets=tuple(m.start for m in batches) if streamed and not is_whole else None,
        is_whole=is_whole,
    )


def read_batches(
    file: Any,  # noqa: ANN401
    path: str,
    numbers: range,
    *,
    offset: int,
    columns: Sequence[str] | None,
) -> Iterator[pa.RecordBatch]:
    """Yield some record batches, whose values are safe to read.

    Args:
        file: open for reading bytes.
        path: for messages.
        numbers: of the batches.
        offset: where the first of them begins in a stream; 0 reads from the beginning.
        columns: to read, those that there are; None reads all.
    """
    streamed = is_stream(file, path)
    schema = _checked_schema(file, path, size_of(file, path), streamed)
    names = [name for name in schema.names if columns is None or name in columns]
    # no field stands for all of them
    fields = [] if columns is None else [schema.names.index(name) for name in names]
    options = pa.ipc.IpcReadOptions(included_fields=fields, use_threads=False)
    file.seek(offset)
    source = pa.PythonFile(file, mode="r")
    found: Iterator[pa.RecordBatch]
    if not streamed:
        reader = pa.ipc.open_file(source, options=options)
        found = (reader.get_batch(number) for number in numbers)
    elif offset:
        messages = (pa.ipc.read_message(source) for _ in numbers)
        found = (pa.ipc.read_record_batch(message, schema) for message in messages)
    else:
        stream = pa.ipc.open_stream(source, options=options)
        found = (batch for number, batch in enumerate(stream) if number in numbers)
    for batch in found:
        _check_values(batch, path)
        yield batch.select(names)


def _checked_schema(file: Any, path: str, size: int, streamed: bool) -> pa.Schema:  # noqa: ANN401
    """Return the schema; its extension types come alive only after their names are allowed."""
    read = _schema_of_header if streamed else _schema_of_footer
    stored = schema_header(file, path, size) if streamed else file_footer(file, path, size)
    with content_of(path):
        check_types(read(inert(stored)), path)
        schema = read(stored)
    check_types(schema, path)
    return schema


def _schema_of_header(header: bytes) -> pa.Schema:
    message = CONTINUATION + len(header).to_bytes(4, "little") + header
    return pa.ipc.read_schema(pa.py_buffer(message))


def _schema_of_footer(footer: bytes) -> pa.Schema:
    file = FILE_HEAD + footer + len(footer).to_bytes(4, "little") + FILE_END
    return pa.ipc.open_file(pa.BufferReader(file)).schema


def _check_values(batch: pa.RecordBatch, path: str) -> None:
    """Raise BadFileError where offsets or indices lead out of a buffer; Arrow would follow them.

    Text that is not UTF-8 is left to whoever reads the row.
    """
    try:
        batch.validate(full=True)
    except pa.ArrowInvalid:
        with content_of(path):
            batch.validate()
            for column in batch.columns:
                column.cast(_as_bytes(column.type)).validate(full=True)


def _as_bytes(kind: pa.DataType) -> pa.DataType:
    """Return the type with bytes in place of text, also inside of others."""
    if isinstance(kind, pa.BaseExtensionType):
        return _as_bytes(kind.storage_type)
    if pa.types.is_string(kind):
        return pa.binary()
    if pa.types.is_large_string(kind):
        return pa.large_binary()
    if pa.types.is_string_view(kind):
        return pa.binary_view()
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_as_bytes(kind.value_type)))
    if pa.types.is_large_list(kind):
        return pa.large_list(kind.value_field.with_type(_as_bytes(kind.value_type)))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_as_bytes(field.type)) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(_as_bytes(kind.key_type), _as_bytes(kind.item_type))
    return kind
