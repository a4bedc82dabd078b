"""Checks of source files: errors, size limits, types; names in messages cannot forge log lines.

Arrow calls the class registered for an extension type when it reads the type in a schema, and
again for each value; Ray registers one whose values are pickles. So type names are checked before
Arrow instantiates any type or value of a file, in schemas whose extension key is renamed.
"""

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from raybatch.errors import ConfigError, RaybatchError, error_text

# pieces up to this size in memory are read, whatever their compression ratio
HARMLESS_BYTES = 64 << 20
# maximum compression ratio: above that of texts that repeat one document
_MAX_RATIO = 1 << 15
_MAX_ROWS = (1 << 31) - 1
# maximum nesting of types; Arrow cannot send deeper ones to another process
MAX_DEPTH = 60
# extension types of Arrow's C++ library, whose metadata and values execute no code
_ALLOWED_EXTENSIONS = ("arrow.json", "arrow.uuid", "arrow.bool8", "arrow.fixed_shape_tensor")
_KEY = b"ARROW:extension:name"
# keys of the same length keep all offsets in the serialized bytes valid
_INERT_KEY, _OTHER_KEY = b"ARROW-extension-name", b"ARROW.extension.name"
_BYTES_OF = {
    pa.string(): pa.binary(),
    pa.large_string(): pa.large_binary(),
    pa.string_view(): pa.binary_view(),
}


class BadFileError(ConfigError):
    """A file is truncated, corrupt or of another format; `skip_bad_files` skips it.

    A file that cannot be opened (permissions, network) is another error: its content is unknown.

    Args:
        reason: the message without the name of the file.
    """

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message, reason)
        self.reason = reason

    def __str__(self) -> str:
        return str(self.args[0])


@contextmanager
def content_of(path: str) -> Iterator[None]:
    """Turn errors of a parser of a file's bytes into BadFileError; use as a context manager.

    Only parse bytes inside: errors of the file system are not caused by the content.
    """
    try:
        yield
    except RaybatchError:
        raise
    except Exception as error:  # each format raises its own errors
        raise unreadable(path, error_text(error)) from error


def unreadable(path: str, reason: str) -> BadFileError:
    return BadFileError(
        f"source file {safe_text(path)} cannot be read; rewrite it, leave it out, or set "
        f"skip_bad_files: {reason}",
        reason,
    )


def safe_text(name: str) -> str:
    r"""Return a file name as printable text; different names stay different.

    Letters of all scripts are kept. Backslashes and unprintable characters (line breaks, control
    characters, bytes that are not UTF-8) are written as Python escapes.

    Example:
        >>> safe_text("a b%20\n.parquet")
        'a b%20\\n.parquet'
    """
    return "".join(
        c if c.isprintable() and c != "\\" else c.encode("unicode_escape").decode() for c in name
    )


def size_of(file: Any, path: str) -> int:  # noqa: ANN401
    """Return the size of an open file in bytes; BadFileError: it is empty."""
    size: int = file.seek(0, io.SEEK_END)
    if not size:
        raise unreadable(path, "it is empty (0 bytes)")
    return size


def check_num_rows(num_rows: int, where: str) -> None:
    """Raise ConfigError if a row group or record batch has more rows than Arrow can number.

    `where` names it in the message, here and in `check_size`.
    """
    if not 0 <= num_rows <= _MAX_ROWS:
        raise ConfigError(
            f"{where} claims {num_rows} rows, but at most {_MAX_ROWS} are supported; rewrite the "
            "file with smaller row groups or record batches"
        )


def check_size(num_bytes: int, stored: int | None, where: str, *, max_bytes: int) -> None:
    """Raise ConfigError if a row group or record batch is too large, or compressed too much.

    Args:
        num_bytes: decompressed size, by the metadata of the file.
        stored: size in the file; None if unknown.
        max_bytes: limit of `num_bytes`.
    """
    if num_bytes > max_bytes:
        raise ConfigError(
            f"{where} needs {num_bytes:,} bytes in memory, above max_row_group_bytes="
            f"{max_bytes:,}; rewrite the file with smaller row groups, read fewer columns "
            "(columns), or raise max_row_group_bytes"
        )
    if stored is not None and num_bytes > max(HARMLESS_BYTES, stored * _MAX_RATIO):
        raise ConfigError(
            f"{where} would grow from {stored:,} bytes to {num_bytes:,} when decompressed, more "
            f"than {_MAX_RATIO:,} "
            "times, like a decompression bomb; rewrite it with another compression, or leave it "
            "out"
        )


def inert(serialized: bytes) -> bytes:
    """Return serialized Arrow schemas with extension types replaced by their storage types."""
    return serialized.replace(_KEY, _INERT_KEY)


def without_refused(serialized: bytes, read: Callable[[bytes], pa.Schema]) -> bytes:
    """Return serialized Arrow schemas in which only the allowed extension types are left.

    Other ones are replaced by their storage types. `read` parses such bytes.
    """
    pieces = serialized.split(_KEY)
    keys = [_OTHER_KEY] * (len(pieces) - 1)
    is_refused = []
    for index in range(len(keys)):
        # one key at a time is inert, which exposes the name of its type
        shown = [*keys[:index], _INERT_KEY, *keys[index + 1 :]]
        schema = read(_with_keys(pieces, shown))
        is_refused.append(any(next(_refused(f, f.name), None) is not None for f in schema))
    return _with_keys(pieces, [_INERT_KEY if refused else _KEY for refused in is_refused])


def _with_keys(pieces: Sequence[bytes], keys: Sequence[bytes]) -> bytes:
    return pieces[0] + b"".join(key + piece for key, piece in zip(keys, pieces[1:], strict=True))


def check_types(schema: pa.Schema, path: str, *, columns: Sequence[str] | None = None) -> bool:
    """Return whether a column that will not be read has an extension type that is not allowed.

    Args:
        schema: from a reader, or from `inert` bytes.
        columns: columns to read; None for all.

    Raises:
        ConfigError: a column to read has such a type, or is nested too deep.
    """
    has_refused = False
    for field in schema:
        if columns is not None and field.name not in columns:
            has_refused |= next(_refused(field, field.name), None) is not None
            continue
        for column, name in _refused(field, field.name):
            raise ConfigError(
                f"source file {safe_text(path)}: column {column!r} has the extension type "
                f"{name!r}, which may run code from the file; rewrite it with plain Arrow types "
                f"(allowed extensions: {', '.join(_ALLOWED_EXTENSIONS)}), or leave the column out "
                "(columns)"
            )
        if _depth(field.type) > MAX_DEPTH:
            raise ConfigError(
                f"source file {safe_text(path)}: column {field.name!r} is nested deeper than "
                f"{MAX_DEPTH} levels; write it as JSON text, or leave the file out"
            )
    return has_refused


def check_values(rows: pa.RecordBatch | pa.Table) -> None:
    """Raise pa.ArrowInvalid if offsets or indices of parsed rows point outside of a buffer.

    Arrow would follow them. Text that is not UTF-8 passes; code that reads the row checks it.
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
    """Return a struct, map or list with its inner types changed; other types unchanged."""

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
    """Yield path and type name of each extension type in a field that is not allowed."""
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
