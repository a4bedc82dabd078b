"""What a piece of a file may take in memory, told before it is read."""

import io
from typing import Any

from raybatch.errors import ConfigError
from raybatch.inputs.file_errors import unreadable

# a piece that takes no more is read however small it is in the file
HARMLESS_BYTES = 64 << 20
# more than codecs make of texts that repeat one document
_MAX_RATIO = 1 << 15
_MAX_ROWS = (1 << 31) - 1


def size_of(file: Any, path: str) -> int:  # noqa: ANN401
    """Return the number of bytes of an open file; raise BadFileError if there are none."""
    size: int = file.seek(0, io.SEEK_END)
    if not size:
        raise unreadable(path, "it is empty (0 bytes)")
    return size


def check_num_rows(num_rows: int, where: str) -> None:
    """Raise ConfigError if a piece has more rows than Arrow can number.

    Args:
        num_rows: as the file says.
        where: names file and piece.
    """
    if not 0 <= num_rows <= _MAX_ROWS:
        raise ConfigError(
            f"{where} says that it has {num_rows} rows; write the file again with smaller ones"
        )


def check_size(num_bytes: int, stored: int | None, where: str, *, max_bytes: int) -> None:
    """Raise ConfigError where a piece is too large, or grows out of next to nothing.

    Args:
        num_bytes: decompressed, as the file says.
        stored: in the file; None where it is not known.
        where: names file and piece.
        max_bytes: that are allowed.
    """
    if num_bytes > max_bytes:
        raise ConfigError(
            f"{where} takes {num_bytes:,} bytes in memory, and max_row_group_bytes is "
            f"{max_bytes:,}; write the file again with smaller row groups, name the columns that "
            "are needed (columns), or raise max_row_group_bytes"
        )
    if stored is not None and num_bytes > max(HARMLESS_BYTES, stored * _MAX_RATIO):
        raise ConfigError(
            f"{where} would grow from {stored:,} bytes to {num_bytes:,}, more than {_MAX_RATIO:,} "
            "times, like a file made to fill the memory; write it again with another compression, "
            "or leave it out"
        )
