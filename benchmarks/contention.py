"""Measures the slowdown of engines that share a host: the same work alone and next to others.

Run: OMP_NUM_THREADS=1 python benchmarks/contention.py [--models dense-4m] [--engines 1 2]
One engine does the same amount of work in turn alone and next to other engines, which compute their
own rows meanwhile, each in a process. A ratio is the median over rounds. CPU seconds show how
engines slow each other down in memory and caches; wall seconds also show how they share the cores.
`busy_cores` is the load of the whole host during the work: if it is above the number of engines,
other processes ran as well.
"""

import argparse
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import conditions
import models
import psutil
from cost_model import checkpoints, load, prepare
from peer_loop import Settings
from suites import RANDOM

from raybatch.backends.base import Backend

# only prompts, mostly decodes, and both
PHASES = {
    "prefill": replace(RANDOM, num_requests=16, output_len=1),
    "decode": replace(RANDOM, num_requests=16, prompt_len=16, output_len=16),
    "both": replace(RANDOM, num_requests=16, output_len=16),
}
_SETTLE_S = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class Spent:
    cpu_s: float
    wall_s: float
    busy_cores: float


def compute_beside(folder: Path) -> None:
    """Compute rows while the last line of stdin is "go"; exit at the end of stdin."""
    backend, is_on = load(folder, Settings()), threading.Event()
    print("ready", flush=True)

    def obey() -> None:
        for line in sys.stdin:
            (is_on.set if line.strip() == "go" else is_on.clear)()
        os._exit(0)

    threading.Thread(target=obey, daemon=True).start()
    for turn in range(1, 1 << 20):
        backend.submit(prepare(PHASES["both"], turn, turn << 32).requests)
        while backend.num_unfinished():
            is_on.wait()
            backend.poll()


@contextmanager
def another_engine(folder: Path) -> Iterator[Callable[[bool], None]]:
    """Start an engine in a process; yield a function that starts (True) or stops its work."""
    command = [sys.executable, str(Path(__file__).resolve()), "--beside", str(folder)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None

    def tell(is_on: bool) -> None:
        process.stdin.write("go\n" if is_on else "rest\n")
        process.stdin.flush()

    try:
        if process.stdout.readline() != "ready\n":
            raise RuntimeError(f"the other engine exited with code {process.wait()}")
        yield tell
    finally:
        process.stdin.close()
        process.stdout.close()
        process.wait()


def work(backend: Backend, phase: str, seed: int) -> Spent:
    """Run one phase on an engine."""
    prompts = prepare(PHASES[phase], seed, (1 << 52) + (seed << 32))
    before, began, cpu = psutil.cpu_times(), time.perf_counter(), time.process_time()
    backend.submit(prompts.requests)
    while backend.num_unfinished():
        backend.poll()
    cpu_s, wall_s = time.process_time() - cpu, time.perf_counter() - began
    after = psutil.cpu_times()
    idle_s = after.idle + after.iowait - before.idle - before.iowait
    busy = psutil.cpu_count() - idle_s / wall_s
    return Spent(cpu_s=cpu_s, wall_s=wall_s, busy_cores=max(0.0, busy))


def measure(name: str, folder: Path, engines: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """Measure one model with each number of engines in turn; the order alternates by round."""
    backend = load(folder, Settings())
    spent: dict[tuple[str, int], list[Spent]] = {(p, n): [] for p in PHASES for n in engines}
    seed = 0
    with ExitStack() as stack:
        others = [stack.enter_context(another_engine(folder)) for _ in range(max(engines) - 1)]
        for number in range(rounds + 1):
            for phase in PHASES:
                for count in engines if number % 2 else engines[::-1]:
                    for place, tell in enumerate(others):
                        tell(place < count - 1)
                    time.sleep(_SETTLE_S)
                    seed += 1
                    found = work(backend, phase, seed)
                    # the first round warms up
                    spent[phase, count] += [found] if number else []
    rows = []
    for (phase, count), found in spent.items():
        alone = spent[phase, engines[0]]
        row: dict[str, Any] = {"model": name, "phase": phase, "engines": count}
        for field in ("cpu_s", "wall_s", "busy_cores"):
            row[field] = round(statistics.median(getattr(each, field) for each in found), 3)
        for field in ("cpu_s", "wall_s"):
            ratios = [
                getattr(one, field) / getattr(base, field)
                for one, base in zip(found, alone, strict=True)
            ]
            row[f"{field}_ratio"] = round(statistics.median(ratios), 3)
            row[f"{field}_ratios"] = [round(ratio, 3) for ratio in ratios]
        rows.append(row)
        print(
            f"{name:10} {phase:8} {count} engines  {row['cpu_s']:7.3f} CPU s x "
            f"{row['cpu_s_ratio']:.3f}  {row['wall_s']:7.3f} s x {row['wall_s_ratio']:.2f}  "
            f"{row['busy_cores']:.1f} cores busy",
            flush=True,
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="dense-4m", help=f"list of {', '.join(models.SHAPES)}")
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--beside", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="write conditions and results to this file")
    args = parser.parse_args()
    if args.beside is not None:
        compute_beside(args.beside)
        return
    if min(args.engines) < 1:
        parser.error("--engines: at least one engine does the work")
    results = [
        row
        for name, folder in checkpoints(args.models)
        for row in measure(name, folder, args.engines, args.rounds)
    ]
    conditions.write_result(args.out, "contention.py", results=results)


if __name__ == "__main__":
    main()
