"""Measures the pool's cost per row: the backend takes no time, so all time is overhead.

    python benchmarks/pool.py --rows 200000 --replicas 2
    python benchmarks/pool.py --unplanned --rows-per-batch 256     as many as a pipeline submits

Prints rows per second of wall time, and CPU microseconds per row of each process. Compare CPU
times, because wall time depends on other load of the machine: 20 us of the coordinator are 50,000
rows a second, as many as one coordinator can take.
"""

import argparse
import asyncio
import json
import os
import random
import time
from pathlib import Path
from typing import Any

import conditions
import numpy as np
import psutil
import pyarrow as pa
import ray

from raybatch.actors.pool import PoolHandle
from raybatch.actors.wire.columns import request_table
from raybatch.actors.wire.records import DEDUP_KEY_BYTES, PoolSpec
from raybatch.config import BackendConfig, EngineConfig, PoolConfig
from raybatch.records.types import Sampling

ROWS_PER_GROUP, CLIENT = 16, "benchmark"


def cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def build_tables(options: argparse.Namespace) -> list[pa.Table]:
    """Return the calls: unlike prompts, with a plan in groups of some rows each."""
    size, rng = options.rows_per_batch, np.random.default_rng(0)
    row_ids = [str(i) for i in range(size)]
    tables = []
    for start in range(0, options.rows - size + 1, size):
        prompts = rng.integers(10, 1000, (size, options.prompt_tokens), dtype=np.int32)
        plan: dict[str, Any] = {}
        if not options.unplanned:
            groups = [(start + i) // ROWS_PER_GROUP for i in range(size)]
            plan = {"group_ids": groups, "prefix_lens": [options.prompt_tokens * 3 // 4] * size}
        tables.append(request_table(row_ids, list(prompts), **plan))
    return tables


async def generate_all(
    handle: PoolHandle, tables: list[pa.Table], in_flight: int, keys: random.Random
) -> int:
    """Submit the calls as a feeder of a job does; return the number of results.

    `keys` gives each row another key, so that no row is a duplicate.
    """
    slots = asyncio.Semaphore(in_flight)

    async def call(number: int, table: pa.Table) -> int:
        async with slots:
            name = f"call {number}"
            results = await handle.generate(
                table,
                (Sampling(max_tokens=16),),
                client=CLIENT,
                name=name,
                dedup_keys=keys.randbytes(table.num_rows * DEDUP_KEY_BYTES),
            )
            handle.forget([name], client=CLIENT)
            return results.num_rows

    return sum(await asyncio.gather(*(call(*numbered) for numbered in enumerate(tables))))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Start a pool, run all calls, and return the costs."""
    spec = PoolSpec(
        model="none",
        backend=BackendConfig(kind="fake", options={"max_num_seqs": 1024}),
        engine=EngineConfig(),
        pool=PoolConfig(replicas=options.replicas),
    )
    handle = PoolHandle(spec)
    tables, keys = build_tables(options), random.Random(0)
    asyncio.run(generate_all(handle, tables[:4], options.in_flight, keys))
    while len(handle.state().pids) < options.replicas:
        time.sleep(0.1)
    state = handle.state()
    pids = {
        "feeder": os.getpid(),
        "coordinator": state.coordinator_pid,
        **{f"replica {rank}": pid for rank, pid in enumerate(state.pids)},
    }
    before = {name: cpu_s(pid) for name, pid in pids.items()}
    began = time.perf_counter()
    num_rows = asyncio.run(generate_all(handle, tables, options.in_flight, keys))
    wall_s = time.perf_counter() - began
    used = {name: cpu_s(pid) - before[name] for name, pid in pids.items()}
    handle.shutdown()
    return {
        "rows": num_rows,
        "rows_per_s": round(num_rows / wall_s),
        "cpu_us_per_row": {name: round(1e6 * of / num_rows, 1) for name, of in used.items()},
    }


def main() -> None:
    """Print the costs of each run, and write them with their conditions."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--rows-per-batch", type=int, default=1024, help="rows of a call")
    parser.add_argument("--unplanned", action="store_true", help="rows without groups of a plan")
    parser.add_argument("--prompt-tokens", type=int, default=100)
    parser.add_argument("--in-flight", type=int, default=16, help="calls at a time")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write conditions and results to this file")
    options = parser.parse_args()
    if options.rows < options.rows_per_batch:
        parser.error("--rows must be at least --rows-per-batch")
    ray.init("local", num_cpus=4, include_dashboard=False, object_store_memory=200 << 20)
    results = []
    for _ in range(options.repetitions):
        results.append(measure(options))
        print(json.dumps(results[-1]), flush=True)
    ray.shutdown()
    conditions.write_result(options.out, "pool.py", results=results)


if __name__ == "__main__":
    main()
