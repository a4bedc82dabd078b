"""Rows of a pool that wait: for any replica, for the one that has their prefix, or to run alone.

Rows that run alone are suspects, which may have ended replicas, and the control.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from raybatch.actors.queue.affinity import PrefixAffinity
from raybatch.actors.queue.bundle_line import Batches, BundleLine
from raybatch.actors.queue.row_states import RowStates
from raybatch.actors.wire.records import Span

_Alone = tuple[Span, ...]


class WaitingLine:
    """One line for all replicas, and one for each replica with the rest of its groups.

    A row whose group has a home goes to the home's own line. That is served first, by its replica,
    and by others before they would idle.
    """

    def __init__(self, batches: Batches, affinity: PrefixAffinity) -> None:
        self.fresh = BundleLine(batches)
        self._batches = batches
        self.affinity = affinity
        self._own: dict[int, BundleLine] = {}

    def __bool__(self) -> bool:
        return bool(self.fresh) or any(self._own.values())

    def batch(self, batch_id: int) -> RowStates:
        return self._batches[batch_id]

    def own(self, replica_id: int) -> BundleLine:
        line = self._own.get(replica_id)
        if line is None:
            line = self._own[replica_id] = BundleLine(self._batches)
        return line

    def others(self, replica_id: int) -> list[int]:
        """Return the other replicas in whose own lines rows wait, most cost first."""
        ids = [r for r, line in self._own.items() if line and r != replica_id]
        return sorted(ids, key=lambda r: -self._own[r].cost)

    def cost_for(self, replica_ids: Iterable[int]) -> int:
        """Return the cost of all rows that wait for any of these replicas, prefixes included."""
        own = sum(self._own[r].cost for r in replica_ids if r in self._own)
        return self.fresh.cost + self.fresh.prefix_tokens + own

    def num_rows(self) -> int:
        return self.fresh.num_rows + sum(line.num_rows for line in self._own.values())

    def add(self, span: Span, *, is_new: bool = False) -> None:
        """Add rows behind all others, or where other members of their group are.

        Args:
            is_new: they are to be grouped before they are handed out.
        """
        batch = self._batches[span.batch_id]
        for start, stop in batch.runs(span.start, span.stop):
            piece = Span(span.batch_id, start, stop)
            group = int(batch.group[start])
            home = self.affinity.join(group, stop - start)
            if home is None:
                self.fresh.add(piece, is_new=is_new)
            else:
                self.own(home).add(piece)

    def put_back(self, spans: Sequence[Span]) -> None:
        """Add rows that were handed out, in this order, before all others."""
        for span in reversed(spans):
            batch = self._batches[span.batch_id]
            for start, stop in reversed(batch.runs(span.start, span.stop)):
                home = self.affinity.of(int(batch.group[start]))
                line = self.fresh if home is None else self.own(home)
                line.add(Span(span.batch_id, start, stop), at_head=True)

    def release(self, replica_id: int) -> None:
        """Return the rows of a replica that is gone to the line of all."""
        line = self._own.pop(replica_id, None)
        for bundle in reversed(line.take_all() if line is not None else []):
            for span in reversed(bundle.spans):
                self.fresh.add(span, at_head=True)

    def free(self, replica_id: int, groups: Iterable[int]) -> None:
        """Return the waiting rows of groups that a replica gave back to the line of all."""
        line = self._own.get(replica_id)
        for group in groups:
            if line is not None and line.has(group):
                for span in reversed(line.pop_group(group).spans):
                    self.fresh.add(span, at_head=True)

    def remove_batch(self, batch_id: int) -> None:
        """Take all rows of one batch out. Complexity: O(spans in the line)."""
        for line in (self.fresh, *self._own.values()):
            line.remove_batch(batch_id)

    def take_at(self, place: float) -> Span:
        """Take out the row at a place between 0, the head, and 1, the last row."""
        row = round(place * (self.num_rows() - 1))
        for line in (self.fresh, *self._own.values()):
            if row < line.num_rows:
                return line.take_row(row)
            row -= line.num_rows
        raise IndexError("no row waits")


class Isolation:
    """Sets of suspects in the order of their trials, and at most one control before them."""

    def __init__(self) -> None:
        self.control: Span | None = None
        self._suspects: deque[_Alone] = deque()

    def __bool__(self) -> bool:
        return self.control is not None or bool(self._suspects)

    def __iter__(self) -> Iterator[Span]:
        if self.control is not None:
            yield self.control
        for spans in self._suspects:
            yield from spans

    def add_suspects(self, spans: list[Span]) -> None:
        """Put suspects before all others, in two halves."""
        middle = (len(spans) + 1) // 2
        for half in (spans[middle:], spans[:middle]):
            if half:
                self._suspects.appendleft(tuple(half))

    def put_back(self, spans: list[Span], *, is_control: bool) -> None:
        """Put rows that a replica had alone, and has not started, before all others."""
        if is_control:
            (self.control,) = spans
        else:
            self._suspects.appendleft(tuple(spans))

    def take(self) -> _Alone:
        """Take the rows that a replica without rows is to run alone; () when there are none."""
        if self.control is not None:
            control, self.control = self.control, None
            return (control,)
        return self._suspects.popleft() if self._suspects else ()

    def drop(self, batch_id: int) -> None:
        kept = (tuple(s for s in spans if s.batch_id != batch_id) for spans in self._suspects)
        self._suspects = deque(spans for spans in kept if spans)
        if self.control is not None and self.control.batch_id == batch_id:
            self.control = None
