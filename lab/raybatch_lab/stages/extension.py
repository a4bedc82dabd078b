"""Replicas by length: stages of a pool, each for a range of lengths, as `pool.stages` asks.

```
rows that wait   --> a replica of the stage where they are to make most of their tokens
rows that run    --> on to a later stage, with their KV, once they have outgrown their own
bounds           --> follow the lengths that run
```

All decisions are pure, and lie beside this; rows move as all rows of a pool do, with one holder at
every moment. Without stages nothing is done at all. Run so far on CPUs with native engines, where
unlike lengths cost next to nothing (`lab/benchmarks/pool_stages.py`); not yet on a GPU, nor with
vLLM (CascadeInfer; mechanisms C3 to C8, C10, C11, C14).
"""

import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import Literal

from raybatch.actors.coordinator.parts import MakeExtension, PoolExtension, PoolParts
from raybatch.actors.coordinator.rebalancer import MoveRows
from raybatch.actors.queue.waiting_queues import WaitingQueues
from raybatch.actors.replicas.placement import Placement
from raybatch.actors.wire.records import PoolSpec
from raybatch.errors import ConfigError
from raybatch.policy.cost.cost_model import EngineLimits
from raybatch.policy.pool.snapshot import PoolPlan, PoolSnapshot
from raybatch_lab.stages.decision import ATTENTION_ALONE, Decision, decide_auto, decide_number
from raybatch_lab.stages.heterogeneity import FLAT
from raybatch_lab.stages.lengths import RowLengths
from raybatch_lab.stages.measured import MeasuredCurve, measured_curve
from raybatch_lab.stages.moving import stage_moves
from raybatch_lab.stages.observed import ObservedSteps
from raybatch_lab.stages.ranges import Ranges, lengths_of
from raybatch_lab.stages.refinement import refine_bounds
from raybatch_lab.stages.replica_seconds import MoveCosts, StagePool

# of a link that was not measured: a network of 10 Gbit
_USUAL_BYTES_PER_S = 1e9
# limits of an engine that has not reported its capacity
_USUAL_LIMITS = EngineLimits(kv_tokens=1 << 40, max_num_seqs=256, block_size=16)
# of the time of the coordinator, at most, that goes into looks at rows that run
_POLL_SHARE = 0.05
# between two refinements of bounds
_REFINE_EVERY_S = 2.0

_logger = logging.getLogger(__name__)


def make_stages(spec: PoolSpec, plan: Placement) -> MakeExtension:
    """Return a function that makes the `Stages` of a pool; an entry point.

    Raises ConfigError if there are fewer engines than stages.
    """
    requested, num_replicas = spec.pool.stages, plan.num_replicas
    if isinstance(requested, int) and requested > num_replicas:
        raise ConfigError(
            f"pool.stages={requested} needs one engine per stage, and the pool has {num_replicas}; "
            "raise pool.replicas or lower pool.stages"
        )
    curve = measured_curve(spec, num_gpus=plan.num_gpus)
    return partial(Stages, requested=requested, curve=curve)


class Stages(PoolExtension):
    """Runs a pool in stages: replicas for short, longer and the longest sequences.

    Args:
        requested: `pool.stages`: the number of stages, or "auto".
        curve: factor on the time of attention for a batch of unequal lengths; None if it was not
            measured.
    """

    # its plans are moves, which the pool itself does
    actions = ()

    def __init__(
        self,
        parts: PoolParts,
        *,
        requested: int | Literal["auto", "off"],
        curve: MeasuredCurve | None,
    ) -> None:
        self._parts, self._requested, self._curve = parts, requested, curve
        self.steps = ObservedSteps()
        self.ranges = Ranges(
            decide=self.decide,
            able=lambda: [r for r, member in parts.members.items() if member.takes_rows],
            load_of=parts.queue.load,
            speed_of=parts.view.throughput.speed,
            is_expected=lambda: parts.replicas.ledger.num_expected(time.monotonic()) > 0,
            slots_of=self._slots_of,
        )
        # of the rows at hand; and whether they were looked at, and with steps that were seen
        self._decision: Decision | None = None
        self._has_looked = self._has_seen = False
        self._not_before = self._refined_s = 0.0
        parts.queue.reserve(self.ranges)

    def snapshot(self, pool: PoolSnapshot | None, now: float) -> PoolSnapshot | None:
        """Return the pool with its running rows, even while other rows wait.

        None if there are no stages, or the last snapshot was too recent.
        """
        if not len(self._parts.registry):
            # the next rows may have other lengths
            self._decision = None
            self._has_looked = self._has_seen = False
            return None
        if self._is_settled() or now < self._not_before:
            return None
        if pool is None:
            staying = [m for m in self._parts.members.values() if m.takes_rows]
            began = time.thread_time()
            pool = self._parts.view.snapshot(staying, (), with_rows=True)
            # a look at many rows takes a while, in which no other call is served
            self._not_before = time.monotonic() + (time.thread_time() - began) / _POLL_SHARE
        for replica in pool.replicas:
            if replica.rows is not None:
                stats = self._parts.members[replica.replica_id].stats
                self.steps.note(replica.replica_id, stats, replica.rows.tokens)
        if not self.ranges.num_stages:
            return None
        if now - self._refined_s >= _REFINE_EVERY_S:
            self._refined_s = now
            self._refine(pool)
        return pool

    def plan(self, snapshot: PoolSnapshot | None, plan: PoolPlan) -> Sequence[MoveRows]:
        """Return the moves of rows that have outgrown their stage.

        Empty while the pool's own plan moves or steals rows, which takes precedence.
        """
        if snapshot is None or plan.moves or plan.steal is not None:
            return ()
        ranges, has_waiting = self.ranges, self._parts.queue.num_waiting() > 0
        # as of the pool's own plan
        has_waiting |= any(replica.num_unstarted > 1 for replica in snapshot.replicas)
        moves = stage_moves(
            snapshot,
            ranges.stage_of,
            ranges.bounds,
            has_waiting=has_waiting,
            kept_slots=ranges.kept_slots,
        )
        return (MoveRows(moves, snapshot),) if moves else ()

    def apply(self, action: object) -> None:
        """Do nothing: the pool carries out moves itself."""

    def note_change(self) -> None:
        """Do nothing: rows are sorted into stages when they are handed out."""

    def decide(self, waiting: WaitingQueues) -> None:
        """Decide on stages for the current rows: once, and again when step costs are known."""
        has_new = self.steps.quality is not None and not self._has_seen
        if self._is_settled() or (self._has_looked and not has_new):
            return
        lengths = lengths_of(waiting.batches)
        if lengths is None:
            return
        self._has_looked, self._has_seen = True, self.steps.quality is not None
        self._decision = self._decided(lengths)
        if self._decision is not None:
            _logger.info("pool.stages=%r: %s", self._requested, self._decision.text)
        if self._decision is None or self._decision.plan is None:
            self.ranges.end()
        else:
            self.ranges.begin(self._decision.plan)

    def _slots_of(self, replica_id: int) -> int | None:
        capacity = self._parts.view.capacity(replica_id)
        return None if capacity is None else capacity.max_num_seqs

    def _is_settled(self) -> bool:
        """Return whether the rows at hand are to have no stages, whatever is seen of them."""
        return self._decision is not None and self._decision.plan is None

    def _decided(self, lengths: RowLengths) -> Decision | None:
        pool, quality = self._pool(), self.steps.quality
        if isinstance(self._requested, int):
            return decide_number(pool, lengths, quality, self._requested)
        if self._curve is None:
            text = (
                "no stages: what unlike lengths cost this engine was not measured here; "
                "raybatch bench calibrate does that"
            )
            return Decision(plan=None, text=text)
        return decide_auto(pool, lengths, quality, self._curve.where)

    def _pool(self) -> StagePool:
        """Return the pool as forecasts take it, with the quality of attention alone."""
        view, members = self._parts.view, self._parts.members
        known = [c for r in members if (c := view.capacity(r)) is not None]
        limits, token_bytes = _USUAL_LIMITS, 0.0
        if known:
            token_bytes = float(known[0].kv_token_bytes)
            limits = EngineLimits(
                kv_tokens=known[0].kv_tokens,
                max_num_seqs=known[0].max_num_seqs,
                block_size=known[0].block_size,
            )
        pool = view.snapshot((), (), with_rows=False)
        return StagePool(
            num_replicas=self._parts.plan.num_replicas,
            quality=ATTENTION_ALONE,
            curve=FLAT if self._curve is None else self._curve.curve,
            limits=limits,
            moves=MoveCosts(
                kv_bytes_per_token=token_bytes, bytes_per_s=pool.bytes_per_s or _USUAL_BYTES_PER_S
            ),
        )

    def _refine(self, pool: PoolSnapshot) -> None:
        ranges, quality = self.ranges, self.steps.quality
        running = [
            [
                replica.rows.tokens
                for replica in pool.replicas
                if replica.rows is not None and ranges.stage_of.get(replica.replica_id) == stage
            ]
            for stage in range(ranges.num_stages)
        ]
        # a stage without replicas has no lengths
        if quality is not None and all(running):
            curve = FLAT if self._curve is None else self._curve.curve
            ranges.bounds = refine_bounds(ranges.bounds, running, quality, curve)
