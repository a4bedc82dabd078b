"""Simulated TP groups: idle replicas join the steps of another one, at configured costs.

The decision is that of a real pool, with the steps that it measures; see
`raybatch_extensions.tp_groups`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from raybatch.actors.coordinator.pool_view import PoolView
from raybatch.policy.pool.snapshot import PoolPlan, PoolSnapshot
from raybatch_extensions.tp_groups.policy import (
    TPGroupHistory,
    TPGroupPlan,
    TPGroupTimes,
    plan_tp_groups,
)
from raybatch_lab.simulator.clock import VirtualClock
from raybatch_lab.simulator.engine import EngineSpec
from raybatch_lab.simulator.replica import SimulatedReplica


@dataclass(slots=True, eq=False)
class _TPGroup:
    plan: TPGroupPlan
    began_s: float


class SimulatedTPGroups:
    """Forms and ends the TP groups of one simulated pool: call `step` regularly.

    Args:
        members: the live replicas by id, updated by the caller.
        on_change: called when a group has ended, so its replicas can take rows.
    """

    def __init__(
        self,
        engine: EngineSpec,
        members: Mapping[int, SimulatedReplica],
        view: PoolView,
        clock: VirtualClock,
        on_change: Callable[[], None],
    ) -> None:
        self.num_formed = 0
        # (from, to) in seconds, by TP worker
        self.busy: dict[int, list[tuple[float, float]]] = {}
        self._engine, self._members, self._view = engine, members, view
        self._clock, self._on_change = clock, on_change
        self._book = TPGroupHistory()
        # by driver
        self._tp_groups: dict[int, _TPGroup] = {}
        self.workers: set[int] = set()

    def takes_rows(self, replica_id: int) -> bool:
        """Return whether a replica is in no TP group."""
        return replica_id not in self.workers and replica_id not in self._tp_groups

    def step(self, plan: PoolPlan, pool: PoolSnapshot) -> None:
        """Form or end groups if this call and the last one decide so."""
        now = self._clock.now
        self._book.retry(now)
        engines = {
            replica.replica_id: (self._members[replica.replica_id].stats, capacity)
            for replica in pool.replicas
            if (capacity := self._view.capacity(replica.replica_id)) is not None
        }
        snapshot = self._book.snapshot(pool, engines)
        wanted, ends = plan_tp_groups(snapshot, plan)
        for driver in snapshot.replicas:
            tp_group = self._tp_groups.get(driver.replica_id)
            if tp_group is None:
                continue
            if driver.tp_ratio is not None:
                measured = TPGroupTimes(driver.tp_ratio, self._engine.tp_switch_s)
                self._book.note_times(tp_group.plan.kind, measured, now)
            if self._book.to_end(driver.replica_id, ends, snapshot) or not driver.num_held:
                self._end(tp_group)
        if (tp_plan := self._book.to_begin(wanted, snapshot)) is not None:
            self._begin(tp_plan)

    def end_all(self) -> None:
        """End all TP groups, so that their replicas can take waiting rows."""
        for tp_group in list(self._tp_groups.values()):
            self._end(tp_group)

    def lose(self, replica_id: int) -> None:
        """End the TP group of a dead replica; its driver recomputes its rows."""
        self._book.forget(replica_id)
        for tp_group in list(self._tp_groups.values()):
            if replica_id in tp_group.plan.workers:
                self._end(tp_group, has_kv=False)
            elif replica_id == tp_group.plan.driver:
                self._end(tp_group)

    def _begin(self, plan: TPGroupPlan) -> None:
        driver = self._members[plan.driver]
        driver.set_slowdown(self._engine.tp_ratios[plan.kind.size], self._engine.tp_switch_s)
        self._tp_groups[plan.driver] = _TPGroup(plan, self._clock.now)
        self.workers.update(plan.workers)
        driver.is_tp_driver = True
        self._book.begin(plan)
        self._book.restart_timing(plan.driver, driver.stats)
        self.num_formed += 1

    def _end(self, tp_group: _TPGroup, *, has_kv: bool = True) -> None:
        del self._tp_groups[tp_group.plan.driver]
        self.workers.difference_update(tp_group.plan.workers)
        for replica_id in tp_group.plan.workers:
            self.busy.setdefault(replica_id, []).append((tp_group.began_s, self._clock.now))
        driver = self._members.get(tp_group.plan.driver)
        self._book.end(tp_group.plan.driver, None if driver is None else driver.stats)
        if driver is not None:
            driver.is_tp_driver = False
            driver.set_slowdown(1.0, self._engine.tp_switch_s)
            if not has_kv:
                driver.recompute()
        self._on_change()
