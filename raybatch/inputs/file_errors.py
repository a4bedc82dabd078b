"""What source files may hold: errors, limits, types; names in messages cannot forge log lines.

Arrow calls the class that is registered for an extension type when it meets the type in a schema,
and that class again for each value; Ray registers one whose values are pickles. So the names of
the types are read, before any value or type of a file comes alive, from schemas in which the key
that makes them alive is renamed.
"""

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from raybatch.errors import ConfigError, RaybatchError, error_text

# a piece that takes no more is read however small it is in the file
HARMLESS_BYTES = 64 << 20
# more than codecs make of texts that repeat one document
_MAX_RATIO = 1 << 15
_MAX_ROWS = (1 << 31) - 1
# of types in others; Arrow cannot send deeper ones to another process
MAX_DEPTH = 60
# of Arrow itself, in C++: their metadata and values are data and nothing else
_ALLOWED_EXTENSIONS = ("arrow.json", "arrow.uuid", "arrow.bool8", "arrow.fixed_shape_tensor")
_KEY = b"ARROW:extension:name"
# of the same length, so that every offset in the bytes around it still holds
_INERT_KEY, _OTHER_KEY = b"ARROW-extension-name", b"ARROW.extension.name"
_BYTES_OF = {
    pa.string(): pa.binary(),
    pa.large_string(): pa.large_binary(),
    pa.string_view(): pa.binary_view(),
}


class BadFileError(ConfigError):
    """What a file holds is cut, broken or of another kind; `skip_bad_files` leaves it out.

    A file that cannot be opened (rights, network) is another error: its content is not known.

    Args:
        reason: without the name of the file.
    """

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message, reason)
        self.reason = reason

    def __str__(self) -> str:
        return str(self.args[0])


@contextmanager
def content_of(path: str) -> Iterator[None]:
    """Turn what the parser of a file's bytes raises into a BadFileError.

    Parse bytes here, and read nothing from the file system: what that raises is no fault of the
    content.
    """
    try:
        yield
    except RaybatchError:
        raise
    except Exception as error:  # each format has errors of its own
        raise unreadable(path, error_text(error)) from error


def unreadable(path: str, reason: str) -> BadFileError:
    return BadFileError(
        f"source file {safe_text(path)} cannot be read; write it again, leave it out, or set "
        f"skip_bad_files: {reason}",
        reason,
    )


def safe_text(name: str) -> str:
    r"""Return a file name as printable text; two names never become one.

    Letters of all scripts stay. A backslash and what cannot be printed (line breaks, control
    characters, bytes that are no UTF-8) are written as Python escapes.

    Example:
        >>> safe_text("a b%20\n.parquet")
        'a b%20\\n.parquet'
    """
    return "".join(
        c if c.isprintable() and c != "\\" else c.encode("unicode_escape").decode() for c in name
    )


def size_of(file: Any, path: str) -> int:  # noqa: ANN401
    """Return the number of bytes of an open file; raise BadFileError if there are none."""
    size: int = file.seek(0, io.SEEK_END)
    if not size:
        raise unreadable(path, "it is empty (0 bytes)")
    return size


def check_num_rows(num_rows: int, where: str) -> None:
    """Raise ConfigError if a piece has more rows than Arrow can number."""
    if not 0 <= num_rows <= _MAX_ROWS:
        raise ConfigError(
            f"{where} says that it has {num_rows} rows; write the file again with smaller ones"
        )


def check_size(num_bytes: int, stored: int | None, where: str, *, max_bytes: int) -> None:
    """Raise ConfigError where a piece is too large, or grows out of next to nothing.

    Args:
        num_bytes: decompressed, as the file says.
        stored: in the file; None where it is not known.
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


def inert(serialized: bytes) -> bytes:
    """Return serialized Arrow schemas with extension types as fields of their storage type."""
    return serialized.replace(_KEY, _INERT_KEY)


def without_refused(serialized: bytes, read: Callable[[bytes], pa.Schema]) -> bytes:
    """Return serialized Arrow schemas in which only the allowed extension types are some."""
    pieces = serialized.split(_KEY)
    keys = [_OTHER_KEY] * (len(pieces) - 1)
    is_refused = []
    for index in range(len(keys)):
        # one of them at a time shows its name
        shown = [*keys[:index], _INERT_KEY, *keys[index + 1 :]]
        schema = read(_with_keys(pieces, shown))
        is_refused.append(any(next(_refused(f, f.name), None) is not None for f in schema))
    return _with_keys(pieces, [_INERT_KEY if refused else _KEY for refused in is_refused])


def _with_keys(pieces: Sequence[bytes], keys: Sequence[bytes]) -> bytes:
    return pieces[0] + b"".join(key + piece for key, piece in zip(keys, pieces[1:], strict=True))


def check_types(schema: pa.Schema, path: str, *, columns: Sequence[str] | None = None) -> bool:
    """Return whether columns that are not read have extension types that are not allowed.

    Args:
        schema: as a reader gives it, or of `inert` bytes.
        columns: that are read; None reads all.

    Raises:
        ConfigError: one that is read has such a type, or is nested too deep.
    """
    has_refused = False
    for field in schema:
        if columns is not None and field.name not in columns:
            has_refused |= next(_refused(field, field.name), None) is not None
            continue
        for column, name in _refused(field, field.name):
            raise ConfigError(
                f"source file {safe_text(path)}: column {column!r} is of the extension type "
                f"{name!r}, which may run code from the file when it is read; write it again as "
                f"plain Arrow types (allowed are {', '.join(_ALLOWED_EXTENSIONS)}), or leave the "
                "column out (columns)"
            )
        if _depth(field.type) > MAX_DEPTH:
            raise ConfigError(
                f"source file {safe_text(path)}: column {field.name!r} is nested deeper than "
                f"{MAX_DEPTH} levels; write it as a JSON text, or leave the file out"
            )
    return has_refused


def check_values(rows: pa.RecordBatch | pa.Table) -> None:
    """Raise pa.ArrowInvalid where offsets or indices of what a parser gave lead out of a buffer.

    Arrow would follow them. Text that is not UTF-8 is left to whoever reads the row.
    """
    try:
        rows.validate(full=True)
    except pa.ArrowInvalid:
        rows.validate()
        for column in rows.columns:
            column.cast(_as_bytes(column.type)).validate(full=True)


def _as_bytes(kind: pa.DataType) -> pa.DataType:
    if isinstance(kind, pa.BaseExtensionType):
        return _as_bytes(kind.storage_type)
    return _BYTES_OF.get(kind) or with_inner_types(kind, _as_bytes)


def with_inner_types(
    kind: pa.DataType, change: Callable[[pa.DataType], pa.DataType]
) -> pa.DataType:
    """Return a struct, map or list with the types inside it changed; any other type as it is."""

    def changed(field: pa.Field) -> pa.Field:
        return field.with_type(change(field.type))

    if pa.types.is_struct(kind):
        return pa.struct(list(map(changed, kind)))
    if pa.types.is_map(kind):
        pair = changed(kind.key_field), changed(kind.item_field)
        return pa.map_(*pair, keys_sorted=kind.keys_sorted)
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(changed(kind.value_field), kind.list_size)
    if pa.types.is_list(kind):
        return pa.list_(changed(kind.value_field))
    return pa.large_list(changed(kind.value_field)) if pa.types.is_large_list(kind) else kind


def _depth(kind: pa.DataType) -> int:
    return max((1 + _depth(kind.field(i).type) for i in range(kind.num_fields)), default=0)


def _refused(field: pa.Field, where: str) -> Iterator[tuple[str, str]]:
    """Yield the path to a field, and the name of its type, where that is not allowed."""
    name = (field.metadata or {}).get(_INERT_KEY)
    if name is not None and name.decode("utf-8", "replace") not in _ALLOWED_EXTENSIONS:
        yield where, name.decode("utf-8", "replace")
    kind = field.type
    while isinstance(kind, pa.BaseExtensionType):
        if kind.extension_name not in _ALLOWED_EXTENSIONS:
            yield where, kind.extension_name
        kind = kind.storage_type
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        yield from _refused(pa.field("values", kind.value_type), f"{where}.values")
        return
    for index in range(kind.num_fields):
        child = kind.field(index)
        yield from _refused(child, f"{where}.{child.name}")
