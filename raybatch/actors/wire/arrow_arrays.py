"""Arrow columns as numpy arrays and back, without copies where that is possible."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raybatch.errors import ConfigError
from raybatch.records.types import TokenIds, Vector

Offsets = npt.NDArray[np.int64]


def whole_array(column: pa.ChunkedArray) -> pa.Array:
    """Return a column as one array, copied only where it has several chunks."""
    # combine_chunks copies also where there is nothing to combine
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def to_numpy(column: pa.Array | pa.ChunkedArray, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return values as numpy, nulls as 0."""
    array = whole_array(column) if isinstance(column, pa.ChunkedArray) else column
    if array.null_count:
        array = array.fill_null(0)
    values: npt.NDArray[Any] = array.to_numpy(zero_copy_only=False)
    return values.astype(dtype, copy=False)


def flat_values(lists: pa.ListArray, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return the values of all lists, one list after another."""
    return to_numpy(lists.flatten(), dtype)


def offsets_of(lengths: npt.NDArray[np.int32]) -> Offsets:
    """Return the running total before each length, and the sum: int64 [n + 1]."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def token_lists(arrays: Sequence[TokenIds]) -> pa.ListArray:
    """Return token ids of many rows as one list array."""
    lengths = np.fromiter((len(a) for a in arrays), np.int32, len(arrays))
    flat = np.concatenate(arrays) if len(arrays) else np.empty(0, np.int32)
    offsets = offsets_of(lengths)
    if offsets[-1] > np.iinfo(np.int32).max:
        raise ConfigError(f"a row batch holds {offsets[-1]} tokens; hand over fewer rows at once")
    return pa.ListArray.from_arrays(
        pa.array(offsets.astype(np.int32)), pa.array(flat.astype(np.int32, copy=False))
    )


def split_lists(lists: pa.ListArray) -> list[TokenIds]:
    """Return the lists as views of one flat array."""
    flat = flat_values(lists, np.dtype(np.int32))
    lengths = lists.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    bounds = offsets_of(lengths).tolist()
    return [flat[a:b] for a, b in itertools.pairwise(bounds)]


def vector_lists(vectors: Sequence[Vector | None]) -> pa.ListArray:
    """Return the vectors of many rows as one list array; None becomes null."""
    known = [vector for vector in vectors if vector is not None]
    if not known:
        return pa.nulls(len(vectors), pa.list_(pa.float32()))
    lengths = np.fromiter((0 if v is None else len(v) for v in vectors), np.int32, len(vectors))
    offsets = offsets_of(lengths)
    if offsets[-1] > np.iinfo(np.int32).max:
        raise ConfigError(f"the vectors of a row batch hold {offsets[-1]} numbers; ask fewer rows")
    return pa.ListArray.from_arrays(
        pa.array(offsets.astype(np.int32)),
        pa.array(np.concatenate(known).astype(np.float32, copy=False)),
        mask=pa.array([vector is None for vector in vectors], pa.bool_()),
    )


def split_vectors(lists: pa.ListArray) -> list[Vector | None]:
    """Return the vectors as views of one flat array; None where there is none."""
    flat = flat_values(lists, np.dtype(np.float32))
    lengths = lists.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    bounds = itertools.pairwise(offsets_of(lengths).tolist())
    is_valid = lists.is_valid().to_pylist()
    return [flat[a:b] if valid else None for (a, b), valid in zip(bounds, is_valid, strict=True)]
