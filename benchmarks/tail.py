"""Simulates how full a pool is up to its last row: heavy tails, a slow replica, a death.

Run: python benchmarks/tail.py --out RESULT.json [--rows 16384 1024] [--seeds 42 43 44]

Queue, scheduler, learnt lengths and plan of the pool are those of raybatch, on a virtual clock. A
step has a price instead of a computation. The prices are assumed, not measured: `flat` steps all
cost the same, as if reading weights bounds them; half of a full `mixed` step depends on its rows.
So ratios show the decisions of a pool, not the speed of an engine. The pool is compared with:

bound      batches of 64 rows dealt to replicas in turn, and rows stay; no row of a batch waits
lpt        rows sharded in advance by their lengths, which no pool knows, longest first
without    all policies but one; `before` is the queue alone, which balances tokens
oracle     the pool with known lengths and rows in the order of their lengths
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import conditions
import numpy as np
from step_simulator import FREE

from raybatch.policy.cost.cost_model import EngineLimits
from raybatch.records.arrays import Ints
from raybatch_lab.simulator.engine import EngineSpec, alone_seconds
from raybatch_lab.simulator.events import Death, Policies, PoolSpec
from raybatch_lab.simulator.figures import Ideal, ideal_of, simulate
from raybatch_lab.simulator.rows import SimulatedRows
from raybatch_lab.simulator.workloads import make_rows

PRICES = {"flat": (0.02, 0.0), "mixed": (0.0128, 0.0002)}
SCENARIOS: dict[str, dict[str, Any]] = {
    "plain": {},
    "slow": {"slowness": {0: 2.0}},
    "killed": {"deaths": (Death(rank=1, at_fraction=0.5),)},
}
POLICIES = {
    "pool": Policies(),
    "without moves": Policies(moves_rows=False),
    "without lengths": Policies(learns_lengths=False),
    "without speeds": Policies(learns_speeds=False),
    "before": Policies(learns_lengths=False, learns_speeds=False, moves_rows=False),
}
MAX_NUM_SEQS, KV_TOKENS, BATCH_ROWS = 64, 1 << 19, 64
# bytes of a token of an 8B model in 16 bits, with 8 KV heads
KV_TOKEN_BYTES = 131_072.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One run of one side; seconds are virtual."""

    workload: str
    rows: int
    seed: int
    replicas: int
    scenario: str
    side: str
    completion_s: float
    of_ideal: float
    idle_share: float | None = None
    num_moved: int = 0
    num_stolen: int = 0


def engine_spec(prices: str) -> EngineSpec:
    step_s, token_s = PRICES[prices]
    limits = EngineLimits(
        kv_tokens=KV_TOKENS, max_num_seqs=MAX_NUM_SEQS, block_size=16, max_batched_tokens=2048
    )
    cost = replace(FREE, step_s=step_s, token_s=(token_s,), limits=limits)
    return EngineSpec(cost=cost, kv_bytes_per_token=KV_TOKEN_BYTES)


def dealt(rows: SimulatedRows, num_replicas: int) -> list[Ints]:
    """Return the rows of each replica if batches are dealt in turn."""
    owner = np.arange(len(rows)) // BATCH_ROWS % num_replicas
    return [np.flatnonzero(owner == rank) for rank in range(num_replicas)]


def longest_first(rows: SimulatedRows, num_replicas: int) -> list[Ints]:
    """Return the rows of each replica by LPT: a row goes to the replica with the fewest tokens."""
    totals = np.zeros(num_replicas)
    shards: list[list[int]] = [[] for _ in range(num_replicas)]
    for row in np.argsort(-rows.output, kind="stable").tolist():
        rank = int(totals.argmin())
        totals[rank] += rows.output[row]
        shards[rank].append(row)
    return [np.array(shard, np.int64) for shard in shards]


SHARDS = {"bound": dealt, "lpt": longest_first}


def sharded_s(
    rows: SimulatedRows, engine: EngineSpec, shards: Sequence[Ints], pool: PoolSpec
) -> float:
    """Return the seconds until the last replica ends, if each runs its own shard."""
    return max(
        pool.slowness.get(rank, 1.0) * alone_seconds(rows.take(shard), engine)
        for rank, shard in enumerate(shards)
        if len(shard)
    )


def run_case(
    rows: SimulatedRows,
    engine: EngineSpec,
    ideal: Ideal,
    scenario: str,
    num_replicas: int,
    sides: Sequence[str],
) -> list[tuple[str, float, Any]]:
    """Return side, seconds and figures of each of `sides`, and of the oracle."""
    late = {rank: 0.01 * rank for rank in range(num_replicas)}
    pool = PoolSpec(num_replicas=num_replicas, late_s=late, **SCENARIOS[scenario])
    found: list[tuple[str, float, Any]] = []
    for side in [side for side in POLICIES if side in sides]:
        figures = simulate(rows, engine, replace(pool, policies=POLICIES[side]), ideal)
        found.append((side, figures.completion_s, figures))
    order = np.argsort(-rows.output, kind="stable")
    figures = simulate(rows.take(order).with_oracle(), engine, pool, ideal)
    found.append(("oracle", figures.completion_s, figures))
    if not pool.deaths:
        for side in [side for side in SHARDS if side in sides]:
            shards = SHARDS[side]
            seconds = sharded_s(rows, engine, shards(rows, num_replicas), pool)
            found.append((side, seconds, None))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", default="W4")
    parser.add_argument("--rows", type=int, nargs="+", default=[16384, 1024])
    parser.add_argument("--replicas", type=int, nargs="+", default=[4])
    parser.add_argument("--seeds", type=int, nargs="+", default=[42])
    parser.add_argument("--prices", choices=PRICES, default="mixed")
    parser.add_argument("--scenarios", choices=SCENARIOS, nargs="+", default=list(SCENARIOS))
    parser.add_argument("--sides", nargs="+", default=[*POLICIES, *SHARDS])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    engine, outcomes = engine_spec(options.prices), list[Outcome]()
    for num_rows in options.rows:
        for seed in options.seeds:
            rows = make_rows(options.workload, num_rows=num_rows, seed=seed)
            ideal = ideal_of(rows, engine)
            for num_replicas in options.replicas:
                for scenario in options.scenarios:
                    if scenario != "plain" and num_replicas == 1:
                        continue
                    speed = PoolSpec(num_replicas=num_replicas, **SCENARIOS[scenario]).speed
                    began = time.perf_counter()
                    for side, seconds, figures in run_case(
                        rows, engine, ideal, scenario, num_replicas, options.sides
                    ):
                        outcomes.append(
                            Outcome(
                                workload=options.workload,
                                rows=num_rows,
                                seed=seed,
                                replicas=num_replicas,
                                scenario=scenario,
                                side=side,
                                completion_s=round(seconds, 2),
                                of_ideal=round(seconds / ideal.seconds(speed), 4),
                                idle_share=None
                                if figures is None
                                else round(figures.idle_share, 4),
                                num_moved=0 if figures is None else figures.num_moved,
                                num_stolen=0 if figures is None else figures.num_stolen,
                            )
                        )
                    print(f"# {num_rows} rows, {scenario}: {time.perf_counter() - began:.0f} s")
    print_tables(outcomes)
    conditions.write_result(
        options.out,
        "tail.py",
        is_simulated=True,
        prices={"step_s, token_s": PRICES[options.prices], "name": options.prices},
        outcomes=[asdict(outcome) for outcome in outcomes],
    )


def print_tables(outcomes: Sequence[Outcome]) -> None:
    """Print each case as medians over seeds, all sides relative to the oracle."""
    cases = dict.fromkeys((o.rows, o.replicas, o.scenario) for o in outcomes)
    for num_rows, num_replicas, scenario in cases:
        of_case = [
            o
            for o in outcomes
            if (o.rows, o.replicas, o.scenario) == (num_rows, num_replicas, scenario)
        ]
        sides = dict.fromkeys(o.side for o in of_case)
        oracle_s = statistics.median(o.completion_s for o in of_case if o.side == "oracle")
        print(f"\n{num_rows} rows on {num_replicas} replicas, {scenario}; simulated")
        print(f"{'side':18}{'seconds':>10}{'of oracle':>11}{'of ideal':>10}{'idle':>7}{'moved':>7}")
        for side in sides:
            its = [o for o in of_case if o.side == side]
            seconds = statistics.median(o.completion_s for o in its)
            idle = [o.idle_share for o in its if o.idle_share is not None]
            print(
                f"{side:18}{seconds:10.1f}{seconds / oracle_s:11.3f}"
                f"{statistics.median(o.of_ideal for o in its):10.3f}"
                f"{f'{statistics.median(idle):.2f}' if idle else '-':>7}"
                f"{statistics.median(o.num_moved for o in its):7.0f}"
            )


if __name__ == "__main__":
    main()
