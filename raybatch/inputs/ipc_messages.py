"""The messages of Arrow IPC files and streams, without their bodies.

    stream   message of the schema, messages of dictionaries and record batches, a mark at the end
    file     b"ARROW1", a stream, a footer that says where the messages begin, b"ARROW1"
    message  ff ff ff ff, length of the header, header, body

Headers and footers are flatbuffers, of which only a few numbers are read.
"""

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

from raybatch.inputs.file_errors import content_of, unreadable

FILE_HEAD = b"ARROW1\0\0"
FILE_END = b"ARROW1"
CONTINUATION = b"\xff\xff\xff\xff"
DICTIONARY, RECORDS = 2, 3
_MARK_BYTES = 8
_MAX_HEADER_BYTES = 256 << 20


class Message(NamedTuple):
    """What the header of a message tells.

    Args:
        kind: `DICTIONARY`, `RECORDS` or another.
        num_rows: of a batch.
        num_bytes: of its values, decompressed.
        start: where it begins in the file.
        stop: where the next one begins.
    """

    kind: int
    num_rows: int
    num_bytes: int
    start: int
    stop: int


def is_stream(file: Any, path: str) -> bool:  # noqa: ANN401
    """Return whether a file is a stream; raise BadFileError if it is neither that nor a file."""
    file.seek(0)
    head = file.read(len(FILE_HEAD))
    if head[: len(FILE_END)] == FILE_END:
        return False
    if head[: len(CONTINUATION)] == CONTINUATION:
        return True
    reason = "it begins neither like an Arrow IPC file nor like a stream"
    if head[:4] == b"FEA1":
        reason = "it is of Feather version 1, which pyarrow.feather.read_table can still read"
    raise unreadable(path, reason)


def schema_header(file: Any, path: str, size: int) -> bytes:  # noqa: ANN401
    """Return the header of a stream's first message, which is the schema."""
    header = _header(file, path, 0, size)
    if header is None:
        raise unreadable(path, "it is a stream without a schema")
    return header


def file_footer(file: Any, path: str, size: int) -> bytes:  # noqa: ANN401
    """Return the footer of an IPC file."""
    tail_bytes = 4 + len(FILE_END)
    tail = b""
    if size > len(FILE_HEAD) + tail_bytes:
        file.seek(size - tail_bytes)
        tail = file.read(tail_bytes)
    length = int.from_bytes(tail[:4], "little", signed=True)
    start = size - tail_bytes - length
    if tail[4:] != FILE_END or length <= 0 or start < len(FILE_HEAD):
        raise unreadable(path, "it begins like an Arrow IPC file and does not end like one: cut")
    file.seek(start)
    footer: bytes = file.read(length)
    return footer


def listed_messages(file: Any, path: str, size: int) -> list[Message]:  # noqa: ANN401
    """Return the messages that the footer of a file lists, dictionaries first."""
    footer = file_footer(file, path, size)
    with content_of(path):
        table = _Table.root(footer)
        # structs of 24 bytes: offset, length of the header, length of the body
        places = [at for slot in (2, 3) for at in table.vector(slot, 24)]
        starts = [struct.unpack_from("<q", footer, at)[0] for at in places]
    messages = [_message(file, path, start, size) for start in starts]
    if None in messages:
        raise unreadable(path, "its footer names a message where there is none")
    return [message for message in messages if message is not None]


def stream_messages(file: Any, path: str, size: int) -> Iterator[Message]:  # noqa: ANN401
    """Yield the messages of a stream after the schema."""
    message = _message(file, path, 0, size)
    while message is not None:
        message = _message(file, path, message.stop, size)
        if message is not None:
            yield message


def _header(file: Any, path: str, start: int, size: int) -> bytes | None:  # noqa: ANN401
    """Return the header of the message at `start`; None at the mark that ends a stream."""
    mark, length = b"", -1
    if 0 <= start <= size - _MARK_BYTES:
        file.seek(start)
        mark = file.read(_MARK_BYTES)
        length = int.from_bytes(mark[4:], "little", signed=True)
    longest = min(_MAX_HEADER_BYTES, size - start - _MARK_BYTES)
    if mark[:4] != CONTINUATION or not 0 <= length <= longest:
        raise unreadable(path, f"neither a message nor the end of a stream at byte {start}: cut")
    header: bytes = file.read(length)
    return header or None


def _message(file: Any, path: str, start: int, size: int) -> Message | None:  # noqa: ANN401
    header = _header(file, path, start, size)
    if header is None:
        return None
    body = start + _MARK_BYTES + len(header)
    with content_of(path):
        table = _Table.root(header)
        kind, stop = table.number(1, "B"), body + table.number(3, "q")
        if not body <= stop <= size:
            raise unreadable(path, f"it ends within the message at byte {start}: cut")
        if kind not in (DICTIONARY, RECORDS):
            return Message(kind, 0, 0, start, stop)
        records = table.child(2)
        if kind == DICTIONARY:
            records = records.child(1)
        # structs of 16 bytes: offset in the body, length
        buffers = [struct.unpack_from("<qq", header, at) for at in records.vector(2, 16)]
        num_rows, is_compressed = records.number(0, "q"), records.has(3)
    sizes = [length for _, length in buffers]
    if is_compressed:
        sizes = [_plain_length(file, body + offset, length) for offset, length in buffers]
    return Message(kind, num_rows, sum(sizes), start, stop)


def _plain_length(file: Any, at: int, length: int) -> int:  # noqa: ANN401
    """Return the length of a compressed buffer after decompression, with which it begins."""
    if length < 8 or at < 0:
        return max(0, length)
    file.seek(at)
    plain = int.from_bytes(file.read(8), "little", signed=True)
    return length - 8 if plain < 0 else plain


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
