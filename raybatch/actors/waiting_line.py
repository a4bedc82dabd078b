"""The rows of a pool that wait for any replica, in the order in which they go."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from raybatch.actors.records import Room, Span
from raybatch.actors.row_states import RowStates


@dataclass(slots=True)
class WaitingLine:
    """Spans of rows, and their cost in all.

    Args:
        batches: states of all row batches; shared with the queue, read only.
        cost: of the rows in the line.
    """

    batches: Mapping[int, RowStates]
    cost: int = 0
    _spans: deque[Span] = field(default_factory=deque)

    def __bool__(self) -> bool:
        return bool(self._spans)

    def __iter__(self) -> Iterator[Span]:
        return iter(self._spans)

    def append(self, span: Span) -> None:
        """Add rows behind all others."""
        self._spans.append(span)
        self.cost += self._cost(span)

    def put_back(self, spans: Sequence[Span]) -> None:
        """Add rows, in this order, before all others."""
        self._spans.extendleft(reversed(spans))
        self.cost += sum(self._cost(s) for s in spans)

    def remove_batch(self, batch_id: int) -> None:
        """Take all rows of one batch out."""
        removed = [s for s in self._spans if s.batch_id == batch_id]
        self._spans = deque(s for s in self._spans if s.batch_id != batch_id)
        self.cost -= sum(self._cost(s) for s in removed)

    def take_at(self, place: float) -> Span:
        """Take out the row at a place between 0, the head, and 1, the last row."""
        lengths = np.array([s.stop - s.start for s in self._spans])
        ends = np.cumsum(lengths)
        target = round(place * (int(ends[-1]) - 1))
        index = int(np.searchsorted(ends, target, side="right"))
        span = self._spans[index]
        row = span.stop - int(ends[index]) + target
        del self._spans[index]
        for piece in (span._replace(start=row + 1), span._replace(stop=row)):
            if piece.start < piece.stop:
                self._spans.insert(index, piece)
        taken = Span(span.batch_id, row, row + 1)
        self.cost -= self._cost(taken)
        return taken

    def cut(self, room: Room, quota: int) -> list[Span]:
        """Take spans from the head: at least one row, else within room and quota of cost."""
        spans: list[Span] = []
        tokens, rows = room.tokens, room.rows
        while self._spans and (not spans or min(tokens, rows, quota) > 0):
            head = self._spans.popleft()
            batch = self.batches[head.batch_id]
            reach = batch.reach(head.start, prompt_tokens=tokens, cost=quota)
            stop = min(head.stop, head.start + rows, reach)
            if stop <= head.start:
                if spans:
                    self._spans.appendleft(head)
                    break
                stop = head.start + 1
            taken = head._replace(stop=stop)
            spans.append(taken)
            if stop < head.stop:
                self._spans.appendleft(head._replace(start=stop))
                break
            rows -= stop - head.start
            tokens -= int(batch.prompt_ends[stop] - batch.prompt_ends[head.start])
            quota -= self._cost(taken)
        self.cost -= sum(self._cost(s) for s in spans)
        return spans

    def _cost(self, span: Span) -> int:
        return self.batches[span.batch_id].cost_between(span.start, span.stop)
