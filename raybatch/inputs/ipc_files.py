"""Arrow IPC, files (Feather 2) and streams: what they hold, and reading it batch by batch.

    stream   schema message, messages of dictionaries and record batches, an end mark
    file     b"ARROW1", a stream, a footer with the places of the messages, b"ARROW1"
    message  ff ff ff ff, length of the header, header, body

Headers and footers are flatbuffers. Sizes are read from them before any body is: a pyarrow reader
would decompress a whole batch to learn its size.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyarrow as pa

from raybatch.inputs.arrow_types import check_types, inert
from raybatch.inputs.file_errors import (
    check_num_rows,
    check_size,
    content_of,
    safe_text,
    size_of,
    unreadable,
)

_FILE_HEAD = b"ARROW1\0\0"
_FILE_END = b"ARROW1"
_CONTINUATION = b"\xff\xff\xff\xff"
_MARK_BYTES = 8
_MAX_HEADER_BYTES = 256 << 20
# kinds of messages
_DICTIONARY, _RECORDS = 2, 3


@dataclass(frozen=True, kw_only=True, slots=True)
class IpcFile:
    """What the headers of a file or stream tell.

    Args:
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
        max_batch_bytes: of one batch, decompressed.

    Raises:
        BadFileError: it is empty, cut, or neither.
        ConfigError: a column has an extension type that is not allowed, or a batch is too large.
    """
    source = _IpcSource(file, path)
    schema = source.schema()
    messages = list(source.messages())
    for index, message in enumerate(messages):
        kind = "record batch" if message.kind == _RECORDS else "the dictionary in message"
        where = f"source file {safe_text(path)}: {kind} {index}"
        check_num_rows(message.num_rows, where)
        stored = message.stop - message.start
        check_size(message.num_bytes, stored, where, max_bytes=max_batch_bytes)
    batches = [message for message in messages if message.kind == _RECORDS]
    is_whole = source.is_stream and len(batches) < len(messages)
    has_offsets = source.is_stream and not is_whole
    return IpcFile(
        schema=schema,
        num_rows=tuple(message.num_rows for message in batches),
        num_bytes=tuple(message.num_bytes for message in batches),
        offsets=tuple(message.start for message in batches) if has_offsets else None,
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
        offset: where the first of them begins in a stream; 0 reads from the beginning.
    """
    container = _IpcSource(file, path)
    schema = container.schema()
    names = [name for name in schema.names if columns is None or name in columns]
    # no field stands for all of them
    fields = [] if columns is None else [schema.names.index(name) for name in names]
    options = pa.ipc.IpcReadOptions(included_fields=fields, use_threads=False)
    file.seek(offset)
    source = pa.PythonFile(file, mode="r")
    batches: Iterator[pa.RecordBatch]
    if not container.is_stream:
        reader = pa.ipc.open_file(source, options=options)
        batches = (reader.get_batch(number) for number in numbers)
    elif offset:
        messages = (pa.ipc.read_message(source) for _ in numbers)
        batches = (pa.ipc.read_record_batch(message, schema) for message in messages)
    else:
        stream = pa.ipc.open_stream(source, options=options)
        batches = (batch for number, batch in enumerate(stream) if number in numbers)
    for batch in batches:
        _check_values(batch, path)
        yield batch.select(names)


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


class _Message(NamedTuple):
    """What the header of a message tells.

    Args:
        kind: `_DICTIONARY`, `_RECORDS` or another.
        num_bytes: of its values, decompressed.
    """

    kind: int
    num_rows: int
    num_bytes: int
    start: int
    stop: int


class _IpcSource:
    """The messages of an open file or stream, without their bodies.

    Every method raises BadFileError where the bytes are cut or of another kind.
    """

    def __init__(self, file: Any, path: str) -> None:  # noqa: ANN401
        self._file, self._path = file, path
        self._size = size_of(file, path)
        self.is_stream = self._is_stream()

    def schema(self) -> pa.Schema:
        """Return the schema; its extension types come alive only after their names are allowed."""
        read = _schema_of_header if self.is_stream else _schema_of_footer
        stored = self._header(0) if self.is_stream else self._footer()
        if stored is None:
            raise unreadable(self._path, "it is a stream without a schema")
        with content_of(self._path):
            check_types(read(inert(stored)), self._path)
            schema = read(stored)
        check_types(schema, self._path)
        return schema

    def messages(self) -> Iterator[_Message]:
        """Yield the messages after the schema; those that a footer lists, dictionaries first."""
        if not self.is_stream:
            yield from self._listed_messages()
            return
        message = self._message(0)
        while message is not None:
            message = self._message(message.stop)
            if message is not None:
                yield message

    def _is_stream(self) -> bool:
        head = self._bytes(0, len(_FILE_HEAD))
        if head.startswith(_FILE_END):
            return False
        if head.startswith(_CONTINUATION):
            return True
        reason = "it begins neither like an Arrow IPC file nor like a stream"
        if head.startswith(b"FEA1"):
            reason = "it is of Feather version 1, which pyarrow.feather.read_table can still read"
        raise unreadable(self._path, reason)

    def _footer(self) -> bytes:
        tail_bytes = 4 + len(_FILE_END)
        tail = b""
        if self._size > len(_FILE_HEAD) + tail_bytes:
            tail = self._bytes(self._size - tail_bytes, tail_bytes)
        length = int.from_bytes(tail[:4], "little", signed=True)
        start = self._size - tail_bytes - length
        if tail[4:] != _FILE_END or length <= 0 or start < len(_FILE_HEAD):
            reason = "it begins like an Arrow IPC file and does not end like one: cut"
            raise unreadable(self._path, reason)
        return self._bytes(start, length)

    def _listed_messages(self) -> Iterator[_Message]:
        footer = self._footer()
        with content_of(self._path):
            table = _Table.root(footer)
            # structs of 24 bytes: offset, length of the header, length of the body
            places = [at for slot in (2, 3) for at in table.vector(slot, 24)]
            starts = [struct.unpack_from("<q", footer, at)[0] for at in places]
        for start in starts:
            message = self._message(start)
            if message is None:
                raise unreadable(self._path, "its footer names a message where there is none")
            yield message

    def _header(self, start: int) -> bytes | None:
        """Return the header of the message at `start`; None at the end mark of a stream."""
        mark, length = b"", -1
        if 0 <= start <= self._size - _MARK_BYTES:
            mark = self._bytes(start, _MARK_BYTES)
            length = int.from_bytes(mark[4:], "little", signed=True)
        longest = min(_MAX_HEADER_BYTES, self._size - start - _MARK_BYTES)
        if mark[:4] != _CONTINUATION or not 0 <= length <= longest:
            reason = f"neither a message nor the end of a stream at byte {start}: cut"
            raise unreadable(self._path, reason)
        return self._bytes(start + _MARK_BYTES, length) or None

    def _message(self, start: int) -> _Message | None:
        header = self._header(start)
        if header is None:
            return None
        body = start + _MARK_BYTES + len(header)
        with content_of(self._path):
            table = _Table.root(header)
            kind, stop = table.number(1, "B"), body + table.number(3, "q")
            if not body <= stop <= self._size:
                raise unreadable(self._path, f"it ends within the message at byte {start}: cut")
            if kind not in (_DICTIONARY, _RECORDS):
                return _Message(kind, 0, 0, start, stop)
            records = table.child(2)
            if kind == _DICTIONARY:
                records = records.child(1)
            # structs of 16 bytes: offset in the body, length
            buffers = [struct.unpack_from("<qq", header, at) for at in records.vector(2, 16)]
            num_rows, is_compressed = records.number(0, "q"), records.has(3)
        sizes = [length for _, length in buffers]
        if is_compressed:
            sizes = [self._plain_length(body + offset, length) for offset, length in buffers]
        return _Message(kind, num_rows, sum(sizes), start, stop)

    def _plain_length(self, at: int, length: int) -> int:
        """Return the decompressed length of a buffer, which its first 8 bytes hold."""
        if length < 8 or at < 0:
            return max(0, length)
        plain = int.from_bytes(self._bytes(at, 8), "little", signed=True)
        return length - 8 if plain < 0 else plain

    def _bytes(self, start: int, length: int) -> bytes:
        self._file.seek(start)
        data: bytes = self._file.read(length)
        return data


def _schema_of_header(header: bytes) -> pa.Schema:
    message = _CONTINUATION + len(header).to_bytes(4, "little") + header
    return pa.ipc.read_schema(pa.py_buffer(message))


def _schema_of_footer(footer: bytes) -> pa.Schema:
    file = _FILE_HEAD + footer + len(footer).to_bytes(4, "little") + _FILE_END
    return pa.ipc.open_file(pa.BufferReader(file)).schema


class _Table:
    """A table of a flatbuffer."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data = data
        self._at = at

    @classmethod
    def root(cls, data: bytes) -> "_Table":
        return cls(data, struct.unpack_from("<I", data)[0])

    def has(self, slot: int) -> bool:
        return self._place(slot) is not None

    def number(self, slot: int, kind: str) -> int:
        """Return a number of a `struct` format; one that is not there is 0."""
        place = self._place(slot)
        return 0 if place is None else int(struct.unpack_from(f"<{kind}", self._data, place)[0])

    def child(self, slot: int) -> "_Table":
        """Return the table that a slot points to."""
        place = self._place(slot)
        if place is None:
            raise ValueError(f"a header lacks its part {slot}")
        return _Table(self._data, place + struct.unpack_from("<I", self._data, place)[0])

    def vector(self, slot: int, item_bytes: int) -> range:
        """Return the places of the items."""
        place = self._place(slot)
        if place is None:
            return range(0)
        start = place + struct.unpack_from("<I", self._data, place)[0] + 4
        (count,) = struct.unpack_from("<I", self._data, start - 4)
        if start + count * item_bytes > len(self._data):
            raise ValueError("a header names more items than it holds")
        return range(start, start + count * item_bytes, item_bytes)

    def _place(self, slot: int) -> int | None:
        (distance,) = struct.unpack_from("<i", self._data, self._at)
        vtable = self._at - distance
        (num_bytes,) = struct.unpack_from("<H", self._data, vtable)
        if 4 + 2 * slot >= num_bytes:
            return None
        (offset,) = struct.unpack_from("<H", self._data, vtable + 4 + 2 * slot)
        return self._at + offset if offset else None
