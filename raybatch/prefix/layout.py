"""Finds the order of a prompt template's fields that shares most. It advises and changes nothing.

Fields are opaque values: two rows share a field if they have the same value, not if two values
begin alike. Only whole KV blocks are shared, counted for a cache that holds everything.

    head  [label value] [label value] [label value]  tail
          `------- fields, in any order ----------'
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from raybatch.records.arrays import Ints
from raybatch.records.hashing import GOLDEN, mix64

# most fields for which all 2^n sets are tried; six fields take 64 sorts of the rows
MAX_EXACT_FIELDS = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class TemplateField:
    """One field of a template over all rows; arrays are read only."""

    name: str
    value_ids: Ints  # [R], equal where the values are equal
    num_tokens: Ints  # [R]
    label_tokens: int = 0  # fixed text that moves with the field, such as "Question: "


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """An order of fields, and the share of prompt tokens found in a cache of unlimited size."""

    fields: tuple[str, ...]
    hit_rate: float


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutAdvice:
    """The order in use, and the one with the highest hit rate; the former if none is better."""

    used: Layout
    best: Layout

    @property
    def text(self) -> str:
        used, best = (f"{100 * layout.hit_rate:.0f} %" for layout in (self.used, self.best))
        if self.best.hit_rate <= self.used.hit_rate:
            return f"the order of the fields is the best one, with a hit rate of {used}"
        change = _change(self.used.fields, self.best.fields)
        return f"{change} raises the hit rate from {used} to {best}"


def advise_layout(
    fields: Sequence[TemplateField],
    *,
    head_tokens: int = 0,
    tail_tokens: int = 0,
    block_size: int = 1,
) -> LayoutAdvice:
    """Find the order of fields that shares most. O(2^n R log R) time, O(R) memory.

    Exact up to six fields, because what a leading set of fields shares does not depend on the
    order inside the set. For more fields, a greedy order is improved by moving single fields.
    """
    sharing = _Sharing(fields, head_tokens, tail_tokens, block_size)
    used = tuple(range(len(fields)))
    search = _best_order if len(fields) <= MAX_EXACT_FIELDS else _greedy_order
    candidate = search(sharing, len(fields))
    best = candidate if sharing.unique_blocks(candidate) < sharing.unique_blocks(used) else used
    layouts = [
        Layout(fields=tuple(fields[i].name for i in order), hit_rate=sharing.hit_rate(order))
        for order in (used, best)
    ]
    return LayoutAdvice(used=layouts[0], best=layouts[1])


class _Sharing:
    """Counts the distinct KV blocks that each field adds behind each set of fields."""

    def __init__(
        self, fields: Sequence[TemplateField], head_tokens: int, tail_tokens: int, block_size: int
    ) -> None:
        assert fields, "a template without fields has no order to advise on"
        self.head_tokens, self.tail_tokens, self.block_size = head_tokens, tail_tokens, block_size
        self.num_rows = len(fields[0].value_ids)
        # pseudorandom keys of values. Their sum over fields identifies a combination of values;
        # among n combinations, two collide with probability n^2 / 2^65
        self.keys = [
            mix64(field.value_ids.astype(np.uint64) + np.uint64(salt * int(GOLDEN) % 2**64))
            for salt, field in enumerate(fields, start=1)
        ]
        self.tokens = [field.num_tokens.astype(np.int64) + field.label_tokens for field in fields]
        self.labels = [field.label_tokens for field in fields]
        self.label_blocks: dict[tuple[frozenset[int], int], int] = {}
        self.value_blocks: dict[tuple[frozenset[int], int], int] = {}

    def added_blocks(self, before: frozenset[int], field: int) -> int:
        """Return the distinct blocks that end inside `field` when it follows the set `before`."""
        together = before | {field}
        for members, known in ((before, self.label_blocks), (together, self.value_blocks)):
            if (members, field) not in known:
                self._measure(members)
        return self.label_blocks[before, field] + self.value_blocks[together, field]

    def unique_blocks(self, order: Sequence[int]) -> int:
        """Return the distinct blocks behind the head with the fields in `order`."""
        return sum(self.added_blocks(frozenset(order[:i]), field) for i, field in enumerate(order))

    def saved_blocks(self, before: frozenset[int], field: int) -> int:
        """Return the cached blocks of `field` that rows find when it follows the set `before`."""
        rows = np.arange(self.num_rows)
        end, start = self._tokens(before | {field}, rows), self._tokens(before, rows)
        blocks = end // self.block_size - start // self.block_size
        return int(blocks.sum()) - self.added_blocks(before, field)

    def hit_rate(self, order: Sequence[int]) -> float:
        """Return the share of prompt tokens that rows find in a cache of unlimited size."""
        if not self.num_rows:
            return 0.0
        prompts = self._tokens(frozenset(order), np.arange(self.num_rows))
        computed = self.head_tokens // self.block_size + self.unique_blocks(order)
        cached = int((prompts // self.block_size).sum()) - computed
        num_tokens = self.num_rows * (self.head_tokens + self.tail_tokens)
        num_tokens += sum(int(tokens.sum()) for tokens in self.tokens)
        return cached * self.block_size / max(num_tokens, 1)

    def _measure(self, members: frozenset[int]) -> None:
        """Count what each field adds as the last of `members`, and its label behind them.

        The label of the next field is the same for all rows with the same values before it.
        """
        key = np.zeros(self.num_rows, np.uint64)
        for field in members:
            key += self.keys[field]
        rows = np.unique(key, return_index=True)[1]
        end = self._tokens(members, rows)
        for field, label in enumerate(self.labels):
            if field in members:
                start = self._tokens(members - {field}, rows) + label
                blocks = end // self.block_size - start // self.block_size
                self.value_blocks[members, field] = int(np.maximum(blocks, 0).sum())
            else:
                blocks = (end + label) // self.block_size - end // self.block_size
                self.label_blocks[members, field] = int(blocks.sum())

    def _tokens(self, members: frozenset[int], rows: Ints) -> Ints:
        """Return the prompt lengths of `rows` up to the end of the last of `members`."""
        tokens = np.full(len(rows), self.head_tokens, np.int64)
        for field in members:
            tokens += self.tokens[field][rows]
        if len(members) == len(self.keys):
            # the last token of a prompt is always computed
            tokens += self.tail_tokens - 1
        return np.maximum(tokens, 0)


def _best_order(sharing: _Sharing, num_fields: int) -> tuple[int, ...]:
    best: dict[frozenset[int], tuple[int, tuple[int, ...]]] = {frozenset(): (0, ())}
    for size in range(1, num_fields + 1):
        for subset in itertools.combinations(range(num_fields), size):
            members = frozenset(subset)
            best[members] = min(
                (best[rest][0] + sharing.added_blocks(rest, field), (*best[rest][1], field))
                for field, rest in ((field, members - {field}) for field in subset)
            )
    return best[frozenset(range(num_fields))][1]


def _greedy_order(sharing: _Sharing, num_fields: int) -> tuple[int, ...]:
    """Put next the field that saves most, then move single fields while that helps."""
    order: tuple[int, ...] = ()
    while len(order) < num_fields:
        placed = frozenset(order)
        left = [field for field in range(num_fields) if field not in placed]
        order += (max(left, key=lambda field: (sharing.saved_blocks(placed, field), -field)),)
    while True:
        # all orders that move one field
        rests = [(field, tuple(other for other in order if other != field)) for field in order]
        moves = [(*r[:i], field, *r[i:]) for field, r in rests for i in range(num_fields)]
        better = min(moves, key=lambda moved: (sharing.unique_blocks(moved), moved))
        if sharing.unique_blocks(better) >= sharing.unique_blocks(order):
            return order
        order = better


def _change(used: tuple[str, ...], best: tuple[str, ...]) -> str:
    """Describe the change from one order to the other."""
    moved = [
        name for name in used if [u for u in used if u != name] == [b for b in best if b != name]
    ]
    for name in moved:
        if best.index(name) < used.index(name):
            return f"putting {{{name}}} before {{{best[best.index(name) + 1]}}}"
    for name in moved:
        return f"putting {{{name}}} after {{{best[best.index(name) - 1]}}}"
    return "the order " + ", ".join(f"{{{name}}}" for name in best)
