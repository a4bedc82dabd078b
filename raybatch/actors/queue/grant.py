"""Selects the waiting rows that one replica gets in one pull.

The replica's own queue goes first: members of groups that it has. Then come whole groups from the
shared queue that fit its credit and its fair share. A group above the share stays for another
replica, and a later one takes its place. A group above any credit is cut; its rest goes to the same
replica. A replica takes rows from queues of others only if it would idle otherwise.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from raybatch.actors.queue.pulling import CUT_WORTH
from raybatch.actors.queue.row_states import ALONE, ReplicaLoad
from raybatch.actors.queue.waiting_queues import GroupBatch, GroupQueue, WaitingQueues
from raybatch.actors.wire.records import Credit, RowRange
from raybatch.policy.pool.plan import rebalancing_cost, share_of

# a group may exceed the share by this part of it; over four replicas that is below 5 % of the load
_SLACK = 1 / 64
# group batches to try behind a head that does not fit the share
_LOOK_AHEAD = 64
# pulls that may skip a group batch before it goes regardless of the share
_MAX_PASSED = 8


def share_out(
    waiting: WaitingQueues,
    credits: Mapping[int, Credit],
    load_of: Callable[[int], ReplicaLoad],
    num_expected: int,
    speed_of: Callable[[int], float],
) -> Iterator[tuple[int, list[RowRange]]]:
    """Divide waiting rows among replicas that pull; yield (replica id, row ranges) of each.

    The caller must note the rows of a replica as held before it asks for the next one.

    Args:
        credits: credit of each replica that pulls, in the order in which they get rows.
        load_of: returns the load of a replica.
        num_expected: number of replicas that will pull soon, for which shares are left.
        speed_of: returns the speed of a replica, 1 for the usual one; shares are proportional.
    """
    left = list(credits)
    while left and waiting:
        # rows above one share reduce the shares of the others
        level = waiting.cost_for(credits) + sum(load_of(r).cost for r in left)
        replica_id = left.pop(0)
        others = (*map(speed_of, left), float(num_expected))
        share = share_of(level, speed_of(replica_id), others)
        own = waiting.own(replica_id)
        quota = share - load_of(replica_id).cost - own.cost
        if quota > 0 or not num_expected or own:
            credit = credits[replica_id]
            grant = Grant(waiting, replica_id, load_of, speed_of, credit, credits, quota, share)
            row_ranges = grant.take()
            if row_ranges:
                yield replica_id, row_ranges


@dataclass(slots=True)
class Grant:
    """Selects rows for one pull of one replica: call `take` once.

    Args:
        credit: rows and prompt tokens that the replica asks for.
        pulling: replicas that get rows in the same dispatch.
        quota: largest cost to take from the shared queue; below 0 if the replica has its share.
        share: cost that the replica should have in total.
    """

    waiting: WaitingQueues
    replica_id: int
    load_of: Callable[[int], ReplicaLoad]
    speed_of: Callable[[int], float]
    credit: Credit
    pulling: Container[int]
    quota: int
    share: int
    row_ranges: list[RowRange] = field(default_factory=list)
    _tokens: int = field(init=False)
    _rows: int = field(init=False)

    def __post_init__(self) -> None:
        self._tokens, self._rows = self.credit.tokens, self.credit.rows

    def take(self) -> list[RowRange]:
        """Remove and return rows: at least one if any waiting row may go to this replica."""
        own = self.waiting.own(self.replica_id)
        while own and self._has_credit():
            if not self._take_whole(own, 0) and not self._take_part(own, 0, self.share):
                break
        if self._has_credit():
            self._take_shared()
        if not self.row_ranges and self.waiting.shared:
            # the head goes even above the quota, and is not cut: a group that is large now may be a
            # small part of later rows
            shared = self.waiting.shared
            if shared[0].group == ALONE:
                self._take_part(shared, 0, self.quota)
            elif not self._take_whole(shared, 0):
                self._take_part(shared, 0, self.share)
        if not self.row_ranges:
            self._take_from_others()
        return self.row_ranges

    def _take_shared(self) -> None:
        """Take rows from the shared queue within credit and quota."""
        shared, place = self.waiting.shared, 0
        slack = max(0, int(self.share * _SLACK))
        while place < min(len(shared), _LOOK_AHEAD) and self._has_credit() and self.quota > 0:
            group_batch = shared[place]
            if group_batch.group == ALONE:
                if not self._take_part(shared, place, self.quota):
                    return
            elif self._price(group_batch) > self.quota + slack:
                if group_batch.num_passed >= _MAX_PASSED:
                    return
                group_batch.num_passed += 1
                place += 1
            elif not self._take_whole(shared, place):
                # a group above the credit is cut, if it is the first of a pull
                is_cut = not self.row_ranges and self._take_part(shared, place, self.share)
                if not is_cut:
                    return

    def _take_from_others(self) -> None:
        """Take rows that are reserved for other replicas."""
        for replica_id in self.waiting.others(self.replica_id):
            own = self.waiting.own(replica_id)
            for place in range(len(own) - 1, max(-1, len(own) - 1 - _LOOK_AHEAD), -1):
                if self._take_reserved(replica_id, own, place):
                    return

    def _take_reserved(self, replica_id: int, own: GroupQueue, place: int) -> bool:
        """Take a part that is worth another prefix computation, or all if no replica has it."""
        group_batch, victim = own[place], self.load_of(replica_id)
        has_prefix = group_batch.group in victim.groups
        limit = rebalancing_cost(
            (victim.cost + own.cost, self.speed_of(replica_id)),
            (self.load_of(self.replica_id).cost, self.speed_of(self.replica_id)),
        )
        if replica_id in self.pulling:
            limit = min(limit, self.quota)
        elif not has_prefix:
            limit = self._price(group_batch)
        prefix_len = self._prefix_price(group_batch)
        least = CUT_WORTH * prefix_len if has_prefix else 1
        if (
            group_batch.cost >= least
            and self._price(group_batch) <= limit
            and self._take_whole(own, place)
        ):
            return True
        budget = min(limit - prefix_len, group_batch.cost)
        if budget < max(1, least):
            return False
        self._take_part(own, place, budget)
        return bool(self.row_ranges)

    def _take_whole(self, queue: GroupQueue, place: int) -> bool:
        """Take a group batch if it fits the credit.

        The first of a pull may use twice the credit, and so may the rest of a group that has
        started: a second pull would delay its prefix.
        """
        group_batch = queue[place]
        tokens = group_batch.tokens + self._prefix_price(group_batch)
        is_strict = bool(self.row_ranges) and queue is self.waiting.shared
        if tokens > self._tokens + (0 if is_strict else self.credit.tokens):
            return False
        if group_batch.num_rows > self._rows + (0 if is_strict else self.credit.rows):
            return False
        self._note(queue, queue.pop(place), group_batch.row_ranges)
        return True

    def _take_part(self, queue: GroupQueue, place: int, cost: int) -> bool:
        """Take the first rows of a group batch; return whether it is used up.

        The other members of a group from the shared queue go to this replica's own queue.
        """
        group_batch = queue[place]
        at_least = 0 if self.row_ranges else 1
        row_ranges = queue.cut(
            place, tokens=self._tokens, rows=self._rows, cost=cost, at_least=at_least
        )
        if not row_ranges:
            return False
        self._note(queue, group_batch, row_ranges)
        is_cut = bool(group_batch.row_ranges)
        if is_cut and queue is self.waiting.shared and group_batch.group != ALONE:
            own = self.waiting.own(self.replica_id)
            for row_range in reversed(queue.pop(place).row_ranges):
                own.add(row_range, at_head=True)
        return not is_cut

    def _note(
        self, queue: GroupQueue, group_batch: GroupBatch, row_ranges: Iterable[RowRange]
    ) -> None:
        """Subtract rows of a group batch, and their prefix, from tokens and quota."""
        prefix_len = self._prefix_price(group_batch)
        self._tokens -= prefix_len
        self.quota -= prefix_len
        if queue is self.waiting.shared:
            self.waiting.affinity.take_turn(group_batch.group)
        self.row_ranges += row_ranges
        for row_range in row_ranges:
            batch = self.waiting.batches[row_range.batch_id]
            self._rows -= row_range.stop - row_range.start
            self._tokens -= batch.tokens_between(row_range.start, row_range.stop)
            self.quota -= batch.cost_between(row_range.start, row_range.stop)

    def _has_credit(self) -> bool:
        return not self.row_ranges or min(self._tokens, self._rows) > 0

    def _price(self, group_batch: GroupBatch) -> int:
        return group_batch.cost + self._prefix_price(group_batch)

    def _prefix_price(self, group_batch: GroupBatch) -> int:
        is_here = group_batch.group in self.load_of(self.replica_id).groups
        return 0 if is_here else group_batch.prefix_len
