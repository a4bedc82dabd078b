"""Measures the pool's cost per row: the backend takes no time, so all time is overhead.

    python benchmarks/pool.py --rows 20000 --replicas 2

Prints rows per second of wall time, and CPU microseconds per row of each process. Compare CPU
times, because wall time depends on other load of the machine.
"""

import argparse
import asyncio
import os
import time

import numpy as np
import psutil
import pyarrow as pa
import ray

from raybatch.actors.pool import PoolHandle
from raybatch.actors.wire.columns import request_table
from raybatch.actors.wire.records import PoolSpec
from raybatch.config import BackendConfig, EngineConfig, PoolConfig
from raybatch.records.types import Sampling


def cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def build_tables(num_rows: int, rows_per_batch: int, prompt_tokens: int) -> list[pa.Table]:
    prompts = np.arange(rows_per_batch * prompt_tokens, dtype=np.int32) % 1000
    prompts = list(prompts.reshape(rows_per_batch, prompt_tokens))
    row_ids = [str(i) for i in range(rows_per_batch)]
    return [request_table(row_ids, prompts) for _ in range(num_rows // rows_per_batch)]


async def generate_all(handle: PoolHandle, tables: list[pa.Table], in_flight: int) -> int:
    slots = asyncio.Semaphore(in_flight)

    async def one(table: pa.Table) -> int:
        async with slots:
            return (await handle.generate(table, (Sampling(max_tokens=16),))).num_rows

    return sum(await asyncio.gather(*(one(table) for table in tables)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--rows-per-batch", type=int, default=250)
    parser.add_argument("--prompt-tokens", type=int, default=100)
    parser.add_argument("--in-flight", type=int, default=16)
    parser.add_argument("--replicas", type=int, default=2)
    options = parser.parse_args()

    ray.init("local", num_cpus=4, include_dashboard=False, object_store_memory=200 << 20)
    spec = PoolSpec(
        model="none",
        backend=BackendConfig(kind="fake", options={"max_num_seqs": 1024}),
        engine=EngineConfig(),
        pool=PoolConfig(replicas=options.replicas),
    )
    handle = PoolHandle(spec)
    tables = build_tables(options.rows, options.rows_per_batch, options.prompt_tokens)
    asyncio.run(generate_all(handle, tables[:4], options.in_flight))
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
    num_rows = asyncio.run(generate_all(handle, tables, options.in_flight))
    wall_s = time.perf_counter() - began
    print(f"rows: {num_rows} in {wall_s:.2f} s = {num_rows / wall_s:.0f} rows/s")
    for name, pid in pids.items():
        print(f"{name}: {1e6 * (cpu_s(pid) - before[name]) / num_rows:.0f} us of CPU per row")
    print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    handle.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
