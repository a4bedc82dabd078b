"""Runs one job without Ray whose rows move or form TP groups, whose engines end or hang meanwhile.

python -m faultlab.moving_driver JOB.yaml FOLDER

FOLDER/moves.json is the plan, a `MovePlan`; FOLDER/moved.json the result, a `Moved`.
"""

import asyncio
import dataclasses
import json
import logging
import os
import random
import signal
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self, cast
from unittest import mock

from raybatch.actors.coordinator.coordinator import Coordinator
from raybatch.actors.coordinator.rebalancer import MoveRows, Rebalancer
from raybatch.actors.executors import local_pools
from raybatch.actors.executors.calls import CallHandle, LocalLoop
from raybatch.actors.executors.local_pools import LocalRuntime
from raybatch.actors.replicas.placement import Placement
from raybatch.actors.replicas.replica_set import Member
from raybatch.actors.replicas.runtime import ReplicaGroup, Started
from raybatch.actors.wire.records import PoolSpec, ReplicaApi
from raybatch.errors import RaybatchError
from raybatch.job.job import Job
from raybatch.policy.pool.snapshot import PoolSnapshot, RowMove
from raybatch_extensions.tp_groups.policy import TPGroupKind, TPGroupPlan
from raybatch_extensions.tp_groups.pool import TPGroups

PLAN, DONE = "moves.json", "moved.json"
# share of random moves that take KV along
_WITH_KV = 0.7
# share of polls of a TP group that end it
_ENDS = 0.1
_ROWS_OF_HUNG = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class MoveFault:
    """The end of one side of a move, or of a rank of a TP group, at one of its steps.

    Args:
        num_before: rows that have moved before, or TP groups that formed.
        step: of `MoveStep` or `TPGroupStep`.
        is_after: the step has been taken.
        victim: "source" or "target", "driver" or "worker".
        hangs: the engine takes no further step and answers no call, instead of being killed.
    """

    num_before: int
    step: str
    is_after: bool
    victim: str
    hangs: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class MovePlan:
    """Moves and faults of a run.

    Args:
        seed: of the moves.
        every_s: between two random moves; None leaves moves to the pool.
        forms_tp_groups: of engines, once one of them is idle, in place of random moves.
        faults: in their order.
        hang_dir: of fake engines, whose thread hangs while their process answers; None stops the
            process of the engine.
    """

    seed: int
    every_s: float | None
    forms_tp_groups: bool = False
    faults: tuple[MoveFault, ...] = ()
    hang_dir: str | None = None

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read one from a file."""
        values = json.loads(path.read_text(encoding="utf-8"))
        faults = tuple(MoveFault(**fault) for fault in values.pop("faults"))
        return cls(faults=faults, **values)


@dataclass(frozen=True, kw_only=True, slots=True)
class Moved:
    """Moves and faults that a run had.

    Args:
        num_failed: moves that left their row where it was.
        num_bytes: of KV.
        num_hung: engines that were found to hang, and were replaced.
        num_tp_groups: formed or failed to form; None where none was to form.
        num_launched: rows that a second engine has begun as well.
        faults: that came.
    """

    num_moved: int
    num_failed: int
    num_bytes: int
    num_hung: int
    faults: tuple[MoveFault, ...]
    num_tp_groups: int | None = None
    num_launched: int = 0

    @property
    def problem(self) -> str:
        """Return what is wrong with the moves, whatever the rows are; "" where nothing is."""
        num_hangs = sum(fault.hangs for fault in self.faults)
        if self.num_tp_groups is None and not self.num_moved:
            return "no row moved"
        if self.num_tp_groups == 0:
            return "no TP group formed"
        # a worker, or one whose rows others have as well, is not missed where the job ends soon
        if self.num_tp_groups is not None or self.num_launched:
            num_hangs = min(num_hangs, self.num_hung)
        if self.num_hung != num_hangs:
            return f"{num_hangs} engines hung, and {self.num_hung} were replaced as hanging"
        return ""

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read one from a file."""
        values = json.loads(path.read_text(encoding="utf-8"))
        faults = tuple(MoveFault(**fault) for fault in values.pop("faults"))
        return cls(faults=faults, **values)


class _MovingRuntime(LocalRuntime):
    """A runtime that begins moves, and ends engines at their steps, by a plan."""

    def __init__(self, loop: LocalLoop, *, plan: MovePlan) -> None:
        super().__init__(loop)
        self.came: list[MoveFault] = []
        self.moving: asyncio.Task[None] | None = None
        self._ended: set[int] = set()
        self._plan, self._rng = plan, random.Random(plan.seed)

    @property
    def _coordinator(self) -> Coordinator:
        """Return the coordinator itself."""
        return cast(Coordinator, self.owner)

    def start(
        self,
        spec: PoolSpec,
        plan: Placement,
        rank: int,
        replica_id: int,
        *,
        avoid: Collection[str] = (),
        group: ReplicaGroup | None = None,
    ) -> Started:
        if self.moving is None and self._plan.every_s is not None:
            self.moving = asyncio.create_task(self._move_rows(self._plan.every_s))
        started = super().start(spec, plan, rank, replica_id, avoid=avoid, group=group)
        return _Watched(started, replica_id, self)

    def reached(self, replica_id: int, step: str, args: tuple[Any, ...], *, is_after: bool) -> None:
        """End a side of a move if that is the next fault, and the move exists."""
        num_hung = self._coordinator._replicas.ledger.num_hung
        is_replaced = num_hung >= sum(fault.hangs for fault in self.came)
        if not is_replaced or len(self.came) == len(self._plan.faults):
            return
        fault = self._plan.faults[len(self.came)]
        if (fault.step, fault.is_after) != (step, is_after) or self._num_done < fault.num_before:
            return
        sides = self._sides(replica_id, args)
        victim = None if sides is None else self._members().get(sides.get(fault.victim, 0))
        # the end of a victim of another fault may not be noticed yet
        if victim is None or victim.pid is None or victim.pid in self._ended:
            return
        # one that has no rows is not missed, and those that have ended may be on their way
        num_rows = self._coordinator._queue.load(victim.replica_id).num_rows
        if not fault.hangs or victim.is_tp_worker or num_rows >= _ROWS_OF_HUNG:
            self.came.append(fault)
            self._end(victim.pid, hangs=fault.hangs)

    def _end(self, pid: int, *, hangs: bool) -> None:
        self._ended.add(pid)
        if hangs and self._plan.hang_dir is not None:
            Path(self._plan.hang_dir, str(pid)).touch()
        else:
            os.kill(pid, signal.SIGSTOP if hangs else signal.SIGKILL)

    @property
    def _rebalancer(self) -> Rebalancer:
        return self._coordinator._rebalancer

    @property
    def _tp_groups(self) -> TPGroups | None:
        """Return the TP groups of the pool; None where its engines form none."""
        extensions = self._rebalancer.extensions
        return next((each for each in extensions if isinstance(each, TPGroups)), None)

    def _num_tp_groups(self) -> tuple[int, int]:
        """Return how many TP groups formed, and how many did not."""
        tp_groups = self._tp_groups
        return (
            (0, 0)
            if tp_groups is None
            else (tp_groups.counters.num_formed, tp_groups.counters.num_failed)
        )

    @property
    def _num_done(self) -> int:
        if self._plan.forms_tp_groups:
            return self._num_tp_groups()[0]
        return self._rebalancer.moves.num_moved

    def _sides(self, replica_id: int, args: tuple[Any, ...]) -> Mapping[str, int] | None:
        """Return the engines that take part in the move that a step is of, or in the TP group."""
        tp_groups = {} if self._tp_groups is None else self._tp_groups._tp_groups
        for tp_group in tp_groups.values():
            driver, (worker,) = tp_group.plan.driver, tp_group.plan.workers
            if replica_id in (driver, worker):
                return {"driver": driver, "worker": worker}
        for row_id, row in self._rebalancer.view._moving.items():
            source, target = row.move.source, row.move.target
            # the pieces of KV name no row
            is_it = args[0] == row_id or not isinstance(args[0], int)
            if is_it and replica_id in (source, target):
                return {"source": source, "target": target}
        return None

    def _members(self) -> dict[int, Member]:
        return self._coordinator._replicas.members

    async def _move_rows(self, every_s: float) -> None:
        """Begin moves of random running rows, or TP groups, at intervals."""
        while True:
            await asyncio.sleep(every_s)
            if self._plan.forms_tp_groups:
                self._form_or_end()
            else:
                self._move_one()

    def _form_or_end(self) -> None:
        """Let an idle engine join one that has rows; or end a TP group, now and then.

        Where a fault is to come at the end of a TP group, it is ended as soon as it works.
        """
        if (tp_groups := self._tp_groups) is None:
            return
        working = [tp_group for tp_group in tp_groups._tp_groups.values() if tp_group.is_formed]
        upcoming = self._plan.faults[len(self.came) : len(self.came) + 1]
        is_awaited = any(fault.step == "reunite" for fault in upcoming)
        if working and (is_awaited or self._rng.random() < _ENDS):
            tp_groups._end(self._rng.choice(working), "its time is over")
        free = {r for r, member in self._members().items() if member.takes_rows}
        idle = sorted(r for r in free if not self._coordinator._queue.load(r).num_rows)
        snapshot = self._snapshot()
        busy = [
            r.replica_id
            for r in snapshot.replicas
            if r.replica_id in free and r.rows is not None and r.rows.can_move.any()
        ]
        if idle and busy:
            driver, workers = self._rng.choice(busy), (self._rng.choice(idle),)
            tp_group = TPGroupPlan(driver, workers, TPGroupKind(2, True), "of chance", 1.0)
            tp_groups._begin(tp_group)

    def _snapshot(self) -> PoolSnapshot:
        view = self._rebalancer.view
        return view.snapshot(self._members().values(), (), with_rows=True)

    def _move_one(self) -> None:
        snapshot = self._snapshot()
        with_rows = [r for r in snapshot.replicas if r.rows is not None and r.rows.can_move.any()]
        if not with_rows or len(snapshot.replicas) < 2:
            return
        source = self._rng.choice(with_rows)
        assert source.rows is not None, "these were chosen"
        row_id = self._rng.choice(source.rows.ids[source.rows.can_move].tolist())
        others = [r.replica_id for r in snapshot.replicas if r is not source]
        with_kv = source.kv_token_bytes > 0 and self._rng.random() < _WITH_KV
        move = RowMove(row_id, source.replica_id, self._rng.choice(others), with_kv)
        self._rebalancer.apply(MoveRows((move,), snapshot))


class _Watched:
    """A replica whose steps of moves and TP groups the runtime sees."""

    def __init__(self, started: Started, replica_id: int, runtime: _MovingRuntime) -> None:
        self._started, self._replica_id, self._runtime = started, replica_id, runtime

    @property
    def actor(self) -> ReplicaApi:
        return cast(ReplicaApi, CallHandle(self._call))

    def end(self) -> None:
        self._started.end()

    def _call(self, name: str, *args: Any) -> Any:  # noqa: ANN401 - of any method
        call = getattr(self._started.actor, name)
        if name == "move":
            return asyncio.create_task(self._step(call, *args))
        if name == "extend" and args[0] == "tp_groups":
            return asyncio.create_task(self._step(partial(call, args[0]), *args[1:]))
        return call(*args)

    async def _step(self, call: Any, step: str, *args: Any) -> Any:  # noqa: ANN401 - of any step
        self._runtime.reached(self._replica_id, step, args, is_after=False)
        answer = await call(step, *args)
        self._runtime.reached(self._replica_id, step, args, is_after=True)
        return answer


def main(job_file: str, folder: str) -> int:
    """Run a job; return the exit code of `raybatch run`."""
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("raybatch").setLevel(logging.INFO)
    runtimes: list[_MovingRuntime] = []
    plan = MovePlan.load(Path(folder, PLAN))

    def make(loop: LocalLoop) -> _MovingRuntime:
        runtimes.append(_MovingRuntime(loop, plan=plan))
        return runtimes[-1]

    with mock.patch.object(local_pools, "LocalRuntime", make):
        try:
            report = Job.from_yaml(job_file).run(progress=lambda *_: None)
        except RaybatchError as error:
            logging.getLogger("raybatch").error("%s", error)
            return 1
    (runtime,) = runtimes
    if runtime.moving is not None and runtime.moving.done():
        runtime.moving.result()
    moves = runtime._rebalancer.moves
    moved = Moved(
        num_moved=moves.num_moved,
        num_failed=moves.num_failed,
        num_bytes=moves.num_bytes,
        num_hung=runtime._coordinator._replicas.ledger.num_hung,
        num_tp_groups=sum(runtime._num_tp_groups()) if plan.forms_tp_groups else None,
        num_launched=runtime._rebalancer.counts()["duplicates"],
        faults=tuple(runtime.came),
    )
    Path(folder, DONE).write_text(json.dumps(dataclasses.asdict(moved)), encoding="utf-8")
    return report.exit_code()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
