"""Measures the gain of a second copy of the last rows if an engine becomes slow, or hangs.

Run: python benchmarks/duplicates.py --out FILE [--rows 1024] [--repeats 3]

A local pool of four fake engines, each in a process, whose steps sleep: 5 ms and 0.5 ms for each of
up to 16 rows. Outputs have 1 to 200 tokens, which depend on the prompts. When half of the rows are
done, one engine takes ten times as long per step, or hangs. Rows move in all scenarios except "no
moves". Completion is wall time, because engines sleep and leave the host to other processes.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import conditions
import numpy as np
import pyarrow as pa

from raybatch.actors.coordinator import rebalancer
from raybatch.actors.pool import PoolHandle
from raybatch.actors.wire.columns import request_table
from raybatch.actors.wire.records import PoolSpec
from raybatch.backends.fake import fake_tokens
from raybatch.config import BackendConfig, EngineConfig, PoolConfig
from raybatch.policy.pool.plan import plan_pool
from raybatch.policy.pool.snapshot import PoolPlan, PoolSnapshot
from raybatch.records.types import Sampling

NUM_REPLICAS, MAX_TOKENS, SLOWNESS = 4, 200, 10.0
STUCK_AFTER_S = 30.0
SCENARIOS = ("none", "slow", "slow, no moves", "hang")


def without_moves(pool: PoolSnapshot) -> PoolPlan:
    """Steal waiting rows as usual, and move no running row."""
    steal = plan_pool(pool).steal
    return PoolPlan(steal=steal, is_settled=steal is None)


def pool_of(folder: str, *, duplicates: bool) -> PoolHandle:
    options = {
        "step_s": 0.005,
        "row_s": 0.0005,
        "max_num_seqs": 16,
        "lengths": "hash",
        "hang_dir": f"{folder}/hang",
        "slow_dir": f"{folder}/slow",
        "slowness": SLOWNESS,
    }
    spec = PoolSpec(
        model="none",
        backend=BackendConfig(kind="fake", options=options),
        engine=EngineConfig(max_batched_tokens=64),
        pool=PoolConfig(
            replicas=NUM_REPLICAS, stuck_after_s=STUCK_AFTER_S, duplicate_last_rows=duplicates
        ),
    )
    return PoolHandle(spec, is_local=True)


def run(num_rows: int, scenario: str, *, duplicates: bool) -> dict[str, Any]:
    """Run all rows once on new engines; check each row's tokens."""
    prompts = [np.array([i % 97, i // 97, 1], np.int32) for i in range(num_rows)]
    sampling = Sampling(max_tokens=MAX_TOKENS)
    table = request_table(
        [str(i) for i in range(num_rows)], prompts, seeds=np.zeros(num_rows, np.uint64)
    )
    with tempfile.TemporaryDirectory() as folder:
        for name in ("hang", "slow"):
            Path(folder, name).mkdir()
        pool = pool_of(folder, duplicates=duplicates)
        pool.start()
        while len(pool.state().pids) < NUM_REPLICAS:
            time.sleep(0.1)
        began = time.perf_counter()
        results = asyncio.run(_whole(pool, table, sampling, scenario, folder, num_rows))
        wall_s = time.perf_counter() - began
        stats = pool.stats()
        pool.shutdown()
    tokens = results["token_ids"].to_pylist()
    expected = [fake_tokens(p, 0, sampling, lengths="hash").tolist() for p in prompts]
    assert tokens == expected, "tokens of a row differ"
    return {
        "scenario": scenario,
        "duplicates": duplicates,
        "wall_s": round(wall_s, 2),
        "num_moved_rows": stats.moved,
        "num_duplicates": stats.duplicates,
        "num_won": stats.won_duplicates,
        "num_hung": stats.hung,
    }


async def _whole(
    pool: PoolHandle, table: pa.Table, sampling: Sampling, scenario: str, folder: str, num_rows: int
) -> pa.RecordBatch | pa.Table:
    rows = asyncio.create_task(pool.generate(table, (sampling,)))
    while pool.stats().rows_done < num_rows / 2:
        await asyncio.sleep(0.05)
    if scenario != "none":
        where = "hang" if scenario == "hang" else "slow"
        Path(folder, where, str(pool.state().pids[0])).touch()
    return await rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--scenarios", nargs="+", default=list(SCENARIOS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    runs = []
    for _ in range(options.repeats):
        for scenario in options.scenarios:
            for duplicates in (False, True):
                plan = without_moves if scenario.endswith("no moves") else plan_pool
                with mock.patch.object(rebalancer, "plan_pool", plan):
                    runs.append(run(options.rows, scenario, duplicates=duplicates))
                print(runs[-1], flush=True)
    medians = {
        f"{scenario}, duplicates {'on' if on else 'off'}": statistics.median(
            r["wall_s"] for r in runs if (r["scenario"], r["duplicates"]) == (scenario, on)
        )
        for scenario in options.scenarios
        for on in (False, True)
    }
    for name, wall_s in medians.items():
        print(f"{name}: {wall_s:.2f} s")
    conditions.write_result(options.out, "duplicates.py", median_wall_s=medians, runs=runs)


if __name__ == "__main__":
    main()
