"""The figures of simulated runs: completion beside what no pool can beat, idle time, scaling."""

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
    """What bounds every pool for some rows.

    Args:
        longest_row_s: seconds of the longest row alone on an engine.
        one_engine_s: of all rows on one engine that is full from the first to the last of them.
    """

    longest_row_s: float
    one_engine_s: float

    def seconds(self, speed: float) -> float:
        """Return the larger of the longest row and an even share, for engines of this speed."""
        return max(self.longest_row_s, self.one_engine_s / speed)


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolFigures:
    """One simulated run; seconds are virtual.

    Args:
        completion_s: from the first replica that is ready to the last row that is reported.
        ideal_s: see `Ideal`.
        linear_share: of what one engine that is always full would do times all engines.
        idle_share: of the replicas' time in the last tenth of the run.
        num_stolen: rows given back by one replica and run by another.
        num_moved: rows that went on elsewhere with their tokens.
        num_teams: that replicas formed.
        num_deaths: of replicas.
        num_given_up: rows that ended their replica too often.
    """

    num_replicas: int
    completion_s: float
    ideal_s: float
    linear_share: float
    idle_share: float
    num_stolen: int
    num_moved: int
    num_teams: int = 0
    num_deaths: int
    num_given_up: int

    @property
    def ratio(self) -> float:
        """Return the completion as a multiple of the ideal."""
        return self.completion_s / self.ideal_s


def ideal_of(rows: SimulatedRows, engine: EngineSpec) -> Ideal:
    """Return what bounds a pool, from one row alone and from one engine that runs all.

    The rate of an engine is that up to the moment at which no row waits any more; rows that are
    fewer than it runs at once have the rate of the whole run.
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
    """Run a job once; equal arguments have equal figures."""
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
        num_teams=outcome.num_teams,
        num_deaths=outcome.num_deaths,
        num_given_up=outcome.num_given_up,
    )


def idle_share(outcome: PoolOutcome, num_replicas: int, part: float = _LAST_PART) -> float:
    """Return the share of time in the last part of a run in which replicas did not step."""
    end_s = outcome.completion_s
    begin_s = end_s - part * (end_s - outcome.ready_s)
    busy_s = sum(
        max(0.0, min(stop, end_s) - max(start, begin_s))
        for replica in outcome.replicas
        for start, stop in replica.busy
    )
    return 1 - busy_s / (num_replicas * (end_s - begin_s))
