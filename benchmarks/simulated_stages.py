"""Simulates replicas for ranges of lengths, and compares them with one pool: when do they pay?

Run: python benchmarks/simulated_stages.py --out result.json

Costs of H100 engines are computed from the data sheet; no H100 is measured. Attention of a batch
takes longer by a factor: 1 if its rows have one length, and the given factor if their deviation
equals the mean (CascadeInfer measured 1.1 to 2.1 on an H100; `length_mix.py` at most 1.04 on a
CPU). Scheduler, blocks and traders are those of raybatch, on a virtual clock. Layouts:

none       one stage
shards     each replica begins rows of a range of final lengths, and keeps them; it takes other rows
           when it has no more of its range
4 x n      four stages with n replicas each and equal work, as in CascadeInfer's figure 16
chain      each replica is a stage, with equal work, as in its figure 14
latency    stages by CascadeInfer's program: the sum of latencies of all rows, cuts at powers of two
makespan   stages by raybatch's program: the slowest stage, including the factor

In `batch` all rows wait at the beginning, lengths are known, and the longest row is first. It also
has `pool`: raybatch's pool with learnt lengths and moves in the tail. In `stream` rows arrive
(Poisson) and lengths are unknown, as in CascadeInfer. Bounds of stages follow the running rows.
Moves take no time from computation here, which favours stages.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import conditions
import numpy as np
from stage_layouts import (
    H100,
    H100_LIMITS,
    H100_MOVES,
    Layout,
    curve_of,
    layouts_of,
    least_latency,
    pool_of,
)
from step_simulator import FREE

from raybatch.records.arrays import Floats
from raybatch_lab.simulator.engine import EngineSpec
from raybatch_lab.simulator.events import PoolSpec
from raybatch_lab.simulator.links import LinkSpec
from raybatch_lab.simulator.pool import SimulatedPool
from raybatch_lab.simulator.rows import SimulatedRows
from raybatch_lab.simulator.staged import StagedOutcome, StagedPool, StagedSpec
from raybatch_lab.stages.choice import choose_stages
from raybatch_lab.stages.heterogeneity import FLAT, MixCurve
from raybatch_lab.stages.lengths import RangeWork, RowLengths
from raybatch_lab.stages.plan import plan_exactly
from raybatch_lab.stages.replica_seconds import work_seconds

FACTORS = (1.0, 1.04, 1.3, 1.7, 2.5)
# tokens of a step whose computation the reading of the weights hides
HIDDEN_TOKENS = 256.0
REFINE_EVERY_S = 2.0
# deviations of the logarithms of prompts and outputs
SPREADS = {"narrow": (0.4, 0.3), "W7": (1.3, 1.0), "long outputs": (0.0, 1.95)}


def make_rows(spread: str, num_rows: int) -> SimulatedRows:
    """Return rows with log-normal prompts (median 403) and outputs (median 245)."""
    prompt_sigma, output_sigma = SPREADS[spread]
    rng = np.random.default_rng(0)
    prompt = np.clip(rng.lognormal(6, prompt_sigma, num_rows), 1, 120_000).astype(np.int64)
    output = np.clip(rng.lognormal(5.5, output_sigma, num_rows), 1, 8192).astype(np.int64)
    return SimulatedRows.of(prompt, output)


def engine_of(curve: MixCurve) -> EngineSpec:
    cost = replace(
        FREE,
        step_s=H100.step_s,
        knots=(HIDDEN_TOKENS,),
        token_s=(0.0, H100.prompt_token_s),
        row_s=H100.row_s,
        pair_s=H100.prompt_pair_s,
        past_pair_s=H100.prompt_pair_s,
        context_s=H100.context_s,
        limits=H100_LIMITS,
    )
    # rows share nothing
    return EngineSpec(
        enable_prefix_caching=False,
        cost=cost,
        kv_bytes_per_token=H100_MOVES.kv_bytes_per_token,
        curve=curve,
    )


def figures_of(
    outcome: StagedOutcome, rows: SimulatedRows, arrivals_s: Floats | None
) -> dict[str, Any]:
    """Return the figures of one run to print and store.

    `busy_s` is the completion time if the work were perfectly balanced. The rate of a stream is
    that of the rows that end before the last row arrives.
    """
    begun_s = np.zeros(len(rows)) if arrivals_s is None else arrivals_s
    end_s = outcome.completion_s if arrivals_s is None else float(arrivals_s[-1])
    per_token_ms = (outcome.ended_s - begun_s) / rows.output * 1e3
    return {
        "completion_s": round(outcome.completion_s, 2),
        "busy_s": round(float(outcome.busy_s.mean()), 2),
        "tokens_per_s": round(float(rows.output[outcome.ended_s <= end_s].sum()) / end_s),
        "ms_per_token": round(float(per_token_ms.mean()), 1),
        "p95_ms_per_token": round(float(np.quantile(per_token_ms, 0.95)), 1),
        "handed_over": outcome.num_handed_over,
        "busy": [round(float(each), 3) for each in outcome.busy_s / outcome.completion_s],
    }


def run_batch(rows: SimulatedRows, factor: float, options: argparse.Namespace) -> dict[str, Any]:
    """Return the runs of all layouts and of raybatch's pool, and the forecast of the last one."""
    pool = pool_of(curve_of(factor), options.replicas)
    lengths = RowLengths(rows.prompt, rows.output)
    runs = []
    if _is_wanted("pool", options):
        spec = PoolSpec(num_replicas=options.replicas)
        outcome = SimulatedPool(rows, engine_of(pool.curve), spec).run()
        busy_s = sum(b - a for replica in outcome.replicas for a, b in replica.busy)
        runs.append(
            {
                "layout": "pool",
                "completion_s": round(outcome.completion_s, 2),
                "busy_s": round(busy_s / options.replicas, 2),
                "tokens_per_s": round(float(rows.output.sum()) / outcome.completion_s),
            }
        )
    for layout in layouts_of(pool, lengths):
        if _is_wanted(layout.name, options):
            spec_of = StagedSpec(
                plan=layout.plan,
                by_final_len=layout.name == "shards",
                levels=layout.moves,
                refine_every_s=REFINE_EVERY_S if layout.moves else None,
                quality=H100,
                network=LinkSpec(bytes_per_s=H100_MOVES.bytes_per_s),
            )
            outcome_of = StagedPool(rows.with_oracle(), engine_of(pool.curve), spec_of).run()
            runs.append(_entry(layout, figures_of(outcome_of, rows, None)))
    choice = choose_stages(pool, lengths)
    forecast = {"none_s": round(choice.sorted_s, 2), "reason": choice.reason}
    if choice.staged_s is not None:
        forecast["makespan_s"] = round(choice.staged_s, 2)
    return {"arrivals": "batch", "forecast": forecast, "runs": runs}


def run_stream(
    rows: SimulatedRows, factor: float, load: float, options: argparse.Namespace
) -> dict[str, Any]:
    """Return the runs of all layouts for rows that arrive at a share of the pool's best rate."""
    pool = pool_of(curve_of(factor), options.replicas)
    rate = load * ideal_rows_per_s(rows, options.replicas)
    gaps = np.random.default_rng(1).exponential(1 / rate, len(rows))
    arrivals_s, runs = np.cumsum(gaps), []
    for layout in layouts_of(pool, RowLengths(rows.prompt, rows.output)):
        if _is_wanted(layout.name, options) and layout.name != "shards":
            spec = StagedSpec(
                plan=layout.plan,
                is_sorted=False,
                arrivals_s=arrivals_s,
                refine_every_s=REFINE_EVERY_S,
                quality=H100,
                network=LinkSpec(bytes_per_s=H100_MOVES.bytes_per_s),
            )
            outcome = StagedPool(rows, engine_of(pool.curve), spec).run()
            runs.append(_entry(layout, figures_of(outcome, rows, arrivals_s)))
    return {"arrivals": f"stream at {load:.0%}", "rows_per_s": round(rate, 1), "runs": runs}


def _is_wanted(layout: str, options: argparse.Namespace) -> bool:
    return not options.layouts or layout in options.layouts


def _entry(layout: Layout, figures: dict[str, Any]) -> dict[str, Any]:
    return {"layout": layout.name, "stages": str(layout), **figures}


def ideal_rows_per_s(rows: SimulatedRows, num_replicas: int) -> float:
    """Return the rows that end each second if lengths do not matter and no replica idles."""
    pool, lengths = pool_of(FLAT, num_replicas), RowLengths(rows.prompt, rows.output)
    work = RangeWork.of_sums(lengths.below(lengths.longest))
    return len(rows) / float(work_seconds(pool, work, len(rows), num_replicas))


def layout_table(spread: str, num_rows: int, factors: Sequence[float]) -> list[dict[str, Any]]:
    """Return the layouts of both programs for pools of 8 and 16 replicas; nothing is run."""
    rows = make_rows(spread, num_rows)
    lengths, found = RowLengths(rows.prompt, rows.output), []
    for num_replicas in (8, 16):
        plans = {"latency": least_latency(pool_of(FLAT, num_replicas), lengths)}
        for factor in factors:
            pool = pool_of(curve_of(factor), num_replicas)
            plans[f"makespan at {factor}"] = plan_exactly(pool, lengths)
        found += [
            {
                "spread": spread,
                "replicas": num_replicas,
                "layout": name,
                "stages": str(Layout(name=name, plan=plan)),
            }
            for name, plan in plans.items()
        ]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--factors", type=float, nargs="+", default=list(FACTORS))
    parser.add_argument("--spreads", choices=SPREADS, nargs="+", default=list(SPREADS))
    parser.add_argument("--loads", type=float, nargs="*", default=[1.0])
    parser.add_argument("--streams", choices=SPREADS, nargs="*", default=["W7"])
    parser.add_argument("--layouts", nargs="*", help="layouts to run; all by default")
    parser.add_argument("--out", type=Path, help="write conditions and results")
    options = parser.parse_args()
    cases, layouts = list[dict[str, Any]](), list[dict[str, Any]]()
    for spread in options.spreads:
        layouts += layout_table(spread, options.rows, options.factors)
        rows = make_rows(spread, options.rows)
        for factor in options.factors:
            began = time.perf_counter()
            found = [run_batch(rows, factor, options)]
            if spread in options.streams:
                found += [run_stream(rows, factor, load, options) for load in options.loads]
            cases += [{"spread": spread, "factor": factor, **case} for case in found]
            for case in cases[-len(found) :]:
                print_case(case)
            print(f"# {time.perf_counter() - began:.0f} s", flush=True)
    for row in layouts:
        print("{spread:14}{replicas:4} {layout:18} {stages}".format(**row))
    conditions.write_result(
        options.out,
        "simulated_stages.py",
        is_simulated=True,
        engine={**asdict(H100), **asdict(H100_LIMITS), **asdict(H100_MOVES)},
        spreads=SPREADS,
        layouts=layouts,
        cases=cases,
    )


def print_case(case: dict[str, Any]) -> None:
    print(f"\n{case['spread']}, factor {case['factor']}, {case['arrivals']}; simulated")
    if "forecast" in case:
        print(f"forecast: {case['forecast']}")
    names = ("completion_s", "busy_s", "tokens_per_s", "ms_per_token", "handed_over")
    print(f"{'layout':10}" + "".join(f"{name:>14}" for name in names))
    for run in case["runs"]:
        cells = "".join(f"{run.get(name, '-'):>14}" for name in names)
        print(f"{run['layout']:10}{cells}  {run.get('stages', '')}")


if __name__ == "__main__":
    main()
