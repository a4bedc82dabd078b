"""The flat index that GPU kernels read of an `AttentionPlan`, built on the host.

Its contents vary by step; shapes and launches depend only on a `StepSize`. A step is one copy to
the device, and with a padded size a CUDA graph can replay it.

An item is some queries and a run of cached positions (a segment, or part of one) that all of them
attend to. A segment that only one chunk reads is joined to the chunk's own item, which avoids a
merge; without `joins_segments` it is a separate run that is not cut. Other runs are cut into spans
if there would be too few programs, and the partial results of a row are merged.

Lengths of decode rows differ by orders of magnitude, so the rows are concatenated and cut into one
piece per program (split-K). A row that is cut has several spans, whose results are merged.
"""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import accumulate
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from raybatch.kernels.attention_plan import AttentionPlan, PrefillPart, PrefixSegment

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


Index = npt.NDArray[np.int32]
Array = TypeVar("Array")

# programs of decode rows that fill a GPU of 132 multiprocessors, three on each
DECODE_PROGRAMS = 396
# work items of runs and KV heads: four per looping program, for even load
RUN_WORKS = 528
# most queries of an item; a program takes some of them, depending on the heads
ITEM_QUERIES = 128
# number of counts at the start of an index
NUM_COUNTS = 4
# integers of a (decode row, block) entry
ENTRY_FIELDS = 3
# most runs of a row whose partial results are kept at once; more are merged in rounds
MAX_RUNS = 8
# shorter spans cost more in merging than they gain
_MIN_SPAN_TOKENS = 256
# longer runs are cut: merging costs less than a single program over the whole run
MAX_JOINED_TOKENS = 4096


class Item(NamedTuple):
    """Work of a GPU program: some queries and a run of cached positions that all attend to.

    Args:
        first_query: first query: a row of the forward batch, or in `Parts.runs` an index into
            `Parts.segment_rows`.
        num_queries: number of queries, at most ITEM_QUERIES; 0 for padding.
        first_place: output index of the first query; those of the others follow.
        first_block: index of the run's first block in the list of blocks.
        num_tokens: cached positions of the run, from the first slot of its first block on; may be
            0.
        first_position: position in the sequence of the run's first token.
        chunk_start: row of the forward batch where the chunk of the queries starts, if any.
    """

    first_query: int
    num_queries: int
    first_place: int
    first_block: int
    num_tokens: int
    first_position: int
    chunk_start: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSize:
    """The counts on which shapes, grids and launches of attention depend.

    Args:
        rows: T of the forward batch, including padding.
        decode_rows: S, the number of rows that may have entries. Those beyond the decode rows of
            the plan have none, and may belong to chunks.
        entries: number of (decode row, block) pairs.
        row_blocks: most entries of one decode row.
        programs: programs per KV head for the entries of decode rows.
        spans, merges, span_places: sizes of `raybatch.kernels.step_index.Spans`.
        chunk_queries, segment_queries: most queries of one item.
        segment_rows: number of (row, run) pairs in which the row reads the run.
        merged_rows: number of rows that read runs.
        places: number of partial results, each of one row over one span of one run.
    """

    rows: int
    decode_rows: int = 0
    entries: int = 0
    row_blocks: int = 0
    programs: int = 0
    spans: int = 0
    merges: int = 0
    span_places: int = 0
    chunk_items: int = 0
    chunk_blocks: int = 0
    chunk_queries: int = 0
    segment_items: int = 0
    segment_rows: int = 0
    segment_blocks: int = 0
    segment_queries: int = 0
    merged_rows: int = 0
    places: int = 0

    def covers(self, other: "StepSize") -> bool:
        """Return whether a plan of size `other` fits an index of this size."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        return all(mine >= theirs for mine, theirs in pairs)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Lengths of the parts of the index, in the order of `Parts`."""
        return (
            NUM_COUNTS,
            self.decode_rows + 1 if self.decode_rows else 0,
            self.programs + 1 if self.programs else 0,
            self.spans * SPAN_FIELDS,
            self.merges * MERGE_FIELDS,
            self.chunk_items * len(Item._fields),
            self.chunk_blocks,
            self.segment_items * len(Item._fields),
            self.segment_rows,
            self.segment_blocks,
            self.merged_rows,
            self.merged_rows + 1 if self.merged_rows else 0,
            self.places,
            self.entries * ENTRY_FIELDS,
        )

    @property
    def num_index(self) -> int:
        return sum(self.lengths)


class Parts(NamedTuple, Generic[Array]):
    """The parts of a flat index, arrays of the host or tensors of the device.

    Args:
        counts: [4], numbers of chunk items, run items, merged rows and merges; further ones in the
            parts are padding.
        starts: [S + 1], where the entries of each decode row start.
        programs: [P + 1], the first span of each program of decode rows.
        spans, merges: see `raybatch.kernels.step_index`, in one dimension.
        chunks: items, flattened [I, 7]; their places are the rows. Sorted by the number of keys,
            or without `joins_segments` by row.
        chunk_blocks: blocks of all runs that are joined to chunks.
        runs: items of all other runs, flattened.
        segment_rows: rows that read these runs, concatenated.
        segment_blocks: blocks of these runs, concatenated.
        merged_rows: rows that read runs, ascending.
        row_starts: [rows that read runs + 1], start of each row's places in `order`.
        order: [places], indices of partial results, ordered by row of the forward batch.
        entries: flattened [P, 3]: block, valid positions and first position, as in `DecodePart`.
            They come last, as their padding is not written.
    """

    counts: Array
    starts: Array
    programs: Array
    spans: Array
    merges: Array
    chunks: Array
    chunk_blocks: Array
    runs: Array
    segment_rows: Array
    segment_blocks: Array
    merged_rows: Array
    row_starts: Array
    order: Array
    entries: Array


class StepIndex:
    """The flat index of one plan, on the host; see the module's docstring for `joins_segments`."""

    def __init__(
        self,
        plan: AttentionPlan,
        *,
        num_rows: int,
        num_kv_heads: int,
        block_size: int,
        joins_segments: bool = True,
    ) -> None:
        starts, entries = _decode_entries(plan)
        most = most_programs(num_kv_heads, DECODE_PROGRAMS)
        spread = spans_of(starts, block_size=block_size, most=most)
        own = _own_runs(plan.segments) if plan.prefill is not None else {}
        others = [run for run in plan.segments if own.get(run.chunk) is not run]
        whole = () if joins_segments else tuple(own.values())
        chunk_items, chunk_blocks = _chunks(plan.prefill, own if joins_segments else {})
        if joins_segments:
            # programs start from the end, with the most keys
            chunk_items.sort(key=_num_keys)
        span = _span_of(others, whole, num_rows, num_kv_heads, block_size)
        items, rows_of_places = _runs(others, whole, span, block_size)
        segments = (*others, *whole)
        merged_rows, row_of_place = np.unique(rows_of_places, return_inverse=True)
        order, row_starts = _grouped(row_of_place, len(merged_rows))
        self._parts: Parts[npt.NDArray[Any]] = Parts(
            np.array(
                [len(chunk_items), len(items), len(merged_rows), len(spread.merges)], np.int32
            ),
            starts,
            spread.programs,
            spread.spans.reshape(-1),
            spread.merges.reshape(-1),
            np.array(chunk_items, np.int32).reshape(-1),
            chunk_blocks,
            np.array(items, np.int32).reshape(-1),
            _joined([part.query_idx.numpy() for part in segments]),
            _joined([part.block_ids.numpy() for part in segments]),
            merged_rows,
            row_starts[: (len(merged_rows) + 1) * bool(items)],
            order,
            entries.reshape(-1),
        )
        num_decode = plan.num_decode if plan.decode is not None else 0
        num_entries = len(entries)
        self.size = StepSize(
            rows=num_rows,
            decode_rows=num_decode,
            entries=num_entries,
            row_blocks=int(np.diff(starts).max(initial=0)),
            programs=max(0, len(spread.programs) - 1),
            spans=len(spread.spans),
            merges=len(spread.merges),
            span_places=spread.num_places,
            chunk_items=len(chunk_items),
            chunk_blocks=len(chunk_blocks),
            chunk_queries=max((item.num_queries for item in chunk_items), default=0),
            segment_items=len(items),
            segment_rows=len(self._parts.segment_rows),
            segment_blocks=len(self._parts.segment_blocks),
            segment_queries=max((item.num_queries for item in items), default=0),
            merged_rows=len(merged_rows),
            places=len(rows_of_places),
        )

    def write(self, size: StepSize, out: Index) -> int:
        """Write the index into `out` [size.num_index], padded to `size`, which must cover it.

        Padded items have no queries, padded rows neither entries nor places. Returns the number of
        integers written; the rest are entries that nothing reads.
        """
        assert size.covers(self.size), f"{size} does not hold {self.size}"
        num_written = size.num_index - (size.entries - self.size.entries) * ENTRY_FIELDS
        out[:num_written] = 0
        padded, own = parts_of(size, out), self._parts
        for target, part in zip(padded, own, strict=True):
            target[: len(part)] = part
        for name in ("starts", "programs", "row_starts"):
            target, starts = getattr(padded, name), getattr(own, name)
            target[len(starts) :] = starts[-1] if len(starts) else 0
        return num_written

    def array(self) -> Index:
        """Return the index without padding."""
        out = np.empty(self.size.num_index, np.int32)
        self.write(self.size, out)
        return out


def rounds_of(
    plan: AttentionPlan, num_rows: int, *, joins_segments: bool = True
) -> list[AttentionPlan]:
    """Split a plan into plans with at most `max_places` partial results each.

    The first one has the decode and prefill parts; the others have only segments, whose results are
    merged into the output one plan after the other. `joins_segments` as in `StepIndex`.
    """
    most = MAX_RUNS * num_rows
    if sum(len(run.query_idx) for run in plan.segments) <= most:
        return [plan]
    own = _own_runs(plan.segments) if joins_segments and plan.prefill is not None else {}
    others = [run for run in plan.segments if own.get(run.chunk) is not run]
    merged = {id(run) for run in others}
    rounds: list[list[PrefixSegment]] = [[run for run in plan.segments if id(run) not in merged]]
    num_readers = 0
    for run in others:
        num_readers += len(run.query_idx)
        if num_readers > most:
            rounds.append([])
            num_readers = len(run.query_idx)
        rounds[-1].append(run)
    first, *rest = (tuple(runs) for runs in rounds)
    alone = AttentionPlan(num_decode=0, decode=None, prefill=None, segments=())
    return [replace(plan, segments=first), *(replace(alone, segments=runs) for runs in rest)]


def cut_places(num_rows: int) -> int:
    """Return the most partial results that cutting runs into spans may add.

    Captured steps reserve memory for that many.
    """
    return 512 + 4 * num_rows


def max_places(num_rows: int, num_kv_heads: int) -> int:
    """Return the most partial results of one of the plans that `rounds_of` returns.

    A run has one for each row that reads it and each of its spans; the number of spans is bounded.
    """
    return MAX_RUNS * num_rows + RUN_WORKS * ITEM_QUERIES // num_kv_heads


def parts_of(size: StepSize, index: Any) -> Parts[Any]:  # noqa: ANN401
    """Return the parts of a flat index of this size, as views of it."""
    stops = tuple(accumulate(size.lengths))
    spans = zip((0, *stops[:-1]), stops, strict=True)
    return Parts(*(index[start:stop] for start, stop in spans))


def _joined(arrays: Sequence[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    return np.concatenate(arrays) if arrays else np.empty(0, np.int64)


def _decode_entries(plan: AttentionPlan) -> tuple[npt.NDArray[np.int64], Index]:
    """Return the start of each row's entries, and the entries."""
    part = plan.decode
    if part is None or not plan.num_decode:
        return np.empty(0, np.int64), np.empty((0, ENTRY_FIELDS), np.int32)
    order, starts = _grouped(part.owners.numpy(), plan.num_decode)
    first = part.num_valid if part.first_positions is None else part.first_positions
    entries = np.empty((len(order), ENTRY_FIELDS), np.int32)
    for field, column in enumerate((part.block_ids, part.num_valid, first)):
        entries[:, field] = column.numpy()[order]
    return starts, entries


def _grouped(
    rows: npt.NDArray[np.int64], num_rows: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the order of indices by row, and the start of each row in it, [num_rows + 1]."""
    starts = np.zeros(num_rows + 1, np.int64)
    np.cumsum(np.bincount(rows, minlength=num_rows), out=starts[1:])
    # numpy uses radix sort for 16-bit integers, 15 times faster
    keys = rows.astype(np.uint16) if num_rows <= 1 << 16 else rows
    return np.argsort(keys, kind="stable"), starts


def _own_runs(segments: Sequence[PrefixSegment]) -> dict[int | None, PrefixSegment]:
    """Return by chunk the first segment that only it reads, if one program can read it."""
    own: dict[int | None, PrefixSegment] = {}
    for run in segments:
        if run.chunk is not None and run.num_tokens <= MAX_JOINED_TOKENS:
            own.setdefault(run.chunk, run)
    return own


def _chunks(
    part: PrefillPart | None, joined: Mapping[int | None, PrefixSegment]
) -> tuple[list[Item], npt.NDArray[np.int64]]:
    """Return the items of chunks including joined segments, and their blocks."""
    if part is None:
        return [], _joined(())
    items: list[Item] = []
    blocks: list[npt.NDArray[np.int64]] = []
    num_blocks = 0
    for chunk, (start, length) in enumerate(zip(part.starts, part.lens, strict=True)):
        own = joined.get(chunk)
        for query in range(0, length, ITEM_QUERIES):
            items.append(
                Item(
                    first_query=start + query,
                    num_queries=min(ITEM_QUERIES, length - query),
                    first_place=start + query,
                    first_block=num_blocks,
                    num_tokens=0 if own is None else own.num_tokens,
                    first_position=0 if own is None else own.first_position,
                    chunk_start=start,
                )
            )
        if own is not None:
            blocks.append(own.block_ids.numpy())
            num_blocks += len(own.block_ids)
    return items, _joined(blocks)


def _num_keys(item: Item) -> int:
    return item.num_tokens + item.first_query - item.chunk_start + item.num_queries


def _span_of(
    parts: Sequence[PrefixSegment],
    whole: Sequence[PrefixSegment],
    num_rows: int,
    num_kv_heads: int,
    block_size: int,
) -> int:
    """Return the positions per item, in whole blocks: as few as fill the device.

    Segments of `whole` are not cut and use some of the programs.
    """
    readers = np.array([len(part.query_idx) for part in parts], np.int64)
    tokens = np.array([part.num_tokens for part in parts], np.int64)
    work = int((-(-readers // ITEM_QUERIES) * tokens).sum())
    span = max(_MIN_SPAN_TOKENS, -(-work * num_kv_heads // RUN_WORKS))
    most_places = cut_places(num_rows) - sum(len(run.query_idx) for run in whole)
    longest = int(tokens.max(initial=0))
    while span < longest and (readers * -(-tokens // span)).sum() > most_places:
        span += span // 4
    return -(-span // block_size) * block_size


def _runs(
    parts: Sequence[PrefixSegment], whole: Sequence[PrefixSegment], span: int, block_size: int
) -> tuple[list[Item], npt.NDArray[np.int64]]:
    """Return the items of runs of at most `span` tokens, and the row of each place.

    Uncut items of `whole` follow.
    """
    spans = [(part, span) for part in parts] + [(part, part.num_tokens) for part in whole]
    items: list[Item] = []
    rows_of_places: list[npt.NDArray[np.int64]] = []
    first_query = first_block = num_places = 0
    for part, span in spans:
        num_queries = len(part.query_idx)
        for begin in range(0, part.num_tokens, span):
            for query in range(0, num_queries, ITEM_QUERIES):
                items.append(
                    Item(
                        first_query=first_query + query,
                        num_queries=min(ITEM_QUERIES, num_queries - query),
                        first_place=num_places + query,
                        first_block=first_block + begin // block_size,
                        num_tokens=min(span, part.num_tokens - begin),
                        first_position=part.first_position + begin,
                        chunk_start=0,
                    )
                )
            rows_of_places.append(part.query_idx.numpy())
            num_places += num_queries
        first_query += num_queries
        first_block += len(part.block_ids)
    return items, _joined(rows_of_places)
