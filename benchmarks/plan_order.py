"""Compares orders of groups on raybatch's scheduler: its queues, blocks and preemptions, no model.

Run: OMP_NUM_THREADS=1 python benchmarks/plan_order.py [--cases W2,W3] [--seeds 3] [--out FILE]
The scheduler with the default options of an engine decides the steps. Steps are counted exactly and
timed by the roofline of `step_simulator.Device`, so seconds are not those of a machine. Workloads
are those of `group_order.py` at three sizes.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import conditions
import numpy as np
from group_order import Workload, expected, group_load, w1, w2, w2_full, w3, w4
from orders import order_groups
from step_simulator import MAX_NUM_SEQS, Device, Outcome, Rows, StepSimulator

from raybatch.config import EngineConfig
from raybatch.prefix.order import EngineCapacity
from raybatch.records.arrays import Ints

# expected tokens of a row about which a policy knows nothing
LIMIT = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A workload, and the block size for its lengths: scaled-down lengths need small blocks."""

    make: Callable[[int], Workload]
    block_size: int = 16


def repeated(make: Callable[[int], Workload], times: int) -> Callable[[int], Workload]:
    """Return a workload with `times` times the groups."""

    def made(seed: int) -> Workload:
        one = make(seed)
        shift = np.repeat(np.arange(times), len(one.kind)) * (int(one.rows.group.max()) + 1)
        columns = {name: np.tile(values, times) for name, values in asdict(one.rows).items()}
        rows = Rows(**(columns | {"group": columns["group"] + shift}))
        return replace(one, rows=rows, kind=np.tile(one.kind, times))

    return made


def full(seed: int) -> Workload:
    return w2_full(seed, reserves_outputs=False)


CASES: dict[str, Case] = {
    "W1": Case(make=w1),
    "W1 x6": Case(make=repeated(w1, 6)),
    "W1 x24": Case(make=repeated(w1, 24)),
    "W2": Case(make=w2),
    "W2 full": Case(make=full, block_size=64),
    "W2 full x4": Case(make=repeated(full, 4), block_size=64),
    "W3 .9": Case(make=lambda seed: w3(seed, 190, 138)),
    "W3 .9 x6": Case(make=lambda seed: w3(seed, 190, 138, scale=6)),
    "W3 .9 x24": Case(make=lambda seed: w3(seed, 190, 138, scale=24)),
    "W3 1.4": Case(make=lambda seed: w3(seed, 197, 52)),
    "W3 1.4 x6": Case(make=lambda seed: w3(seed, 197, 52, scale=6)),
    "W3 1.4 x24": Case(make=lambda seed: w3(seed, 197, 52, scale=24)),
    "W4": Case(make=w4),
    "W4 x6": Case(make=repeated(w4, 6)),
    "W4 x24": Case(make=repeated(w4, 24)),
}
ORDERS = ("auto", "shuffle", "ratio", "dual_scan", "tail .1", "tail .25", "tail .5")


def room_of(device: Device) -> EngineCapacity:
    engine = EngineConfig(max_batched_tokens=device.token_budget, max_num_seqs=MAX_NUM_SEQS)
    return EngineCapacity.of(engine)


def counts(outcome: Outcome) -> dict[str, float]:
    return {
        "sum_s": outcome.sum_s,
        "overlap_s": outcome.overlap_s,
        "steps": len(outcome.step_tokens),
        "tokens": int(outcome.step_tokens.sum()),
        "preemptions": outcome.preemptions,
        "recomputed": outcome.recomputed_tokens,
        "held_steps": outcome.admission_stalls,
    }


def rows_in_order(workload: Workload, by: str, knows: str, seed: int) -> Ints:
    """Return the rows in the order of a planner with this knowledge of their outputs."""
    load = group_load(workload.rows, expected(workload, knows, seed))
    if knows == "nothing":
        load = replace(load, output_tokens=load.num_rows * float(LIMIT))
    density, capacity = workload.device.density(), room_of(workload.device)
    rank = np.argsort(order_groups(load, by=by, seed=seed, density=density, capacity=capacity))
    return np.argsort(rank[workload.rows.group], kind="stable")


def run(case: Case, by: str, knows: str, seed: int) -> dict[str, float]:
    workload = case.make(seed)
    rows = rows_in_order(workload, by, knows, seed)
    engine = StepSimulator(workload.rows, rows, workload.device, block_size=case.block_size)
    return counts(engine.run())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--orders", default=",".join(ORDERS))
    parser.add_argument("--knows", default="nothing,probe,true")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write conditions and results to this file")
    options = parser.parse_args()
    results = []
    for name in options.cases.split(","):
        for knows in options.knows.split(","):
            for by in options.orders.split(","):
                is_same = by == "shuffle" and knows != options.knows.split(",")[0]
                runs = (
                    []
                    if is_same
                    else [run(CASES[name], by, knows, s) for s in range(options.seeds)]
                )
                if runs:
                    mean = {key: float(np.mean([one[key] for one in runs])) for key in runs[0]}
                    results.append({"case": name, "knows": knows, "order": by, **mean})
                    print(json.dumps(results[-1]), flush=True)
    what = "steps of the real scheduler, timed by the reference roofline; no run on an engine"
    conditions.write_result(
        options.out, "plan_order.py", what=what, seeds=options.seeds, runs=results
    )


if __name__ == "__main__":
    main()
