"""Runs raybatch's scheduler over token counts: the effect of an order of groups on its steps.

Steps are those of `raybatch_lab.simulator`. The time of a step comes from a roofline and is not
measured.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
from orders import DensityModel

from raybatch.actors.queue.row_states import ALONE
from raybatch.policy.cost.cost_model import CostModel, EngineLimits
from raybatch.policy.cost.layers import full_step_tokens
from raybatch.records.arrays import Ints
from raybatch_lab.simulator.engine import EngineSpec, SimulatedEngine
from raybatch_lab.simulator.rows import SimulatedRows

MAX_NUM_SEQS = 1024
# the engine counts steps, and the roofline gives their times
FREE = CostModel(
    step_s=0.0,
    knots=(),
    token_s=(0.0,),
    row_s=0.0,
    pair_s=0.0,
    past_pair_s=0.0,
    context_s=0.0,
    shared_pair_s=0.0,
    shared_read_s=0.0,
    fit_error=0.0,
    limits=EngineLimits(kv_tokens=1, max_num_seqs=1, block_size=1),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Rows of the simulated engine; arrays are int64 [R], members of a group are adjacent.

    Args:
        group: group ids from 0.
        prefix: shared tokens of the row's group.
        distinct: prompt tokens that the row does not share.
        output: tokens that the row generates, at least 1.
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
        max_rows: most running rows.
        reserves_outputs: whether lengths are known and a row starts only if the cache has room for
            the outputs of all running rows; if not, the engine learns lengths and decides.
        kv_bytes: KV bytes per token.
    """

    token_budget: int
    kv_tokens: int
    max_rows: int = MAX_NUM_SEQS
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
        """Return the density model of this device, for orders of groups."""
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
    """Counters and seconds of a run.

    Args:
        step_tokens: tokens of each step, int64 [steps].
        prefill_tokens: prompt tokens computed, including tokens recomputed after preemption.
        recomputed_tokens: prefill tokens that had been computed before.
        preemptions: preempted rows.
        admission_stalls: steps in which a row waited because memory was forecast to run out.
        sum_s: makespan if compute and KV reads of a step add up.
        overlap_s: makespan if the longer of the two hides the other.
        bound_s: lower bound of any order: all compute, all memory traffic, or the longest row.
    """

    step_tokens: Ints
    prefill_tokens: int
    recomputed_tokens: int
    preemptions: int
    admission_stalls: int
    sum_s: float
    overlap_s: float
    bound_s: float


class StepSimulator:
    """Simulates one run over `rows` in `order` (row positions), on raybatch's scheduler.

    Args:
        block_size: tokens of one cache block.
        waits: whether rows wait for memory, as they do in an engine on this device.
        expected: output tokens that the engine expects of each row; None lets it learn them.
        limit: most output tokens of each row; None means the number that the row generates.
        likely: typical output lengths that come with the rows, as in a pool that ran other rows.
    """

    def __init__(
        self,
        rows: Rows,
        order: Ints,
        device: Device,
        *,
        block_size: int = 16,
        waits: bool = True,
        expected: Ints | None = None,
        limit: int | None = None,
        likely: tuple[int, ...] = (),
    ) -> None:
        self.rows, self.device = rows, device
        simulated = SimulatedRows(
            prompt=rows.prefix + rows.distinct,
            output=rows.output,
            max_tokens=rows.output if limit is None else np.full(len(rows.output), limit),
            group=np.where(rows.prefix > 0, rows.group, ALONE),
            prefix=rows.prefix // block_size * block_size,
            expected=rows.output if device.reserves_outputs else expected,
            likely=likely,
        )
        limits = EngineLimits(
            kv_tokens=device.kv_tokens // block_size * block_size,
            max_num_seqs=device.max_rows,
            block_size=block_size,
            max_batched_tokens=device.token_budget,
        )
        full_step_tokens = device.full_step_tokens if waits else math.inf
        spec = EngineSpec(
            cost=replace(FREE, limits=limits),
            full_step_tokens=0.0 if device.reserves_outputs else full_step_tokens,
        )
        self.engine = SimulatedEngine(simulated, spec)
        self.engine.add(order.tolist())

    def run(self) -> Outcome:
        engine, device = self.engine, self.device
        tokens, sum_s, overlap_s = list[int](), 0.0, 0.0
        compute_s = memory_s = 0.0
        while len(engine.begin()):
            step = engine.counts
            pairs = step.pairs + step.past_pairs
            compute, attention = device.compute_s(step.tokens, pairs), device.compute_s(0, pairs)
            read = device.read_s(step.context_reads + step.shared_pairs)
            sum_s += max(device.weights_s, compute - attention) + attention + read
            overlap_s += max(device.weights_s + read, compute)
            compute_s, memory_s = compute_s + compute, memory_s + read
            tokens.append(int(step.tokens))
            engine.compute(1)
        if engine.num_generated < self.rows.output.sum():
            raise RuntimeError(f"rows do not fit {device.kv_tokens} tokens of KV")
        longest = int(self.rows.output.max()) * (device.fixed_s + device.weights_s)
        fixed, counters = len(tokens) * device.fixed_s, engine.scheduler.counters
        return Outcome(
            step_tokens=np.array(tokens),
            prefill_tokens=counters.prompt_tokens
            - counters.cached_tokens
            + counters.num_recomputed_tokens,
            recomputed_tokens=counters.num_recomputed_tokens,
            preemptions=counters.num_preemptions,
            admission_stalls=counters.num_admission_stalls,
            sum_s=sum_s + fixed,
            overlap_s=overlap_s + fixed,
            bound_s=max(compute_s, memory_s, longest),
        )
