"""Compares a pool with stages and one without: two native engines, mixed lengths, long contexts.

Run: PYTHONPATH=benchmarks python lab/benchmarks/pool_stages.py [--rounds 3] [--out RESULT.json]

A local pool of two engines in processes, one thread each, runs `dense-4m` over three kinds of rows:
short rows, rows with long prompts, and rows that grow from short to long. They come in random
order, and there are more than run at once. Pools with and without stages take turns, each round
with its own prompts, after a warm-up round. A third pool, which is not timed, logs the choice of
`auto`. Both timed pools must generate the same tokens. The CPU seconds of the busier engine, which
decide the time of a job on a quiet host, and the wall seconds are compared with the forecast that
the pool with stages makes from the steps that it has measured.
"""

import argparse
import asyncio
import logging
import re
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import conditions
import models
import numpy as np
import psutil
import pyarrow as pa

from raybatch.actors.pool import PoolHandle
from raybatch.actors.wire.columns import request_table
from raybatch.actors.wire.records import PoolSpec
from raybatch.config import BackendConfig, EngineConfig, PoolConfig
from raybatch.records.types import Sampling

# rows, prompts and outputs
KINDS = {
    "short": (60, (32, 128), (100, 200)),
    "long prompt": (14, (1600, 2400), (150, 300)),
    "growing": (10, (64, 128), (1200, 1600)),
}
SIDES = ("off", 2)
MAX_NUM_SEQS, KV_BYTES = 8, 256 << 20
_SAVED = re.compile(r"the forecast saves (-?[\d.]+)% over .*, by (steps \w+)")


class LogLines(logging.Handler):
    """Keeps the log lines of stages on their choice."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def pool_of(folder: Path, stages: int | str) -> PoolHandle:
    spec = PoolSpec(
        model=str(folder),
        backend=BackendConfig(kind="native"),
        engine=EngineConfig(
            device="cpu", num_threads=1, max_num_seqs=MAX_NUM_SEQS, kv_cache_bytes=KV_BYTES
        ),
        pool=PoolConfig(replicas=2, stages=stages),
    )
    return PoolHandle(spec, is_local=True)


def rows_of(seed: int, share: float) -> tuple[pa.Table, tuple[Sampling, ...]]:
    """Return the rows of one round, and a sampling for each."""
    rng = np.random.default_rng(seed)
    rows = []
    for count, prompts, outputs in KINDS.values():
        for _ in range(max(1, round(share * count))):
            prompt = rng.integers(10, models.VOCAB_SIZE, rng.integers(*prompts)).astype(np.int32)
            rows.append((prompt, Sampling(max_tokens=int(rng.integers(*outputs)), ignore_eos=True)))
    order = rng.permutation(len(rows)).tolist()
    prompts, samplings = zip(*(rows[i] for i in order), strict=True)
    numbers = [str(i) for i in range(len(rows))]
    return request_table(numbers, prompts, sampling=list(range(len(rows)))), samplings


def cpu_s(pool: PoolHandle) -> np.ndarray:
    """Return the CPU seconds of each engine's process so far."""
    times = [psutil.Process(pid).cpu_times() for pid in pool.state().pids]
    return np.array([each.user + each.system for each in times])


def run(pool: PoolHandle, seed: int, share: float) -> tuple[dict[str, Any], list[list[int]]]:
    """Return seconds, moves and tokens of one round."""
    table, samplings = rows_of(seed, share)
    moved, cpu, began = pool.stats().moved, cpu_s(pool), time.perf_counter()
    results = asyncio.run(pool.generate(table, samplings))
    figures = {
        "wall_s": round(time.perf_counter() - began, 2),
        "cpu_s": np.sort(cpu_s(pool) - cpu).round(2).tolist(),
        "moved": pool.stats().moved - moved,
    }
    return figures, results["token_ids"].to_pylist()


def measure(folder: Path, num_rounds: int, share: float, log: LogLines) -> dict[str, Any]:
    pools = {side: pool_of(folder, side) for side in (*SIDES, "auto")}
    for pool in pools.values():
        pool.start()
    while any(len(pool.state().pids) < 2 for pool in pools.values()):
        time.sleep(0.1)
    runs = []
    # the first round measures steps, so that the rounds that count are planned with them
    for number in range(-1, num_rounds):
        tokens = []
        for side in SIDES if number % 2 else reversed(SIDES):
            figures, its = run(pools[side], 100 + number, share)
            tokens.append(its)
            one = {"round": number, "stages": side, **figures}
            print(one, flush=True)
            runs += [one] if number >= 0 else []
        assert tokens[0] == tokens[1], "stages change tokens"
    run(pools["auto"], 100, share)
    for pool in pools.values():
        pool.shutdown()
    wall, cpu = (
        {
            str(side): statistics.median(get(r) for r in runs if r["stages"] == side)
            for side in SIDES
        }
        for get in (lambda r: r["wall_s"], lambda r: r["cpu_s"][-1])
    )
    found = [match for line in log.lines if (match := _SAVED.search(line))]
    forecasts = [float(m.group(1)) for m in found if m.group(2) == "steps as"]
    return {
        "median_wall_s": wall,
        "median_cpu_s": cpu,
        "saved_percent": {
            "forecast": forecasts,
            "measured_cpu": round(100 * (1 - cpu["2"] / cpu["off"]), 1),
            "measured_wall": round(100 * (1 - wall["2"] / wall["off"]), 1),
        },
        "said": log.lines,
        "runs": runs,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--share", type=float, default=1.0, help="share of the rows of each kind")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    log, logger = LogLines(), logging.getLogger("raybatch_lab.stages")
    logger.addHandler(log)
    logger.setLevel(logging.INFO)
    with tempfile.TemporaryDirectory() as folder:
        models.write("dense-4m", Path(folder))
        found = measure(Path(folder), options.rounds, options.share, log)
    for line in (*log.lines, found["median_cpu_s"], found["saved_percent"]):
        print(line)
    conditions.write_result(options.out, "../lab/benchmarks/pool_stages.py", **found)


if __name__ == "__main__":
    main()
