"""JSON lines as Arrow tables; a broken line is an error that names the file and the line."""

from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.json as paj

from raybatch.errors import ConfigError

# what Arrow takes at most as one block
_MAX_BLOCK_BYTES = (1 << 31) - 1
_Failure = (pa.ArrowInvalid, pa.ArrowNotImplementedError)


def read_json_lines(path: str) -> pa.Table:
    """Return the rows of one file; a text that looks like a date stays the text that it is.

    A file without a line is a table without columns.

    Args:
        path: with its protocol.

    Raises:
        ConfigError: a line is no JSON object, or its values do not fit those of earlier lines.

    Memory: the whole file.
    """
    with fsspec.open(path, "rb") as file:
        data = file.read()
    if not data.strip():
        return pa.table({})
    try:
        return _parse(data)
    except _Failure as error:
        cause = error
    # a line that is longer than a block of Arrow's fails like a broken one
    try:
        return _parse(data, block_bytes=len(data))
    except _Failure as error:
        cause = error
    raise ConfigError(_explain(path, data.splitlines(), cause))


def _parse(data: bytes, *, block_bytes: int | None = None) -> pa.Table:
    options = None
    if block_bytes is not None:
        options = paj.ReadOptions(block_size=min(block_bytes + 1, _MAX_BLOCK_BYTES))
    table = paj.read_json(pa.BufferReader(data), read_options=options)
    schema = pa.schema([f.with_type(_without_dates(f.type)) for f in table.schema])
    if schema.equals(table.schema):
        return table
    explicit = paj.ParseOptions(explicit_schema=schema)
    return paj.read_json(pa.BufferReader(data), read_options=options, parse_options=explicit)


def _without_dates(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_temporal(kind):
        return pa.string()
    if pa.types.is_list(kind):
        return pa.list_(_without_dates(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([f.with_type(_without_dates(f.type)) for f in kind])
    return kind


def _explain(path: str, lines: list[bytes], cause: Any) -> str:  # noqa: ANN401 - Arrow has no types
    """Name the last line of the shortest beginning of the file that does not parse."""
    good, bad = 0, len(lines)
    while bad - good > 1:
        middle = (good + bad) // 2
        found = _failure_of(lines[:middle])
        if found is None:
            good = middle
        else:
            bad, cause = middle, found
    text = lines[bad - 1].decode("utf-8", "backslashreplace")
    shown = text if len(text) <= 80 else f"{text[:80]}..."
    # the number of a row that Arrow names is that of a block
    reason = str(cause).splitlines()[0].partition(" in row ")[0]
    return (
        f"source file {path}, line {bad}: {reason}: {shown!r}; every line must be one JSON object "
        "whose values have the types of the lines before: mend or remove the line"
    )


def _failure_of(lines: list[bytes]) -> Exception | None:
    data = b"\n".join(lines)
    try:
        if data.strip():
            _parse(data, block_bytes=len(data))
    except _Failure as error:
        return error  # type: ignore[no-any-return]
    return None
