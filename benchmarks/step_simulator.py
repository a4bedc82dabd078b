"""An engine as a sequence of steps over token counts: what an order of groups does to them.

Decode first, then running prefills, then new rows in order, under a token budget and a KV size. A
prefix is computed by the first member that starts and held until the last member has ended, or
until a row does not fit beside those that nobody uses. When the KV cache is full the youngest row
gives its own part back and computes it again later. Time per step is a roofline; no figure of it
is a measurement.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np
from orders import DensityModel

from raybatch.policy.step_seconds import full_step_tokens
from raybatch.records.arrays import Ints


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """What the simulated engine runs; arrays are int64 [R], members of a group side by side.

    Args:
        group: ids from 0.
        prefix: shared tokens of the row's group.
        distinct: prompt tokens of its own.
        output: tokens that it generates, at least 1.
    """

    group: Ints
    prefix: Ints
    distinct: Ints
    output: Ints


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """The reference roofline of the workloads, and the limits of an engine on it.

    Args:
        token_budget: tokens of one step.
        kv_tokens: size of the cache.
        max_rows: running rows at most.
        reserves_outputs: admit a row only if the outputs of all running rows fit too; else one
            token of growth per running row is kept free.
        kv_bytes: per token.
    """

    token_budget: int
    kv_tokens: int
    max_rows: int = 1 << 30
    reserves_outputs: bool = False
    kv_bytes: float = 131_072
    params: float = 8e9
    weight_bytes: float = 16e9
    hidden: int = 4096
    layers: int = 32
    flops_per_s: float = 2.2e14
    bytes_per_s: float = 1.6e12
    fixed_s: float = 1.5e-3

    def density(self) -> DensityModel:
        """Return this device as orders of groups see it."""
        return DensityModel(
            active_params=self.params,
            num_layers=self.layers,
            hidden_size=self.hidden,
            kv_bytes_per_token=self.kv_bytes,
            flops_per_s=self.flops_per_s,
            bytes_per_s=self.bytes_per_s,
        )

    def compute_s(self, tokens: float, pairs: float) -> float:
        linear = 2 * self.params * tokens
        return (linear + 4 * self.hidden * self.layers * pairs) / self.flops_per_s

    def read_s(self, kv_tokens: float) -> float:
        return kv_tokens * self.kv_bytes / self.bytes_per_s

    @property
    def full_step_tokens(self) -> float:
        kv_bytes = int(self.kv_tokens * self.kv_bytes)
        return full_step_tokens(weight_bytes=int(self.weight_bytes), kv_bytes=kv_bytes)

    @property
    def weights_s(self) -> float:
        return self.weight_bytes / self.bytes_per_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a run came to.

    Args:
        step_tokens: int64 [steps].
        prefill_tokens: computed, including again after preemption.
        preemptions: rows that gave their cache back.
        sum_s: makespan if compute and KV reads of a step add up.
        overlap_s: makespan if the longer of the two hides the other.
        bound_s: no order can be faster: all compute, all memory traffic, or the longest row.
    """

    step_tokens: Ints
    prefill_tokens: int
    preemptions: int
    sum_s: float
    overlap_s: float
    bound_s: float


class StepSimulator:
    """One run over `rows` in `order` (row positions)."""

    def __init__(self, rows: Rows, order: Ints, device: Device) -> None:
        self.rows, self.device = rows, device
        self.waiting: deque[int] = deque(order.tolist())
        self.running: list[int] = []
        self.todo = np.zeros(len(rows.group), np.int64)
        # cache that a row holds beside its group's prefix
        self.held = np.zeros(len(rows.group), np.int64)
        self.generated = np.zeros(len(rows.group), np.int64)
        self.left = np.bincount(rows.group)
        self.is_live = np.zeros(len(self.left), bool)
        self.used = self.prefill = self.preemptions = 0
        self.tokens: list[int] = []
        self.compute_s = self.memory_s = self.sum_s = self.overlap_s = 0.0

    def run(self) -> Outcome:
        while self.running or self.waiting:
            self._step()
        longest = int(self.rows.output.max()) * (self.device.fixed_s + self.device.weights_s)
        fixed = len(self.tokens) * self.device.fixed_s
        return Outcome(
            step_tokens=np.array(self.tokens),
            prefill_tokens=self.prefill,
            preemptions=self.preemptions,
            sum_s=self.sum_s + fixed,
            overlap_s=self.overlap_s + fixed,
            bound_s=max(self.compute_s, self.memory_s, longest),
        )

    def _step(self) -> None:
        running = np.array(self.running, np.int64)
        decoding = running[self.todo[running] == 0][: self.device.token_budget]
        while self.used + len(decoding) > self.device.kv_tokens:
            if len(self.running) == 1 and self._drop_idle_prefixes(self.running[0]):
                continue
            self._preempt()
            decoding = decoding[decoding != self.waiting[0]]
        context = self._context(decoding)
        self.used += len(decoding)
        self.held[decoding] += 1
        chunks = self._prefill(self.device.token_budget - len(decoding))
        self.generated[decoding] += 1
        for row, _, _ in chunks:
            self.generated[row] += self.todo[row] == 0
        num_prefill = sum(chunk for _, chunk, _ in chunks)
        if not num_prefill and not len(decoding):
            raise RuntimeError(f"row {self.waiting[0]} does not fit {self.device.kv_tokens} tokens")
        pairs = sum(chunk * (start + chunk / 2) for _, chunk, start in chunks)
        self._count(len(decoding) + num_prefill, pairs, int(context.sum()))
        self.prefill += num_prefill
        self._end(np.array(self.running, np.int64))

    def _context(self, rows: Ints) -> Ints:
        return self.rows.prefix[rows] + self.rows.distinct[rows] + self.generated[rows]

    def _prefill(self, budget: int) -> list[tuple[int, int, int]]:
        """Give the budget to running prefills and new rows; return (row, tokens, position)."""
        chunks = []
        for row in [r for r in self.running if self.todo[r]]:
            budget -= self._chunk(row, budget, chunks)
        growth = int((self.rows.output - self.generated)[self.running].sum())
        while budget > 0 and self.waiting and len(self.running) < self.device.max_rows:
            row = self.waiting[0]
            new = int(self.rows.output[row] - self.generated[row])
            reserve = growth + new if self.device.reserves_outputs else len(self.running)
            group = self.rows.group[row]
            prefix = 0 if self.is_live[group] else int(self.rows.prefix[row])
            own = int(self.rows.distinct[row] + self.generated[row])
            if self.used + prefix + own + reserve > self.device.kv_tokens:
                if not self.running and self._drop_idle_prefixes(row):
                    continue
                break
            growth += new
            self.waiting.popleft()
            self.running.append(row)
            self.is_live[group] = True
            self.held[row] = own
            self.todo[row] += prefix + own
            self.used += prefix + own
            budget -= self._chunk(row, budget, chunks)
        return chunks

    def _chunk(self, row: int, budget: int, chunks: list[tuple[int, int, int]]) -> int:
        chunk = min(budget, int(self.todo[row]))
        if chunk > 0:
            total = int(self._context(np.array([row]))[0])
            chunks.append((row, chunk, total - int(self.todo[row])))
            self.todo[row] -= chunk
        return max(chunk, 0)

    def _preempt(self) -> None:
        row = self.running.pop()
        self.used -= int(self.held[row])
        # what is left of a prefix stays a debt of the row
        self.todo[row] = max(int(self.todo[row] - self.held[row]), 0)
        self.waiting.appendleft(row)
        self.preemptions += 1

    def _drop_idle_prefixes(self, row: int) -> bool:
        """Give up the prefixes that no running row uses, but for that of `row`; is there any?"""
        rows = self.rows
        is_idle = self.is_live & (self.left > 0)
        is_idle[rows.group[[row, *self.running]]] = False
        of_idle = is_idle[rows.group]
        self.todo[of_idle] = 0
        prefixes = np.zeros(len(self.left), np.int64)
        prefixes[rows.group] = rows.prefix
        self.used -= int(prefixes[is_idle].sum())
        self.is_live[is_idle] = False
        return bool(prefixes[is_idle].any())

    def _end(self, running: Ints) -> None:
        ended = running[self.generated[running] >= self.rows.output[running]]
        if not len(ended):
            return
        gone = set(ended.tolist())
        self.running = [row for row in self.running if row not in gone]
        for row in ended.tolist():
            self.used -= int(self.held[row])
            group = self.rows.group[row]
            self.left[group] -= 1
            if not self.left[group]:
                self.used -= int(self.rows.prefix[row])

    def _count(self, tokens: int, pairs: float, kv_read: int) -> None:
        device = self.device
        compute, read = device.compute_s(tokens, pairs), device.read_s(kv_read)
        attention = device.compute_s(0, pairs)
        self.tokens.append(tokens)
        self.compute_s += compute
        self.memory_s += read
        self.sum_s += max(device.weights_s, compute - attention) + attention + read
        self.overlap_s += max(device.weights_s + read, compute)
