"""Reads text files, compressed or not, in blocks of whole lines."""

import codecs
import io
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import fsspec
import pyarrow as pa

from raybatch.errors import ConfigError, error_text
from raybatch.inputs.file_errors import safe_text, size_of, unreadable

# longest line of a compressed file; the default `max_row_bytes` of a row is far lower
MAX_LINE_BYTES = 256 << 20
# decompressed size that every file may have, and the largest ratio beyond it
LEAST_ALLOWED_BYTES = 1 << 30
MAX_GROWTH = 100
# reasons why a file is not JSON lines
OVER_LINES = "an object over several lines; `jq -c .` writes each as one line"
JSON_ARRAY = "the file is one JSON array; `jq -c '.[]'` writes it as lines"

_CODECS = {".gz": "gzip", ".zst": "zstd"}
_MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}


class ScannedText(NamedTuple):
    """What reading a file once tells; `num_bytes` is the size of the columns to read, in memory."""

    schema: pa.Schema
    num_rows: int
    num_bytes: int


def read_blocks(
    path: str,
    *,
    block_bytes: int,
    max_line_bytes: int = MAX_LINE_BYTES,
    max_decompressed_bytes: int | None = None,
) -> Iterator[bytes]:
    """Yield the content of one file in order, in whole lines; its first bytes decide the codec.

    Memory: one block, and the longest line of an uncompressed file. The limits hold for compressed
    files; None allows 1 GiB, or a hundred times the file size if that is more.

    Raises:
        BadFileError: a compressed file is truncated or corrupt, or its content is not UTF-8.
        ConfigError: a compressed file, or a line of it, is larger than its limit.
    """
    left = b""
    for index, (codec, data) in enumerate(_coded(path, block_bytes, max_decompressed_bytes)):
        if not index:
            _check_head(path, data)
            data = data.removeprefix(codecs.BOM_UTF8)
        # only cut before more data, so that a last line without an end is no separate block; the
        # second byte of a line end may be in the next chunk
        end = left.rfind(b"\n") + 1 or left.rfind(b"\r", 0, -1) + 1
        if end:
            yield left[:end]
        left = left[end:] + data
        if len(left) > max_line_bytes + block_bytes and codec is not None:
            raise ConfigError(
                f"source file {safe_text(path)} has a line of more than {max_line_bytes:,} bytes "
                "when decompressed; rewrite it with shorter lines, or decompress it"
            )
    if left:
        yield left


def not_lines(head: bytes) -> str | None:
    """Return why a file with these first bytes is not JSON lines in UTF-8; None if it may be."""
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in head[:4]:
        return "it is UTF-16 or UTF-32; convert it with `iconv -f UTF-16 -t UTF-8`"
    return JSON_ARRAY if head.lstrip().startswith(b"[") else None


def _check_head(path: str, data: bytes) -> None:
    """Raise BadFileError if the decompressed content begins like another format."""
    if data.startswith(tuple(_MAGIC)):
        raise unreadable(path, "it is compressed twice: decompress it once")
    if data.startswith(b"PAR1"):
        raise unreadable(path, "it is compressed Parquet: decompress it")
    # refuse a one-line array before all of it is in memory
    if (reason := not_lines(data)) and (reason != JSON_ARRAY or b"\n" not in data):
        raise unreadable(path, f"line 1: {reason}")


def _codec_of(file: Any, path: str) -> str | None:  # noqa: ANN401
    """Return the codec by the first bytes, or by the name unless the file begins like a line."""
    head = bytes(file.read(64))
    file.seek(0)
    if codec := next((codec for magic, codec in _MAGIC.items() if head.startswith(magic)), None):
        return codec
    is_plain = head.lstrip().startswith((b"{", b"["))
    named = next((codec for end, codec in _CODECS.items() if path.lower().endswith(end)), None)
    return None if is_plain else named


def text_chunks(path: str, chunk_bytes: int, max_bytes: int | None) -> Iterator[bytes]:
    """Yield the content of one file in order; see `read_blocks` for limits and errors."""
    return (data for _, data in _coded(path, chunk_bytes, max_bytes))


def _coded(
    path: str, block_bytes: int, max_bytes: int | None
) -> Iterator[tuple[str | None, bytes]]:
    """Yield the codec of a file, None if it is not compressed, with each piece of its content."""
    with fsspec.open(path, "rb") as file:
        codec = _codec_of(file, path)
        if codec is None:
            yield from ((None, data) for data in iter(partial(file.read, block_bytes), b""))
            return
        stream = _Decompressed(file, codec, path, max_bytes)
        data = stream.read(block_bytes)
        # a decompression bomb is refused before its rows are parsed
        if len(data) > MAX_GROWTH * file.tell():
            while stream.read(block_bytes):
                pass
            stream = _Decompressed(file, codec, path, max_bytes)
        else:
            yield codec, data
        yield from ((codec, data) for data in iter(partial(stream.read, block_bytes), b""))


class _Watched(io.RawIOBase):
    """A file that records read errors, to tell them from errors of its content."""

    error: Exception | None = None

    def __init__(self, file: Any) -> None:  # noqa: ANN401
        self._file = file

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        try:
            return bytes(self._file.read(size))
        except Exception as error:
            self.error = error
            raise


class _Decompressed:
    """Read the decompressed bytes of a file from its beginning, up to a limit."""

    def __init__(self, file: Any, codec: str, path: str, max_bytes: int | None) -> None:  # noqa: ANN401
        self._path, self._max_bytes = path, max_bytes
        self._num_stored, self._num_bytes = size_of(file, path), 0
        file.seek(0)
        self._file = _Watched(file)
        self._stream = pa.CompressedInputStream(pa.PythonFile(self._file, mode="r"), codec)

    def read(self, size: int) -> bytes:
        """Return at most `size` bytes, none at the end; see `read_blocks` for what it raises."""
        try:
            data: bytes = self._stream.read(size)
        except (OSError, pa.ArrowException) as error:
            if self._file.error is not None:
                raise self._file.error from error
            raise unreadable(self._path, error_text(error)) from error
        self._num_bytes += len(data)
        limit = self._max_bytes or max(LEAST_ALLOWED_BYTES, MAX_GROWTH * self._num_stored)
        if self._num_bytes > limit:
            rule = f"{LEAST_ALLOWED_BYTES:,} bytes, or {MAX_GROWTH} times its size if that is more"
            by_default = f" by default ({rule})" if self._max_bytes is None else ""
            raise ConfigError(
                f"source file {safe_text(self._path)} of {self._num_stored:,} bytes decompresses "
                f"to more than max_decompressed_bytes={limit:,}{by_default}; leave it out, or, if "
                "you trust it, raise max_decompressed_bytes or decompress it"
            )
        return data
