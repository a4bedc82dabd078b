"""Rows that a replica runs alone: suspects, which may have ended replicas, and the control."""

from collections import deque
from collections.abc import Iterator

from raybatch.actors.wire.records import Span

_Alone = tuple[Span, ...]


class Isolation:
    """Sets of suspects in the order in which they are tried, and at most one control before them.

    Attributes:
        control: row that waits as the control.
    """

    def __init__(self) -> None:
        self.control: Span | None = None
        self._suspects: deque[_Alone] = deque()

    def __bool__(self) -> bool:
        return self.control is not None or bool(self._suspects)

    def __iter__(self) -> Iterator[Span]:
        """Yield all rows that wait here."""
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
        """Put what a replica had alone, and has not started, before all others."""
        if is_control:
            (self.control,) = spans
        else:
            self._suspects.appendleft(tuple(spans))

    def take(self) -> _Alone:
        """Take what a replica without rows is to run alone; nothing when all else may run."""
        if self.control is not None:
            control, self.control = self.control, None
            return (control,)
        return self._suspects.popleft() if self._suspects else ()

    def drop(self, batch_id: int) -> None:
        """Take the rows of one batch out."""
        kept = (tuple(s for s in spans if s.batch_id != batch_id) for spans in self._suspects)
        self._suspects = deque(spans for spans in kept if spans)
        if self.control is not None and self.control.batch_id == batch_id:
            self.control = None
