"""What the kernels of a GPU read of an `AttentionPlan`: one flat index, made on the host.

Its content changes from step to step; shapes and launches follow from a `StepSize` alone. So a step
is one copy to the device, and where its size is padded, a graph can repeat it.

An item is some queries and a run of cached positions, or a part of one, that all of them see. What
a chunk alone reads of its prompt's earlier blocks is an item of the chunk itself, so there is
nothing to merge; without `joins_runs` it is a run that is not cut. Other runs are cut into spans
where there would be too few programs otherwise, and the partial results of a row are merged.
"""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import accumulate
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from raybatch.kernels.attention_plan import AttentionPlan, ContextPart, PrefillPart
from raybatch.kernels.decode_spans import MERGE_FIELDS, SPAN_FIELDS, most_programs, spans_of

Index = npt.NDArray[np.int32]
Array = TypeVar("Array")

# programs of decode rows that fill a GPU of 132 multiprocessors: the registers of one hold three
DECODE_PROGRAMS = 396
# items of runs and KV heads: four for each program that takes them in turns, so that turns are even
RUN_WORKS = 528
# queries of an item at most; how many of them a program takes depends on the heads
ITEM_QUERIES = 128
# numbers that say how many items and rows a step has
NUM_COUNTS = 4
# numbers of a pair of a decode row and a block
ENTRY_FIELDS = 3
# of a row whose partial results are kept at once; those of more runs are merged in rounds
MAX_RUNS = 8
# shorter spans cost more in merging than they win
_MIN_SPAN_TOKENS = 256
# from here on, merging costs less than a single program that walks the whole run
MAX_JOINED_TOKENS = 4096


class Item(NamedTuple):
    """What a program computes.

    Args:
        first_query: a row of the forward batch, or of runs an index into the list of their rows.
        num_queries: at most ITEM_QUERIES; 0 where an item is padding.
        first_place: where the first query's output goes; the others follow.
        first_block: of the run, an index into the list of blocks.
        num_tokens: of the run, from the first slot of its first block on; may be 0.
        first_position: of the run, in the sequence.
        chunk_start: row of the forward batch where the queries' chunk starts, if they have one.
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
    """All that shapes, grids and launches of attention depend on.

    Args:
        rows: T of the forward batch, padding included.
        decode_rows: S; rows up to it walk blocks of their own. Those behind the decode rows of the
            plan have none, and may belong to chunks.
        entries: pairs of a decode row and a block.
        row_blocks: most entries of a decode row.
        programs: of each KV head, over which the entries of decode rows are spread.
        spans, merges, span_places: see `raybatch.kernels.decode_spans`.
        chunk_queries, run_queries: most queries of an item.
        run_rows: readers of all runs.
        merged_rows: rows that read runs.
        places: partial results, each of one row over one span of one run.
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
    run_items: int = 0
    run_rows: int = 0
    run_blocks: int = 0
    run_queries: int = 0
    merged_rows: int = 0
    places: int = 0

    def covers(self, other: "StepSize") -> bool:
        """Return whether a plan of that size can be written into an index of this one."""
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
            self.run_items * len(Item._fields),
            self.run_rows,
            self.run_blocks,
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
        counts: how many items of chunks, items of runs, merged rows and merges there are, as what
            is behind them is padding.
        starts: [S + 1], where each decode row's entries start.
        programs: [P + 1], the first span of each program of decode rows.
        spans, merges: see `raybatch.kernels.decode_spans`, in one dimension.
        chunks: items, [I, 7] in one dimension; their places are the rows themselves. They ascend by
            the keys that they read, or without `joins_runs` by row.
        chunk_blocks: the blocks of all runs that chunks read alone.
        runs: items of all other runs.
        run_rows: the rows of these, one run after the other.
        run_blocks: the blocks of these, one run after the other.
        merged_rows: the rows that read runs, ascending.
        row_starts: [rows that read runs + 1], where the places of each start in `order`.
        order: [places], places by row of the forward batch.
        entries: [P, 3] in one dimension: block, valid positions and first position of each, as in
            `DecodePart`. They are the end, as what is left of them for padding is not written.
    """

    counts: Array
    starts: Array
    programs: Array
    spans: Array
    merges: Array
    chunks: Array
    chunk_blocks: Array
    runs: Array
    run_rows: Array
    run_blocks: Array
    merged_rows: Array
    row_starts: Array
    order: Array
    entries: Array


class StepIndex:
    """The index of one plan, on the host."""

    def __init__(
        self,
        plan: AttentionPlan,
        *,
        num_rows: int,
        num_kv_heads: int,
        block_size: int,
        joins_runs: bool = True,
    ) -> None:
        starts, entries = _decode_entries(plan)
        most = most_programs(num_kv_heads, DECODE_PROGRAMS)
        spread = spans_of(starts, block_size=block_size, most=most)
        own = _own_runs(plan.contexts) if plan.prefill is not None else {}
        others = [run for run in plan.contexts if own.get(run.chunk) is not run]
        whole = () if joins_runs else tuple(own.values())
        chunk_items, chunk_blocks = _chunks(plan.prefill, own if joins_runs else {})
        if joins_runs:
            # programs take those with most keys first, from the end
            chunk_items.sort(key=_num_keys)
        span = _span_of(others, whole, num_rows, num_kv_heads, block_size)
        items, rows_of_places = _runs(others, whole, span, block_size)
        contexts = (*others, *whole)
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
            _joined([part.query_idx.numpy() for part in contexts]),
            _joined([part.block_ids.numpy() for part in contexts]),
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
            run_items=len(items),
            run_rows=len(self._parts.run_rows),
            run_blocks=len(self._parts.run_blocks),
            run_queries=max((item.num_queries for item in items), default=0),
            merged_rows=len(merged_rows),
            places=len(rows_of_places),
        )

    def write(self, size: StepSize, out: Index) -> int:
        """Write the index into `out` [size.num_index], padded to `size`, which covers this one's.

        Padded items have no queries, and padded rows neither entries nor places. Returns how many
        numbers were written: those behind are of entries that nothing reads.
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
        """Return the index in its own size."""
        out = np.empty(self.size.num_index, np.int32)
        self.write(self.size, out)
        return out


def rounds_of(
    plan: AttentionPlan, num_rows: int, *, joins_runs: bool = True
) -> list[AttentionPlan]:
    """Return plans that do together what one does, and have few partial results each.

    All but the first have runs alone, whose results are added to those of the plans before; of no
    plan there are more than `max_places`. `joins_runs` as in `StepIndex`.
    """
    most = MAX_RUNS * num_rows
    if sum(len(run.query_idx) for run in plan.contexts) <= most:
        return [plan]
    own = _own_runs(plan.contexts) if joins_runs and plan.prefill is not None else {}
    others = [run for run in plan.contexts if own.get(run.chunk) is not run]
    merged = {id(run) for run in others}
    rounds: list[list[ContextPart]] = [[run for run in plan.contexts if id(run) not in merged]]
    num_readers = 0
    for run in others:
        num_readers += len(run.query_idx)
        if num_readers > most:
            rounds.append([])
            num_readers = len(run.query_idx)
        rounds[-1].append(run)
    first, *rest = (tuple(runs) for runs in rounds)
    alone = AttentionPlan(num_decode=0, decode=None, prefill=None, contexts=())
    return [replace(plan, contexts=first), *(replace(alone, contexts=runs) for runs in rest)]


def cut_places(num_rows: int) -> int:
    """Return the most partial results that splitting runs may create.

    Captured steps reserve memory for that many.
    """
    return 512 + 4 * num_rows


def max_places(num_rows: int, num_kv_heads: int) -> int:
    """Return the most partial results of a plan of `rounds_of`.

    Each run has one per row, and one for each span but its last; of these, no more items than are
    wanted fill their queries.
    """
    return MAX_RUNS * num_rows + RUN_WORKS * ITEM_QUERIES // num_kv_heads


def parts_of(size: StepSize, index: Any) -> Parts[Any]:  # noqa: ANN401
    """Return the parts of an index as views of it."""
    stops = tuple(accumulate(size.lengths))
    spans = zip((0, *stops[:-1]), stops, strict=True)
    return Parts(*(index[start:stop] for start, stop in spans))


def _joined(arrays: Sequence[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    return np.concatenate(arrays) if arrays else np.empty(0, np.int64)


def _decode_entries(plan: AttentionPlan) -> tuple[npt.NDArray[np.int64], Index]:
    """Return where the entries of each row start, and the entries."""
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
    """Return the order of numbers by row, and where each row starts in it, [num_rows + 1]."""
    starts = np.zeros(num_rows + 1, np.int64)
    np.cumsum(np.bincount(rows, minlength=num_rows), out=starts[1:])
    # numpy sorts numbers of 16 bits by their digits, in a fifteenth of the time
    keys = rows.astype(np.uint16) if num_rows <= 1 << 16 else rows
    return np.argsort(keys, kind="stable"), starts


def _own_runs(contexts: Sequence[ContextPart]) -> dict[int | None, ContextPart]:
    """Return by chunk the first run that it alone reads, where one program can walk it."""
    own: dict[int | None, ContextPart] = {}
    for run in contexts:
        if run.chunk is not None and run.num_tokens <= MAX_JOINED_TOKENS:
            own.setdefault(run.chunk, run)
    return own


def _chunks(
    part: PrefillPart | None, joined: Mapping[int | None, ContextPart]
) -> tuple[list[Item], npt.NDArray[np.int64]]:
    """Return the items of chunks with the runs that are joined to them, and their blocks."""
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
    parts: Sequence[ContextPart],
    whole: Sequence[ContextPart],
    num_rows: int,
    num_kv_heads: int,
    block_size: int,
) -> int:
    """Return how many positions an item takes, whole blocks: as few as fill the device.

    Runs of `whole`, which are not cut, take places beside these.
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
    parts: Sequence[ContextPart], whole: Sequence[ContextPart], span: int, block_size: int
) -> tuple[list[Item], npt.NDArray[np.int64]]:
    """Return the items of runs of `span` tokens at most, and the row of each place.

    Those of `whole` follow, which are not cut.
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
