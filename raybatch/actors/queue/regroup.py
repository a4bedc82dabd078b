"""Groups unplanned waiting rows by the prefixes of all rows in flight; no Ray.

New rows join a group that waits or has a replica, if its prefix covers most of their prompt. Others
wait ungrouped at the end, until they are a quarter of the queue or reach its head. Then the queue
is grouped and ordered again:

    before   | g5 | g2 | g7 | new rows |
    after    | oldest | g9 | g7 | g2 | g8 |     rows of g5, g2, g7 and new ones, most output first

So a row takes part in a few groupings, at any length of the queue. Then it counts as old: old group
batches go first, in their order, and later rows cannot delay them.
"""

from itertools import compress, pairwise

import numpy as np
import numpy.typing as npt

from raybatch.actors.queue.row_states import ALONE, row_ranges_of
from raybatch.actors.queue.waiting_queues import Batches, GroupBatch, PrefixAffinity, WaitingQueues
from raybatch.actors.wire.records import RowRange
from raybatch.prefix.block_keys import BlockKeys
from raybatch.prefix.plan import match_prefixes, plan_in_flight
from raybatch.records.arrays import Ints

_NEW_FRACTION = 1 / 4
# groupings of a row before it is old
_MAX_GROUPINGS = 4
# share of a prompt; a short live prefix must not keep a row from a longer waiting one
_MIN_JOINED_FRACTION = 1 / 2


class Regrouping:
    """Adds row batches to the waiting queues (`add`), and forms their prefix groups (`refresh`)."""

    def __init__(self, batches: Batches, waiting: WaitingQueues, affinity: PrefixAffinity) -> None:
        self.num_groupings = 0
        self._batches = batches
        self._waiting = waiting
        self._affinity = affinity
        self._num_new = 0

    def add(self, batch_id: int, rows: npt.NDArray[np.intp]) -> None:
        """Add rows of a new batch to the queues; rows with a plan keep the groups of the plan."""
        batch = self._batches[batch_id]
        row_ranges = row_ranges_of(batch_id, rows)
        if batch.keys is None:
            for row_range in row_ranges:
                self._waiting.add(row_range)
            return
        known = (self._waiting.shared.groups(), *self._affinity.groups())
        group, prefix = match_prefixes(batch.keys, known)
        joins = (group >= 0) & (prefix >= batch.prompt * _MIN_JOINED_FRACTION)
        batch.assign(np.flatnonzero(joins), group[joins], prefix[joins])
        for row_range in row_ranges:
            for start, stop in batch.runs(row_range.start, row_range.stop):
                is_new = not joins[start]
                self._waiting.add(RowRange(batch_id, start, stop), is_new=is_new)
                self._num_new += (stop - start) * is_new

    def refresh(self) -> None:
        """Form groups in the shared queue again if enough rows are new; near-linear time."""
        shared = self._waiting.shared
        if not self._num_new or not shared:
            return
        if self._num_new >= shared.num_rows * _NEW_FRACTION or shared[0].is_new:
            self._num_new = 0
            self.num_groupings += 1
            self._regroup()

    def _regroup(self) -> None:
        oldest = self.num_groupings - _MAX_GROUPINGS
        shared = self._waiting.shared
        group_batches = shared.take_all()
        young = [group_batch for group_batch in group_batches if group_batch.arrival >= oldest]
        has_keys = [self._batches[u.row_ranges[0].batch_id].keys is not None for u in young]
        first = has_keys.index(True) if any(has_keys) else len(young)
        for group_batch in [
            group_batch for group_batch in group_batches if group_batch.arrival < oldest
        ] + young[:first]:
            shared.insert(group_batch)
        self._add_grouped(list(compress(young, has_keys)))
        for group_batch, is_grouped in zip(young[first:], has_keys[first:], strict=True):
            if not is_grouped:
                shared.insert(group_batch)

    def _add_grouped(self, group_batches: list[GroupBatch]) -> None:
        """Plan the rows of these group batches, and queue them in the order of the plan."""
        row_ranges = sorted(
            row_range for group_batch in group_batches for row_range in group_batch.row_ranges
        )
        if not row_ranges:
            return
        batch_ids = np.repeat(
            [s.batch_id for s in row_ranges], [s.stop - s.start for s in row_ranges]
        )
        rows = np.concatenate([np.arange(s.start, s.stop) for s in row_ranges])
        borders = [*np.unique(batch_ids, return_index=True)[1].tolist(), len(rows)]
        parts = [(self._batches[int(batch_ids[a])], rows[a:b]) for a, b in pairwise(borders)]
        kept = [batch.keys.take(of_batch) for batch, of_batch in parts if batch.keys is not None]
        assert len(kept) == len(parts), "only rows with block keys are grouped"
        keys = BlockKeys.concat(kept)
        outputs = np.concatenate([batch.output[of_batch] for batch, of_batch in parts])
        plan = plan_in_flight(keys, outputs)
        for (batch, of_batch), (a, b) in zip(parts, pairwise(borders), strict=True):
            batch.assign(of_batch, plan.group_id[a:b], plan.prefix_len[a:b])
        ordered = (column[plan.order] for column in (batch_ids, rows, plan.group_id))
        self._add_in_order(*ordered)

    def _add_in_order(self, batch_ids: Ints, rows: Ints, groups: Ints) -> None:
        alone: GroupBatch | None = None
        columns = (batch_ids, rows - np.arange(len(rows)), groups)
        is_border = np.logical_or.reduce([np.diff(column) != 0 for column in columns])
        for start, stop in pairwise([0, *(np.flatnonzero(is_border) + 1).tolist(), len(rows)]):
            first = int(rows[start])
            row_range = RowRange(int(batch_ids[start]), first, first + stop - start)
            arrival = self._batches[row_range.batch_id].arrival
            if groups[start] != ALONE:
                alone = None
                self._waiting.add(row_range)
                continue
            if alone is None or alone.arrival != arrival:
                alone = GroupBatch(ALONE, arrival=arrival)
                self._waiting.shared.insert(alone)
            self._waiting.shared.extend(alone, row_range)
