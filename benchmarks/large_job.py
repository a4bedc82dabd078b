"""A whole job of many rows, and the same command again: seconds, rows per second, driver's memory.

Run: OMP_NUM_THREADS=1 python benchmarks/large_job.py --rows 1000000
Parquet files of token ids (see `plan_job.py`) are planned, answered by the fake backend without
waiting, written in units, and audited. What is measured is therefore everything but the engines.
The memory of driver and coordinator, without pages of the object store, is noted with the rows that
are done; its slope is that of the second half, where all that starts has started. The run after it
finds everything done.
"""

import argparse
import json
import multiprocessing
import resource
import shutil
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import conditions
import numpy as np
import plan_job
import psutil
import ray

from raybatch import BackendConfig, Job, LLMStage, PoolConfig
from raybatch.records.pool_stats import PoolStats

_MIB = 1 << 20


def run_once(folder: Path, said: Connection) -> None:
    """Run the job of a folder in this process, and send what it took."""
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    stage = LLMStage(
        "demo",
        tokenized_prompt="ids",
        sampling={"max_tokens": 8},
        backend=BackendConfig(kind="fake"),
        pool=PoolConfig(replicas=1),
    )
    driver, coordinators = psutil.Process(), list[psutil.Process]()
    memory: dict[str, list[tuple[int, float]]] = {"driver": [], "coordinator": []}

    def note(stats: PoolStats, _rows_total: int) -> None:
        if not coordinators:
            coordinators.append(psutil.Process(stage.pool.state().coordinator_pid))
        for name, process in (("driver", driver), ("coordinator", coordinators[0])):
            # pages of the object store are not its own
            memory[name].append((stats.rows_done, process.memory_full_info().uss / _MIB))

    began = time.monotonic()
    report = Job(source=str(folder / "in"), sink=str(folder / "out"), stage=stage).run(
        progress=note
    )
    seconds = time.monotonic() - began
    said.send(
        {
            "seconds": round(seconds, 1),
            "rows_written": report.rows_out,
            "rows_of_this_run": max((rows for rows, _ in memory["driver"]), default=0),
            "driver_peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
            "mib_by_rows": {name: _thinned(of) for name, of in memory.items()},
            "bytes_per_row": {name: _slope(of) for name, of in memory.items()},
        }
    )


def _thinned(memory: list[tuple[int, float]]) -> list[tuple[int, int]]:
    return [(rows, round(mib)) for rows, mib in memory[:: max(1, len(memory) // 20)]]


def _slope(memory: list[tuple[int, float]]) -> float | None:
    """Return the bytes that the driver grew by per finished row in the second half of a run."""
    most = max((rows for rows, _ in memory), default=0)
    half = [(rows, mib) for rows, mib in memory if rows >= most / 2]
    if len({rows for rows, _ in half}) < 3:
        return None
    rows, mib = np.array(half).T
    return round(float(np.polyfit(rows, mib * _MIB, 1)[0]), 1)


def in_process(folder: Path) -> dict[str, Any]:
    """Run the job in a driver of its own and return what it took."""
    spawn = multiprocessing.get_context("spawn")
    hears, said = spawn.Pipe(duplex=False)
    driver = spawn.Process(target=run_once, args=(folder, said))
    driver.start()
    said.close()
    try:
        found: dict[str, Any] = hears.recv()
    except EOFError:
        raise SystemExit("the driver ended without a result") from None
    driver.join()
    return found


def main() -> None:
    """Print what the job and the run after it took, and write it with its conditions."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--out", type=Path, help="write conditions and results to this file")
    options = parser.parse_args()
    folder, results = Path(tempfile.mkdtemp(prefix="raybatch-large-")), []
    try:
        (folder / "in").mkdir()
        plan_job.write_source(folder / "in", options.rows, options.seed)
        for name in ("first run", "run after it"):
            results.append({"run": name, "rows": options.rows, **in_process(folder)})
            print(json.dumps(results[-1]), flush=True)
    finally:
        shutil.rmtree(folder)
    conditions.write_result(options.out, "large_job.py", results=results)


if __name__ == "__main__":
    main()
