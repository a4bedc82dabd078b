"""Measures the CPU time of an engine step without the model: schedule, build batch, apply tokens.

Run: OMP_NUM_THREADS=1 python benchmarks/scheduler.py
Every step is measured with the thread's CPU clock; the table shows medians. In "join" rounds one
sequence in 64 is replaced by a new one in each step, as in a run with outputs of 64 tokens.
"""

import argparse
import time

import numpy as np
import torch

from raybatch.engine.batch.forward_batch import BatchBuilder
from raybatch.engine.finish_rules import FinishRules
from raybatch.engine.scheduling.scheduler import Scheduler
from raybatch.engine.sequences.block_manager import BlockManager
from raybatch.engine.sequences.table import Sequence, SequenceTable
from raybatch.records.types import Request, Sampling

PHASES = ("schedule", "build", "advance", "finish")


class NoStopStrings:
    """Stop checker for runs without stop strings."""

    def add(self, slot: int, sampling: Sampling) -> None:
        raise NotImplementedError

    def remove(self, slot: int) -> None:
        raise NotImplementedError

    def check(self, slot: int, token_id: int) -> str | None:
        raise NotImplementedError


class Bench:
    """Steps a scheduler with `num_seqs` running sequences, and times the phases of each step."""

    def __init__(self, num_seqs: int, prompt: int, group: int, block_size: int) -> None:
        num_blocks = num_seqs * (-(-(prompt + 128) // block_size) + 2)
        self.table = SequenceTable(
            max_slots=num_seqs, num_blocks=num_blocks, block_size=block_size, max_model_len=8192
        )
        self.scheduler = Scheduler(
            BlockManager(num_blocks, block_size),
            self.table,
            max_batched_tokens=max(2048, 2 * num_seqs),
            enable_prefix_caching=True,
        )
        self.builder = BatchBuilder(self.table, num_blocks)
        self.rules = FinishRules(num_seqs, (0,), NoStopStrings())
        self.rng = np.random.default_rng(0)
        self.prompt, self.group, self.num_added = prompt, group, 0
        self.times: dict[str, list[float]] = {phase: [] for phase in PHASES}

    def add(self) -> None:
        if self.num_added % self.group == 0:
            self.stem = self.rng.integers(1, 30000, self.prompt)
        tokens = self.stem.astype(np.int32)
        if self.group > 1:
            tokens[-32:] = self.rng.integers(1, 30000, 32)
        # sequences of the first wave do not end by themselves; `replace` removes them
        left = 4096 if self.num_added < len(self.table.records) else 64
        request = Request(
            request_id=self.num_added,
            row_id="",
            prompt_token_ids=tokens,
            sampling=Sampling(max_tokens=left),
        )
        self.scheduler.add(
            Sequence(
                request=request, sample_idx=0, arrival=self.num_added, max_len=len(tokens) + left
            )
        )
        self.num_added += 1

    def step(self) -> None:
        marks = [time.thread_time()]
        schedule = self.scheduler.schedule()
        for slot in schedule.admitted:
            record = self.table.record(slot)
            self.rules.add(
                slot, record.request.sampling, record.request.prompt_token_ids, record.token_ids
            )
        marks.append(time.thread_time())
        self.builder.build(schedule)
        marks.append(time.thread_time())
        slots = self.scheduler.advance(schedule)
        tokens = np.full(len(slots), 7)
        self.table.append_tokens(slots, tokens)
        marks.append(time.thread_time())
        num_generated = self.table.num_tokens[slots] - self.table.num_prompt[slots]
        limits = self.table.max_len[slots] - self.table.num_prompt[slots]
        for slot, *_ in self.rules.find(slots, tokens, num_generated, limits):
            self.rules.remove(slot)
            self.scheduler.remove(slot)
        marks.append(time.thread_time())
        for phase, begin, end in zip(PHASES, marks, marks[1:], strict=False):
            self.times[phase].append((end - begin) * 1e3)

    def fill(self) -> None:
        for _ in self.table.records:
            self.add()
        while self.scheduler.num_waiting:
            self.step()
        for _ in range(3):
            self.step()
        for times in self.times.values():
            times.clear()

    def replace(self, count: int) -> None:
        running = np.flatnonzero(self.table.phase == 2)
        for slot in self.rng.choice(running, count, replace=False).tolist():
            self.scheduler.remove(slot)
            self.add()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-seqs", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--prompt", type=int, default=192)
    parser.add_argument("--block-size", type=int, default=64)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"CPU ms per step, median of {options.steps}; prompts of {options.prompt} tokens,")
    print(f"block {options.block_size}; share: 16 rows per prefix of prompt - 32 tokens")
    print(
        f"{'seqs':>5} {'share':>5} {'join':>5} "
        + " ".join(f"{p:>9}" for p in PHASES)
        + "     total"
    )
    for num_seqs in options.num_seqs:
        for group in (1, 16):
            bench = Bench(num_seqs, options.prompt, group, options.block_size)
            bench.fill()
            for joins in (0, num_seqs // 64):
                for times in bench.times.values():
                    times.clear()
                for _ in range(options.steps):
                    bench.replace(joins)
                    bench.step()
                medians = [float(np.median(bench.times[phase])) for phase in PHASES]
                cells = " ".join(f"{value:9.3f}" for value in (*medians, sum(medians)))
                print(f"{num_seqs:5} {group:5} {joins:5} {cells}")


if __name__ == "__main__":
    main()
