"""Compares rows that start by a forecast of KV memory with rows that start when blocks are free.

Run: OMP_NUM_THREADS=1 python benchmarks/admission.py [--cases W2,W4] [--seeds 3] [--out FILE]
Cases, steps and seconds are those of `plan_order.py`: raybatch's scheduler and a roofline, no
engine. The simulated engine knows the output lengths that the planner knows. If the planner knows
none, the engine learns lengths, and each row may be as long as the longest. With "seen", rows come
with typical lengths of all outputs, as in a pool that has run similar rows. With "mean", each row
is expected to have the mean length.
"""

import argparse
import itertools
import json
from dataclasses import replace
from pathlib import Path

import conditions
import numpy as np
from group_order import expected
from plan_order import CASES, LIMIT, Case, counts, rows_in_order
from step_simulator import StepSimulator

# number of typical lengths that come with rows
NUM_SEEN = 32
ORDERS = ("shuffle", "ratio", "dual_scan")


def run(
    case: Case, by: str, knows: str, seed: int, *, waits: bool, kv_share: float
) -> dict[str, float]:
    workload = case.make(seed)
    if kv_share < 1:
        device = workload.device
        device = replace(device, kv_tokens=int(device.kv_tokens * kv_share))
        workload = replace(workload, device=device)
    output = workload.rows.output
    planner = "nothing" if knows in ("seen", "mean") else knows
    known = expected(workload, planner, seed)
    if knows == "mean":
        known = np.full(len(output), output.mean())
    middles = (np.arange(NUM_SEEN) + 0.5) / NUM_SEEN
    seen = np.quantile(output, middles).astype(int).tolist() if knows == "seen" else []
    limit = max(LIMIT, int(output.max()))
    engine = StepSimulator(
        workload.rows,
        rows_in_order(workload, by, planner, seed),
        workload.device,
        block_size=case.block_size,
        waits=waits,
        expected=None if known is None else np.rint(np.minimum(known, limit)).astype(np.int64),
        limit=None if knows == "true" else limit,
        likely=tuple(seen),
    )
    return counts(engine.run())


def compared(
    name: str, by: str, knows: str, num_seeds: int, kv_share: float
) -> list[dict[str, object]]:
    """Return a run without waiting and a run with it, with seconds relative to the first."""
    entries = list[dict[str, object]]()
    base: dict[str, float] = {}
    for waits in (False, True):
        runs = [
            run(CASES[name], by, knows, seed, waits=waits, kv_share=kv_share)
            for seed in range(num_seeds)
        ]
        mean = {key: float(np.mean([one[key] for one in runs])) for key in runs[0]}
        base = base or mean
        entries.append(
            {
                "case": name,
                "knows": knows,
                "order": by,
                "waits": waits,
                **{key: round(value, 4) for key, value in mean.items()},
                "recomputed_share": round(mean["recomputed"] / mean["tokens"], 4),
                "sum_over_first": round(mean["sum_s"] / base["sum_s"], 4),
                "overlap_over_first": round(mean["overlap_s"] / base["overlap_s"], 4),
            }
        )
    return entries


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--orders", default=",".join(ORDERS))
    parser.add_argument("--knows", default="nothing,seen,mean,probe,true")
    parser.add_argument("--kv-share", type=float, default=1.0, help="share of the case's KV cache")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write conditions and results to this file")
    options = parser.parse_args()
    choices = (options.cases, options.knows, options.orders)
    results = []
    for name, knows, by in itertools.product(*(each.split(",") for each in choices)):
        results += compared(name, by, knows, options.seeds, options.kv_share)
        print(*map(json.dumps, results[-2:]), sep="\n", flush=True)
    what = "steps of the real scheduler, timed by the reference roofline; no run on an engine"
    conditions.write_result(
        options.out,
        "admission.py",
        what=what,
        seeds=options.seeds,
        kv_share=options.kv_share,
        runs=results,
    )


if __name__ == "__main__":
    main()
