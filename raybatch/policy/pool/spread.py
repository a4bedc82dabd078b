"""Chooses which running rows migrate to which replica in the long tail of a batch.

A replica with r rows finishes with its longest one, and each of its steps costs as much as r rows.
Rows go from the replica that would finish last to one with free capacity, as long as the later of
both finishes sooner by more than the move costs. Source: BatchGen, section 5.3 (data-parallel
spread), and Llumnix (arXiv:2406.03243); moves are chosen from measured steps here. Rows of a
draining replica go wherever there is capacity.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from raybatch.policy.pool.snapshot import (
    LEFT_SHARES,
    PoolSnapshot,
    ReplicaSnapshot,
    RowMove,
    RunningRows,
)
from raybatch.policy.pool.throughput import StepSeconds
from raybatch.records.arrays import Bools, Floats, Ints

# concurrent moves from or to a replica (CascadeInfer, section 5)
MAX_MOVES = 3
# moves of a row, except away from a draining engine
_MAX_TIMES = 2
# least forecast saving of moves, as a share and in seconds
_LEAST_GAIN, _LEAST_S = 0.02, 0.25
# bandwidth of a link that was not measured: 10 Gbit/s
_USUAL_BYTES_PER_S = 1e9
# shares up to the middle between two neighbours, and their log ratios
_BELOW = np.append((np.array(LEFT_SHARES[:-1]) + np.array(LEFT_SHARES[1:])) / 2, 1.0)
_LOG_STEPS = np.diff(np.log(_BELOW), prepend=0.0)
# candidate targets, those that finish first; and the growth of candidate numbers of rows
_NUM_TARGETS, _GROWTH = 4, 4
# decimals of seconds, so that equal rows give equal ends in any order of summation
_DECIMALS = 9


def longest(quantiles: Floats) -> float:
    """Return the expected tokens left of the longest row; quantiles as in `RunningRows`."""
    return float(longest_of_each(quantiles, np.ones((1, len(quantiles)), bool))[0])


def longest_of_each(quantiles: Floats, is_in: Bools) -> Floats:
    """Return `longest` of each of several sets of rows, [C].

    Args:
        quantiles: of all rows, [S, shares].
        is_in: membership of rows in sets, [C, S].
    """
    num_rows, num_shares = quantiles.shape
    if not num_rows:
        return np.zeros(len(is_in))
    order = quantiles.argsort(axis=None, kind="stable")
    values, (row, share) = quantiles.ravel()[order], np.divmod(order, num_shares)
    # each row is at most this long by its own share, and all of them by the product
    at_most = np.exp(np.cumsum(is_in[:, row] * _LOG_STEPS[share], axis=1))
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    known_from = (is_in * place[::num_shares]).max(axis=1)
    at_most[np.arange(len(order)) < known_from[:, None]] = 0.0
    expected = values[0] + (1 - at_most[:, :-1]) @ np.diff(values)
    return np.where(is_in.any(axis=1), expected, 0.0)


def end_s(left: Floats, seconds: StepSeconds, quantiles: Floats | None = None) -> float:
    """Return the seconds until rows with `left` remaining tokens, [S], have finished.

    The fixed step cost counts for each token of the longest row, the cost of a row for each of its
    tokens. Without `quantiles` the rows have their expected lengths.
    """
    most = left.max(initial=0.0) if quantiles is None else longest(quantiles)
    return float(seconds.step_s * most + seconds.row_s * left.sum())


def spread_rows(pool: PoolSnapshot) -> tuple[tuple[RowMove, ...], float]:
    """Choose moves with which the pool finishes sooner.

    Returns (moves, long rows first; forecast saving in seconds).
    """
    known = [r for r in pool.replicas if r.rows is not None and r.seconds is not None]
    known = [replica for replica in known if replica.can_give and not replica.is_tp_driver]
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
    """Return which rows have not moved too often, as forecasts fluctuate."""
    if rows.times_moved is None:
        return np.ones(len(rows), bool)
    return rows.times_moved < _MAX_TIMES


class _Choices(NamedTuple):
    """C candidate sets of rows that may leave a place, with their forecasts."""

    rows: Ints  # [R], by their positions, the longest first
    is_in: Bools  # [C, R]
    counts: Ints  # [C]
    tokens: Floats  # [C]
    left: Floats  # [C]
    longest: Floats  # [C], the tokens to expect of the longest row
    stay_s: Floats  # [C], when the place ends without them


class _Better(NamedTuple):
    """Rows, by position, that go to a place, and when the later of both places finishes."""

    rows: Ints
    target: int
    end_s: float


class _Spread:
    """Greedy search for moves: rows and their places, replicas being places 0 to n - 1."""

    def __init__(self, replicas: Sequence[ReplicaSnapshot], bytes_per_s: float) -> None:
        rows = [r.rows for r in replicas if r.rows is not None]
        self._replicas, self._bytes_per_s = replicas, bytes_per_s
        self._seconds = [r.seconds for r in replicas if r.seconds is not None]
        self._ids, self._tokens, self._left, self._can_move = (
            np.concatenate([getattr(of_one, name) for of_one in rows])
            for name in ("ids", "tokens", "left", "can_move")
        )
        self._can_move = self._can_move & np.concatenate([_may_move(of_one) for of_one in rows])
        self._quantiles = np.concatenate([_quantiles(of_one) for of_one in rows])
        self._origin: Ints = np.repeat(np.arange(len(rows)), [len(of_one) for of_one in rows])
        self._place = self._origin.copy()
        # the rows at each place, ascending
        self._rows_at = [np.flatnonzero(self._origin == place) for place in range(len(rows))]
        self._longest = [longest(self._quantiles[at]) for at in self._rows_at]
        self._free_seqs = np.array([r.free_seqs for r in replicas])
        self._free_tokens = np.array([r.free_kv_tokens for r in replicas])
        self.ends: Floats = np.array([self._end_s(place) for place in range(len(rows))])

    def best(self) -> _Better | None:
        """Return the best move of rows off the replica that finishes last; None if none pays."""
        source = int(self.ends.argmax())
        targets = np.flatnonzero((self._free_seqs > 0) & (self.ends < self.ends[source]))
        targets = targets[np.argsort(self.ends[targets], kind="stable")][:_NUM_TARGETS]
        if not len(targets):
            return None
        choices = self._choices(source)
        limit_s = round(float(self.ends[source] - _least_s(self.ends[source])), _DECIMALS)
        best: _Better | None = None
        for target in targets.tolist():
            best = self._best_at(target, source, choices, limit_s) or best
            limit_s = limit_s if best is None else best.end_s
        return best

    def _best_at(
        self, target: int, source: int, choices: _Choices, limit_s: float
    ) -> _Better | None:
        """Return the first of the best choices for a place, None if none meets the limit."""
        seconds, here = self._seconds[target], self._rows_at[target]
        others_s = seconds.row_s * (self._left[here].sum() + choices.left)
        others_s += choices.tokens * self._token_move_s(source, target)[0]
        # a lower bound: the longest of both sets is at least the longest of either
        most = np.maximum(choices.longest, self._longest[target])
        ends = np.maximum(choices.stay_s, seconds.step_s * most + others_s)
        needed = (choices.tokens + choices.left).astype(int)
        has_room = choices.counts <= self._free_seqs[target]
        has_room &= needed <= self._free_tokens[target]
        able = np.flatnonzero(has_room & (ends < limit_s))
        if not len(able):
            return None
        comes = choices.is_in[able]
        is_there = np.hstack((np.ones((len(able), len(here)), bool), comes))
        most = longest_of_each(self._quantiles[np.append(here, choices.rows)], is_there)
        ends = np.maximum(choices.stay_s[able], seconds.step_s * most + others_s[able])
        ends = ends.round(_DECIMALS)
        first = int(ends.argmin())
        if ends[first] >= limit_s:
            return None
        return _Better(choices.rows[comes[first]], target, float(ends[first]))

    def _choices(self, source: int) -> _Choices:
        """Return candidate sets of a place: the longest rows, the shortest, every n-th one."""
        here, seconds = self._rows_at[source], self._seconds[source]
        can_move = self._can_move[here]
        rows, others = here[can_move], here[~can_move]
        rows = rows[np.lexsort((self._ids[rows], -self._left[rows]))]
        is_in = _chosen(len(rows))
        left = is_in @ self._left[rows]
        everywhere = np.append(rows, others)
        stays = np.ones((len(is_in), len(everywhere)), bool)
        stays[:, : len(rows)] = ~is_in
        most = longest_of_each(self._quantiles[everywhere], stays)
        return _Choices(
            rows=rows,
            is_in=is_in,
            counts=is_in.sum(axis=1),
            tokens=is_in @ self._tokens[rows],
            left=left,
            longest=longest_of_each(self._quantiles[rows], is_in),
            stay_s=seconds.step_s * most + seconds.row_s * (self._left[here].sum() - left),
        )

    def apply(self, better: _Better) -> None:
        rows, target = better.rows, better.target
        source = int(self._place[rows[0]])
        self._place[rows] = target
        needed = int((self._tokens[rows] + self._left[rows]).sum())
        self._rows_at[source] = np.setdiff1d(self._rows_at[source], rows, assume_unique=True)
        self._rows_at[target] = np.union1d(self._rows_at[target], rows)
        for place, sign in ((source, 1), (target, -1)):
            self._free_seqs[place] += sign * len(rows)
            self._free_tokens[place] += sign * needed
            self._longest[place] = longest(self._quantiles[self._rows_at[place]])
            self.ends[place] = self._end_s(place)

    def moves(self) -> tuple[RowMove, ...]:
        (moved,) = np.nonzero(self._place != self._origin)
        moved = moved[np.lexsort((self._ids[moved], -self._left[moved]))]
        return tuple(self._move(row) for row in moved.tolist())

    def _move(self, row: int) -> RowMove:
        source, target = int(self._origin[row]), int(self._place[row])
        _, with_kv = self._token_move_s(source, target)
        leaves, comes = (self._replicas[place].replica_id for place in (source, target))
        return RowMove(int(self._ids[row]), leaves, comes, with_kv)

    def _token_move_s(self, source: int, target: int) -> tuple[float, bool]:
        """Return the seconds per token of the cheaper move, and whether it copies KV."""
        recompute_s = self._seconds[target].token_s
        if not self._replicas[source].is_like(self._replicas[target]):
            return recompute_s, False
        copy_s = self._replicas[source].kv_token_bytes / self._bytes_per_s
        # prefill costs are unknown before the first prompts
        with_kv = copy_s <= recompute_s or not recompute_s
        return (copy_s, True) if with_kv else (recompute_s, False)

    def _end_s(self, place: int) -> float:
        seconds, left = self._seconds[place], self._left[self._rows_at[place]]
        return float(seconds.step_s * self._longest[place] + seconds.row_s * left.sum())


def _chosen(num_rows: int) -> Bools:
    """Return sets of `num_rows` ordered rows, [C, R]: the first, the last, every n-th one."""
    chosen, count = [], 1
    while count <= num_rows:
        stride, is_in = num_rows // count, np.zeros((3, num_rows), bool)
        is_in[0, :count] = is_in[1, num_rows - count :] = True
        is_in[2, stride - 1 :: stride][:count] = True
        chosen.append(is_in)
        count += max(1, count // _GROWTH)
    return np.concatenate(chosen) if chosen else np.zeros((0, 0), bool)


def _quantiles(rows: RunningRows) -> Floats:
    if rows.quantiles is not None:
        return rows.quantiles
    return np.repeat(rows.left[:, None], len(LEFT_SHARES), axis=1)


def _least_s(end_s: float) -> float:
    """Return the least forecast saving that is worth a move."""
    return max(_LEAST_S, _LEAST_GAIN * end_s)


def drain_moves(pool: PoolSnapshot, source_id: int) -> tuple[RowMove, ...]:
    """Return moves of running rows off a draining replica, rows with most remaining tokens first.

    Rows move even if the pool does not finish sooner, as they may be lost with their replica. A row
    takes its KV along if the other engine accepts it, and goes to the replica with most free
    sequences. A replica has at most `MAX_MOVES` concurrent moves.
    """
    source = next((r for r in pool.replicas if r.replica_id == source_id), None)
    if source is None or source.rows is None:
        return ()
    others = [r for r in pool.replicas if r.replica_id != source_id]
    others = [r for r in others if r.can_give and not r.is_tp_driver]
    spaces = [_FreeSpace(r, source) for r in others]
    rows, moves = source.rows, list[RowMove]()
    (movable,) = np.nonzero(rows.can_move)
    for row in movable[np.lexsort((rows.ids[movable], -rows.left[movable]))].tolist():
        if source.num_moves + len(moves) >= MAX_MOVES:
            break
        tokens = int(rows.tokens[row])
        able = [space for space in spaces if space.fits(tokens)]
        if able:
            space = max(able, key=lambda space: (space.is_like, space.free_seqs, -space.replica_id))
            space.take(tokens)
            moves.append(RowMove(int(rows.ids[row]), source_id, space.replica_id, space.is_like))
    return tuple(moves)


class _FreeSpace:
    """The free capacity of one replica while moves are chosen."""

    def __init__(self, replica: ReplicaSnapshot, source: ReplicaSnapshot) -> None:
        self.replica_id, self.is_like = replica.replica_id, replica.is_like(source)
        self.free_seqs, self._free_tokens = replica.free_seqs, replica.free_kv_tokens
        # a replica that reported no rows has unknown capacity
        self._num_moves = MAX_MOVES - replica.num_moves if replica.rows is not None else 0

    def fits(self, tokens: int) -> bool:
        return min(self._num_moves, self.free_seqs) > 0 and tokens < self._free_tokens

    def take(self, tokens: int) -> None:
        self._num_moves -= 1
        self.free_seqs -= 1
        self._free_tokens -= tokens
