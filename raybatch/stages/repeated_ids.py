"""Where an id stands that several rows of a source have."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raybatch.stages.batches import python_values
from raybatch.stages.file_slices import FileSlice

__all__ = ["first_repeated"]

_SHOWN_CHARS = 40


def first_repeated(ids: pa.ChunkedArray, slices: Sequence[FileSlice]) -> str:
    """Return the first id that several rows have, and the first two of these rows.

    Args:
        ids: of all rows, in the order of `slices`, one of them repeated; none is null.
        slices: of the source.
    """
    encoded = pc.dictionary_encode(ids.unify_dictionaries())
    codes = np.concatenate([chunk.indices.to_numpy() for chunk in encoded.chunks])
    code = codes[np.argmax(np.bincount(codes)[codes] > 1)]
    first, second = np.flatnonzero(codes == code)[:2].tolist()
    (value,) = python_values(ids.slice(first, 1))
    # a repr, because a terminal obeys some of what a text may hold
    text = repr(value)
    shown = text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."
    return f"{shown} in {_place(slices, first)} and {_place(slices, second)}"


def _place(slices: Sequence[FileSlice], row: int) -> str:
    """Return file and position of a row of the source."""
    for part in slices:
        if row < part.num_rows:
            return f"{part.name}:{part.first_row + row}"
        row -= part.num_rows
    raise IndexError(f"the source ends {row} rows before the row that is asked for")
