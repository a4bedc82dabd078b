"""Which order of a prompt template's fields would share most; advice, never applied by itself.

Fields are opaque values: two rows share a field if they have the same value, not if two values
begin alike. Only whole KV blocks are shared, counted for a cache that holds everything.

    head  [label value] [label value] [label value]  tail
          `------- fields, in any order ----------'
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from raybatch.errors import ConfigError
from raybatch.prefix.load import Ints

__all__ = ["MAX_EXACT_FIELDS", "Layout", "LayoutAdvice", "TemplateField", "advise_layout"]

# up to here all 2^n sets of fields are tried; 64 sorts of the rows at six fields
MAX_EXACT_FIELDS = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class TemplateField:
    """One field of a template over all rows; arrays are read only.

    Args:
        name: as in the template, without braces.
        value_ids: int64 [R], equal where the values are equal.
        num_tokens: int64 [R], length of each value.
        label_tokens: fixed text that moves with the field, such as "Question: ".
    """

    name: str
    value_ids: Ints
    num_tokens: Ints
    label_tokens: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """An order of fields and what it shares.

    Args:
        fields: names in order.
        hit_rate: share of all prompt tokens that come from a cache that holds everything.
    """

    fields: tuple[str, ...]
    hit_rate: float


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutAdvice:
    """The order in use beside the best one found.

    Args:
        used: the order of the template.
        best: the order with the highest hit rate; `used` if none is better.
        is_exact: whether all orders were considered.
    """

    used: Layout
    best: Layout
    is_exact: bool

    @property
    def text(self) -> str:
        """One sentence for the user."""
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
    """Find the order of fields that shares most. O(2^n R log R), greedy above six fields.

    Exact because what a leading set of fields shares does not depend on the order inside the set.

    Args:
        fields: in the order of the template, at least one.
        head_tokens: fixed text before all fields.
        tail_tokens: fixed text after all fields.
        block_size: tokens of a KV block.

    Raises:
        ConfigError: fields differ in their number of rows, or one value has two lengths.
    """
    sharing = _Sharing(fields, head_tokens, tail_tokens, block_size)
    used = tuple(range(len(fields)))
    is_exact = len(fields) <= MAX_EXACT_FIELDS
    found = _best_order(sharing, len(fields)) if is_exact else _greedy_order(sharing, len(fields))
    best = found if sharing.unique_blocks(found) < sharing.unique_blocks(used) else used
    layouts = [
        Layout(
            fields=tuple(fields[i].name for i in order),
            hit_rate=sharing.hit_rate(order),
        )
        for order in (used, best)
    ]
    return LayoutAdvice(used=layouts[0], best=layouts[1], is_exact=is_exact)


class _Sharing:
    """Counts the distinct KV blocks that each field adds behind each set of fields."""

    def __init__(
        self, fields: Sequence[TemplateField], head_tokens: int, tail_tokens: int, block_size: int
    ) -> None:
        _check(fields)
        self.head_tokens, self.tail_tokens, self.block_size = head_tokens, tail_tokens, block_size
        self.num_fields, self.num_rows = len(fields), len(fields[0].value_ids)
        self.values = [
            np.unique(field.value_ids, return_inverse=True)[1].astype(np.int64) for field in fields
        ]
        self.tokens = [field.num_tokens.astype(np.int64) + field.label_tokens for field in fields]
        self.labels = [field.label_tokens for field in fields]
        alike = np.zeros(self.num_rows, np.int64)
        self.combinations: dict[frozenset[int], tuple[Ints, Ints]] = {
            frozenset(): (alike, alike[:1])
        }
        self.added: dict[tuple[frozenset[int], int], int] = {}

    def added_blocks(self, before: frozenset[int], field: int) -> int:
        """Return the distinct blocks that end inside `field` when it follows the set `before`.

        Its label is the same for all rows with the same values before it.
        """
        known = self.added.get((before, field))
        if known is None:
            together = before | {field}
            start = self._tokens(before)
            blocks = [
                tokens // self.block_size
                for tokens in (start, start + self.labels[field], self._tokens(together))
            ]
            first = [self._combination(members)[1] for members in (before, together)]
            label, value = (
                np.maximum(blocks[i + 1] - blocks[i], 0)[first[i]].sum() for i in range(2)
            )
            known = int(label + value)
            self.added[before, field] = known
        return known

    def unique_blocks(self, order: Sequence[int]) -> int:
        """Return the distinct blocks behind the head when fields come in `order`."""
        return sum(self.added_blocks(frozenset(order[:i]), field) for i, field in enumerate(order))

    def saved_blocks(self, before: frozenset[int], field: int) -> int:
        """Return the blocks of `field` that rows find when it follows the set `before`."""
        end, start = self._tokens(before | {field}), self._tokens(before)
        blocks = end // self.block_size - start // self.block_size
        return int(blocks.sum()) - self.added_blocks(before, field)

    def hit_rate(self, order: Sequence[int]) -> float:
        """Return the share of prompt tokens that a cache of any size would give."""
        prompts = self._tokens(frozenset(range(self.num_fields)))
        computed = self.head_tokens // self.block_size + self.unique_blocks(order)
        cached = int((prompts // self.block_size).sum()) - computed
        num_tokens = self.num_rows * (self.head_tokens + self.tail_tokens)
        num_tokens += sum(int(tokens.sum()) for tokens in self.tokens)
        return cached * self.block_size / max(num_tokens, 1)

    def _combination(self, members: frozenset[int]) -> tuple[Ints, Ints]:
        """Return an id per row for its values of `members`, and the first row of each id."""
        known = self.combinations.get(members)
        if known is None:
            last = max(members)
            values = self.values[last]
            # both factors are at most the number of rows
            pairs = self._combination(members - {last})[0] * (values.max(initial=0) + 1) + values
            _, first, ids = np.unique(pairs, return_index=True, return_inverse=True)
            known = self.combinations[members] = (ids.astype(np.int64), first.astype(np.int64))
        return known

    def _tokens(self, members: frozenset[int]) -> Ints:
        """Return the length of each row's prompt up to the end of the last of `members`."""
        tokens = np.full(self.num_rows, self.head_tokens, np.int64)
        for field in members:
            tokens += self.tokens[field]
        if len(members) == self.num_fields:
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
        better = min(_moves(order), key=lambda moved: (sharing.unique_blocks(moved), moved))
        if sharing.unique_blocks(better) >= sharing.unique_blocks(order):
            return order
        order = better


def _moves(order: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the orders in which one field stands elsewhere."""
    moves = []
    for field in order:
        rest = tuple(other for other in order if other != field)
        moves.extend((*rest[:i], field, *rest[i:]) for i in range(len(order)))
    return moves


def _change(used: tuple[str, ...], best: tuple[str, ...]) -> str:
    """Say in words how to get from one order to the other."""
    moved = [
        name for name in used if [u for u in used if u != name] == [b for b in best if b != name]
    ]
    for name in moved:
        if best.index(name) < used.index(name):
            return f"putting {{{name}}} before {{{best[best.index(name) + 1]}}}"
    for name in moved:
        return f"putting {{{name}}} after {{{best[best.index(name) - 1]}}}"
    return "the order " + ", ".join(f"{{{name}}}" for name in best)


def _check(fields: Sequence[TemplateField]) -> None:
    if not fields:
        raise ConfigError("a template without fields has no order to advise on")
    num_rows = len(fields[0].value_ids)
    for field in fields:
        if {len(field.value_ids), len(field.num_tokens)} != {num_rows}:
            raise ConfigError(
                f"field {{{field.name}}} has {len(field.value_ids)} values and "
                f"{len(field.num_tokens)} lengths, {{{fields[0].name}}} has {num_rows} values"
            )
        _, first, value = np.unique(field.value_ids, return_index=True, return_inverse=True)
        differs = field.num_tokens != field.num_tokens[first[value]]
        if differs.any():
            row = int(np.argmax(differs))
            raise ConfigError(
                f"field {{{field.name}}}: rows {int(first[value[row]])} and {row} have the same "
                "value id, but lengths "
                f"{field.num_tokens[first[value[row]]]} and {field.num_tokens[row]}"
            )
