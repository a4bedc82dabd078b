"""The bytes of a JSONL file, decompressed as its name says, in blocks of whole lines."""

import codecs
import io
from collections.abc import Iterator
from functools import partial
from typing import Any

import fsspec
import pyarrow as pa

from raybatch.errors import ConfigError, error_text
from raybatch.inputs.file_errors import safe_text, size_of, unreadable

# what one parse takes: large enough that its threads have work, small beside a row batch
BLOCK_BYTES = 16 << 20
# of a compressed file; a row may have far less by default (`max_row_bytes`)
MAX_LINE_BYTES = 256 << 20
# what every compressed file may grow to, and how many times its size a larger one may
LEAST_ALLOWED_BYTES = 1 << 30
MAX_GROWTH = 100

_CODECS = {".gz": "gzip", ".zst": "zstd"}
_MAGIC = {b"\x1f\x8b": ".gz", b"\x28\xb5\x2f\xfd": ".zst"}


def read_blocks(
    path: str,
    *,
    block_bytes: int = BLOCK_BYTES,
    max_line_bytes: int = MAX_LINE_BYTES,
    max_decompressed_bytes: int | None = None,
) -> Iterator[bytes]:
    """Yield the content of one file in order, cut behind ends of lines.

    Memory: one block, and of a file that is not compressed its longest line.

    Args:
        path: with its protocol; what its name ends in says how it is compressed.
        max_line_bytes: of a line of a compressed file.
        max_decompressed_bytes: that a compressed file may grow to; None allows 1 GiB, and larger
            files a hundred times their size.

    Raises:
        BadFileError: a compressed file is cut or broken, or compressed in another way.
        ConfigError: a compressed file, or a line of it, grows beyond its limit.
    """
    left = b""
    for index, data in enumerate(_chunks(path, block_bytes, max_decompressed_bytes)):
        if not index:
            _check_beginning(data, path)
            data = data.removeprefix(codecs.BOM_UTF8)
        # cut where more follows, so that a last line without an end is no block of its own; the
        # end of a line may be two bytes, of which the second one comes with what follows
        end = left.rfind(b"\n") + 1 or left.rfind(b"\r", 0, -1) + 1
        if end:
            yield left[:end]
        left = left[end:] + data
        if len(left) > max_line_bytes + block_bytes and _codec_of(path) is not None:
            raise ConfigError(
                f"source file {safe_text(path)} has a line of more than {max_line_bytes:,} bytes "
                "when it is decompressed; write it again with shorter lines, or decompress it"
            )
    if left:
        yield left


def _codec_of(path: str) -> str | None:
    return next((codec for end, codec in _CODECS.items() if path.lower().endswith(end)), None)


def _check_beginning(data: bytes, path: str) -> None:
    for magic, suffix in _MAGIC.items():
        if data.startswith(magic):
            is_twice = _codec_of(path) is not None
            problem = "is compressed twice: decompress it once" if is_twice else "is compressed"
            raise unreadable(path, f"it {problem}, and let its name end in {suffix}")


def _chunks(path: str, block_bytes: int, max_bytes: int | None) -> Iterator[bytes]:
    with fsspec.open(path, "rb") as file:
        codec = _codec_of(path)
        if codec is None:
            yield from iter(partial(file.read, block_bytes), b"")
            return
        stream = _Decompressed(file, codec, path, max_bytes)
        data = stream.read(block_bytes)
        # a file made to fill the memory is refused before its many rows are parsed
        if len(data) > MAX_GROWTH * file.tell():
            while stream.read(block_bytes):
                pass
            stream = _Decompressed(file, codec, path, max_bytes)
            data = stream.read(block_bytes)
        while data:
            yield data
            data = stream.read(block_bytes)


class _Watched(io.RawIOBase):
    """A file that knows whether reading it has failed, which is no fault of its content."""

    error: Exception | None = None

    def __init__(self, file: Any) -> None:  # noqa: ANN401
        self._file = file

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        try:
            data: bytes = self._file.read(size)
        except Exception as error:
            self.error = error
            raise
        return data


class _Decompressed:
    """The decompressed bytes of a file, from its beginning; no more of them than are allowed."""

    def __init__(self, file: Any, codec: str, path: str, max_bytes: int | None) -> None:  # noqa: ANN401
        self._path, self._max_bytes = path, max_bytes
        self._num_stored, self._num_bytes = size_of(file, path), 0
        file.seek(0)
        self._file = _Watched(file)
        self._stream = pa.CompressedInputStream(pa.PythonFile(self._file, mode="r"), codec)

    def read(self, size: int) -> bytes:
        """Return at most `size` bytes, none at the end.

        Raises:
            BadFileError: the compressed bytes are cut or broken.
            ConfigError: there are more than are allowed.
        """
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
                f"source file {safe_text(self._path)} has {self._num_stored:,} bytes and grows to "
                f"more than {limit:,} when it is decompressed, which is what "
                f"max_decompressed_bytes allows{by_default}; leave it out, or, if you know where "
                "it comes from, raise max_decompressed_bytes or decompress it"
            )
        return data
