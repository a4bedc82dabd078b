"""Which steps are captured: a few sizes of each kind, and which of them a step is padded to."""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

from raybatch.kernels.step_index import ITEM_QUERIES, MAX_JOINED_TOKENS, StepSize

# from so many rows on, sizes of a kind are so many to each doubling
_FINE_ROWS, _FINE, _COARSE = 64, 8, 4
# smaller steps of these kinds are padded to so many rows
_LEAST_MIXED, _LEAST_SHARED = 16, 8


@dataclass(frozen=True, slots=True)
class GraphSize:
    """A captured step: all that its shapes depend on."""

    step: StepSize
    # rows of the logits; all rows where there are as many
    num_logits: int

    @property
    def has_all_logits(self) -> bool:
        return self.num_logits == self.step.rows

    @property
    def num_index(self) -> int:
        """Numbers of a step: token ids, positions, slots, rows with logits, and the index."""
        return 3 * self.step.rows + self.num_logits + self.step.num_index


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphShape:
    """How large captured steps may be.

    Steps of decodes alone are padded least, as there is least to compute in them; then those that
    read shared runs as well; chunks of prompts, with and without decodes, come in any mixture.
    """

    # rows of each kind, ascending: decodes alone, decodes with shared runs, chunks with anything
    decode: tuple[int, ...]
    shared: tuple[int, ...] = ()
    mixed: tuple[int, ...] = ()
    # blocks that one row may read, and pairs of a row and a block of a step
    max_row_blocks: int
    max_entries: int
    block_size: int

    @classmethod
    def within(
        cls,
        *,
        max_rows: int,
        max_tokens: int,
        max_row_blocks: int,
        max_entries: int,
        block_size: int,
    ) -> "GraphShape":
        """Return the sizes for steps of up to `max_rows` decodes and `max_tokens` tokens."""
        return cls(
            decode=step_sizes(max_rows, _FINE),
            shared=_from(_LEAST_SHARED, step_sizes(max_rows, _COARSE)),
            mixed=_from(_LEAST_MIXED, step_sizes(max_tokens, _COARSE)),
            max_row_blocks=max_row_blocks,
            max_entries=max_entries,
            block_size=block_size,
        )

    @property
    def max_rows(self) -> int:
        return self.decode[-1]

    def sizes(self) -> "GraphSizes":
        return GraphSizes(
            decode=tuple(GraphSize(self._decode(rows), rows) for rows in self.decode),
            shared=tuple(GraphSize(self._shared(rows, rows), rows) for rows in self.shared),
            # a graph whose rows all have logits does not say which
            mixed=tuple(
                GraphSize(self._mixed(rows), max(1, min(self.max_rows, rows - 1)))
                for rows in self.mixed
            ),
        )

    def _decode(self, rows: int) -> StepSize:
        entries = min(rows * self.max_row_blocks, self.max_entries)
        return StepSize(
            rows=rows, decode_rows=rows, entries=entries, row_blocks=self.max_row_blocks
        )

    def _shared(self, rows: int, decode_rows: int) -> StepSize:
        """Room for runs of two readers each, or trees of several levels with more."""
        decode = self._decode(decode_rows)
        return StepSize(
            rows=rows,
            decode_rows=decode_rows,
            entries=decode.entries,
            row_blocks=decode.row_blocks,
            run_items=4 + rows // 2,
            run_rows=64 + 2 * rows,
            run_blocks=self.max_row_blocks + 8 * rows,
            run_queries=min(rows, ITEM_QUERIES),
            places=512 + 4 * rows,
        )

    def _mixed(self, rows: int) -> StepSize:
        """Room for chunks of 16 tokens as well as for one."""
        shared = self._shared(rows, min(rows, self.max_rows))
        items = 4 + rows // 16 + rows // ITEM_QUERIES
        # a chunk alone reads so many blocks; of more, a run is made
        per_item = min(self.max_row_blocks, MAX_JOINED_TOKENS // self.block_size + 1)
        return StepSize(
            **{name: getattr(shared, name) for name in shared.__slots__}
            | {
                "chunk_items": items,
                "chunk_blocks": min(items * per_item, 1 << 14),
                "chunk_queries": min(rows, ITEM_QUERIES),
            }
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphSizes:
    """The captured sizes, ascending by rows in each kind."""

    decode: tuple[GraphSize, ...]
    shared: tuple[GraphSize, ...]
    mixed: tuple[GraphSize, ...]

    def all(self) -> tuple[GraphSize, ...]:
        return (*self.decode, *self.shared, *self.mixed)

    def pick(self, step: StepSize, num_logits: int) -> GraphSize | str:
        """Return the smallest size that a step fits into, else why there is none.

        That is one of the reasons of `GraphCounts`.
        """
        kind = self.decode
        if step.chunk_items or step.decode_rows < step.rows:
            kind = self.mixed
        elif step.run_items:
            kind = self.shared
        first = bisect_left(kind, step.rows, key=lambda size: size.step.rows)
        for size in kind[first:]:
            if size.num_logits >= num_logits and size.step.covers(step):
                return size
        if first == len(kind):
            return "rows"
        return _shortage(step, kind[-1].step)


def _shortage(step: StepSize, largest: StepSize) -> str:
    """Return what a step has too much of."""
    if step.entries > largest.entries:
        return "blocks"
    if step.chunk_items > largest.chunk_items or step.chunk_blocks > largest.chunk_blocks:
        return "prompts"
    return "shared prefix"


def step_sizes(max_rows: int, to_a_doubling: int) -> tuple[int, ...]:
    """Return the rows of captured steps up to `max_rows`: 1 2 4 8 16 24 32 and on.

    From 64 rows on there are so many to each doubling, and the padding of a step is as small a part
    of its rows at most.
    """
    sizes = {max_rows}
    size = 1
    while size < max_rows:
        sizes.add(size)
        doubled = 1 << (size.bit_length() - 1)
        size += max(1, min(size, 8 if size < _FINE_ROWS else doubled // to_a_doubling))
    return tuple(sorted(sizes))


def _from(least: int, sizes: Iterable[int]) -> tuple[int, ...]:
    """Return those sizes that are no smaller, and the largest one in any case."""
    *others, largest = sizes
    return (*(size for size in others if size >= least), largest)
