"""Measures the coordinator's cost of a finished row, in one process and without an engine.

Run: python benchmarks/batch_registry.py --out FILE [--before FILE] [--rows 200000] [--repeats 5]

One client submits rows in batches, as feeders do, and replicas hold them. Each report of a replica
brings some results of one batch. The script times all work of the coordinator for a report, in CPU
time: `BatchRegistry.take` (results, counters, learnt lengths, weighing of waiting rows) and the
dispatch of more rows. Results are encoded beforehand. A row has 1 to 64 tokens, 64 are allowed, and
its progress was reported once. When no row waits, the script times the work after a report: a
dispatch that hands out nothing, and `Rebalancer.rebalance`.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import conditions
import numpy as np
import pyarrow as pa

from raybatch.actors.coordinator.parts import PoolParts
from raybatch.actors.coordinator.pool_view import PoolView
from raybatch.actors.coordinator.rebalancer import Rebalancer
from raybatch.actors.coordinator.registry import BatchRegistry
from raybatch.actors.queue.row_queue import RowQueue
from raybatch.actors.replicas.placement import Placement
from raybatch.actors.replicas.replica_set import Member
from raybatch.actors.replicas.starts import StuckWatch
from raybatch.actors.wire.columns import encode_completions
from raybatch.actors.wire.records import Credit, RowGroups, Submission
from raybatch.config import PoolConfig
from raybatch.records.types import Completion, ReplicaStats

MAX_TOKENS, PROMPT_TOKENS = 64, 100
BATCH_ROWS = 1024
REPORT_ROWS = (16, 64, 256, 1024)
NUM_REPLICAS = 8
NUM_WATCHED = 128


def submission_of(number: int, size: int, *, has_groups: bool) -> Submission:
    """Return a row batch; groups have 64 rows each, which share half of their prompts."""
    groups = None
    if has_groups:
        ids = (np.arange(size) // 64 + number * size).astype(np.int64)
        groups = RowGroups(group_ids=ids, prefix_lens=np.full(size, PROMPT_TOKENS // 2, np.int32))
    return Submission(
        token=str(number),
        client="c",
        prompt_tokens=np.full(size, PROMPT_TOKENS, np.int32),
        max_new_tokens=np.full(size, MAX_TOKENS, np.int64),
        groups=groups,
    )


def results_of(rows: range, rng: np.random.Generator) -> pa.RecordBatch:
    lengths = rng.integers(1, MAX_TOKENS + 1, len(rows))
    completions = [
        Completion(
            request_id=row,
            token_ids=np.zeros(length, np.int32),
            finish_reason="length" if length == MAX_TOKENS else "stop",
        )
        for row, length in zip(rows, lengths.tolist(), strict=True)
    ]
    return encode_completions(np.array(rows, np.int32), completions)


def finish_all(num_rows: int, report_rows: int, *, has_groups: bool) -> dict[str, Any]:
    """Return microseconds per finished row of taking results, and of handing out more."""
    registry, rng = BatchRegistry(RowQueue(3), on_drop=lambda *_: None), np.random.default_rng(0)
    for number in range(num_rows // BATCH_ROWS):
        registry.add(submission_of(number, BATCH_ROWS, has_groups=has_groups))
    whole = results_of(range(BATCH_ROWS), rng)
    tokens = whole.column("token_ids").value_lengths().to_numpy()
    credit = Credit(tokens=1 << 40, rows=BATCH_ROWS)
    take_s = dispatch_s = 0.0
    num_done = 0
    while True:
        began = time.thread_time()
        granted = [
            (replica_id, each)
            for replica_id in range(1, NUM_REPLICAS + 1)
            for row_ranges in registry.queue.dispatch({replica_id: credit}).values()
            for each in registry.assign(row_ranges)
        ]
        dispatch_s += time.thread_time() - began
        if not granted:
            break
        for replica_id, assignment in granted:
            rows = np.concatenate([np.arange(s.start, s.stop) for s in assignment.row_ranges])
            # replicas report the progress of their rows at intervals
            registry.lengths.note_running([(assignment.batch_id, rows, (tokens[rows] + 1) // 2)])
            reports = [
                whole.take(pa.array(rng.permutation(rows[start : start + report_rows])))
                for start in range(0, len(rows), report_rows)
            ]
            began = time.thread_time()
            for results in reports:
                num_done += registry.take(replica_id, assignment.batch_id, results)
            take_s += time.thread_time() - began
    assert num_done == num_rows // BATCH_ROWS * BATCH_ROWS, num_done
    return {"take_us": 1e6 * take_s / num_done, "dispatch_us": 1e6 * dispatch_s / num_done}


def look_us(*, is_one_idle: bool, num_looks: int = 200) -> float:
    """Return the microseconds of work after a report of one of many replicas if no row waits."""
    registry, ids = BatchRegistry(RowQueue(3), on_drop=lambda *_: None), range(1, NUM_WATCHED + 1)
    registry.add(submission_of(0, BATCH_ROWS, has_groups=False))
    nothing = SimpleNamespace(actor=None, end=lambda: None)
    members = {r: Member(replica_id=r, rank=r, started=nothing, is_ready=True) for r in ids}
    credits = dict.fromkeys(ids, Credit(tokens=PROMPT_TOKENS, rows=1))
    parts = PoolParts(
        pool=PoolConfig(stuck_after_s=None),
        plan=Placement(num_replicas=1, num_cpus=0, num_gpus=0, num_engines_on_host=1),
        runtime=SimpleNamespace(died=(), failed=()),
        registry=registry,
        replicas=SimpleNamespace(members=members, kill=lambda *_: None),
        view=PoolView(registry.queue, registry.lengths),
        stuck=StuckWatch(PoolConfig()),
        pending_pulls=credits,
        spawn=lambda _: None,
        on_change=lambda: None,
    )
    rebalancer = Rebalancer(parts)
    rows = BATCH_ROWS // (NUM_WATCHED - is_one_idle)
    working = ids[is_one_idle:]
    while registry.queue.has_waiting():
        registry.queue.dispatch(
            dict.fromkeys(working, Credit(tokens=PROMPT_TOKENS * rows, rows=rows))
        )
    for replica_id in ids:
        rebalancer.view.note_report(replica_id, ReplicaStats(), None)
    began = time.thread_time()
    for _ in range(num_looks):
        registry.queue.dispatch(credits, 0, rebalancer.view.throughput.speed)
        rebalancer.rebalance()
    return 1e6 * (time.thread_time() - began) / num_looks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--before", type=Path, help="result of another commit to include")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    sides = []
    for has_groups in (False, True):
        for report_rows in REPORT_ROWS:
            runs = [
                finish_all(options.rows, report_rows, has_groups=has_groups)
                for _ in range(options.repeats)
            ]
            side = {"has_groups": has_groups, "rows_per_report": report_rows}
            for name in ("take_us", "dispatch_us"):
                values = sorted(round(each[name], 3) for each in runs)
                side |= {name: statistics.median(values), f"{name}_range": [values[0], values[-1]]}
            sides.append(side)
            print(side, flush=True)
    looks = {}
    for name, is_one_idle in (("all at work", False), ("one idle", True)):
        values = sorted(round(look_us(is_one_idle=is_one_idle), 1) for _ in range(options.repeats))
        looks[name] = {"median": statistics.median(values), "all": values}
        print(f"after a report, {NUM_WATCHED} replicas, {name}: {looks[name]['median']} us")
    parts: dict[str, Any] = {"per_finished_row": sides, "after_a_report_of_128_replicas_us": looks}
    if options.before is not None:
        parts["before"] = json.loads(options.before.read_text(encoding="utf-8"))
    conditions.write_result(options.out, "batch_registry.py", **parts)


if __name__ == "__main__":
    main()
