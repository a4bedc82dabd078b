"""What one replica takes out of the waiting line in one pull.

Its own line goes first: members of groups that it has. Then whole groups from the line of all, as
long as they fit its room and its fair share; a group that does not fit the share stays for another
replica, and one further back takes its place. A group that fits no room is cut: the replica has
the next pull of it, too. Only where a replica would idle does it take rows of a group of another.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from raybatch.actors.queue.pulling import CUT_WORTH
from raybatch.actors.queue.row_states import ALONE, ReplicaLoad
from raybatch.actors.queue.waiting_line import Bundle, BundleLine, WaitingLine
from raybatch.actors.wire.records import Room, Span
from raybatch.policy.pool.plan import levelling_cost, share_of

# a group may exceed the share by this part of it; what that adds up to over four replicas is less
# than 5 % of the load
_SLACK = 1 / 64
# bundles behind the head that are tried when the head does not fit the share
_LOOK_AHEAD = 64
# pulls in which a bundle is passed over, before it goes whatever the share
_MAX_PASSED = 8


def share_out(
    line: WaitingLine,
    rooms: Mapping[int, Room],
    load_of: Callable[[int], ReplicaLoad],
    num_expected: int,
    speed_of: Callable[[int], float],
) -> Iterator[tuple[int, list[Span]]]:
    """Yield what replicas take out of the line; each is to be handed out before the next one.

    Args:
        rooms: of the replicas that pull, in the order in which they take.
        num_expected: replicas that will pull soon, for which a share is left.
        speed_of: a replica, beside one of usual speed; one that is twice as fast has twice the
            share.
    """
    left = list(rooms)
    while left and line:
        # what one has taken above its share is taken off the others'
        level = line.cost_for(rooms) + sum(load_of(r).cost for r in left)
        replica_id = left.pop(0)
        others = (*map(speed_of, left), float(num_expected))
        share = share_of(level, speed_of(replica_id), others)
        own = line.own(replica_id)
        quota = share - load_of(replica_id).cost - own.cost
        if quota > 0 or not num_expected or own:
            room = rooms[replica_id]
            grant = Grant(line, replica_id, load_of, speed_of, room, rooms, quota, share)
            spans = grant.take()
            if spans:
                yield replica_id, spans


@dataclass(slots=True)
class Grant:
    """One pull of one replica; used once.

    Args:
        pulling: replicas that take in the same turn.
        quota: cost that it takes at most from the line of all, below 0 where it has too much.
    """

    line: WaitingLine
    replica_id: int
    load_of: Callable[[int], ReplicaLoad]
    speed_of: Callable[[int], float]
    room: Room
    pulling: Container[int]
    quota: int
    share: int
    spans: list[Span] = field(default_factory=list)
    _tokens: int = field(init=False)
    _rows: int = field(init=False)

    def __post_init__(self) -> None:
        self._tokens, self._rows = self.room.tokens, self.room.rows

    def take(self) -> list[Span]:
        """Take rows out of the line: at least one if any may go to this replica."""
        own = self.line.own(self.replica_id)
        while own and self._has_room():
            if not self._take_whole(own, 0) and not self._take_part(own, 0, self.share):
                break
        if self._has_room():
            self._take_fresh()
        if not self.spans and self.line.fresh:
            # its head goes above the quota, too, and is not cut: what is a large group now may be a
            # small part of the rows that follow
            fresh = self.line.fresh
            if fresh[0].group == ALONE:
                self._take_part(fresh, 0, self.quota)
            elif not self._take_whole(fresh, 0):
                self._take_part(fresh, 0, self.share)
        if not self.spans:
            self._take_from_others()
        return self.spans

    def _take_fresh(self) -> None:
        """Take from the line of all what fits room and quota."""
        fresh, place = self.line.fresh, 0
        slack = max(0, int(self.share * _SLACK))
        while place < min(len(fresh), _LOOK_AHEAD) and self._has_room() and self.quota > 0:
            bundle = fresh[place]
            if bundle.group == ALONE:
                if not self._take_part(fresh, place, self.quota):
                    return
            elif self._price(bundle) > self.quota + slack:
                if bundle.num_passed >= _MAX_PASSED:
                    return
                bundle.num_passed += 1
                place += 1
            elif not self._take_whole(fresh, place):
                # one that fits no room is cut, as the first of a pull
                is_cut = not self.spans and self._take_part(fresh, place, self.share)
                if not is_cut:
                    return

    def _take_from_others(self) -> None:
        """Take rows that are reserved for other replicas, where no others wait."""
        for replica_id in self.line.others(self.replica_id):
            own = self.line.own(replica_id)
            for place in range(len(own) - 1, max(-1, len(own) - 1 - _LOOK_AHEAD), -1):
                if self._take_reserved(replica_id, own, place):
                    return

    def _take_reserved(self, replica_id: int, own: BundleLine, place: int) -> bool:
        """Take the part of a bundle that is worth one more prefix, or all if no replica has it."""
        bundle, victim = own[place], self.load_of(replica_id)
        has_prefix = bundle.group in victim.groups
        limit = levelling_cost(
            (victim.cost + own.cost, self.speed_of(replica_id)),
            (self.load_of(self.replica_id).cost, self.speed_of(self.replica_id)),
        )
        if replica_id in self.pulling:
            limit = min(limit, self.quota)
        elif not has_prefix:
            limit = self._price(bundle)
        prefix_len = self._prefix_price(bundle)
        least = CUT_WORTH * prefix_len if has_prefix else 1
        if bundle.cost >= least and self._price(bundle) <= limit and self._take_whole(own, place):
            return True
        budget = min(limit - prefix_len, bundle.cost)
        if budget < max(1, least):
            return False
        self._take_part(own, place, budget)
        return bool(self.spans)

    def _take_whole(self, line: BundleLine, place: int) -> bool:
        """Take a bundle if it fits the room.

        The first of a pull may exceed the room by as much again, and so may the rest of a group
        that has started: it is better not to let a prefix wait for a second pull.
        """
        bundle = line[place]
        tokens = bundle.tokens + self._prefix_price(bundle)
        is_strict = bool(self.spans) and line is self.line.fresh
        if tokens > self._tokens + (0 if is_strict else self.room.tokens):
            return False
        if bundle.num_rows > self._rows + (0 if is_strict else self.room.rows):
            return False
        self._note(line, line.pop(place), bundle.spans)
        return True

    def _take_part(self, line: BundleLine, place: int, cost: int) -> bool:
        """Take the first rows of a bundle, and return whether it is used up.

        The other members of a group from the line of all go to this replica's own line.
        """
        bundle = line[place]
        at_least = 0 if self.spans else 1
        spans = line.cut(place, tokens=self._tokens, rows=self._rows, cost=cost, at_least=at_least)
        if not spans:
            return False
        self._note(line, bundle, spans)
        is_cut = bool(bundle.spans)
        if is_cut and line is self.line.fresh and bundle.group != ALONE:
            own = self.line.own(self.replica_id)
            for span in reversed(line.pop(place).spans):
                own.add(span, at_head=True)
        return not is_cut

    def _note(self, line: BundleLine, bundle: Bundle, spans: Iterable[Span]) -> None:
        """Take rows of a bundle off the room and the quota, with their prefix."""
        prefix_len = self._prefix_price(bundle)
        self._tokens -= prefix_len
        self.quota -= prefix_len
        if line is self.line.fresh:
            self.line.affinity.take_turn(bundle.group)
        self.spans += spans
        for span in spans:
            batch = self.line.batches[span.batch_id]
            self._rows -= span.stop - span.start
            self._tokens -= batch.tokens_between(span.start, span.stop)
            self.quota -= batch.cost_between(span.start, span.stop)

    def _has_room(self) -> bool:
        return not self.spans or min(self._tokens, self._rows) > 0

    def _price(self, bundle: Bundle) -> int:
        return bundle.cost + self._prefix_price(bundle)

    def _prefix_price(self, bundle: Bundle) -> int:
        is_here = bundle.group in self.load_of(self.replica_id).groups
        return 0 if is_here else bundle.prefix_len
