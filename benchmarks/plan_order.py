"""Orders of groups on the product's own scheduler: its queues, blocks and preemptions, no model.

Run: OMP_NUM_THREADS=1 python benchmarks/plan_order.py [--cases W2,W3] [--seeds 3] [--out FILE]
Steps are decided by `Scheduler` over `SequenceTable` and `BlockManager` with the default options of
an engine, counted exactly, and timed by the reference roofline of `step_simulator.Device`; seconds
are of that roofline, not of a machine. Workloads are those of `group_order.py` at three sizes.
"""

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import conditions
import numpy as np
from group_order import Workload, expected, group_load, w1, w2, w2_full, w3, w4
from orders import order_groups
from step_simulator import Device, Rows

from raybatch.config import EngineConfig
from raybatch.engine.scheduling.scheduler import Scheduler
from raybatch.engine.sequences.block_manager import BlockManager
from raybatch.engine.sequences.table import Sequence, SequenceTable
from raybatch.prefix.order import Room
from raybatch.records.arrays import Ints
from raybatch.records.types import Request, Sampling

MAX_NUM_SEQS = 1024
# tokens of a row that nobody knows better
LIMIT = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A workload, and the block size that fits its lengths: those of a tenth take small blocks."""

    make: Callable[[int], Workload]
    block_size: int = 16


def repeated(make: Callable[[int], Workload], times: int) -> Callable[[int], Workload]:
    """Return a workload with so many times the groups."""

    def made(seed: int) -> Workload:
        one = make(seed)
        shift = np.repeat(np.arange(times), len(one.kind)) * (int(one.rows.group.max()) + 1)
        columns = {name: np.tile(values, times) for name, values in asdict(one.rows).items()}
        rows = Rows(**(columns | {"group": columns["group"] + shift}))
        return replace(one, rows=rows, kind=np.tile(one.kind, times))

    return made


def full(seed: int) -> Workload:
    return w2_full(seed, reserves_outputs=False)


CASES: dict[str, Case] = {
    "W1": Case(make=w1),
    "W1 x6": Case(make=repeated(w1, 6)),
    "W1 x24": Case(make=repeated(w1, 24)),
    "W2": Case(make=w2),
    "W2 full": Case(make=full, block_size=64),
    "W2 full x4": Case(make=repeated(full, 4), block_size=64),
    "W3 .9": Case(make=lambda seed: w3(seed, 190, 138)),
    "W3 .9 x6": Case(make=lambda seed: w3(seed, 190, 138, scale=6)),
    "W3 .9 x24": Case(make=lambda seed: w3(seed, 190, 138, scale=24)),
    "W3 1.4": Case(make=lambda seed: w3(seed, 197, 52)),
    "W3 1.4 x6": Case(make=lambda seed: w3(seed, 197, 52, scale=6)),
    "W3 1.4 x24": Case(make=lambda seed: w3(seed, 197, 52, scale=24)),
    "W4": Case(make=w4),
    "W4 x6": Case(make=repeated(w4, 6)),
    "W4 x24": Case(make=repeated(w4, 24)),
}
ORDERS = ("auto", "shuffle", "ratio", "dual_scan", "tail .1", "tail .25", "tail .5")


def room_of(device: Device) -> Room:
    engine = EngineConfig(max_batched_tokens=device.token_budget, max_num_seqs=MAX_NUM_SEQS)
    return Room.of(engine)


class Engine:
    """The scheduler with sequences that end at known lengths, a step at a time.

    Args:
        waits: whether rows wait for memory, as they do in an engine on this device.
        expected: output tokens that the engine expects of each row; None leaves it to learn them.
        limit: output tokens that it allows each row; None allows no more than it generates.
        likely: output lengths that come with the rows, as those of a pool that has seen others.
    """

    def __init__(
        self,
        rows: Rows,
        order: Ints,
        device: Device,
        block_size: int,
        *,
        waits: bool = True,
        expected: Ints | None = None,
        limit: int | None = None,
        likely: tuple[int, ...] = (),
    ) -> None:
        self.device, self.rows = device, rows
        num_blocks = device.kv_tokens // block_size
        prompt, num_groups = rows.prefix + rows.distinct, int(rows.group.max()) + 1
        allowed = rows.output if limit is None else np.full(len(rows.output), limit)
        longest = int((prompt + allowed).max())
        # of the row in each slot, prompt and output
        self.lengths, self.targets = prompt + rows.output, np.zeros(MAX_NUM_SEQS, np.int64)
        self.table = SequenceTable(
            max_slots=min(MAX_NUM_SEQS, device.token_budget),
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=longest,
        )
        self.scheduler = Scheduler(
            BlockManager(num_blocks, block_size),
            self.table,
            max_batched_tokens=device.token_budget,
            enable_prefix_caching=True,
            full_step_tokens=device.full_step_tokens if waits else math.inf,
        )
        random = np.random.default_rng(7)
        widest = int(rows.prefix.max(initial=0))
        stems = random.integers(1, 1 << 30, (num_groups, widest), np.int32)
        for arrival, row in enumerate(order.tolist()):
            prefix, group = int(rows.prefix[row]), int(rows.group[row])
            own = random.integers(1, 1 << 30, int(rows.distinct[row]), np.int32)
            request = Request(
                request_id=row,
                row_id="",
                prompt_token_ids=np.concatenate([stems[group, :prefix], own]),
                sampling=Sampling(max_tokens=int(allowed[row])),
                group_id=group if prefix else None,
                prefix_len=prefix // block_size * block_size,
                likely_output_lens=likely,
            )
            self.scheduler.add(
                Sequence(
                    request=request,
                    sample_idx=0,
                    arrival=arrival,
                    max_len=int(prompt[row] + allowed[row]),
                    expected_len=None if expected is None else int(prompt[row] + expected[row]),
                )
            )

    def run(self) -> dict[str, float]:
        table, scheduler, device = self.table, self.scheduler, self.device
        sums = {"sum_s": 0.0, "overlap_s": 0.0}
        num_steps = num_tokens = 0
        while scheduler.num_waiting or table.num_running:
            step = scheduler.schedule()
            if step.ended:
                raise RuntimeError(f"{len(step.ended)} rows do not fit the cache")
            read = device.read_s(int(table.num_tokens[step.decode_slots].sum()))
            middle = step.chunk_starts + step.chunk_lens / 2
            compute = device.compute_s(step.num_tokens, 0)
            attention = device.compute_s(0, float(step.chunk_lens @ middle))
            sums["sum_s"] += device.fixed_s + max(device.weights_s, compute) + attention + read
            hidden = max(device.weights_s + read, compute + attention)
            sums["overlap_s"] += device.fixed_s + hidden
            num_steps, num_tokens = num_steps + 1, num_tokens + step.num_tokens
            for slot in step.admitted:
                self.targets[slot] = self.lengths[table.record(slot).request.request_id]
            slots = scheduler.advance(step)
            table.append_tokens(slots, np.full(len(slots), 7))
            for slot in slots[table.num_tokens[slots] >= self.targets[slots]].tolist():
                scheduler.finish(slot)
        counters = scheduler.counters
        return sums | {
            "steps": num_steps,
            "tokens": num_tokens,
            "preemptions": counters.num_preemptions,
            "recomputed": counters.num_recomputed_tokens,
            "held_steps": counters.num_held_steps,
        }


def rows_in_order(workload: Workload, by: str, knows: str, seed: int) -> Ints:
    """Return the rows as a planner that knows so much of their outputs puts them."""
    load = group_load(workload.rows, expected(workload, knows, seed))
    if knows == "nothing":
        load = replace(load, output_tokens=load.num_rows * float(LIMIT))
    density, room = workload.device.density(), room_of(workload.device)
    rank = np.argsort(order_groups(load, by=by, seed=seed, density=density, room=room))
    return np.argsort(rank[workload.rows.group], kind="stable")


def run(case: Case, by: str, knows: str, seed: int) -> dict[str, float]:
    workload = case.make(seed)
    rows = rows_in_order(workload, by, knows, seed)
    return Engine(workload.rows, rows, workload.device, case.block_size).run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--orders", default=",".join(ORDERS))
    parser.add_argument("--knows", default="nothing,probe,true")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write conditions and results to this file")
    options = parser.parse_args()
    results = []
    for name in options.cases.split(","):
        for knows in options.knows.split(","):
            for by in options.orders.split(","):
                is_same = by == "shuffle" and knows != options.knows.split(",")[0]
                runs = (
                    []
                    if is_same
                    else [run(CASES[name], by, knows, s) for s in range(options.seeds)]
                )
                if runs:
                    mean = {key: float(np.mean([one[key] for one in runs])) for key in runs[0]}
                    results.append({"case": name, "knows": knows, "order": by, **mean})
                    print(json.dumps(results[-1]), flush=True)
    what = "steps of the real scheduler, timed by the reference roofline; no run on an engine"
    conditions.write_result(
        options.out, "plan_order.py", what=what, seeds=options.seeds, runs=results
    )


if __name__ == "__main__":
    main()
