"""Arrow IPC files (Feather 2) and streams: scanning their headers, reading them by batch.

    stream   schema message, messages of dictionaries and record batches, an end mark
    file     b"ARROW1", a stream, a footer with the places of the messages, b"ARROW1"
    message  ff ff ff ff, length of the header, header, body

Headers and footers are flatbuffers. Sizes are read from them before any body is read: a pyarrow
reader would decompress a whole batch to learn its size.
"""

import io
import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from raybatch.inputs.file_errors import (
    check_num_rows,
    check_size,
    check_types,
    check_values,
    content_of,
    inert,
    safe_text,
    size_of,
    unreadable,
    without_refused,
)

_FILE_HEAD = b"ARROW1\0\0"
_FILE_END = b"ARROW1"
# bytes after the footer: its length, and the mark
_TAIL_BYTES = 4 + len(_FILE_END)
_CONTINUATION = b"\xff\xff\xff\xff"
_MARK_BYTES = 8
_MAX_HEADER_BYTES = 256 << 20
# message kinds in Arrow's flatbuffers schema
_DICTIONARY, _RECORDS = 2, 3


class Message(NamedTuple):
    """Metadata of a message, from its header.

    `num_bytes` is the size of its decompressed values; `start` and `stop` are bytes of the file.
    """

    kind: int
    num_rows: int
    num_bytes: int
    start: int
    stop: int


class IpcFile(NamedTuple):
    """Metadata of a file or stream, from its headers.

    `is_alone`: it is a stream without dictionaries, so each batch can be read from its first byte.
    `is_whole`: it is a stream with dictionaries, so it must be read from the beginning. Both are
    False for a file: its footer says where the batches are.
    """

    schema: pa.Schema
    batches: list[Message]
    is_alone: bool
    is_whole: bool


def open_ipc(
    file: Any,  # noqa: ANN401
    path: str,
    *,
    columns: Sequence[str] | None,
    max_batch_bytes: int,
) -> IpcFile:
    """Return the metadata of a file or stream without decompressing or decoding its batches.

    Raises:
        BadFileError: it is empty, truncated, or not Arrow IPC.
        ConfigError: a column to read has an extension type that is not allowed, or a batch is too
            large.
    """
    source = _IpcSource(file, path, columns)
    schema = source.schema()
    messages = list(source.messages())
    for index, message in enumerate(messages):
        kind = "record batch" if message.kind == _RECORDS else "the dictionary in message"
        where = f"source file {safe_text(path)}: {kind} {index}"
        check_num_rows(message.num_rows, where)
        stored = message.stop - message.start
        check_size(message.num_bytes, stored, where, max_bytes=max_batch_bytes)
    batches = [message for message in messages if message.kind == _RECORDS]
    has_others = len(batches) < len(messages)
    is_stream = source.is_stream
    return IpcFile(schema, batches, is_stream and not has_others, is_stream and has_others)


def read_batches(
    file: Any,  # noqa: ANN401
    path: str,
    numbers: range,
    *,
    offset: int,
    columns: Sequence[str] | None,
) -> Iterator[pa.RecordBatch]:
    """Yield the record batches with the indices `numbers`; their values are validated.

    `offset` is the byte of a stream where the first of them begins; 0: read from the beginning.
    """
    container = _IpcSource(file, path, columns)
    schema = container.schema()
    file = container.file
    names = [name for name in schema.names if columns is None or name in columns]
    # an empty list includes all fields
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
        with content_of(path):
            check_values(batch)
        yield batch.select(names)


class _Patched(io.RawIOBase):
    """A file with some bytes replaced by as many others."""

    def __init__(self, file: Any, start: int, data: bytes) -> None:  # noqa: ANN401
        self._file, self._start, self._data = file, start, data

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        return int(self._file.tell())

    def read(self, size: int = -1) -> bytes:
        at = self.tell() - self._start
        data = bytearray(self._file.read(size))
        begin, end = max(0, -at), min(len(data), len(self._data) - at)
        if begin < end:
            data[begin:end] = self._data[at + begin : at + end]
        return bytes(data)


class _IpcSource:
    """Read the messages of an open file or stream without their bodies.

    `file` is safe to pass to an Arrow reader once `schema` has returned.

    All methods raise BadFileError if bytes are missing or of another format.
    """

    def __init__(self, file: Any, path: str, columns: Sequence[str] | None) -> None:  # noqa: ANN401
        self.file = self._file = file
        self._path, self._columns = path, columns
        self._size = size_of(file, path)
        head = self._bytes(0, len(_FILE_HEAD))
        self.is_stream = head.startswith(_CONTINUATION)
        if not self.is_stream and not head.startswith(_FILE_END):
            reason = "it does not begin like an Arrow IPC file or stream"
            if head.startswith(b"FEA1"):
                reason = "it is Feather version 1; pyarrow.feather.read_table can convert it"
            raise unreadable(path, reason)

    def schema(self) -> pa.Schema:
        """Return the schema; extension types are instantiated only after their names are allowed.

        Columns that are not read have the storage type in place of a refused extension type.
        """
        stored = self._header(0) if self.is_stream else self._footer()
        if stored is None:
            raise unreadable(self._path, "it is a stream without a schema")
        with content_of(self._path):
            if check_types(self._schema_of(inert(stored)), self._path, columns=self._columns):
                stored = without_refused(stored, self._schema_of)
                tail_bytes = len(stored) + _TAIL_BYTES
                start = _MARK_BYTES if self.is_stream else self._size - tail_bytes
                self.file = _Patched(self._file, start, stored)
            schema = self._schema_of(stored)
        check_types(schema, self._path, columns=self._columns)
        return schema

    def _schema_of(self, stored: bytes) -> pa.Schema:
        length = len(stored).to_bytes(4, "little")
        if self.is_stream:
            return pa.ipc.read_schema(pa.py_buffer(_CONTINUATION + length + stored))
        return pa.ipc.open_file(pa.BufferReader(_FILE_HEAD + stored + length + _FILE_END)).schema

    def messages(self) -> Iterator[Message]:
        """Yield the messages after the schema in order; those of a file with dictionaries first."""
        if self.is_stream:
            message = self._message(0)
            while message is not None and (message := self._message(message.stop)) is not None:
                yield message
            return
        footer = self._footer()
        with content_of(self._path):
            table = _Table(footer)
            # structs of 24 bytes: offset, length of the header, length of the body
            places = [at for slot in (2, 3) for at in table.vector(slot, 24)]
            starts = [struct.unpack_from("<q", footer, at)[0] for at in places]
        for start in starts:
            if (message := self._message(start)) is None:
                raise unreadable(self._path, "its footer points to a message that does not exist")
            yield message

    def _footer(self) -> bytes:
        tail = b""
        if self._size > len(_FILE_HEAD) + _TAIL_BYTES:
            tail = self._bytes(self._size - _TAIL_BYTES, _TAIL_BYTES)
        length = int.from_bytes(tail[:4], "little", signed=True)
        start = self._size - _TAIL_BYTES - length
        if tail[4:] != _FILE_END or length <= 0 or start < len(_FILE_HEAD):
            reason = "it begins like an Arrow IPC file but does not end like one: truncated"
            raise unreadable(self._path, reason)
        return self._bytes(start, length)

    def _header(self, start: int) -> bytes | None:
        """Return the header of the message at `start`; None at the end mark of a stream."""
        mark, length = b"", -1
        if 0 <= start <= self._size - _MARK_BYTES:
            mark = self._bytes(start, _MARK_BYTES)
            length = int.from_bytes(mark[4:], "little", signed=True)
        longest = min(_MAX_HEADER_BYTES, self._size - start - _MARK_BYTES)
        if mark[:4] != _CONTINUATION or not 0 <= length <= longest:
            reason = f"no message and no end of a stream at byte {start}: truncated"
            raise unreadable(self._path, reason)
        return self._bytes(start + _MARK_BYTES, length) or None

    def _message(self, start: int) -> Message | None:
        header = self._header(start)
        if header is None:
            return None
        body = start + _MARK_BYTES + len(header)
        with content_of(self._path):
            table = _Table(header)
            kind, stop = table.number(1, "B"), body + table.number(3, "q")
            if not body <= stop <= self._size:
                raise unreadable(self._path, f"the message at byte {start} is truncated")
            if kind not in (_DICTIONARY, _RECORDS):
                return Message(kind, 0, 0, start, stop)
            records = table.child(2)
            if kind == _DICTIONARY:
                records = records.child(1)
            # structs of 16 bytes: offset in the body, length
            buffers = [struct.unpack_from("<qq", header, at) for at in records.vector(2, 16)]
            num_rows, is_compressed = records.number(0, "q"), records.place(3) is not None
        num_bytes = 0
        for offset, length in buffers:
            plain = length
            if is_compressed and (length < 8 or body + offset < 0):
                plain = max(0, length)
            elif is_compressed:
                # the first 8 bytes hold the decompressed length, -1 if not compressed
                stored = int.from_bytes(self._bytes(body + offset, 8), "little", signed=True)
                plain = length - 8 if stored < 0 else stored
            num_bytes += plain
        return Message(kind, num_rows, num_bytes, start, stop)

    def _bytes(self, start: int, length: int) -> bytes:
        self._file.seek(start)
        return bytes(self._file.read(length))


class _Table:
    def __init__(self, data: bytes, at: int = 0) -> None:
        """Open the flatbuffers table that the offset at `at` points to; by default the root."""
        self._data = data
        self._at = at + struct.unpack_from("<I", data, at)[0]

    def number(self, slot: int, kind: str) -> int:
        """Return the number in field `slot`, of `struct` format `kind`; 0 if it is absent."""
        place = self.place(slot)
        return 0 if place is None else int(struct.unpack_from(f"<{kind}", self._data, place)[0])

    def child(self, slot: int) -> "_Table":
        place = self.place(slot)
        if place is None:
            raise ValueError(f"the header of a message lacks its required field {slot}")
        return _Table(self._data, place)

    def vector(self, slot: int, item_bytes: int) -> range:
        place = self.place(slot)
        if place is None:
            return range(0)
        start = place + struct.unpack_from("<I", self._data, place)[0] + 4
        (count,) = struct.unpack_from("<I", self._data, start - 4)
        if start + count * item_bytes > len(self._data):
            raise ValueError("the header of a message claims more items than its bytes hold")
        return range(start, start + count * item_bytes, item_bytes)

    def place(self, slot: int) -> int | None:
        (distance,) = struct.unpack_from("<i", self._data, self._at)
        vtable = self._at - distance
        (num_bytes,) = struct.unpack_from("<H", self._data, vtable)
        if 4 + 2 * slot >= num_bytes:
            return None
        (offset,) = struct.unpack_from("<H", self._data, vtable + 4 + 2 * slot)
        return self._at + offset if offset else None
