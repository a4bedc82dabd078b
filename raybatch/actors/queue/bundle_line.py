"""Waiting rows in bundles that go together: members of one prefix group, or neighbours of none."""

from collections import deque
from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from raybatch.actors.queue.row_states import ALONE, RowStates
from raybatch.actors.wire.records import Span

Batches = Mapping[int, RowStates]


@dataclass(slots=True, eq=False)
class Bundle:
    """Rows that wait together; the sums are over what they have beyond the prefix.

    Args:
        arrival: of the row batch that came first.
        is_new: came without a plan and was not grouped since.
        num_passed: pulls that took bundles behind it and not this one.
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


class BundleLine:
    """Bundles in the order in which they go, at most one of each group.

    The sums are over all bundles; `cost` is without prefixes.
    """

    def __init__(self, batches: Batches) -> None:
        self.num_rows = self.cost = self.prefix_tokens = 0
        self._batches = batches
        self._bundles: deque[Bundle] = deque()
        self._of_group: dict[int, Bundle] = {}

    def __len__(self) -> int:
        return len(self._bundles)

    def __getitem__(self, place: int) -> Bundle:
        """Return the bundle at a place; fast near the head."""
        return self._bundles[place]

    def groups(self) -> Set[int]:
        return self._of_group.keys()

    def add(self, span: Span, *, at_head: bool = False, is_new: bool = False) -> None:
        """Add rows of one group, to its other members or as a bundle at either end."""
        batch = self._batches[span.batch_id]
        group = int(batch.group[span.start])
        bundle = self._of_group.get(group)
        if bundle is None:
            prefix_len = int(batch.prefix[span.start])
            bundle = Bundle(group, prefix_len, arrival=batch.arrival, is_new=is_new)
            self.insert(bundle, at_head=at_head)
        self.extend(bundle, span, at_head=at_head)

    def insert(self, bundle: Bundle, *, at_head: bool = False) -> None:
        """Put a bundle behind or before all others; its group has no bundle here."""
        if bundle.group != ALONE:
            self._of_group[bundle.group] = bundle
        self.num_rows += bundle.num_rows
        self.cost += bundle.cost
        self.prefix_tokens += bundle.prefix_len
        put = self._bundles.appendleft if at_head else self._bundles.append
        put(bundle)

    def extend(self, bundle: Bundle, span: Span, *, at_head: bool = False) -> None:
        """Add rows to a bundle of this line, behind or before its others."""
        self._weigh(bundle, span, 1)
        bundle.arrival = min(bundle.arrival, self._batches[span.batch_id].arrival)
        put = bundle.spans.appendleft if at_head else bundle.spans.append
        put(span)

    def pop(self, place: int = 0) -> Bundle:
        bundle = self._bundles[place]
        del self._bundles[place]
        self._of_group.pop(bundle.group, None)
        self.num_rows -= bundle.num_rows
        self.cost -= bundle.cost
        self.prefix_tokens -= bundle.prefix_len
        return bundle

    def pop_group(self, group: int) -> Bundle:
        """Take the bundle of a group out. Complexity: O(bundles)."""
        return self.pop(self._bundles.index(self._of_group[group]))

    def cut(
        self, place: int, *, tokens: int, rows: int, cost: int, at_least: int = 0
    ) -> list[Span]:
        """Take the first rows of a bundle out, as many as stay within all budgets.

        `at_least` 1 takes one row even above the budgets.
        """
        bundle = self._bundles[place]
        taken: list[Span] = []
        while bundle.spans:
            head = bundle.spans[0]
            batch = self._batches[head.batch_id]
            reach = batch.reach(head.start, tokens=tokens, cost=cost)
            least = head.start + (0 if taken else at_least)
            stop = max(min(head.stop, head.start + rows, reach), least)
            if stop <= head.start:
                break
            piece = head._replace(stop=stop)
            taken.append(piece)
            bundle.spans.popleft()
            if stop < head.stop:
                bundle.spans.appendleft(head._replace(start=stop))
            self._weigh(bundle, piece, -1)
            rows -= stop - head.start
            tokens -= batch.tokens_between(head.start, stop)
            cost -= batch.cost_between(head.start, stop)
        if not bundle.spans:
            self.pop(place)
        return taken

    def take_row(self, row: int) -> Span:
        """Take out the row at a position among all rows. Complexity: O(rows in the line)."""
        for place, bundle in enumerate(self._bundles):
            for index, span in enumerate(bundle.spans):
                if row < span.stop - span.start:
                    taken = Span(span.batch_id, span.start + row, span.start + row + 1)
                    del bundle.spans[index]
                    for left in (span._replace(start=taken.stop), span._replace(stop=taken.start)):
                        if left.start < left.stop:
                            bundle.spans.insert(index, left)
                    self._weigh(bundle, taken, -1)
                    if not bundle.spans:
                        self.pop(place)
                    return taken
                row -= span.stop - span.start
        raise IndexError("the line has fewer rows")

    def remove_batch(self, batch_id: int) -> None:
        """Take all rows of one batch out. Complexity: O(spans in the line)."""
        for bundle in self._bundles:
            gone = [span for span in bundle.spans if span.batch_id == batch_id]
            for span in gone:
                self._weigh(bundle, span, -1)
            if gone:
                bundle.spans = deque(s for s in bundle.spans if s.batch_id != batch_id)
        for bundle in self.take_all():
            if bundle.spans:
                self.insert(bundle)

    def reweigh(self) -> None:
        """Sum up the cost of all bundles anew. O(spans in the line)."""
        self.cost = 0
        for bundle in self._bundles:
            costs = (self._batches[s.batch_id].cost_between(s.start, s.stop) for s in bundle.spans)
            bundle.cost = sum(costs)
            self.cost += bundle.cost

    def take_all(self) -> list[Bundle]:
        bundles = list(self._bundles)
        self._bundles.clear()
        self._of_group.clear()
        self.num_rows = self.cost = self.prefix_tokens = 0
        return bundles

    def _weigh(self, bundle: Bundle, span: Span, sign: int) -> None:
        batch = self._batches[span.batch_id]
        num_rows = sign * (span.stop - span.start)
        cost = sign * batch.cost_between(span.start, span.stop)
        bundle.num_rows += num_rows
        bundle.tokens += sign * batch.tokens_between(span.start, span.stop)
        bundle.cost += cost
        self.num_rows += num_rows
        self.cost += cost
