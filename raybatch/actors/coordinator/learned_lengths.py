"""Learns output lengths from the whole pool, and estimates those of open rows; no Ray.

    add -------> expected costs        assign ----> lengths for the engine, quantiles to check
    finished --> sketches, coverage    running ---> tokens so far, lower bounds of outputs

A length expected by a plan is used until the row runs.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from raybatch.actors.wire.columns import generated_lengths, has_error, to_numpy
from raybatch.actors.wire.records import LikelyLengths, RowRange, Submission
from raybatch.policy.lengths import LengthModel, RowKinds, bands
from raybatch.records.arrays import Bools, Floats, Ints
from raybatch.records.pool_stats import QuantileCoverage
from raybatch.records.types import TokenLengths

# quantiles whose coverage is reported
COVERED_SHARES = (0.1, 0.5, 0.9)
# lengths that an engine starts with; fewer miss the tail, which decides whether memory runs out
_NUM_LIKELY = 32
# members of a group in one row batch that justify a separate sketch
_MIN_GROUP_ROWS = 32
# growth of known outputs after which waiting rows are estimated again
_MORE_ROWS = 2.0
# outputs after which that happens at the latest
_AT_LEAST_EVERY_ROWS = 4096

_Rows = npt.NDArray[np.integer]


@dataclass(slots=True)
class _Batch:
    """Rows of one open batch.

    Args:
        max_tokens: limit of each sample of a row, int64 [rows].
        planned: total over samples that a plan expects, where `is_planned`.
        tokens: last reported length of the longest running sample; 0 while unknown.
        predicted: float32 [rows, shares]; NaN if nothing was known when a row was assigned.
    """

    kinds: RowKinds
    num_samples: Ints
    max_tokens: Ints
    planned: Ints
    is_planned: Bools
    tokens: Ints
    predicted: npt.NDArray[np.float32]


class _Run(NamedTuple):
    """Rows of a batch whose token counts have changed, [n] each."""

    kinds: RowKinds
    before: Ints
    now: Ints


@dataclass(slots=True)
class Coverage:
    """Counts how many outputs were shorter than, or at most, their predicted quantiles."""

    num_rows: int = 0
    num_below: Ints = field(default_factory=lambda: np.zeros(len(COVERED_SHARES), np.int64))
    num_at_most: Ints = field(default_factory=lambda: np.zeros(len(COVERED_SHARES), np.int64))

    def note(self, lengths: Ints, predicted: npt.NDArray[np.float32]) -> None:
        is_known = ~np.isnan(predicted[:, 0])
        of, quantiles = lengths[is_known, None], predicted[is_known]
        self.num_rows += len(of)
        self.num_below += (of < quantiles).sum(axis=0)
        self.num_at_most += (of <= quantiles).sum(axis=0)

    def quantiles(self) -> tuple[QuantileCoverage, ...]:
        """Return the counts of each predicted quantile, () if no length was predicted."""
        if not self.num_rows:
            return ()
        counts = zip(self.num_below.tolist(), self.num_at_most.tolist(), strict=True)
        return tuple(
            QuantileCoverage(
                share=share, num_rows=self.num_rows, num_below=below, num_at_most=at_most
            )
            for share, (below, at_most) in zip(COVERED_SHARES, counts, strict=True)
        )


class LearnedLengths:
    """Estimates output lengths of rows: `open` a batch, then note running and finished rows."""

    def __init__(self) -> None:
        self.model = LengthModel()
        self._batches: dict[int, _Batch] = {}
        # outputs of each client, and the count at which its waiting rows are estimated again
        self._num_ended: Counter[str] = Counter()
        self._due: defaultdict[str, int] = defaultdict(lambda: round(_MORE_ROWS))

    def __contains__(self, batch_id: int) -> bool:
        return batch_id in self._batches

    def open(self, batch_id: int, submission: Submission) -> Ints:
        """Add a row batch; return the expected output tokens of each row, over all samples."""
        bound, expected = submission.max_new_tokens, submission.expected_new_tokens
        num_rows = len(bound)
        samples = np.ones(num_rows, np.int64)
        if submission.num_samples is not None:
            samples = submission.num_samples.astype(np.int64)
        is_planned = np.zeros(num_rows, np.bool_)
        if expected is not None:
            is_planned = expected < bound
        planned = bound if expected is None else expected
        of_plan = bands(bound // samples, planned // samples, is_planned)
        groups = _large_groups(submission, num_rows)
        self._batches[batch_id] = batch = _Batch(
            kinds=RowKinds(client=submission.client, bands=of_plan, groups=groups),
            num_samples=samples,
            max_tokens=bound // samples,
            planned=planned,
            is_planned=is_planned,
            tokens=np.zeros(num_rows, np.int64),
            predicted=np.full((num_rows, len(COVERED_SHARES)), np.nan, np.float32),
        )
        return self._totals(batch, np.arange(num_rows))

    def close(self, batch_id: int) -> None:
        """Forget a batch whose rows have stopped."""
        if (batch := self._batches.pop(batch_id, None)) is not None:
            rows = np.flatnonzero(batch.tokens)
            self._note_runs([self._run(batch, rows, np.zeros(len(rows), np.int64))])

    def likely(self, batch_id: int, row_ranges: Sequence[RowRange]) -> LikelyLengths | None:
        """Return likely output lengths of rows, to send with them to an engine; None if unknown.

        Also records predicted quantiles, which `note_finished` compares with the actual lengths.
        """
        if (batch := self._batches.get(batch_id)) is None:
            return None
        rows = np.concatenate([np.arange(each.start, each.stop) for each in row_ranges])
        kinds, lengths = np.zeros(len(rows), np.int32), list[TokenLengths]([()])
        for distribution, at in self.model.distributions(batch.kinds.take(rows)):
            its = rows[at]
            # rows assigned again keep their first prediction
            first = its[np.isnan(batch.predicted[its, 0])]
            none = np.zeros(len(first), np.int64)
            quantiles = distribution.quantiles(COVERED_SHARES, none, batch.max_tokens[first])
            batch.predicted[first] = quantiles
            unplanned = at[~batch.is_planned[its]]
            if len(unplanned):
                kinds[unplanned] = len(lengths)
                longest = int(batch.max_tokens[rows[unplanned]].max())
                lengths.append(distribution.sample(_NUM_LIKELY, longest))
        return LikelyLengths(kinds=kinds, lengths=tuple(lengths)) if len(lengths) > 1 else None

    def note_running(self, note_report: Iterable[tuple[int, _Rows, _Rows]]) -> None:
        """Note the tokens so far of running rows, as (batch id, rows, tokens of each row)."""
        self._note_runs(
            [
                self._run(batch, rows, num_tokens)
                for batch_id, rows, num_tokens in note_report
                if (batch := self._batches.get(batch_id)) is not None
            ]
        )

    def note_finished(self, batch_id: int, results: pa.RecordBatch, coverage: Coverage) -> None:
        """Learn from results of an open batch, and count them in `coverage`."""
        is_error = has_error(results)
        if is_error.any():
            results = results.filter(pa.array(~is_error))
        rows = to_numpy(results.column("row"), np.int64)
        lengths = generated_lengths(results)
        is_cut = pc.equal(results.column("finish_reason"), "length")
        coverage.note(lengths, self._batches[batch_id].predicted[rows])
        self.note_lengths(batch_id, rows, lengths, to_numpy(is_cut, np.bool_))

    def note_lengths(self, batch_id: int, rows: Ints, lengths: Ints, is_cut: Bools) -> None:
        """Learn the lengths of finished samples; arrays are [n], with one entry per sample.

        Args:
            rows: row of each sample.
            lengths: its output tokens.
            is_cut: it ended because it reached its `max_tokens`.
        """
        batch = self._batches[batch_id]
        before = batch.tokens[rows]
        if (batch.num_samples[rows] > 1).any():
            # running samples of a row were counted as one
            is_first = np.zeros(len(rows), np.bool_)
            is_first[np.unique(rows, return_index=True)[1]] = True
            before = np.where(is_first, before, 0)
        batch.tokens[rows] = 0
        self._num_ended[batch.kinds.client] += len(rows)
        self.model.note(batch.kinds.take(rows), lengths, is_cut, before)

    def tokens_so_far(self, batch_id: int, rows: _Rows) -> tuple[Ints, Floats]:
        """Return (last reported tokens, expected remaining tokens) of rows, [n] each."""
        num_tokens = self._batches[batch_id].tokens[rows]
        return num_tokens, self.expected_left(batch_id, rows, num_tokens)

    def expected_left(self, batch_id: int, rows: _Rows, num_tokens: _Rows) -> Floats:
        """Return the expected remaining tokens of one sample of each row, float64 [n].

        Args:
            num_tokens: tokens that the sample has generated so far, int [n].
        """
        batch = self._batches[batch_id]
        now, bound = np.asarray(num_tokens, np.int64), batch.max_tokens[rows]
        learned = self.model.expect(batch.kinds.take(rows), now, bound)
        # a sample that outgrew its plan is expected to continue for a while
        planned = batch.planned[rows] // batch.num_samples[rows]
        known = np.where(np.isnan(learned), np.minimum(now + 1 + now // 8, bound), learned)
        known = np.where(now < planned, planned, known)
        unknown = np.where(np.isnan(learned), bound, learned)
        return np.maximum(np.where(batch.is_planned[rows], known, unknown) - now, 0.0)

    def quantiles_left(
        self, batch_id: int, rows: _Rows, num_tokens: _Rows, shares: Sequence[float], left: Floats
    ) -> Floats:
        """Return quantiles of the remaining tokens of one sample of each row, float64 [n, shares].

        All quantiles of a row are equal if a plan expects its length, or nothing is known.

        Args:
            num_tokens: tokens that the sample has generated so far, int [n].
            shares: the quantiles to return, such as 0.5 for the median.
            left: result of `expected_left` for these rows.
        """
        batch, now = self._batches[batch_id], np.asarray(num_tokens, np.int64)
        lengths = np.repeat((now + left)[:, None], len(shares), axis=1)
        planned = batch.planned[rows] // batch.num_samples[rows]
        is_open = ~batch.is_planned[rows] | (now >= planned)
        for distribution, at in self.model.distributions(batch.kinds.take(rows)):
            its = at[is_open[at]]
            bound = batch.max_tokens[rows[its]]
            lengths[its] = distribution.quantiles(shares, now[its], bound)
        return lengths - now[:, None]

    def reweighed(self, client: str) -> Iterator[tuple[int, Callable[[_Rows], Ints]]]:
        """Yield (batch id, function) for the open batches of a client, to reweigh waiting rows.

        The function returns the expected output tokens of some rows. Nothing is yielded until the
        known outputs of the client have doubled, or grown by some thousands, since the last time.
        """
        num_ended = self._num_ended[client]
        if num_ended < self._due[client]:
            return
        self._due[client] = int(min(_MORE_ROWS * num_ended, num_ended + _AT_LEAST_EVERY_ROWS))
        for batch_id, batch in self._batches.items():
            if batch.kinds.client == client:
                yield batch_id, partial(self._totals, batch)

    def _totals(self, batch: _Batch, rows: _Rows) -> Ints:
        """Return the expected tokens of rows before they run, over their samples."""
        is_all = len(rows) == len(batch.max_tokens)
        kinds = batch.kinds if is_all else batch.kinds.take(rows)
        max_tokens = batch.max_tokens[rows]
        learned = self.model.expect(kinds, None, max_tokens)
        each = np.where(np.isnan(learned), max_tokens, np.ceil(learned))
        totals = each.astype(np.int64) * batch.num_samples[rows]
        return np.where(batch.is_planned[rows], batch.planned[rows], totals)

    def _run(self, batch: _Batch, rows: _Rows, num_tokens: _Rows) -> _Run:
        before, batch.tokens[rows] = batch.tokens[rows], num_tokens
        is_other = before != num_tokens
        kinds = batch.kinds.take(rows[is_other])
        return _Run(kinds, before[is_other], num_tokens[is_other])

    def _note_runs(self, runs: Sequence[_Run]) -> None:
        by_client: defaultdict[str, list[_Run]] = defaultdict(list)
        for run in runs:
            by_client[run.kinds.client].append(run)
        for of_client in by_client.values():
            before = np.concatenate([run.before for run in of_client])
            if len(before):
                kinds = RowKinds.joined([run.kinds for run in of_client])
                self.model.note_running(kinds, before, np.concatenate([r.now for r in of_client]))


def _large_groups(submission: Submission, num_rows: int) -> Ints:
    """Return the planned group of each row, -1 for no group or a small one."""
    if submission.groups is None:
        return np.full(num_rows, -1, np.int64)
    groups = submission.groups.group_ids
    _, which, counts = np.unique(groups, return_inverse=True, return_counts=True)
    return np.where(counts[which] >= _MIN_GROUP_ROWS, groups, -1)
