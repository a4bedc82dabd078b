"""The sizes of captured steps, and the size that a step is padded to."""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, replace

from raybatch.kernels.step_index import (
    DECODE_PROGRAMS,
    ITEM_QUERIES,
    MAX_JOINED_TOKENS,
    StepSize,
    cut_places,
    most_programs,
)

# from _FINE_ROWS rows on, number of sizes per doubling: for decodes, and for the other kinds
_FINE_ROWS, _FINE, _COARSE = 64, 8, 4
# smallest sizes in rows: of mixed steps, and of decodes with shared prefixes
_LEAST_MIXED, _LEAST_SHARED = 16, 8


def has_logits(size: StepSize) -> bool:
    """Return whether all rows of a captured step have logits, as without prompt chunks.

    Otherwise the graph ends before the output of the last layer's attention is added, and only rows
    with logits are computed further: their number varies too much for padding.
    """
    return not size.chunk_items


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphShape:
    """Limits of the captured steps.

    Decode-only steps have the finest sizes, as they are the shortest; then decodes with shared
    prefixes. Steps with prompt chunks have any mixture, with and without shared prefixes.
    """

    # rows of each kind, ascending: decodes only; decodes with shared prefixes; steps with chunks,
    # captured twice: without segments and with them
    decode: tuple[int, ...]
    shared: tuple[int, ...] = ()
    mixed: tuple[int, ...] = ()
    # most blocks that one row may read, and most (row, block) pairs of a step
    max_row_blocks: int
    max_entries: int
    block_size: int
    num_kv_heads: int

    @classmethod
    def within(
        cls,
        *,
        max_rows: int,
        max_tokens: int,
        max_row_blocks: int,
        max_entries: int,
        block_size: int,
        num_kv_heads: int,
    ) -> "GraphShape":
        """Return the shape for steps of up to `max_rows` decodes and `max_tokens` tokens."""
        return cls(
            decode=step_sizes(max_rows, _FINE),
            shared=_from(_LEAST_SHARED, step_sizes(max_rows, _COARSE)),
            mixed=_from(_LEAST_MIXED, step_sizes(max_tokens, _COARSE)),
            max_row_blocks=max_row_blocks,
            max_entries=max_entries,
            block_size=block_size,
            num_kv_heads=num_kv_heads,
        )

    @property
    def max_rows(self) -> int:
        return self.decode[-1]

    def sizes(self) -> "GraphSizes":
        return GraphSizes(
            decode=tuple(map(self._decode, self.decode)),
            shared=tuple(map(self._shared, self.shared)),
            mixed=tuple(self._mixed(self._decode(rows)) for rows in self.mixed),
            mixed_shared=tuple(self._mixed(self._shared(rows)) for rows in self.mixed),
        )

    def _decode(self, num_rows: int) -> StepSize:
        """Capacity for decodes in up to `max_rows` of the rows."""
        programs = most_programs(self.num_kv_heads, DECODE_PROGRAMS)
        rows = min(num_rows, self.max_rows)
        return StepSize(
            rows=num_rows,
            decode_rows=rows,
            entries=min(rows * self.max_row_blocks, self.max_entries),
            row_blocks=self.max_row_blocks,
            programs=programs,
            spans=rows + programs,
            merges=min(rows, programs),
            span_places=2 * programs,
        )

    def _shared(self, rows: int) -> StepSize:
        """Capacity for segments of two readers each, or for trees of several levels."""
        return replace(
            self._decode(rows),
            segment_items=4 + rows // 2,
            segment_rows=64 + 2 * rows,
            segment_blocks=self.max_row_blocks + 8 * rows,
            segment_queries=min(rows, ITEM_QUERIES),
            merged_rows=rows,
            places=cut_places(rows),
        )

    def _mixed(self, others: StepSize) -> StepSize:
        """Capacity for chunks of 16 tokens or one large chunk, next to other rows."""
        rows = others.rows
        items = 4 + rows // 16 + rows // ITEM_QUERIES
        # a chunk joins up to this many cached blocks; beyond, they are a segment
        per_item = min(self.max_row_blocks, MAX_JOINED_TOKENS // self.block_size + 1)
        return replace(
            others,
            chunk_items=items,
            chunk_blocks=min(items * per_item, 1 << 14),
            chunk_queries=min(rows, ITEM_QUERIES),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphSizes:
    """The captured sizes, in ascending order of rows for each kind."""

    decode: tuple[StepSize, ...]
    shared: tuple[StepSize, ...]
    mixed: tuple[StepSize, ...]
    mixed_shared: tuple[StepSize, ...]

    def all(self) -> tuple[StepSize, ...]:
        return (*self.decode, *self.shared, *self.mixed, *self.mixed_shared)

    def pick(self, step: StepSize) -> StepSize | str:
        """Return the smallest captured size that fits a step, else the limit that the step exceeds.

        The limit is a key of `GraphCounts.eager_steps`, such as "rows".
        """
        kind = self.decode
        if step.chunk_items or step.decode_rows < step.rows:
            kind = self.mixed_shared if step.segment_items else self.mixed
        elif step.segment_items:
            kind = self.shared
        first = bisect_left(kind, step.rows, key=lambda size: size.rows)
        for size in kind[first:]:
            if size.covers(step):
                return size
        if first == len(kind):
            return "rows"
        return _shortage(step, kind[-1])


def _shortage(step: StepSize, largest: StepSize) -> str:
    """Return which limit a step exceeds."""
    if step.entries > largest.entries:
        return "blocks"
    if step.chunk_items > largest.chunk_items or step.chunk_blocks > largest.chunk_blocks:
        return "prompts"
    return "shared prefix"


def step_sizes(max_rows: int, to_a_doubling: int) -> tuple[int, ...]:
    """Return the rows of captured steps up to `max_rows`: 1 2 4 8 16 24 32 ...

    From 64 rows on there are `to_a_doubling` sizes per doubling, so the padding is at most
    1 / `to_a_doubling` of the rows.
    """
    sizes = {max_rows}
    size = 1
    while size < max_rows:
        sizes.add(size)
        doubled = 1 << (size.bit_length() - 1)
        size += max(1, min(size, 8 if size < _FINE_ROWS else doubled // to_a_doubling))
    return tuple(sorted(sizes))


def _from(least: int, sizes: Iterable[int]) -> tuple[int, ...]:
    """Return the sizes of at least `least`, and always the largest one."""
    *others, largest = sizes
    return (*(size for size in others if size >= least), largest)
