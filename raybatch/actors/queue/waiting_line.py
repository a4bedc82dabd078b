"""Rows of a pool that wait: for any replica, for the one that has their prefix, or to run alone.

A group is live where rows of it are held: there its prefix is in memory. For a while after its
last row the replica still counts as having it, since its cache may remember the prefix.

Rows wait in bundles that go together: members of one prefix group, or neighbours of none. Those
that run alone are suspects, which may have ended replicas, and the control.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field

from raybatch.actors.queue.row_states import ALONE, RowStates
from raybatch.actors.wire.records import Room, Span

_MAX_PAST = 4096
# rows that may go to the replica of their group before earlier rows, until the group has its
# next turn in the line
_MAX_JOINED = 1024

Batches = Mapping[int, RowStates]
_Alone = tuple[Span, ...]


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


class PrefixAffinity:
    """Replicas of the groups that are live, and of the last few thousand that were."""

    def __init__(self) -> None:
        self.num_cuts = 0
        self.cut_tokens = 0
        self._live: dict[int, list[int]] = {}
        # oldest first
        self._past: dict[int, int] = {}
        self._joined: dict[int, int] = {}

    def of(self, group: int) -> int | None:
        """Return the first replica that got rows of a group, None where none is known."""
        live = self._live.get(group)
        return live[0] if live else self._past.get(group)

    def groups(self) -> tuple[Set[int], Set[int]]:
        """Return all groups of which a replica is known: those that are live, and the others."""
        return self._live.keys(), self._past.keys()

    def start(
        self, replica_id: int, started: Iterable[tuple[int, int]], *, is_computed: bool = True
    ) -> None:
        """Note groups that a replica had no rows of, each with the tokens of its prefix.

        The prefix of a row that comes with its KV is not computed once more.
        """
        for group, prefix_len in started:
            self._past.pop(group, None)
            replica_ids = self._live.setdefault(group, [])
            if replica_ids and is_computed:
                self.num_cuts += 1
                self.cut_tokens += prefix_len
            replica_ids.append(replica_id)

    def end(self, replica_id: int, groups: Iterable[int]) -> None:
        """Note groups whose last row at a replica is done."""
        for group in groups:
            self.leave(replica_id, [group])
            if group not in self._live:
                self._past[group] = replica_id
        while len(self._past) > _MAX_PAST:
            group = next(iter(self._past))
            del self._past[group]
            self._joined.pop(group, None)

    def leave(self, replica_id: int, groups: Iterable[int]) -> None:
        """Note groups whose rows a replica has given back; it is not theirs any more."""
        for group in groups:
            live = self._live[group]
            live.remove(replica_id)
            if not live:
                del self._live[group]

    def forget(self, replica_id: int, groups: Iterable[int]) -> None:
        """Note that a replica is gone, which had rows of `groups`."""
        self.leave(replica_id, groups)
        self._past = {g: r for g, r in self._past.items() if r != replica_id}
        self._joined = {g: n for g, n in self._joined.items() if self.of(g) is not None}

    def join(self, group: int, num_rows: int) -> int | None:
        """Return the replica that more rows of a group may go to at once.

        None where none is known, and when so many have done so that those who wait would starve.
        """
        replica_id = self.of(group)
        num_joined = self._joined.get(group, 0)
        if replica_id is None or num_joined >= _MAX_JOINED:
            return None
        self._joined[group] = num_joined + num_rows
        return replica_id

    def take_turn(self, group: int) -> None:
        """Note that a group is at the head of the line, so that more rows may join it again."""
        self._joined.pop(group, None)


class NoRanges:
    """What a line asks about rows that only some replicas are to take: here any may take any."""

    def sort(self, line: "WaitingLine", rooms: Mapping[int, Room]) -> Mapping[int, Room]:
        """Put rows of the line of all into lines of replicas; return what is to be handed out."""
        return rooms

    def has_waiting(self, line: "WaitingLine") -> bool:
        """Return whether rows wait in lines of replicas although others may take them."""
        return False

    def may_take(self, replica_id: int, of: int) -> bool:
        """Return whether a replica may have rows that wait for another one."""
        return True


class WaitingLine:
    """One line for all replicas, and one for each replica with the rest of its groups.

    A row whose group has a replica goes to the replica's own line. That is served first, by its
    replica, and by others before they would idle.
    """

    def __init__(self, batches: Batches, affinity: PrefixAffinity) -> None:
        self.batches = batches
        self.fresh = BundleLine(batches)
        self.affinity = affinity
        self.ranges = NoRanges()
        self._own: dict[int, BundleLine] = {}

    def __bool__(self) -> bool:
        return bool(self.fresh) or any(self._own.values())

    def own(self, replica_id: int) -> BundleLine:
        if replica_id not in self._own:
            self._own[replica_id] = BundleLine(self.batches)
        return self._own[replica_id]

    def others(self, replica_id: int) -> list[int]:
        """Return the other replicas in whose own lines rows wait, most cost first."""
        ids = [r for r, line in self._own.items() if line and r != replica_id]
        ids = [r for r in ids if self.ranges.may_take(replica_id, r)]
        return sorted(ids, key=lambda r: -self._own[r].cost)

    def cost_for(self, replica_ids: Iterable[int]) -> int:
        """Return the cost of all rows that wait for any of these replicas, prefixes included."""
        own = sum(self._own[r].cost for r in replica_ids if r in self._own)
        return self.fresh.cost + self.fresh.prefix_tokens + own

    def num_rows(self) -> int:
        return self.fresh.num_rows + sum(line.num_rows for line in self._own.values())

    def add(self, span: Span, *, is_new: bool = False) -> None:
        """Add rows behind all others, or where other members of their group are.

        With `is_new` they are to be grouped before they are handed out.
        """
        batch = self.batches[span.batch_id]
        for start, stop in batch.runs(span.start, span.stop):
            replica_id = self.affinity.join(int(batch.group[start]), stop - start)
            line = self.fresh if replica_id is None else self.own(replica_id)
            line.add(Span(span.batch_id, start, stop), is_new=is_new and replica_id is None)

    def put_back(self, spans: Sequence[Span]) -> None:
        """Add rows that were handed out, in this order, before all others."""
        for span in reversed(spans):
            batch = self.batches[span.batch_id]
            for start, stop in reversed(batch.runs(span.start, span.stop)):
                replica_id = self.affinity.of(int(batch.group[start]))
                line = self.fresh if replica_id is None else self.own(replica_id)
                line.add(Span(span.batch_id, start, stop), at_head=True)

    def release(self, replica_id: int) -> None:
        """Return the rows of a replica that is gone to the line of all."""
        for bundle in reversed(self.own(replica_id).take_all()):
            for span in reversed(bundle.spans):
                self.fresh.add(span, at_head=True)
        del self._own[replica_id]

    def free(self, replica_id: int, groups: Iterable[int]) -> None:
        """Return the waiting rows of groups that a replica gave back to the line of all."""
        line = self.own(replica_id)
        for group in groups:
            if group in line.groups():
                for span in reversed(line.pop_group(group).spans):
                    self.fresh.add(span, at_head=True)

    def remove_batch(self, batch_id: int) -> None:
        """Take all rows of one batch out. Complexity: O(spans in the line)."""
        for line in (self.fresh, *self._own.values()):
            line.remove_batch(batch_id)

    def reweigh(self) -> None:
        """Sum up anew what waits, after the cost of rows has changed. O(spans in the line)."""
        for line in (self.fresh, *self._own.values()):
            line.reweigh()

    def take_at(self, place: float) -> Span:
        """Take out the row at a place between 0, the head, and 1, the last row."""
        row = round(place * (self.num_rows() - 1))
        for line in (self.fresh, *self._own.values()):
            if row < line.num_rows:
                return line.take_row(row)
            row -= line.num_rows
        raise IndexError("no row waits")


class Isolation:
    """Sets of suspects in the order in which they run, and at most one control before them."""

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
