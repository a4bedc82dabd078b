"""Keeps the rows that wait without a plan in groups, as far as those in flight show; no Ray.

New rows join a group that waits or has a home, if that covers most of their prompt. The
others wait ungrouped behind all, until they are a quarter of the line or have come to its head.
Then the line is grouped and ordered afresh:

    before   | g5 | g2 | g7 | new rows |
    after    | oldest | g9 | g7 | g2 | g8 |     rows of g5, g2, g7 and new ones, most output first

So a row takes part in a few groupings, whatever the length of the line. After some it counts as
old: old bundles go first, in the order they are in, and later rows cannot hold them up.
"""

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from raybatch.actors.queue.affinity import PrefixAffinity
from raybatch.actors.queue.bundle_line import Batches, Bundle
from raybatch.actors.queue.row_states import ALONE, RowStates, spans_of
from raybatch.actors.queue.waiting_line import WaitingLine
from raybatch.actors.wire.records import Span
from raybatch.prefix.block_keys import BlockKeys
from raybatch.prefix.in_flight import match_prefixes, plan_in_flight

_NEW_FRACTION = 1 / 4
# groupings that a row takes part in before it is old
_MAX_GROUPINGS = 4
# of a prompt, so that a short live prefix does not keep a row from a longer one that waits
_MIN_JOINED_FRACTION = 1 / 2

_Int64s = npt.NDArray[np.int64]


class Regrouping:
    """Adds row batches to the line, and groups what waits there.

    Attributes:
        num_groupings: how often the line was grouped.
    """

    def __init__(self, batches: Batches, line: WaitingLine, affinity: PrefixAffinity) -> None:
        self.num_groupings = 0
        self._batches = batches
        self._line = line
        self._affinity = affinity
        self._num_new = 0

    def add(self, batch_id: int, rows: npt.NDArray[np.intp]) -> None:
        """Add rows of a new batch to the line; planned rows stay in the groups that they have."""
        batch = self._batches[batch_id]
        spans = spans_of(batch_id, rows)
        if batch.keys is None:
            for span in spans:
                self._line.add(span)
            return
        known = (self._line.fresh.groups(), *self._affinity.groups())
        group, prefix = match_prefixes(batch.keys, known)
        joins = (group >= 0) & (prefix >= batch.prompt * _MIN_JOINED_FRACTION)
        batch.assign(np.flatnonzero(joins), group[joins], prefix[joins])
        runs = [run for span in spans for run in batch.runs(span.start, span.stop)]
        for start, stop in runs:
            is_new = not joins[start]
            self._line.add(Span(batch_id, start, stop), is_new=is_new)
            self._num_new += (stop - start) * is_new

    def refresh(self) -> None:
        """Group the line afresh if enough of it is new. Complexity: near-linear in the line."""
        fresh = self._line.fresh
        if not self._num_new or not fresh:
            return
        if self._num_new >= fresh.num_rows * _NEW_FRACTION or fresh[0].is_new:
            self._num_new = 0
            self.num_groupings += 1
            self._regroup()

    def _regroup(self) -> None:
        oldest = self.num_groupings - _MAX_GROUPINGS
        bundles = self._line.fresh.take_all()
        planned = [u for u in bundles if u.arrival >= oldest and self._has_keys(u)]
        others = [u for u in bundles if u.arrival >= oldest and not self._has_keys(u)]
        first = bundles.index(planned[0]) if planned else 0
        before = set(bundles[:first])
        for bundle in bundles:
            if bundle.arrival < oldest:
                self._line.fresh.insert(bundle)
        for bundle in others:
            if bundle in before:
                self._line.fresh.insert(bundle)
        self._add_grouped(planned)
        for bundle in others:
            if bundle not in before:
                self._line.fresh.insert(bundle)

    def _has_keys(self, bundle: Bundle) -> bool:
        return self._batches[bundle.spans[0].batch_id].keys is not None

    def _add_grouped(self, bundles: list[Bundle]) -> None:
        """Plan the rows of these bundles, and add them to the line in the order of the plan."""
        spans = sorted(span for bundle in bundles for span in bundle.spans)
        if not spans:
            return
        batch_ids = np.repeat([s.batch_id for s in spans], [s.stop - s.start for s in spans])
        rows = np.concatenate([np.arange(s.start, s.stop) for s in spans])
        batches = np.unique(batch_ids, return_index=True)[1].tolist()
        parts = [
            (self._batches[int(batch_ids[a])], rows[a:b])
            for a, b in pairwise([*batches, len(rows)])
        ]
        keys = BlockKeys.concat([_keys_of(batch, of_batch) for batch, of_batch in parts])
        outputs = np.concatenate([batch.output[of_batch] for batch, of_batch in parts])
        plan = plan_in_flight(keys, outputs)
        start = 0
        for batch, of_batch in parts:
            here = slice(start, start + len(of_batch))
            batch.assign(of_batch, plan.group_id[here], plan.prefix_len[here])
            start += len(of_batch)
        ordered = (column[plan.order] for column in (batch_ids, rows, plan.group_id))
        self._add_in_order(*ordered)

    def _add_in_order(self, batch_ids: _Int64s, rows: _Int64s, groups: _Int64s) -> None:
        fresh = self._line.fresh
        alone: Bundle | None = None
        for start, stop in _runs((batch_ids, rows - np.arange(len(rows)), groups)):
            first = int(rows[start])
            span = Span(int(batch_ids[start]), first, first + stop - start)
            arrival = self._batches[span.batch_id].arrival
            if groups[start] != ALONE:
                alone = None
                self._line.add(span)
            elif alone is not None and alone.arrival == arrival:
                fresh.extend(alone, span)
            else:
                alone = Bundle(ALONE, arrival=arrival)
                fresh.insert(alone)
                fresh.extend(alone, span)


def _keys_of(batch: RowStates, rows: _Int64s) -> BlockKeys:
    if batch.keys is None:
        raise AssertionError("only rows with block keys are grouped")
    return batch.keys.take(rows)


def _runs(columns: tuple[_Int64s, ...]) -> list[tuple[int, int]]:
    """Return the runs of rows in which every column stays the same."""
    is_border = np.logical_or.reduce([np.diff(column) != 0 for column in columns])
    ends = [0, *(np.flatnonzero(is_border) + 1).tolist(), len(columns[0])]
    return list(pairwise(ends))
