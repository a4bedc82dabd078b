"""Rows whose columns take too much memory, found without a look at every row."""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

# what stands for a text or bytes in a view: its length, and where it is
_INTS_PER_VIEW = 4


def large_rows(table: pa.Table, *, max_bytes: int) -> dict[int, int]:
    """Return the rows that take more than `max_bytes`, to the bytes that they take.

    Complexity: slices of the table, a number of them that grows with its bytes over `max_bytes`.
    """
    # the buffers of some types are shared by all rows, so this is at least what any row takes
    if table.nbytes <= max_bytes:
        return {}
    return dict(_found(table, 0, table.num_rows, max_bytes))


def _found(table: pa.Table, start: int, stop: int, max_bytes: int) -> Iterator[tuple[int, int]]:
    rows = table.slice(start, stop - start)
    num_bytes = sum(_bytes_of(chunk) for column in rows.columns for chunk in column.chunks)
    if num_bytes <= max_bytes or start == stop:
        return
    if stop - start == 1:
        yield start, num_bytes
        return
    middle = (start + stop) // 2
    yield from _found(table, start, middle, max_bytes)
    yield from _found(table, middle, stop, max_bytes)


def _bytes_of(values: pa.Array) -> int:
    """Return the size of values; what several of them share counts for each one."""
    kind = values.type
    if isinstance(kind, pa.BaseExtensionType):
        return _bytes_of(values.storage)
    if pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
        return _view_bytes(values)
    if pa.types.is_dictionary(kind):
        return int(values.indices.nbytes) + _dictionary_bytes(values)
    if pa.types.is_struct(kind):
        return sum(map(_bytes_of, values.flatten()))
    if pa.types.is_map(kind):
        start, stop = values.offsets[0].as_py(), values.offsets[-1].as_py()
        return sum(_bytes_of(of.slice(start, stop - start)) for of in (values.keys, values.items))
    if hasattr(values, "flatten") and not pa.types.is_union(kind):
        return _bytes_of(values.flatten())
    return int(values.nbytes)


def _view_bytes(values: pa.Array) -> int:
    views = values.buffers()[1]
    if views is None or not len(values):
        return 0
    lengths = np.frombuffer(views, np.int32).reshape(-1, _INTS_PER_VIEW)[:, 0]
    chosen = lengths[values.offset : values.offset + len(values)]
    is_valid = values.is_valid().to_numpy(zero_copy_only=False)
    return int(chosen[is_valid].sum(dtype=np.int64))


def _dictionary_bytes(values: pa.DictionaryArray) -> int:
    try:
        lengths = pc.binary_length(values.dictionary)
    except pa.ArrowNotImplementedError:
        return 0  # of no text, so its values are small
    return pc.sum(pc.cast(lengths.take(values.indices), pa.int64())).as_py() or 0
