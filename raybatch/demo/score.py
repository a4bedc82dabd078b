"""Scoring of demo answers."""

import pyarrow as pa
import pyarrow.compute as pc


def exact_match(
    expected: pa.Array | pa.ChunkedArray, generated: pa.Array | pa.ChunkedArray
) -> pa.BooleanArray:
    """Compare texts without the white space around them.

    Args:
        expected: Right answers, strings.
        generated: Model outputs, strings, of the same length; a null is never right.

    Returns:
        One boolean per row, never null: false where either side is null.

    Example:
        >>> exact_match(pa.array(["Oak Hill", "red"]), pa.array([" Oak Hill", "blue"])).to_pylist()
        [True, False]
    """
    left, right = (pc.utf8_trim_whitespace(_join(x)) for x in (expected, generated))
    return pc.fill_null(pc.equal(left, right), False)


def _join(texts: pa.Array | pa.ChunkedArray) -> pa.Array:
    chunks = texts.combine_chunks() if isinstance(texts, pa.ChunkedArray) else texts
    return chunks.cast(pa.string())
