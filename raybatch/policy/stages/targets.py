"""Which replica each row belongs to under a plan of stages: what the plan of the pool asks for."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from raybatch.errors import ConfigError
from raybatch.policy.stages.overload import is_overloaded
from raybatch.policy.stages.plan import StagePlan
from raybatch.policy.stages.routing import next_stage, stage_for
from raybatch.records.arrays import Bools, Floats, Ints


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsSnapshot:
    """Rows that wait or run, and what the replicas hold.

    Args:
        lengths: tokens so far, those of the prompt for a row that waits, [N].
        expected_lens: tokens at the end, as expected, [N].
        is_running: [N].
        holders: the replica that runs each row, [N]; not read for a row that waits.
        loads: KV tokens that the running rows of each replica hold, [E].
    """

    lengths: Ints
    expected_lens: Ints
    is_running: Bools
    holders: Ints
    loads: Floats

    def __post_init__(self) -> None:
        columns = (self.lengths, self.expected_lens, self.is_running, self.holders)
        if len({len(column) for column in columns}) > 1:
            sizes = [len(column) for column in columns]
            raise ConfigError(f"the columns of rows have {sizes} entries; they must have as many")


def target_replicas(
    plan: StagePlan, rows: RowsSnapshot, bounds: npt.ArrayLike | None = None
) -> Ints:
    """Return the replica that each row belongs to, [N]; a running row that stays has its holder.

    A row that waits goes to the earliest stage that covers it; one that has outgrown its stage goes
    on to a later one; both to the replica with the least load, long rows first. Then a replica that
    holds a quarter more than its stage gives rows to others of it. O(N log N).

    Args:
        bounds: between stages; those of the plan by default.

    Raises:
        ConfigError: there are not as many loads as replicas of the plan.
    """
    stage_of = plan.stage_of_replica
    if len(rows.loads) != len(stage_of):
        raise ConfigError(f"there are {len(rows.loads)} loads for {len(stage_of)} replicas")
    bounds = plan.bounds if bounds is None else bounds
    waiting, holders = ~rows.is_running, np.where(rows.is_running, rows.holders, 0)
    stages = stage_for(bounds, rows.lengths)
    held = np.where(waiting, 0, stage_of[holders])
    stages = np.where(waiting, stages, next_stage(bounds, rows.lengths, held))
    targets, loads = holders.copy(), rows.loads.astype(float)
    leaves = waiting | (stages > held)
    gone = leaves & rows.is_running
    np.subtract.at(loads, holders[gone], rows.lengths[gone])
    # tokens that a row will hold before it ends or goes on
    ends = np.append(np.asarray(bounds, float), np.inf)
    demands = np.maximum(rows.lengths, np.minimum(rows.expected_lens, ends[stages]))
    for stage in range(len(plan.stages)):
        members = np.flatnonzero(stage_of == stage)
        arriving = np.flatnonzero(leaves & (stages == stage))
        for row in arriving[np.argsort(-demands[arriving], kind="stable")].tolist():
            best = int(members[loads[members].argmin()])
            targets[row] = best
            loads[best] += demands[row]
        _level(members, targets, loads, rows, ~leaves & (stages == stage))
    return targets


def _level(
    members: Ints, targets: Ints, loads: Floats, rows: RowsSnapshot, is_movable: Bools
) -> None:
    """Move rows off overloaded replicas of one stage, those first that level both sides best.

    `targets` and `loads` are modified in place.
    """
    for replica in members[is_overloaded(loads[members])].tolist():
        own = np.flatnonzero(is_movable & (targets == replica))
        while len(own) and is_overloaded(loads[members])[members == replica].any():
            best = int(members[loads[members].argmin()])
            lengths = rows.lengths[own]
            higher = np.maximum(loads[replica] - lengths, loads[best] + lengths)
            place = int(higher.argmin())
            if higher[place] >= loads[replica]:
                break
            targets[own[place]] = best
            loads[best] += lengths[place]
            loads[replica] -= lengths[place]
            own = np.delete(own, place)
