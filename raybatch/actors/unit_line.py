"""Waiting rows in units that go together: members of one prefix group, or neighbours of none."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from raybatch.actors.records import Span
from raybatch.actors.row_states import ALONE, RowStates

Batches = Mapping[int, RowStates]


@dataclass(slots=True, eq=False)
class Unit:
    """Rows that wait together; the sums are over what they have beyond the prefix.

    Args:
        group: prefix group, `ALONE` for rows that share nothing.
        prefix_len: tokens that the group shares.
        arrival: of the row batch that came first.
        is_new: came without a plan and was not grouped since.
        num_passed: pulls that took units behind it and not this one.
        spans: in the order in which they run.
        num_rows: rows.
        tokens: prompt tokens.
        cost: prompt tokens and expected outputs.
    """

    group: int
    prefix_len: int = 0
    arrival: int = 0
    is_new: bool = False
    num_passed: int = 0
    spans: deque[Span] = field(default_factory=deque)
    num_rows: int = 0
    tokens: int = 0
    cost: int = 0


class UnitLine:
    """Units in the order in which they go, at most one of each group.

    Args:
        batches: states of all row batches; shared with the queue, read only.

    Attributes:
        num_rows: in all units.
        cost: of all rows, without prefixes.
        prefix_tokens: of all units.
    """

    def __init__(self, batches: Batches) -> None:
        self.num_rows = 0
        self.cost = 0
        self.prefix_tokens = 0
        self._batches = batches
        self._units: deque[Unit] = deque()
        self._of_group: dict[int, Unit] = {}

    def __len__(self) -> int:
        return len(self._units)

    def __iter__(self) -> Iterator[Unit]:
        return iter(self._units)

    def __getitem__(self, place: int) -> Unit:
        """Return the unit at a place; fast near the head."""
        return self._units[place]

    def groups(self) -> Iterable[int]:
        """Return the groups that wait here."""
        return self._of_group.keys()

    def has(self, group: int) -> bool:
        """Return whether members of a group wait here."""
        return group in self._of_group

    def add(self, span: Span, *, at_head: bool = False, is_new: bool = False) -> None:
        """Add rows of one group, to its other members or as a unit behind or before all others."""
        batch = self._batches[span.batch_id]
        group = int(batch.group[span.start])
        unit = self._of_group.get(group)
        if unit is None:
            prefix_len = int(batch.prefix[span.start])
            unit = Unit(group, prefix_len, arrival=batch.arrival, is_new=is_new)
            self.insert(unit, at_head=at_head)
        self.extend(unit, span, at_head=at_head)

    def insert(self, unit: Unit, *, at_head: bool = False) -> None:
        """Put a unit behind or before all others; its group has no unit here."""
        if unit.group != ALONE:
            self._of_group[unit.group] = unit
        self.num_rows += unit.num_rows
        self.cost += unit.cost
        self.prefix_tokens += unit.prefix_len
        if at_head:
            self._units.appendleft(unit)
        else:
            self._units.append(unit)

    def extend(self, unit: Unit, span: Span, *, at_head: bool = False) -> None:
        """Add rows to a unit of this line, behind or before its others."""
        self._weigh(unit, span, 1)
        unit.arrival = min(unit.arrival, self._batches[span.batch_id].arrival)
        if at_head:
            unit.spans.appendleft(span)
        else:
            unit.spans.append(span)

    def pop(self, place: int = 0) -> Unit:
        """Take the unit at a place out."""
        unit = self._units[place]
        del self._units[place]
        self._of_group.pop(unit.group, None)
        self.num_rows -= unit.num_rows
        self.cost -= unit.cost
        self.prefix_tokens -= unit.prefix_len
        return unit

    def pop_group(self, group: int) -> Unit:
        """Take the unit of a group out. Complexity: O(units)."""
        return self.pop(self._units.index(self._of_group[group]))

    def cut(
        self, place: int, *, tokens: int, rows: int, cost: int, at_least: int = 0
    ) -> list[Span]:
        """Take the first rows of a unit out, as many as stay within all budgets.

        Args:
            place: of the unit.
            tokens: prompt tokens.
            rows: rows.
            cost: prompt tokens and expected outputs.
            at_least: 1 takes one row even above the budgets, 0 does not.
        """
        unit = self._units[place]
        taken: list[Span] = []
        while unit.spans:
            head = unit.spans[0]
            batch = self._batches[head.batch_id]
            reach = batch.reach(head.start, tokens=tokens, cost=cost)
            least = head.start + (0 if taken else at_least)
            stop = max(min(head.stop, head.start + rows, reach), least)
            if stop <= head.start:
                break
            piece = head._replace(stop=stop)
            taken.append(piece)
            unit.spans.popleft()
            if stop < head.stop:
                unit.spans.appendleft(head._replace(start=stop))
            self._weigh(unit, piece, -1)
            rows -= stop - head.start
            tokens -= batch.tokens_between(head.start, stop)
            cost -= batch.cost_between(head.start, stop)
        if not unit.spans:
            self.pop(place)
        return taken

    def take_row(self, row: int) -> Span:
        """Take out the row at a position among all rows. Complexity: O(rows in the line)."""
        for place, unit in enumerate(self._units):
            if row < unit.num_rows:
                return self._take_row_of(place, row)
            row -= unit.num_rows
        raise IndexError("the line has fewer rows")

    def remove_batch(self, batch_id: int) -> None:
        """Take all rows of one batch out. Complexity: O(spans in the line)."""
        for unit in self._units:
            for span in [s for s in unit.spans if s.batch_id == batch_id]:
                unit.spans.remove(span)
                self._weigh(unit, span, -1)
        self._drop_empty()

    def take_all(self) -> list[Unit]:
        """Take every unit out."""
        units = list(self._units)
        self._units.clear()
        self._of_group.clear()
        self.num_rows = self.cost = self.prefix_tokens = 0
        return units

    def _take_row_of(self, place: int, row: int) -> Span:
        unit = self._units[place]
        for index, span in enumerate(unit.spans):
            if row < span.stop - span.start:
                taken = Span(span.batch_id, span.start + row, span.start + row + 1)
                del unit.spans[index]
                for piece in (span._replace(start=taken.stop), span._replace(stop=taken.start)):
                    if piece.start < piece.stop:
                        unit.spans.insert(index, piece)
                break
            row -= span.stop - span.start
        self._weigh(unit, taken, -1)
        if not unit.spans:
            self.pop(place)
        return taken

    def _drop_empty(self) -> None:
        kept = [unit for unit in self.take_all() if unit.spans]
        for unit in kept:
            self.insert(unit)

    def _weigh(self, unit: Unit, span: Span, sign: int) -> None:
        batch = self._batches[span.batch_id]
        num_rows = sign * (span.stop - span.start)
        cost = sign * batch.cost_between(span.start, span.stop)
        unit.num_rows += num_rows
        unit.tokens += sign * batch.tokens_between(span.start, span.stop)
        unit.cost += cost
        self.num_rows += num_rows
        self.cost += cost
