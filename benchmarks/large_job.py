"""Runs a whole job of many rows, and the same job again: seconds, rows per second, memory, files.

Run: OMP_NUM_THREADS=1 python benchmarks/large_job.py --rows 1000000
     OMP_NUM_THREADS=1 python benchmarks/large_job.py --rows 500000 --text --kill-at 0.5
Parquet files of token ids (see `plan_job.py`), or of texts of 1,500 characters (--words 330), of
which 16 rows share two thirds, are planned, answered by the fake backend without waiting, written
in units, and audited. So everything but the engines is measured; --backend native has an engine.
The memory of driver and coordinator, without pages of the object store, is recorded with the number
of rows done. Its slope is taken over the second half, when all processes have started. The second
run finds everything done. With --kill-at all processes of the first run are killed once this share
of the rows is done; the next run records the time to its first new row. With --peer the same texts
go through `ray.data.llm`, whose engine takes no time either (`large_job_raydata.py`).
"""

import argparse
import contextlib
import json
import multiprocessing
import re
import resource
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import conditions
import large_job_raydata
import meters
import numpy as np
import plan_job
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import ray
from ray._private.internal_api import memory_summary

from raybatch import BackendConfig, Job, LLMStage, PoolConfig
from raybatch.records.pool_stats import PoolStats

_MIB = 1 << 20


def write_texts(folder: Path, num_rows: int, seed: int, num_words: int = 330) -> None:
    """Write prompts of random words: documents in random order, and a question on each."""
    num_own = num_words // 3
    rng = np.random.default_rng(seed)
    words = np.array([f"{a}{b}" for a in "bdfglmnprst" for b in ("alo", "eri", "ove", "un", "ist")])
    document = rng.permutation(num_rows) // plan_job.ROWS_PER_DOCUMENT
    texts = {}

    def text_of(number: int) -> str:
        if number not in texts:
            texts[number] = " ".join(
                np.random.default_rng((seed, number)).choice(words, 2 * num_own)
            )
        return texts[number]

    for start in range(0, num_rows, plan_job.ROWS_PER_FILE):
        of = document[start : start + plan_job.ROWS_PER_FILE].tolist()
        tails = rng.choice(words, (len(of), num_own))
        prompts = [f"{text_of(d)} {' '.join(tail)}" for d, tail in zip(of, tails, strict=True)]
        pq.write_table(pa.table({"prompt": prompts}), folder / f"{start:012d}.parquet")


def run_once(
    folder: Path,
    sender: Connection,
    num_replicas: int,
    kill_at_rows: int | None = None,
    backend: str = "fake",
) -> None:
    """Run the job of a folder in this process, and send its time and memory.

    With `kill_at_rows` it sends what it knows once these rows are done, and waits to be killed.
    """
    began = time.monotonic()
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    is_text = pq.read_schema(next((folder / "in").iterdir())).names == ["prompt"]
    stage = LLMStage(
        "demo",
        **({"prompt": "{prompt}"} if is_text else {"tokenized_prompt": "ids"}),
        sampling={"max_tokens": 8},
        backend=BackendConfig(kind=backend),
        pool=PoolConfig(replicas=num_replicas),
    )
    driver, coordinators = psutil.Process(), list[psutil.Process]()
    memory: dict[str, list[tuple[int, float]]] = {"driver": [], "coordinator": []}

    events: dict[str, float] = {}

    def note(stats: PoolStats, _rows_total: int) -> None:
        for name, has_come in (("ready_s", stats.num_ready), ("first_row_s", stats.rows_done)):
            if has_come:
                events.setdefault(name, round(time.monotonic() - began, 1))
        if kill_at_rows is not None and stats.rows_done >= kill_at_rows:
            seconds = round(time.monotonic() - began, 1)
            sender.send(
                {
                    "seconds": seconds,
                    **events,
                    "rows_of_this_run": stats.rows_done,
                    "mib_by_rows": {name: _thinned(of) for name, of in memory.items()},
                    "spilled_mib": _spilled_mib(),
                }
            )
            time.sleep(600)
        if not coordinators:
            coordinators.append(psutil.Process(stage.pool.state().coordinator_pid))
        for name, process in (("driver", driver), ("coordinator", coordinators[0])):
            # unique set size, which leaves out pages of the object store
            memory[name].append((stats.rows_done, process.memory_full_info().uss / _MIB))

    report = Job(source=str(folder / "in"), sink=str(folder / "out"), stage=stage).run(
        progress=note
    )
    seconds = time.monotonic() - began
    sender.send(
        {
            "seconds": round(seconds, 1),
            **events,
            "files": len(report.output_files),
            "spilled_mib": _spilled_mib(),
            "rows_written": report.rows_out,
            "rows_of_this_run": max((rows for rows, _ in memory["driver"]), default=0),
            "driver_peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
            "mib_by_rows": {name: _thinned(of) for name, of in memory.items()},
            "bytes_per_row": {name: _slope(of) for name, of in memory.items()},
        }
    )


def _spilled_mib() -> int:
    """Return what Ray has written from its object store to disk."""
    found = re.search(r"Spilled (\d+) MiB", memory_summary(stats_only=True))
    return int(found[1]) if found else 0


class CpuByRole(meters.Sampler):
    """Context manager that sums CPU seconds of a process tree by what its processes do.

    A Ray worker does what its title says: an actor, or a task such as MapBatches(read_tasks).
    """

    def __init__(self, pid: int) -> None:
        super().__init__(interval_s=0.25)
        self.seconds: dict[str, float] = {}
        self._pid = pid
        self._before: dict[psutil.Process, float] = {}

    def sample(self) -> None:
        for process in meters.tree(self._pid):
            with contextlib.suppress(psutil.Error, IndexError):
                times, title = process.cpu_times(), process.cmdline()[0]
                used = times.user + times.system
                role = "driver" if process.pid == self._pid else _role(title)
                added = used - self._before.get(process, 0.0)
                self.seconds[role] = self.seconds.get(role, 0.0) + added
                self._before[process] = used


def _role(title: str) -> str:
    if not title.startswith("ray::"):
        return Path(title.split()[0]).name
    inner = re.search(r"\((\w+)\)+$", title.removeprefix("ray::"))
    return inner[1] if inner else re.split(r"[.(:]", title.removeprefix("ray::"))[0]


def _thinned(memory: list[tuple[int, float]]) -> list[tuple[int, int]]:
    return [(rows, round(mib)) for rows, mib in memory[:: max(1, len(memory) // 20)]]


def _slope(memory: list[tuple[int, float]]) -> float | None:
    """Return the growth in bytes per finished row in the second half of a run."""
    most = max((rows for rows, _ in memory), default=0)
    half = [(rows, mib) for rows, mib in memory if rows >= most / 2]
    if len({rows for rows, _ in half}) < 3:
        return None
    rows, mib = np.array(half).T
    return round(float(np.polyfit(rows, mib * _MIB, 1)[0]), 1)


def in_process(
    folder: Path,
    num_replicas: int,
    kill_at_rows: int | None = None,
    run: Callable[..., None] = run_once,
) -> dict[str, Any]:
    """Run the job in a separate driver process, and return its time and memory.

    With `kill_at_rows` all its processes are killed once these rows are done.
    """
    spawn = multiprocessing.get_context("spawn")
    receiver, sender = spawn.Pipe(duplex=False)
    more = {} if kill_at_rows is None else {"kill_at_rows": kill_at_rows}
    driver = spawn.Process(target=run, args=(folder, sender, num_replicas), kwargs=more)
    driver.start()
    sender.close()
    with CpuByRole(driver.pid) as cpu:
        try:
            found: dict[str, Any] = receiver.recv()
        except EOFError:
            raise SystemExit("the driver ended without a result") from None
    by_most = sorted(cpu.seconds.items(), key=lambda one: -one[1])
    found["cpu_s"] = {role: round(seconds, 1) for role, seconds in by_most if seconds > 0.5}
    if kill_at_rows is not None:
        root = psutil.Process(driver.pid)
        processes = [root, *root.children(recursive=True)]
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes)
    driver.join()
    return found


def main() -> None:
    """Print figures of both runs, and write them with their conditions."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--text", action="store_true", help="texts instead of token ids")
    parser.add_argument("--words", type=int, default=330, help="words of a text")
    parser.add_argument("--kill-at", type=float, help="share of the rows after which a run dies")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--backend", default="fake", help='"native" runs the demo model')
    parser.add_argument("--peer", action="store_true", help="ray.data.llm with the same texts too")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--out", type=Path, help="write conditions and results to this file")
    options = parser.parse_args()
    if options.peer and not options.text:
        parser.error("--peer needs --text")
    run = partial(run_once, backend=options.backend)
    folder, results = Path(tempfile.mkdtemp(prefix="raybatch-large-")), []
    try:
        (folder / "in").mkdir()
        if options.text:
            write_texts(folder / "in", options.rows, options.seed, options.words)
        else:
            plan_job.write_source(folder / "in", options.rows, options.seed)
        runs: dict[str, int | None] = {"first run": None, "run after it": None}
        if options.kill_at is not None:
            kill_at = int(options.rows * options.kill_at)
            runs = {"killed run": kill_at, "run after a kill": None, "run after it": None}
        about = {"rows": options.rows, "text": options.text, "replicas": options.replicas}
        about |= {"words": options.words} if options.text else {}
        about |= {"backend": options.backend}
        for name, kill_at_rows in runs.items():
            found = in_process(folder, options.replicas, kill_at_rows, run=run)
            results.append({"run": name, **about, **found})
            print(json.dumps(results[-1]), flush=True)
        if options.peer:
            found = in_process(folder, options.replicas, run=large_job_raydata.run_once)
            results.append({"run": "ray.data.llm", **about, "backend": "none", **found})
            print(json.dumps(results[-1]), flush=True)
    finally:
        shutil.rmtree(folder)
    conditions.write_result(options.out, "large_job.py", results=results)


if __name__ == "__main__":
    main()
