"""The view, learning and rebalancing of a simulated coordinator.

Follows `raybatch.actors.coordinator`: its `PoolView`, its `LearnedLengths`, its `Rebalancer`.
"""

from collections.abc import Collection, Mapping

import numpy as np

from raybatch.actors.coordinator.learned_lengths import LearnedLengths
from raybatch.actors.coordinator.pool_view import PoolView
from raybatch.actors.queue.row_queue import RowQueue
from raybatch.actors.wire.records import Progress, Submission
from raybatch.policy.pool.plan import plan_pool
from raybatch.policy.pool.snapshot import PoolPlan, PoolSnapshot
from raybatch.records.arrays import Ints
from raybatch.records.types import ReplicaStats
from raybatch_lab.simulator.events import Policies
from raybatch_lab.simulator.replica import SimulatedReplica
from raybatch_lab.simulator.rows import SimulatedRows

# all rows are one batch, so that a row is its own request id
BATCH = 0
_CLIENT = "simulated"


class SimulatedRebalancer:
    """Learns lengths and speeds for a simulated coordinator, and plans its steals and moves."""

    def __init__(self, queue: RowQueue, rows: SimulatedRows, policies: Policies) -> None:
        self._lengths = LearnedLengths()
        self.view = PoolView(queue, self._lengths)
        self._queue, self._rows, self._policies = queue, rows, policies

    def begin(self) -> None:
        """Queue all rows with their expected lengths."""
        rows = self._rows
        submission = Submission(
            token="",
            client=_CLIENT,
            prompt_tokens=rows.prompt.astype(np.int32),
            max_new_tokens=rows.max_tokens,
            expected_new_tokens=rows.expected,
            groups=rows.groups,
        )
        expected = self._lengths.open(BATCH, submission)
        self._queue.add(BATCH, rows.prompt, expected, groups=rows.groups)

    def speed(self, replica_id: int) -> float:
        return self.view.throughput.speed(replica_id) if self._policies.learns_speeds else 1.0

    def ended(self, done: Ints) -> None:
        """Learn the output lengths of rows that have ended; `done` has their indices."""
        if self._policies.learns_lengths and len(done):
            lengths, bound = self._rows.output[done], self._rows.max_tokens[done]
            self._lengths.note_lengths(BATCH, done, lengths, lengths >= bound)
            self._queue.reweigh(self._lengths.reweighed(_CLIENT))

    def note_report(self, replica_id: int, stats: ReplicaStats, progress: Progress | None) -> None:
        self.view.note_report(replica_id, stats, progress)
        if progress is not None and self._policies.learns_lengths:
            rows = progress.rows
            is_held = self._queue.is_held(replica_id, BATCH, rows.request_ids)
            held, num_generated = rows.request_ids[is_held], rows.num_generated[is_held]
            self._lengths.note_running([(BATCH, held, num_generated)])

    def plan(
        self, members: Mapping[int, SimulatedReplica], pulling: Collection[int], *, with_rows: bool
    ) -> tuple[PoolPlan, PoolSnapshot]:
        """Return the plan of the pool, and the snapshot that it is based on."""
        snapshot = self.view.snapshot(members.values(), pulling, with_rows=with_rows)
        return plan_pool(snapshot), snapshot

    @property
    def moves_rows(self) -> bool:
        return self._policies.moves_rows
