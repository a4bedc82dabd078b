"""Which Arrow types a source may have, found out before any value or type of a file comes alive.

Arrow calls the class that is registered for an extension type when it meets the type in a schema,
and that class again for each value; Ray registers one whose values are pickles. So the names of
the types are read from schemas in which the key that makes them alive is renamed.
"""

import base64
from collections.abc import Iterator

import pyarrow as pa

from raybatch.errors import ConfigError
from raybatch.inputs.file_errors import safe_text

# of types in others; Arrow cannot send deeper ones to another process
MAX_DEPTH = 60

# of Arrow itself, in C++: their metadata and values are data and nothing else
ALLOWED_EXTENSIONS = ("arrow.json", "arrow.uuid", "arrow.bool8", "arrow.fixed_shape_tensor")
_KEY = b"ARROW:extension:name"
# of the same length, so that every offset in the bytes around it still holds
_INERT_KEY = b"ARROW-extension-name"


def inert(serialized: bytes) -> bytes:
    """Return serialized Arrow schemas with extension types as fields of their storage type."""
    return serialized.replace(_KEY, _INERT_KEY)


def inert_schema(stored: bytes) -> pa.Schema:
    """Return the schema that a Parquet file keeps in its metadata, without extension types.

    Args:
        stored: base64 of the value of `ARROW:schema`.
    """
    return pa.ipc.read_schema(pa.py_buffer(inert(base64.b64decode(stored))))


def check_types(schema: pa.Schema, path: str) -> None:
    """Raise ConfigError if a column has an extension type that is not allowed, also inside others.

    So are types that are nested too deep.

    Args:
        schema: as a reader gives it, or of `inert` bytes.
    """
    for column, name in refused_types(schema):
        raise ConfigError(
            f"source file {safe_text(path)}: column {column!r} is of the extension type {name!r}, "
            "which may run code from the file when it is read; write it again as plain Arrow types "
            f"(allowed are {', '.join(ALLOWED_EXTENSIONS)}), or leave the file out"
        )
    for field in schema:
        if _depth(field.type) > MAX_DEPTH:
            raise ConfigError(
                f"source file {safe_text(path)}: column {field.name!r} is nested deeper than "
                f"{MAX_DEPTH} levels; write it as a JSON text, or leave the file out"
            )


def refused_types(schema: pa.Schema) -> Iterator[tuple[str, str]]:
    """Yield column (with the path to the field inside of it) and name of types not allowed."""
    for field in schema:
        yield from _refused(field, field.name)


def _depth(kind: pa.DataType) -> int:
    children = [kind.field(index).type for index in range(kind.num_fields)]
    return 1 + max(map(_depth, children)) if children else 0


def _refused(field: pa.Field, where: str) -> Iterator[tuple[str, str]]:
    name = (field.metadata or {}).get(_INERT_KEY)
    if name is not None and name.decode("utf-8", "replace") not in ALLOWED_EXTENSIONS:
        yield where, name.decode("utf-8", "replace")
    kind = field.type
    while isinstance(kind, pa.BaseExtensionType):
        if kind.extension_name not in ALLOWED_EXTENSIONS:
            yield where, kind.extension_name
        kind = kind.storage_type
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        yield from _refused(pa.field("values", kind.value_type), f"{where}.values")
        return
    for index in range(kind.num_fields):
        child = kind.field(index)
        yield from _refused(child, f"{where}.{child.name}")
