"""Builds the snapshots that `plan_pool` reads from the reports of replicas; no Ray, no clock."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import numpy as np

from raybatch.actors.coordinator.learned_lengths import LearnedLengths
from raybatch.actors.queue.row_queue import RowQueue
from raybatch.actors.wire.records import ROW_BITS, ROW_MASK, Progress
from raybatch.policy.pool.snapshot import (
    LEFT_SHARES,
    PoolSnapshot,
    ReplicaSnapshot,
    RowMove,
    RunningRows,
)
from raybatch.policy.pool.spread import MAX_MOVES
from raybatch.policy.pool.throughput import ThroughputModel
from raybatch.records.arrays import Floats
from raybatch.records.types import Capacity, ReplicaStats, RowProgress

# weight of the latest copy in the bandwidth of a link
_LATEST = 0.3


class Watched(Protocol):
    """What the coordinator knows about a replica without calling it."""

    replica_id: int
    is_ready: bool
    is_tp_driver: bool

    @property
    def stats(self) -> ReplicaStats: ...

    @property
    def host_id(self) -> str: ...


class _Row(NamedTuple):
    """A row that moves, with its tokens when the move was planned, and its remaining tokens."""

    move: RowMove
    num_tokens: int
    left: float
    quantiles: Floats


class _Left(NamedTuple):
    """Remaining tokens of the sequences of a replica; 0 for a sequence that has left."""

    expected: Floats  # [S]
    quantiles: Floats  # [S, shares]


@dataclass(slots=True)
class _Known:
    """The last report of a replica, and its last row progress."""

    stats: ReplicaStats
    progress: Progress | None = None
    # until it reports again, its count of unstarted rows is stale
    is_stale: bool = False
    # rows that arrived since the last row progress
    come: dict[int, _Row] = field(default_factory=dict)


class PoolView:
    """Collects reports of replicas and moves of rows, and makes snapshots of the pool from them."""

    def __init__(self, queue: RowQueue, lengths: LearnedLengths) -> None:
        self.throughput = ThroughputModel()
        # replicas that may hang: they neither give nor get rows
        self.silent: Set[int] = frozenset()
        self._queue, self._lengths = queue, lengths
        self._known: dict[int, _Known] = {}
        self._moving: dict[int, _Row] = {}
        # by source and by target replica
        self._moving_at: defaultdict[int, dict[int, _Row]] = defaultdict(dict)
        # counts of the few rows that have moved
        self._times_moved: Counter[int] = Counter()
        self._bytes_per_s: float | None = None

    def note_report(self, replica_id: int, stats: ReplicaStats, progress: Progress | None) -> None:
        """Update from a report; without `progress` the last known one stays valid."""
        self.throughput.note(replica_id, stats)
        before = self._known.get(replica_id)
        known = self._known[replica_id] = _Known(stats, progress)
        if progress is None and before is not None:
            known.progress, known.come = before.progress, before.come

    def forget(self, replica_id: int) -> None:
        self._known.pop(replica_id, None)
        self.throughput.forget(replica_id)

    def note_stale(self, replica_id: int) -> None:
        """Note that rows are being taken from a replica, so that its last report is stale."""
        if replica_id in self._known:
            self._known[replica_id].is_stale = True

    def note_copy(self, num_bytes: int, seconds: float) -> None:
        """Record a measured KV copy between two replicas, by which moves are forecast."""
        if num_bytes and seconds > 0:
            rate = num_bytes / seconds
            known = rate if self._bytes_per_s is None else self._bytes_per_s
            self._bytes_per_s = (1 - _LATEST) * known + _LATEST * rate

    def begin_move(self, move: RowMove, rows: RunningRows) -> None:
        """Count a row that begins to move at its target; `rows` are those of its source."""
        (place,) = np.flatnonzero(rows.ids == move.row_id)
        left = float(rows.left[place])
        quantiles = np.full(len(LEFT_SHARES), left)
        if rows.quantiles is not None:
            quantiles = rows.quantiles[place]
        row = _Row(move, int(rows.tokens[place]), left, quantiles)
        for moving in self._moving_of(move):
            moving[move.row_id] = row

    def end_move(self, move: RowMove, *, has_moved: bool) -> None:
        row, known = self._moving.get(move.row_id), self._known.get(move.target)
        for moving in self._moving_of(move):
            moving.pop(move.row_id, None)
        if has_moved:
            self._times_moved[move.row_id] += 1
        if has_moved and row is not None and known is not None:
            known.come[move.row_id] = row

    def is_moving(self, row_id: int) -> bool:
        return row_id in self._moving

    def capacity(self, replica_id: int) -> Capacity | None:
        """Return the capacity of a replica, None if it has not reported it."""
        known = self._known.get(replica_id)
        return None if known is None or known.progress is None else known.progress.capacity

    def may_steal(self, pulling: Iterable[int]) -> bool:
        """Return whether a replica of `pulling` is idle, and any replica reported waiting rows.

        A cheap check before `snapshot`, since it runs after each report.
        """
        is_one_idle = not all(self._queue.load(r).num_rows for r in pulling)
        return is_one_idle and any(known.stats.num_waiting > 1 for known in self._known.values())

    def may_begin(self, move: RowMove) -> bool:
        """Return whether both replicas may take part in another move."""
        return all(self.num_moves(r) < MAX_MOVES for r in (move.source, move.target))

    def num_moves(self, replica_id: int) -> int:
        """Return the number of rows that move from or to a replica."""
        return len(self._moving_at.get(replica_id, ()))

    def _moving_of(self, move: RowMove) -> tuple[dict[int, _Row], ...]:
        return self._moving, self._moving_at[move.source], self._moving_at[move.target]

    def snapshot(
        self, members: Iterable[Watched], pulling: Collection[int], *, with_rows: bool
    ) -> PoolSnapshot:
        """Return the state of the pool.

        Args:
            members: replicas to include, if ready.
            pulling: ids of replicas that ask for rows.
            with_rows: include each running row and the costs of steps.
        """
        ready = [member for member in members if member.is_ready]
        left = self._left([member.replica_id for member in ready]) if with_rows else {}
        return PoolSnapshot(
            replicas=tuple(self._replica(m, left.get(m.replica_id)) for m in ready),
            pulling=frozenset(pulling),
            has_waiting=self._queue.has_waiting(),
            bytes_per_s=self._bytes_per_s,
        )

    def _replica(self, member: Watched, left: _Left | None) -> ReplicaSnapshot:
        replica_id = member.replica_id
        load = self._queue.load(replica_id)
        known = self._known.get(replica_id, _Known(member.stats))
        plain = ReplicaSnapshot(
            replica_id=replica_id,
            num_held=load.num_rows,
            cost=load.cost,
            num_unstarted=known.stats.num_waiting,
            can_give=not (known.is_stale or load.is_testing or replica_id in self.silent),
            speed=self.throughput.speed(replica_id),
        )
        if left is None or known.progress is None:
            return plain
        reported = set(known.progress.rows.request_ids.tolist())
        coming = self._coming(replica_id, known, reported)
        rows = self._rows(replica_id, known.progress.rows, left, coming)
        capacity = known.progress.capacity
        num_tokens = sum(row.num_tokens for row in coming)
        num_used = round(known.stats.kv_used_fraction * capacity.kv_tokens) + num_tokens
        return replace(
            plain,
            seconds=self.throughput.seconds(replica_id),
            rows=rows,
            free_kv_tokens=max(0, capacity.kv_tokens - num_used),
            free_seqs=max(0, capacity.max_num_seqs - len(rows)),
            kv_token_bytes=capacity.kv_token_bytes,
            num_moves=self.num_moves(replica_id),
            host=member.host_id,
            is_tp_driver=member.is_tp_driver,
        )

    def _rows(
        self, replica_id: int, reported: RowProgress, left: _Left, coming: Sequence[_Row]
    ) -> RunningRows:
        """Return the rows that a replica decodes and still holds, and those that move to it."""
        is_leaving = np.isin(reported.request_ids, list(self._moving_at.get(replica_id, ())))
        is_here = (left.expected > 0) & ~is_leaving
        _, first, counts = np.unique(reported.request_ids, return_inverse=True, return_counts=True)
        can_move = (counts[first] == 1) & (reported.num_generated > 0)
        if with_copies := self._queue.copies.row_ids():
            can_move &= ~np.isin(reported.request_ids, with_copies)
        ids = np.append(reported.request_ids[is_here], [r.move.row_id for r in coming]).astype("i8")
        times = self._times_moved
        return RunningRows(
            ids=ids,
            times_moved=np.array([times[i] for i in ids.tolist()], "i8") if times else None,
            tokens=np.append(reported.num_tokens[is_here], [r.num_tokens for r in coming]).astype(
                "i8"
            ),
            left=np.append(left.expected[is_here], [r.left for r in coming]).astype("f8"),
            can_move=np.append(can_move[is_here], np.zeros(len(coming))).astype(bool),
            quantiles=np.vstack([left.quantiles[is_here], *(r.quantiles for r in coming)]),
        )

    def _coming(self, replica_id: int, known: _Known, reported: set[int]) -> list[_Row]:
        moving = self._moving_at.get(replica_id, {}).values()
        under_way = [row for row in moving if row.move.target == replica_id]
        come = [
            row
            for row_id, row in known.come.items()
            if not (row_id in reported or row_id in self._moving)
            and self._is_held(replica_id, row_id)
        ]
        return [*under_way, *come]

    def _is_held(self, replica_id: int, row_id: int) -> bool:
        rows = np.array([row_id & ROW_MASK])
        return bool(self._queue.is_held(replica_id, row_id >> ROW_BITS, rows)[0])

    def _left(self, replica_ids: Iterable[int]) -> dict[int, _Left]:
        """Return the remaining tokens of the sequences of each replica that reported them.

        One pass over all replicas, as the rows of one batch are at many.
        """
        found = ((r, self._known.get(r)) for r in replica_ids)
        reported = {r: known.progress.rows for r, known in found if known and known.progress}
        if not reported:
            return {}
        ids, num_generated = (
            np.concatenate([getattr(rows, name) for rows in reported.values()])
            for name in ("request_ids", "num_generated")
        )
        sizes = [len(rows.request_ids) for rows in reported.values()]
        holders = np.repeat(list(reported), sizes)
        is_copy = self._queue.copies.are_at(holders, ids)
        expected, quantiles = np.zeros(len(ids)), np.zeros((len(ids), len(LEFT_SHARES)))
        batch_ids, rows = ids >> ROW_BITS, ids & ROW_MASK
        for batch_id in np.unique(batch_ids).tolist():
            (places,) = np.nonzero(batch_ids == batch_id)
            is_here = self._queue.is_held(holders[places], batch_id, rows[places])
            places = places[is_here | is_copy[places]]
            if batch_id in self._lengths and len(places):
                of = batch_id, rows[places], num_generated[places]
                left = self._lengths.expected_left(*of)
                expected[places] = np.maximum(1.0, left)
                more = self._lengths.quantiles_left(*of, LEFT_SHARES, left)
                quantiles[places] = np.maximum(1.0, more)
        ends = np.cumsum(sizes)[:-1]
        return dict(
            zip(
                reported,
                map(_Left, np.split(expected, ends), np.split(quantiles, ends)),
                strict=True,
            )
        )
