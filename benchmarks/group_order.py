"""Compares orders of groups on simulated engines: steps, tokens per step, makespan.

Run: OMP_NUM_THREADS=1 python benchmarks/group_order.py [--workloads W1,W2] [--seeds 5]
Steps are the scheduler's, and seconds those of a roofline (`step_simulator.py`). Orders come from
`orders.py`, which gets the expected outputs of the column "knows": nothing, each class's largest
output, the means of a probe of 1 % of the rows, or the true lengths. Cells are medians over seeds,
with the worst seed in brackets.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import conditions
import numpy as np
from orders import order_groups
from step_simulator import MAX_NUM_SEQS, Device, Outcome, Rows, StepSimulator

from raybatch.planning.probe import choose_probe, estimate_from_probe
from raybatch.prefix.order import GroupLoad
from raybatch.records.arrays import Floats, Ints

TAIL_SIGMA, TAIL_CLIP = 1.95, 9.2


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Rows of a seed, the class of each row, and the engine that they run on."""

    rows: Rows
    kind: Ints
    device: Device


def classes(
    counts: list[tuple[int, int, int, int, int]], outputs: Callable[[Ints], Ints] | None = None
) -> tuple[Rows, Ints]:
    """Build rows from (groups, members, prefix, distinct, output) of each class."""
    table = np.array(counts, np.int64)
    kind = np.repeat(np.arange(len(table)), table[:, 0] * table[:, 1])
    members = np.repeat(table[:, 1], table[:, 0])
    group = np.repeat(np.arange(len(members)), members)
    prefix, distinct, output = table[kind, 2:].T
    output = output if outputs is None else outputs(output)
    return Rows(group=group, prefix=prefix, distinct=distinct, output=output), kind


def w1(seed: int, members: int = 16) -> Workload:
    rows, kind = classes([(1024 // members, members, 256 if members > 1 else 0, 32, 16)])
    if members == 1:
        rows = replace(rows, distinct=rows.distinct + 256)
    return Workload(rows=rows, kind=kind, device=Device(token_budget=256, kv_tokens=24_000))


def w2(seed: int, max_rows: int = MAX_NUM_SEQS) -> Workload:
    """Short and long prefills in turns."""
    rows, kind = classes([(1, 16, 48, 16, 48), (1, 16, 512, 32, 8)] * 20)
    device = Device(token_budget=256, kv_tokens=24_000, max_rows=max_rows)
    return Workload(rows=rows, kind=kind % 2, device=device)


def w2_full(seed: int, *, reserves_outputs: bool, max_rows: int = MAX_NUM_SEQS) -> Workload:
    rows, kind = classes([(1, 16, 400, 100, 400), (1, 16, 4000, 200, 40)] * 100)
    device = Device(
        token_budget=2048, kv_tokens=400_000, max_rows=max_rows, reserves_outputs=reserves_outputs
    )
    return Workload(rows=rows, kind=kind % 2, device=device)


def w3(seed: int, num_b: int, num_c: int, *, sigma: float = 0.0, scale: int = 1) -> Workload:
    """Lengths are a tenth of the published ones and KV bytes ten times, so densities are kept."""
    random = np.random.default_rng([3, seed])

    def draw(mean: Ints) -> Ints:
        noise = np.exp(random.normal(-(sigma**2) / 2, sigma, len(mean)))
        return np.maximum(np.rint(mean * noise), 1).astype(np.int64)

    counts = [(4, 60, 60, 8, 2), (num_b, 1, 0, 120, 12), (num_c, 1, 0, 10, 300)]
    rows, kind = classes([(scale * groups, *rest) for groups, *rest in counts], draw)
    device = Device(
        token_budget=256, kv_tokens=40_000, kv_bytes=1_310_720, reserves_outputs=scale > 1
    )
    return Workload(rows=rows, kind=kind, device=device)


def w4(seed: int) -> Workload:
    random = np.random.default_rng([4, seed])

    def draw(mean: Ints) -> Ints:
        tail = np.exp(random.normal(np.log(6), TAIL_SIGMA, len(mean)))
        limit = TAIL_CLIP * np.quantile(tail, 0.95)
        return np.maximum(np.rint(np.minimum(tail, limit)), 1).astype(np.int64)

    rows, kind = classes([(512, 1, 0, 32, 6)], draw)
    return Workload(rows=rows, kind=kind, device=Device(token_budget=256, kv_tokens=24_000))


WORKLOADS: dict[str, Callable[[int], Workload]] = {
    "W1": w1,
    "W1 zero share": lambda seed: w1(seed, members=1),
    "W2": w2,
    "W2 64 rows": lambda seed: w2(seed, max_rows=64),
    "W2 full": lambda seed: w2_full(seed, reserves_outputs=False),
    "W2 full reserving": lambda seed: w2_full(seed, reserves_outputs=True),
    "W2 full 256 rows": lambda seed: w2_full(seed, reserves_outputs=True, max_rows=256),
    "W3 .9/.35": lambda seed: w3(seed, 190, 138),
    "W3 1.4/.35": lambda seed: w3(seed, 197, 52),
    "W3 .9/.35 spread": lambda seed: w3(seed, 190, 138, sigma=1.0),
    "W3 .9/.35 x6": lambda seed: w3(seed, 190, 138, scale=6),
    "W3 1.4/.35 x6": lambda seed: w3(seed, 197, 52, scale=6),
    "W3 .9/.35 x6 spread": lambda seed: w3(seed, 190, 138, sigma=1.0, scale=6),
    "W4": w4,
}
CASES: tuple[tuple[str, str], ...] = (
    ("depth_first", "-"),
    ("shuffle", "-"),
    ("ratio", "nothing"),
    ("ratio", "max"),
    ("ratio", "probe"),
    ("ratio", "true"),
    ("ascending", "max"),
    ("dual_scan", "max"),
    ("dual_scan", "true"),
)


def expected(workload: Workload, knows: str, seed: int) -> Floats | None:
    """Return what a planner expects each row to generate."""
    output = workload.rows.output
    if knows in ("-", "nothing"):
        return None
    if knows == "true":
        return output.astype(float)
    if knows == "probe":
        probe = choose_probe(workload.rows.group, workload.kind, fraction=0.01, seed=seed)
        group = np.where(workload.rows.prefix > 0, workload.rows.group, -1)
        return estimate_from_probe(probe, output[probe], group, workload.kind)
    largest = np.zeros(int(workload.kind.max()) + 1)
    np.maximum.at(largest, workload.kind, output)
    return largest[workload.kind]


def group_load(rows: Rows, outputs: Floats | None) -> GroupLoad:
    first = np.unique(rows.group, return_index=True)[1]
    return GroupLoad(
        prefix_tokens=rows.prefix[first],
        distinct_tokens=np.bincount(rows.group, rows.distinct).astype(np.int64),
        num_rows=np.bincount(rows.group),
        output_tokens=np.ones(len(first)) if outputs is None else np.bincount(rows.group, outputs),
    )


def run(workload: Workload, by: str, knows: str, seed: int) -> Outcome:
    device = workload.device
    density = device.density()
    load = group_load(workload.rows, expected(workload, knows, seed))
    order = order_groups(load, by=by, seed=seed, density=density)
    rank = np.argsort(order)
    rows = np.argsort(rank[workload.rows.group], kind="stable")
    return StepSimulator(workload.rows, rows, device).run()


def lines(name: str, seeds: int) -> Iterator[str]:
    for by, knows in CASES:
        runs = [run(WORKLOADS[name](seed), by, knows, seed) for seed in range(seeds)]
        sums, overlaps = ([getattr(r, k) for r in runs] for k in ("sum_s", "overlap_s"))
        tokens = [np.quantile(r.step_tokens, (0.1, 0.5)) for r in runs]
        low, middle = np.median(tokens, axis=0)
        yield (
            f"| {name} | {by} | {knows} | {np.median([len(r.step_tokens) for r in runs]):.0f} "
            f"| {low:.0f} | {middle:.0f} | {np.mean([r.step_tokens.mean() for r in runs]):.0f} "
            f"| {np.median(sums):.2f} ({max(sums):.2f}) "
            f"| {np.median(overlaps):.2f} ({max(overlaps):.2f}) "
            f"| {np.median([r.bound_s / r.overlap_s for r in runs]):.0%} "
            f"| {np.median([r.preemptions for r in runs]):.0f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write conditions and results to this file")
    options = parser.parse_args()
    header = (
        "| workload | order | knows | steps | p10 | median | mean tokens per step "
        "| makespan s, sum (worst) | overlap (worst) | of bound | preempted |"
    )
    print(header)
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    table = []
    for name in options.workloads.split(","):
        for line in lines(name, options.seeds):
            print(line, flush=True)
            table.append(line)
    what = "simulated steps on the reference roofline; no run on an engine"
    conditions.write_result(options.out, "group_order.py", what=what, table=[header, *table])


if __name__ == "__main__":
    main()
