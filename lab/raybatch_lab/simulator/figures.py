"""Figures of simulated runs: completion relative to a lower bound, idle time, scaling."""

from dataclasses import dataclass

import numpy as np

from raybatch_lab.simulator.engine import EngineSpec, alone_seconds
from raybatch_lab.simulator.events import PoolSpec
from raybatch_lab.simulator.pool import PoolOutcome, SimulatedPool
from raybatch_lab.simulator.rows import SimulatedRows

# of a run: the last part, in which replicas fall idle
_LAST_PART = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Ideal:
    """Lower bounds of the seconds of a job, for any pool of one kind of engine.

    Args:
        longest_row_s: seconds of the longest row alone on an engine.
        one_engine_s: seconds of all rows on one engine whose batch is always full.
    """

    longest_row_s: float
    one_engine_s: float

    def seconds(self, speed: float) -> float:
        """Return the lower bound for a pool of this speed: `longest_row_s`, or an even share.

        `speed` is that of the whole pool, see `PoolSpec.speed`.
        """
        return max(self.longest_row_s, self.one_engine_s / speed)


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolFigures:
    """Results of one simulated run; seconds are simulated ones.

    Args:
        completion_s: seconds from when the first replica is ready until the last row is reported.
        ideal_s: lower bound of `completion_s`, see `Ideal`.
        linear_share: throughput, as a share of that of as many engines with full batches.
        idle_share: share of the replicas' time in the last tenth of the run without a step.
        num_stolen: unstarted rows that went from one replica to another.
        num_moved: running rows that moved to another replica.
        num_tp_groups: TP groups that replicas formed.
        num_deaths: crashes of replicas.
        num_given_up: rows given up after too many crashes.
    """

    num_replicas: int
    completion_s: float
    ideal_s: float
    linear_share: float
    idle_share: float
    num_stolen: int
    num_moved: int
    num_tp_groups: int = 0
    num_deaths: int
    num_given_up: int

    @property
    def ratio(self) -> float:
        """Return `completion_s` as a multiple of `ideal_s`."""
        return self.completion_s / self.ideal_s


def ideal_of(rows: SimulatedRows, engine: EngineSpec) -> Ideal:
    """Return the lower bounds of a job, by simulating the longest row alone and all rows.

    The rate of a full engine is measured until its last waiting row starts; if all rows start at
    once, the whole run counts.
    """
    longest = {int(rows.output.argmax()), int(rows.prompt.argmax())}
    longest_row_s = max(alone_seconds(rows.take(np.array([row])), engine) for row in longest)
    outcome = SimulatedPool(rows, engine, PoolSpec(num_replicas=1)).run()
    one_engine_s = outcome.completion_s
    if outcome.dry_tokens and outcome.dry_s > 0:
        total = int(rows.output.sum())
        one_engine_s = min(one_engine_s, outcome.dry_s * total / outcome.dry_tokens)
    return Ideal(longest_row_s=longest_row_s, one_engine_s=one_engine_s)


def simulate(rows: SimulatedRows, engine: EngineSpec, pool: PoolSpec, ideal: Ideal) -> PoolFigures:
    """Simulate one run of a job; equal arguments give equal results."""
    outcome = SimulatedPool(rows, engine, pool).run()
    completion_s = outcome.completion_s - outcome.ready_s
    return PoolFigures(
        num_replicas=pool.num_replicas,
        completion_s=completion_s,
        ideal_s=ideal.seconds(pool.speed),
        linear_share=ideal.one_engine_s / pool.speed / completion_s,
        idle_share=idle_share(outcome, pool.num_replicas),
        num_stolen=outcome.num_stolen,
        num_moved=outcome.num_moved,
        num_tp_groups=outcome.num_tp_groups,
        num_deaths=outcome.num_deaths,
        num_given_up=outcome.num_given_up,
    )


def idle_share(outcome: PoolOutcome, num_replicas: int, part: float = _LAST_PART) -> float:
    """Return the share of the replicas' time, in the last `part` of a run, without a step."""
    end_s = outcome.completion_s
    begin_s = end_s - part * (end_s - outcome.ready_s)
    busy_s = sum(
        max(0.0, min(stop, end_s) - max(start, begin_s))
        for replica in outcome.replicas
        for start, stop in replica.busy
    )
    return 1 - busy_s / (num_replicas * (end_s - begin_s))
