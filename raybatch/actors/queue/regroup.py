"""Keeps the rows that wait without a plan in groups, as far as those in flight show; no Ray.

New rows join a group that waits or has a replica, if that covers most of their prompt. The
others wait ungrouped behind all, until they are a quarter of the line or have come to its head.
Then the line is grouped and ordered afresh:

    before   | g5 | g2 | g7 | new rows |
    after    | oldest | g9 | g7 | g2 | g8 |     rows of g5, g2, g7 and new ones, most output first

So a row takes part in a few groupings, whatever the length of the line. After some it counts as
old: old bundles go first, in the order they are in, and later rows cannot hold them up.
"""

from itertools import compress, pairwise

import numpy as np
import numpy.typing as npt

from raybatch.actors.queue.row_states import ALONE, spans_of
from raybatch.actors.queue.waiting_line import Batches, Bundle, PrefixAffinity, WaitingLine
from raybatch.actors.wire.records import Span
from raybatch.prefix.block_keys import BlockKeys
from raybatch.prefix.in_flight import match_prefixes, plan_in_flight
from raybatch.records.arrays import Ints

_NEW_FRACTION = 1 / 4
# groupings that a row takes part in before it is old
_MAX_GROUPINGS = 4
# of a prompt, so that a short live prefix does not keep a row from a longer one that waits
_MIN_JOINED_FRACTION = 1 / 2


class Regrouping:
    """Adds row batches to the line, and groups what waits there."""

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
        for span in spans:
            for start, stop in batch.runs(span.start, span.stop):
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
        fresh = self._line.fresh
        bundles = fresh.take_all()
        young = [bundle for bundle in bundles if bundle.arrival >= oldest]
        has_keys = [self._batches[u.spans[0].batch_id].keys is not None for u in young]
        first = has_keys.index(True) if any(has_keys) else len(young)
        for bundle in [bundle for bundle in bundles if bundle.arrival < oldest] + young[:first]:
            fresh.insert(bundle)
        self._add_grouped(list(compress(young, has_keys)))
        for bundle, is_grouped in zip(young[first:], has_keys[first:], strict=True):
            if not is_grouped:
                fresh.insert(bundle)

    def _add_grouped(self, bundles: list[Bundle]) -> None:
        """Plan the rows of these bundles, and add them to the line in the order of the plan."""
        spans = sorted(span for bundle in bundles for span in bundle.spans)
        if not spans:
            return
        batch_ids = np.repeat([s.batch_id for s in spans], [s.stop - s.start for s in spans])
        rows = np.concatenate([np.arange(s.start, s.stop) for s in spans])
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
        alone: Bundle | None = None
        columns = (batch_ids, rows - np.arange(len(rows)), groups)
        is_border = np.logical_or.reduce([np.diff(column) != 0 for column in columns])
        for start, stop in pairwise([0, *(np.flatnonzero(is_border) + 1).tolist(), len(rows)]):
            first = int(rows[start])
            span = Span(int(batch_ids[start]), first, first + stop - start)
            arrival = self._batches[span.batch_id].arrival
            if groups[start] != ALONE:
                alone = None
                self._line.add(span)
                continue
            if alone is None or alone.arrival != arrival:
                alone = Bundle(ALONE, arrival=arrival)
                self._line.fresh.insert(alone)
            self._line.fresh.extend(alone, span)
