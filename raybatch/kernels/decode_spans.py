"""Splits the blocks of decode rows into spans of nearly equal work for the programs of a GPU.

Row lengths differ by orders of magnitude, so rows are concatenated and cut into one piece per
program (split-K). A row that is cut has several spans, whose results are merged.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]

# numbers of a span: row, first entry, end of the entries, place
SPAN_FIELDS = 4
# numbers of a row that is merged: row, first place, how many
MERGE_FIELDS = 3
# overhead of a span in tokens: queries are read and results written
_SPAN_TOKENS = 64
# minimum tokens per program
_MIN_PROGRAM_TOKENS = 256


class Spans(NamedTuple):
    """Assignment of the entries of decode rows to programs of a GPU kernel.

    A span is a range of entries of one row; a program computes some consecutive spans. A row with
    several spans has one partial result per span, which are merged.

    Args:
        programs: [P + 1], the first span of each program, then the number of spans.
        spans: [N, 4], of each span: row, first entry, end of its entries, and the index of its
            partial result; -1 if it is the only span of the row.
        merges: [M, 3], of each row with several spans: row, index of its first partial result, and
            the number of them.
        num_places: number of partial results of all rows.
    """

    programs: Numbers
    spans: Numbers
    merges: Numbers
    num_places: int


def most_programs(num_kv_heads: int, target: int) -> int:
    """Return the number of programs per KV head, at least 1, for `target` programs in total."""
    return max(1, target // num_kv_heads)


def spans_of(starts: Numbers, *, block_size: int, most: int) -> Spans:
    """Spread the entries of rows evenly over at most `most` programs.

    Row r has the entries from starts[r] up to, not including, starts[r + 1]. Each span also counts
    as some entries, for its overhead. Example: with rows of 1 and 5 entries and a span overhead of
    one entry, three programs get row 0 and the first entry of row 1; two entries; the last two.
    """
    num_rows = len(starts) - 1
    if num_rows < 1:
        none = np.zeros(0, np.int64)
        return Spans(none, none.reshape(0, SPAN_FIELDS), none.reshape(0, MERGE_FIELDS), 0)
    counts = np.diff(starts)
    # in entries
    of_span = max(1, _SPAN_TOKENS // block_size)
    least = max(1, _MIN_PROGRAM_TOKENS // block_size)
    num_programs = min(most, max(num_rows, int(starts[-1]) // least))
    ends = np.cumsum(counts + of_span)
    begins = ends - counts - of_span
    cuts = np.arange(1, num_programs) * (int(ends[-1]) / num_programs)
    rows = np.searchsorted(ends, cuts, side="right")
    inside = np.clip(np.rint(cuts - begins[rows] - of_span).astype(np.int64), 0, counts[rows])
    is_inside = (inside > 0) & (inside < counts[rows])
    entries = starts[rows] + inside
    cut_entries, first_of_cut = np.unique(entries[is_inside], return_index=True)
    num_spans = 1 + np.bincount(rows[is_inside][first_of_cut], minlength=num_rows)
    first_spans = np.cumsum(num_spans) - num_spans
    of_row = np.repeat(np.arange(num_rows), num_spans)
    spans = np.empty((len(of_row), SPAN_FIELDS), np.int64)
    is_first = np.zeros(len(of_row), bool)
    is_first[first_spans] = True
    spans[:, 0] = of_row
    spans[is_first, 1] = starts[:-1]
    spans[~is_first, 1] = cut_entries
    spans[:-1, 2] = spans[1:, 1]
    is_last = np.roll(is_first, -1)
    spans[is_last, 2] = starts[1:]
    is_cut = (num_spans > 1)[of_row]
    spans[:, 3] = np.where(is_cut, np.cumsum(is_cut) - 1, -1)
    # a cut at the end of a row belongs before the next row
    before = np.where(is_inside, np.searchsorted(cut_entries, entries), 0)
    first_cut = np.searchsorted(cut_entries, starts[rows])
    next_span = first_spans[rows] + np.where(is_inside, before - first_cut + 1, 0)
    next_span = np.where(inside == counts[rows], first_spans[rows] + num_spans[rows], next_span)
    # a row without entries has its one span before the cut
    programs = np.concatenate(([0], np.maximum.accumulate(next_span), [len(of_row)]))
    merged = np.flatnonzero(num_spans > 1)
    merges = np.stack((merged, spans[first_spans[merged], 3], num_spans[merged]), axis=1)
    return Spans(programs, spans, merges, int(is_cut.sum()))
