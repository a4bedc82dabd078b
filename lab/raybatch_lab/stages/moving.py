"""Which running rows go on in another replica, as they have outgrown the range of theirs; pure."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from raybatch.policy.pool.snapshot import PoolSnapshot, ReplicaSnapshot, RowMove, RunningRows
from raybatch.policy.pool.spread import MAX_MOVES
from raybatch.records.arrays import Bools, Floats
from raybatch_lab.stages.messages import Bid
from raybatch_lab.stages.plan import is_overloaded, next_stage
from raybatch_lab.stages.sending import best_bidder

# of a link that was not measured: a network of 10 Gbit
_USUAL_BYTES_PER_S = 1e9
# the most that a row's move may take, of the seconds that it still runs
_MOVE_SHARE = 1 / 8


@dataclass(slots=True)
class _Place:
    """A replica, with its free slots and memory while moves are chosen."""

    replica: ReplicaSnapshot
    rows: RunningRows
    stage: int
    load: float
    free_seqs: int
    free_tokens: int
    num_moves: int
    # of its rows, the tokens to come: of the longest, and of all
    longest: float
    left: float

    def end_s(self, left: float = 0.0) -> float:
        """Return the seconds until all its rows end, with another one of `left` more tokens."""
        seconds = self.replica.seconds
        assert seconds is not None, "a replica whose steps were measured"
        return seconds.step_s * max(self.longest, left) + seconds.row_s * (self.left + left)

    def has_room(self, tokens: int) -> bool:
        return min(self.free_seqs, MAX_MOVES - self.num_moves) > 0 and tokens <= self.free_tokens


def stage_moves(
    pool: PoolSnapshot,
    stage_of: Mapping[int, int],
    bounds: Floats,
    *,
    has_waiting: bool,
    kept_slots: Callable[[int], int] = lambda _: MAX_MOVES,
) -> tuple[RowMove, ...]:
    """Return moves of running rows that have outgrown their stage, by replica, longest rows first.

    A row moves to the stage of its current length, to the replica with room that `best_bidder`
    chooses, and never to an earlier stage. It stays if it has moved once for each bound, or if its
    remaining run is too short for the seconds of a move.

    Args:
        stage_of: stage of each replica by id; replicas without one take no part.
        bounds: lengths between stages, ascending.
        has_waiting: rows wait in the pool. Then a replica that holds a quarter more than the
            average of its stage also gives a row to others of the stage. Without waiting rows, no
            move may make a replica end later than the last one does now.
        kept_slots: returns the slots of a replica that are kept free for rows that move there.

    Source: CascadeInfer, sections 3.2 and 4.4.
    """
    places = [
        _place(r, r.rows, stage_of[r.replica_id])
        for r in pool.replicas
        if r.rows is not None and r.seconds is not None and r.replica_id in stage_of
    ]
    places = [
        place for place in places if place.replica.can_give and not place.replica.is_tp_driver
    ]
    if has_waiting:
        for place in places:
            place.free_seqs = min(place.free_seqs, kept_slots(place.replica.replica_id))
    bytes_per_s = pool.bytes_per_s or _USUAL_BYTES_PER_S
    latest_s = math.inf if has_waiting else max((place.end_s() for place in places), default=0.0)
    moves: list[RowMove] = []
    for source in places:
        rows = source.rows
        stages = next_stage(bounds, rows.tokens, np.full(len(rows), source.stage))
        may_leave = _may_leave(source, len(bounds), bytes_per_s)
        outgrown = np.flatnonzero((stages > source.stage) & may_leave)
        for row in outgrown[np.argsort(-rows.tokens[outgrown], kind="stable")].tolist():
            left = float(rows.left[row])
            others = [
                place
                for place in places
                if place.stage == stages[row] and place.end_s(left) <= latest_s
            ]
            moves += _offer(source, row, others, bytes_per_s)
        if has_waiting and not len(outgrown):
            moves += _rebalance(source, places, may_leave, bytes_per_s)
    return tuple(moves)


def _place(replica: ReplicaSnapshot, rows: RunningRows, stage: int) -> _Place:
    return _Place(
        replica=replica,
        rows=rows,
        stage=stage,
        load=float(rows.tokens.sum()),
        free_seqs=replica.free_seqs,
        free_tokens=replica.free_kv_tokens,
        num_moves=replica.num_moves,
        longest=float(rows.left.max(initial=0.0)),
        left=float(rows.left.sum()),
    )


def _may_leave(source: _Place, max_times: int, bytes_per_s: float) -> Bools:
    """Return which rows of a replica may move, and run long enough for that."""
    rows, seconds = source.rows, source.replica.seconds
    assert seconds is not None, "a replica whose steps were measured"
    may = rows.can_move.copy()
    if rows.times_moved is not None:
        may &= rows.times_moved < max_times
    run_s = rows.left * (seconds.step_s + seconds.row_s * len(rows))
    copy_s = rows.tokens * source.replica.kv_token_bytes / bytes_per_s
    recompute_s = rows.tokens * seconds.token_s
    # a row without KV on its replica is computed again
    move_s = copy_s if source.replica.kv_token_bytes else recompute_s
    return np.asarray(may & (move_s <= _MOVE_SHARE * run_s))


def _offer(
    source: _Place, row: int, others: Iterable[_Place], bytes_per_s: float
) -> Sequence[RowMove]:
    """Return the move of a row to the best of some replicas; none where none has room."""
    rows = source.rows
    tokens = int(rows.tokens[row])
    needed = tokens + int(rows.left[row])
    able = {p.replica.replica_id: p for p in others if p.has_room(needed) and p is not source}
    if not able or source.num_moves >= MAX_MOVES:
        return ()
    copy_s = tokens * source.replica.kv_token_bytes / bytes_per_s
    # the one with the least load answers first
    answers = sorted(able.items(), key=lambda each: (each[1].load, each[0]))
    bids = {r: Bid(load=p.load, start_s=copy_s * p.num_moves) for r, p in answers}
    target = able[best_bidder(bids)]
    for place in (source, target):
        place.num_moves += 1
    target.free_seqs -= 1
    target.free_tokens -= needed
    target.load += tokens
    source.load -= tokens
    target.longest = max(target.longest, float(rows.left[row]))
    target.left += float(rows.left[row])
    with_kv = source.replica.is_like(target.replica)
    move = RowMove(
        int(rows.ids[row]), source.replica.replica_id, target.replica.replica_id, with_kv
    )
    return (move,)


def _rebalance(
    source: _Place, places: Sequence[_Place], may_leave: Bools, bytes_per_s: float
) -> Sequence[RowMove]:
    """Return the move of one row of a replica that has too many for its stage."""
    peers = [place for place in places if place.stage == source.stage]
    loads = np.array([place.load for place in peers])
    if not is_overloaded(loads)[peers.index(source)]:
        return ()
    tokens = source.rows.tokens
    fits = np.flatnonzero(may_leave & (tokens <= source.load - loads.mean()))
    if not len(fits):
        return ()
    row = int(fits[tokens[fits].argmax()])
    others = [place for place in peers if place.load + tokens[row] <= source.load]
    return _offer(source, row, others, bytes_per_s)
