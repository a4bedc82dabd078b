"""How the blocks of decode rows are spread over the programs of a GPU: spans of nearly equal work.

Lengths of rows differ by orders of magnitude, so rows are laid end to end and the whole is cut into
as many pieces as there are programs. A row that is cut has several spans, whose results are merged.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]

# numbers of a span: row, first entry, end of the entries, place
SPAN_FIELDS = 4
# numbers of a row that is merged: row, first place, how many
MERGE_FIELDS = 3
# what beginning a span costs, in tokens: queries are read, and results are written
_SPAN_TOKENS = 64
# minimum tokens per program
_MIN_PROGRAM_TOKENS = 256


class Spans(NamedTuple):
    """What each program computes, in order.

    Args:
        programs: [P + 1], the first span of each program.
        spans: [N, 4], a row, its entries from one to another, and where its result goes: a place
            among partial results, or -1 where the row has no other span.
        merges: [M, 3], the rows that are cut: a row, the first of its places, and how many.
        num_places: partial results of all rows.
    """

    programs: Numbers
    spans: Numbers
    merges: Numbers
    num_places: int


def most_programs(num_kv_heads: int, target: int) -> int:
    """Return how many programs of each KV head fill a device that `target` programs fill."""
    return max(1, target // num_kv_heads)


def spans_of(starts: Numbers, *, block_size: int, most: int) -> Spans:
    """Spread rows over at most so many programs; row r has the entries starts[r]..starts[r + 1].

    With two rows of 1 and 5 blocks of 64 and three programs of two blocks each, counting what a
    span costs as one: row 0 and the first block of row 1, then two blocks, and the last two.
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
    # a cut at the end of a row is one before the next row
    before = np.where(is_inside, np.searchsorted(cut_entries, entries), 0)
    first_cut = np.searchsorted(cut_entries, starts[rows])
    next_span = first_spans[rows] + np.where(is_inside, before - first_cut + 1, 0)
    next_span = np.where(inside == counts[rows], first_spans[rows] + num_spans[rows], next_span)
    # a row without entries has its one span before the cut
    programs = np.concatenate(([0], np.maximum.accumulate(next_span), [len(of_row)]))
    merged = np.flatnonzero(num_spans > 1)
    merges = np.stack((merged, spans[first_spans[merged], 3], num_spans[merged]), axis=1)
    return Spans(programs, spans, merges, int(is_cut.sum()))
