"""Which running rows move to which replica, once nothing waits: the long tail of a batch.

A replica with r rows ends when its longest one does, and each of its steps costs what r rows cost.
Rows go from the replica that would end last to one that has room, as long as the later of both ends
sooner by more than the move costs. Source: BatchGen, section 5.3 (data-parallel spread), and
Llumnix (arXiv:2406.03243); what moves follows from measured steps here.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from raybatch.policy.pool.rates import StepSeconds
from raybatch.policy.pool.snapshot import (
    LEFT_SHARES,
    PoolSnapshot,
    ReplicaSnapshot,
    RowMove,
    RunningRows,
)
from raybatch.records.arrays import Bools, Floats, Ints

# moves of a replica at once, to and from it (CascadeInfer, section 5)
MAX_MOVES = 3
# that a row moves, but away from an engine that ends
_MAX_TIMES = 2
# a forecast that is better by less is not worth a move
_LEAST_GAIN, _LEAST_S = 0.02, 0.25
# of a link that was not measured: a network of 10 Gbit
_USUAL_BYTES_PER_S = 1e9
# the shares up to the middle between two neighbours, and their ratios
_BELOW = np.append((np.array(LEFT_SHARES[:-1]) + np.array(LEFT_SHARES[1:])) / 2, 1.0)
_LOG_STEPS = np.diff(np.log(_BELOW), prepend=0.0)
# replicas that are looked at as places for rows, those that end first, and by which part numbers of
# rows grow; in a large pool fewer, so that a plan takes no seconds
_NUM_TARGETS, _GROWTH = 4, 4
_LARGE_POOL, _NUM_TARGETS_OF_LARGE, _GROWTH_OF_LARGE = 32, 2, 1


def longest(quantiles: Floats) -> float:
    """Return the tokens to expect of the longest of some rows, given as in `RunningRows`."""
    num_rows, num_shares = quantiles.shape
    if not num_rows:
        return 0.0
    order = quantiles.argsort(axis=None, kind="stable")
    share = order % num_shares
    # each row is at most this long by its own share, and all of them by the product
    is_known = np.cumsum(share == 0) == num_rows
    all_at_most = np.where(is_known, np.exp(np.cumsum(_LOG_STEPS[share])), 0.0)
    return float(quantiles.ravel()[order] @ np.diff(all_at_most, prepend=0.0))


def end_s(left: Floats, seconds: StepSeconds, quantiles: Floats | None = None) -> float:
    """Return the seconds until rows with so many tokens to come have ended, [S].

    A step is taken for each token of the longest row; what a row adds to a step, for each of its
    own. Without `quantiles` the rows are as long as they are expected to be.
    """
    most = left.max(initial=0.0) if quantiles is None else longest(quantiles)
    return float(seconds.step_s * most + seconds.row_s * left.sum())


def spread_rows(pool: PoolSnapshot) -> tuple[tuple[RowMove, ...], float]:
    """Return moves, and by how many seconds the pool ends earlier by them.

    They come in the order in which they are to be made: long rows first.
    """
    known = [r for r in pool.replicas if r.rows is not None and r.seconds is not None]
    known = [replica for replica in known if replica.can_give and not replica.team_size]
    if len(known) < 2:
        return (), 0.0
    spread = _Spread(known, pool.bytes_per_s or _USUAL_BYTES_PER_S)
    before_s = spread.ends.max()
    while (better := spread.best()) is not None:
        spread.apply(better)
    saved_s = float(before_s - spread.ends.max())
    if saved_s <= _least_s(before_s):
        return (), 0.0
    return spread.moves(), saved_s


def _may_move(rows: RunningRows) -> Bools:
    """Return which rows have not moved too often: forecasts go up and down, and rows with them."""
    if rows.times_moved is None:
        return np.ones(len(rows), bool)
    return rows.times_moved < _MAX_TIMES


class _Better(NamedTuple):
    """Rows that go to a place, by their positions, and when the later of both places ends."""

    rows: Ints
    target: int
    end_s: float


class _Spread:
    """All rows and where each would be; replicas are places 0 to n - 1 here."""

    def __init__(self, replicas: Sequence[ReplicaSnapshot], bytes_per_s: float) -> None:
        rows = [r.rows for r in replicas if r.rows is not None]
        self._replicas, self._bytes_per_s = replicas, bytes_per_s
        self._num_targets, self._growth = _NUM_TARGETS, _GROWTH
        if len(replicas) > _LARGE_POOL:
            self._num_targets, self._growth = _NUM_TARGETS_OF_LARGE, _GROWTH_OF_LARGE
        self._seconds = [r.seconds for r in replicas if r.seconds is not None]
        self._ids, self._tokens, self._left, self._can_move = (
            np.concatenate([getattr(of_one, name) for of_one in rows])
            for name in ("ids", "tokens", "left", "can_move")
        )
        self._can_move = self._can_move & np.concatenate([_may_move(of_one) for of_one in rows])
        self._quantiles = np.concatenate([_quantiles(of_one) for of_one in rows])
        self._origin: Ints = np.repeat(np.arange(len(rows)), [len(of_one) for of_one in rows])
        self._place = self._origin.copy()
        self._free_seqs = np.array([r.free_seqs for r in replicas])
        self._free_tokens = np.array([r.free_kv_tokens for r in replicas])
        self.ends: Floats = np.array([self._end_s(place) for place in range(len(replicas))])

    def best(self) -> _Better | None:
        """Return what to move from the place that ends last, None where nothing is worth it."""
        source = int(self.ends.argmax())
        targets = np.flatnonzero((self._free_seqs > 0) & (self.ends < self.ends[source]))
        targets = targets[np.argsort(self.ends[targets], kind="stable")][: self._num_targets]
        limit_s = float(self.ends[source] - _least_s(self.ends[source]))
        best: _Better | None = None
        for target in targets.tolist():
            for rows in self._candidates(source, target):
                ends = self._end_after(rows, source, target)
                if ends < (limit_s if best is None else best.end_s):
                    best = _Better(rows, target, ends)
        return best

    def apply(self, better: _Better) -> None:
        rows, target = better.rows, better.target
        source = int(self._place[rows[0]])
        self._place[rows] = target
        needed = self._needed(rows)
        for place, sign in ((source, 1), (target, -1)):
            self._free_seqs[place] += sign * len(rows)
            self._free_tokens[place] += sign * needed
            self.ends[place] = self._end_s(place)

    def _needed(self, rows: Ints) -> int:
        """Return the tokens that rows have in the end, whose KV has to fit."""
        return int((self._tokens[rows] + self._left[rows]).sum())

    def moves(self) -> tuple[RowMove, ...]:
        (moved,) = np.nonzero(self._place != self._origin)
        moved = moved[np.lexsort((self._ids[moved], -self._left[moved]))]
        return tuple(self._move(row) for row in moved.tolist())

    def _move(self, row: int) -> RowMove:
        source, target = int(self._origin[row]), int(self._place[row])
        _, with_kv = self._move_s(np.array([row]), source, target)
        leaves, comes = (self._replicas[place].replica_id for place in (source, target))
        return RowMove(int(self._ids[row]), leaves, comes, with_kv)

    def _candidates(self, source: int, target: int) -> Iterator[Ints]:
        """Yield sets of rows that there is room for: the longest, the shortest, every n-th one."""
        (rows,) = np.nonzero((self._place == source) & self._can_move)
        rows = rows[np.lexsort((self._ids[rows], -self._left[rows]))]
        count, most = 1, min(len(rows), int(self._free_seqs[target]))
        while count <= most:
            stride = max(1, len(rows) // count)
            for chosen in (rows[:count], rows[-count:], rows[stride - 1 :: stride][:count]):
                if self._needed(chosen) <= self._free_tokens[target]:
                    yield chosen
            count += max(1, count // self._growth)

    def _end_after(self, rows: Ints, source: int, target: int) -> float:
        """Return when the later of both places ends if these rows move."""
        stays = self._place == source
        stays[rows] = False
        joins = self._place == target
        joins[rows] = True
        move_s, _ = self._move_s(rows, source, target)
        return max(self._end_of(stays, source), self._end_of(joins, target) + move_s)

    def _move_s(self, rows: Ints, source: int, target: int) -> tuple[float, bool]:
        """Return what the cheaper way to move rows costs, and whether it takes KV along."""
        tokens = float(self._tokens[rows].sum())
        recompute_s = tokens * self._seconds[target].token_s
        if not self._replicas[source].is_like(self._replicas[target]):
            return recompute_s, False
        copy_s = tokens * self._replicas[source].kv_token_bytes / self._bytes_per_s
        # the cost of prompts is not known before some were computed
        with_kv = copy_s <= recompute_s or not recompute_s
        return (copy_s, True) if with_kv else (recompute_s, False)

    def _end_s(self, place: int) -> float:
        return self._end_of(self._place == place, place)

    def _end_of(self, rows: Bools, place: int) -> float:
        return end_s(self._left[rows], self._seconds[place], self._quantiles[rows])


def _quantiles(rows: RunningRows) -> Floats:
    if rows.quantiles is not None:
        return rows.quantiles
    return np.repeat(rows.left[:, None], len(LEFT_SHARES), axis=1)


def _least_s(end_s: float) -> float:
    """Return by how much sooner something has to end to be worth a move."""
    return max(_LEAST_S, _LEAST_GAIN * end_s)
