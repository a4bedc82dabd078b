"""Compares simulated pools of up to 128 replicas with BatchGen's tables 3, 5, 6 (arXiv:2606.21712).

Run: python benchmarks/simulated_tables.py --out FOLDER

Queue, scheduler, learnt lengths and plan of the pool are those of raybatch, on a virtual clock.
Engines are DeepSeek-R1 on H20 and H200 with the costs of `published_engines.py` from published
rates. The tables show how sides compare, and how they scale with engines. Minutes differ from the
paper's: all kernels are as good as `gpu_forecast.py` assumes, and nothing inside an engine waits.

Prompts and outputs have the means of the paper, which gives nothing else about lengths. Lengths are
log-normal, with a 95th percentile of 2.3 times the median. The longest output is every row's
`max_tokens`. No length is known in advance.

table 3   6,000 rows on one engine, for which a pool decides nothing: simulated and published
          minutes. With room for 10 rows (KV `copied`) every 20th row runs, and minutes are scaled
table 5   10,000 rows on 32, 64 and 128 H20. `pool` and `bound` have engines of 16 GPUs, like the
          paper's SGLang; `bound` deals rows to them in turn, and rows stay there. `instances` is
          the pool with BatchGen's engines: one of 32, one of 64 and two of 64 GPUs
table 6   10,000 rows on 128 H20: the pool of 8 engines, and engines split by phase, of which some
          compute prompts and the others outputs. KV is sent over the network between them; an
          engine for outputs can have any number of rows waiting, and takes rows when it has room
scaling   64 rows for each slot of each replica, the prices of `tail.py`, KV for all: rows of 1,000
          and 500 tokens, and on the fewest replicas W4, whose longest row is 40 times the mean
"""

import argparse
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path

import conditions
import numpy as np
from published_engines import H20, H200, MAX_NUM_SEQS, Engine
from split_pool import SplitPool
from tail import engine_spec, sharded_s

from raybatch.records.arrays import Ints
from raybatch_lab.simulator import workloads
from raybatch_lab.simulator.events import PoolSpec
from raybatch_lab.simulator.figures import Ideal, ideal_of, simulate
from raybatch_lab.simulator.pool import SimulatedPool
from raybatch_lab.simulator.rows import SimulatedRows

# deviation of the logarithms of lengths
SIGMA = 0.5
# mean tokens of prompts and outputs
WORKLOADS = {
    "8K-2K": (8000, 2000),
    "2K-8K": (2000, 8000),
    "12K-4K": (12_000, 4000),
    "6.5K-2.8K": (6500, 2800),
    "1K-0.5K": (1000, 500),
}
TABLE_3 = {
    Engine(gpu=H20, num_gpus=8, kv="copied"): {"8K-2K": (816.7, None), "2K-8K": (3116.7, None)},
    Engine(gpu=H20, num_gpus=8, kv="host"): {"8K-2K": (None, 625.1), "2K-8K": (None, 1684.1)},
    Engine(gpu=H20, num_gpus=16): {"8K-2K": (137.0, 82.6), "2K-8K": (242.5, 194.3)},
    Engine(gpu=H200, num_gpus=8): {"8K-2K": (95.2, 75.1), "2K-8K": (208.3, 165.0)},
}
# minutes of tuned SGLang and of BatchGen with its kernels
TABLE_5 = {
    "12K-4K": {32: (239.2, 139.7), 64: (120.8, 66.3), 128: (61.1, 33.5)},
    "6.5K-2.8K": {32: (139.9, 63.9), 64: (71.2, 30.4), 128: (36.0, 15.5)},
}
# engines of 16 GPUs for prompts, and minutes of SGLang with the others for outputs
TABLE_6 = {1: 137.9, 2: 67.4, 3: 49.0, 4: 38.6, 5: 40.1, 6: 55.6, 7: 112.0}
TABLE_6_POOL = 17.5
# on the engine with room for 10 rows, one row in this number runs, and times are scaled to all
FEW_PLACES = 20
# KV for each slot of the scaling pools
SLOT_TOKENS = 65_536


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One simulated run.

    Args:
        rows_per_place: all rows over the rows whose KV fits into memory at once.
        of_linear: speed over linear scaling of this side's first entry, which has fewer GPUs; in
            `scaling`, over linear scaling of one engine that is always full.
        sglang: minutes of tuned SGLang in the paper, or of its engines split by phase.
        batchgen: minutes of BatchGen in the paper.
    """

    table: str
    workload: str
    engines: str
    side: str
    minutes: float
    rows_per_place: float
    of_linear: float | None = None
    sglang: float | None = None
    batchgen: float | None = None
    cpu_s: float


def make_rows(workload: str, num_rows: int, seed: int) -> SimulatedRows:
    rng = np.random.Generator(np.random.PCG64(seed))

    def lengths(mean: float) -> Ints:
        drawn = rng.lognormal(np.log(mean) - SIGMA**2 / 2, SIGMA, num_rows)
        return np.maximum(1, np.rint(drawn)).astype(np.int64)

    prompt, output = WORKLOADS[workload]
    return SimulatedRows.of(lengths(prompt), lengths(output))


def places(workload: str, engine: Engine, num_engines: int) -> float:
    """Return the rows of mean lengths, at half of their outputs, that fit into memory at once."""
    prompt, output = WORKLOADS[workload]
    return num_engines * min(MAX_NUM_SEQS, engine.kv_tokens / (prompt + output / 2))


def pool_s(rows: SimulatedRows, engine: Engine, num_engines: int) -> float:
    pool = PoolSpec(num_replicas=num_engines, network=engine.network)
    return SimulatedPool(rows, engine.spec(), pool).run().completion_s


def bound_s(rows: SimulatedRows, engine: Engine, num_engines: int) -> float:
    shards = [np.arange(rank, len(rows), num_engines) for rank in range(num_engines)]
    return sharded_s(rows, engine.spec(), shards, PoolSpec(num_replicas=num_engines))


def table_3(options: argparse.Namespace) -> Iterator[Entry]:
    for workload in ("8K-2K", "2K-8K"):
        rows = make_rows(workload, options.rows or 6000, options.seed)
        for engine, published in TABLE_3.items():
            began = time.process_time()
            # with room for few rows, a part of the rows has the rate of all rows
            part = rows.take(np.arange(0, len(rows), FEW_PLACES if engine.kv == "copied" else 1))
            seconds = pool_s(part, engine, 1) * rows.output.sum() / part.output.sum()
            sglang, batchgen = published[workload]
            yield Entry(
                table="3",
                workload=workload,
                engines=str(engine),
                side="engine",
                minutes=round(seconds / 60, 1),
                rows_per_place=round(len(rows) / places(workload, engine, 1), 1),
                sglang=sglang,
                batchgen=batchgen,
                cpu_s=round(time.process_time() - began, 1),
            )


def table_5(options: argparse.Namespace) -> Iterator[Entry]:
    unit = Engine(gpu=H20, num_gpus=16)
    instances = {32: (32, 1), 64: (64, 1), 128: (64, 2)}
    for workload in options.workloads:
        published = TABLE_5[workload]
        rows = make_rows(workload, options.rows or 10_000, options.seed)
        for side, run in (("pool", pool_s), ("bound", bound_s), ("instances", pool_s)):
            first: float | None = None
            for num_gpus, (sglang, batchgen) in published.items():
                engine, num_engines = unit, num_gpus // unit.num_gpus
                if side == "instances":
                    size, num_engines = instances[num_gpus]
                    engine = replace(unit, num_gpus=size)
                began = time.process_time()
                seconds = run(rows, engine, num_engines)
                first = first or seconds * num_gpus
                yield Entry(
                    table="5",
                    workload=workload,
                    engines=f"{num_engines} of {engine}",
                    side=side,
                    minutes=round(seconds / 60, 1),
                    rows_per_place=round(len(rows) / places(workload, engine, num_engines), 1),
                    of_linear=round(first / (seconds * num_gpus), 3),
                    sglang=sglang if side == "bound" else None,
                    batchgen=batchgen if side != "bound" else None,
                    cpu_s=round(time.process_time() - began, 1),
                )


def table_6(options: argparse.Namespace) -> Iterator[Entry]:
    workload, unit, num_engines = "8K-2K", Engine(gpu=H20, num_gpus=16), 8
    rows = make_rows(workload, options.rows or 10_000, options.seed)
    for num_prompt in (0, *TABLE_6):
        began, split = time.process_time(), (num_prompt, num_engines - num_prompt)
        if num_prompt:
            side = f"{split[0]}:{split[1]}"
            seconds = SplitPool(rows, unit.spec(), split, network=unit.network).run()
        else:
            side, seconds = "pool", pool_s(rows, unit, num_engines)
        yield Entry(
            table="6",
            workload=workload,
            engines=f"{num_engines} of {unit}",
            side=side,
            minutes=round(seconds / 60, 1),
            rows_per_place=round(len(rows) / places(workload, unit, split[1]), 1),
            sglang=TABLE_6.get(num_prompt),
            batchgen=None if num_prompt else TABLE_6_POOL,
            cpu_s=round(time.process_time() - began, 1),
        )


def scaling(options: argparse.Namespace) -> Iterator[Entry]:
    usual = engine_spec("mixed")
    limits = replace(
        usual.cost.limits, max_num_seqs=options.slots, kv_tokens=options.slots * SLOT_TOKENS
    )
    cost = replace(usual.cost, limits=limits)
    engine = replace(usual, cost=cost, enable_prefix_caching=False)
    for workload, counts in (("1K-0.5K", options.replicas), ("W4", options.replicas[:1])):
        first: tuple[Ideal, int] | None = None
        for num_replicas in counts:
            num_rows = num_replicas * options.slots * options.rows_per_slot
            began = time.process_time()
            rows = (
                workloads.make_rows(workload, num_rows=num_rows, seed=options.seed)
                if workload == "W4"
                else make_rows(workload, num_rows, options.seed)
            )
            num_tokens = int(rows.output.sum())
            # the rate of an engine that is always full does not depend on the number of rows
            first = first or (ideal_of(rows, engine), num_tokens)
            full_s = first[0].one_engine_s * num_tokens / first[1]
            ideal = replace(first[0], one_engine_s=full_s)
            figures = simulate(rows, engine, PoolSpec(num_replicas=num_replicas), ideal)
            yield Entry(
                table="scaling",
                workload=workload,
                engines=f"{num_replicas} replicas, {num_rows} rows",
                side="pool",
                minutes=round(figures.completion_s / 60, 1),
                rows_per_place=options.rows_per_slot,
                of_linear=round(figures.linear_share, 4),
                cpu_s=round(time.process_time() - began, 1),
            )


TABLES = {"3": table_3, "5": table_5, "6": table_6, "scaling": scaling}


def entries_of(options: argparse.Namespace) -> Iterator[Entry]:
    for table in options.tables:
        yield from TABLES[table](options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", choices=TABLES, nargs="+", default=[*TABLES])
    parser.add_argument("--workloads", choices=TABLE_5, nargs="+", default=["12K-4K"])
    parser.add_argument("--rows", type=int, help="rows of tables; default: the paper's")
    parser.add_argument("--replicas", type=int, nargs="+", default=[8, 32, 64, 128])
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--rows-per-slot", type=int, default=64)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    began, entries = time.process_time(), list[Entry]()
    for key, found in groupby(entries_of(options), lambda e: (e.table, e.workload)):
        table, workload = key
        print(f"\n{table}, {workload}; simulated, with the paper's minutes")
        names = ("minutes", "of_linear", "sglang", "batchgen", "rows_per_place", "cpu_s")
        print(f"{'side':10} {'engines':28}" + "".join(f"{name:>15}" for name in names))
        for entry in found:
            entries.append(entry)
            cells = ("-" if (v := getattr(entry, name)) is None else v for name in names)
            line = "".join(f"{cell:>15}" for cell in cells)
            print(f"{entry.side:10} {entry.engines:28}{line}", flush=True)
    seconds = round(time.process_time() - began, 1)
    print(f"\n{seconds} CPU seconds")
    engines = [*TABLE_3, *(Engine(gpu=H20, num_gpus=size) for size in (32, 64))]
    conditions.write_result(
        options.out,
        "simulated_tables.py",
        is_simulated=True,
        assumptions=__doc__,
        prices={str(engine): asdict(engine.spec().cost) for engine in engines},
        cpu_s=seconds,
        entries=[asdict(entry) for entry in entries],
    )


if __name__ == "__main__":
    main()
