"""What replicas of a host gain by sharing weights: memory for KV, and the time of a job.

Memory is counted (`policy.memory_plan`); passes and jobs are simulated, at rates that a GPU is told
to reach.
"""

from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from raybatch.models.config import ModelSpec
from raybatch.pictures.wording import duration
from raybatch.policy.cost.layers import ModelShape
from raybatch.policy.decode_times import GpuRates, PassCosts
from raybatch.policy.memory_plan import (
    BatchBounds,
    GpuBudget,
    Holding,
    MemoryPlan,
    ModelBytes,
    batch_bounds,
    copied_bytes,
    pays,
    plan_memory,
)
from raybatch.policy.ownership import Ownership, ShareBy
from raybatch.policy.sharing import most_round_rows
from raybatch.records.arrays import Ints
from raybatch_lab.sharing.shared_job import HostSpec, run_job
from raybatch_lab.sharing.shared_rounds import round_threshold, simulate_round
from raybatch_lab.sharing.shared_weights import GroupLinks, SharedGroup, simulate_group

# assumed: of a module what no graph hides, and its launches without a graph, as engines that share
# weights have none; its sum over GPUs; of a step the host's part
_MODULE_S, _LAUNCHED_S, _REDUCE_S, _STEP_S = 10e-6, 40e-6, 10e-6, 1e-3
# launches of one more tile, and of one of experts, whose rows are routed, sorted and summed again
_TILE_S, _EXPERTS_TILE_S = 15e-6, 35e-6
# before a copy of weights and a hop of rows
_COPY_S, _HOP_S = 10e-6, 40e-6
# rows of the largest pass that is simulated
MOST_ROWS = 1024
# rows of a simulated job, and for each that a host has KV for; deviation of the logs of lengths
_MOST_JOB_ROWS, _JOB_ROWS_PER_PLACE, _SIGMA = 2000, 4, 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryQuestion:
    """What is asked of a model.

    Args:
        size: replicas of a host, which may share weights.
        tp: GPUs of a replica.
        rates: what a GPU reaches; None leaves out all that takes seconds.
        element_bytes: of weights and KV.
        sequence_tokens: of the longest row of a job, half of it a prompt; of a pass, what each row
            has cached.
        shares_tiles: whether engines know tiles, and rows travel in the tail.
        max_rows: of a replica's batch.
        max_pass_tokens: rows and prompt tokens of a pass.
    """

    budget: GpuBudget
    tp: int
    size: int
    sequence_tokens: int
    num_slots: int | None = None
    rates: GpuRates | None = None
    element_bytes: int = 2
    shares_tiles: bool = True
    max_rows: int = MOST_ROWS
    max_pass_tokens: int = 2048


@dataclass(frozen=True, kw_only=True, slots=True)
class SharingGain:
    """What is found of a model.

    Args:
        bounds: of a replica's batch; None where rates are not known.
        pass_s: simulated seconds of a pass with the largest batch, by ownership, in the better of
            both modes.
        threshold_rows: below which rows travel; None where they do not, or rates are not known.
        replicated_s, shared_s: of a simulated job of `job_rows` rows; None where it cannot be.
    """

    question: MemoryQuestion
    sizes: ModelBytes
    plan: MemoryPlan
    bounds: BatchBounds | None
    pass_s: dict[ShareBy, float]
    threshold_rows: float | None = None
    job_rows: int = 0
    replicated_s: float | None = None
    shared_s: float | None = None

    @property
    def best(self) -> Holding | None:
        """Return the way to take: by simulated jobs, or by KV where nothing is known of seconds."""
        if self.bounds is None:
            ways = (self.plan.replicated, self.plan.shared)
            able = [way for way in ways if not self.problem_of(way)]
            return max(able, key=lambda way: way.kv_tokens, default=None)
        if self.shared_s is None:
            return None if self.replicated_s is None else self.plan.replicated
        return self.plan.shared if pays(self.replicated_s, self.shared_s) else self.plan.replicated

    def problem_of(self, way: Holding) -> str:
        """Return why a way cannot be, with rows as long as they may be; "" where it can."""
        tokens = self.question.sequence_tokens
        if way.problem or way.kv_tokens >= tokens:
            return way.problem
        return f"it has KV for {way.kv_tokens:,} tokens, and rows may have {tokens:,}"


def sharing_gain(spec: ModelSpec, question: MemoryQuestion) -> SharingGain:
    """Plan the memory of a model, with simulated passes where rates are known.

    Raises:
        ConfigError: the model cannot be split or shared so.
    """
    num_bytes = question.element_bytes
    sizes = ModelBytes.of(spec, element_bytes=num_bytes, kv_element_bytes=num_bytes)
    timing = None if question.rates is None else _Timing.of(spec, sizes, question.rates, question)
    plan = plan_memory(
        sizes,
        question.budget,
        tp=question.tp,
        size=question.size,
        num_slots=question.num_slots,
        shares_tiles=question.shares_tiles,
    )
    pass_s = {} if timing is None else timing.pass_seconds(plan)
    gain = SharingGain(question=question, sizes=sizes, plan=plan, bounds=None, pass_s=pass_s)
    if timing is None:
        return gain
    prompt, output = _job_rows(plan, question)
    threshold_rows = timing.threshold_rows(plan.shared) if question.shares_tiles else None
    return replace(
        gain,
        bounds=timing.bounds,
        threshold_rows=threshold_rows,
        job_rows=len(prompt),
        replicated_s=timing.job_s(plan.replicated, prompt, output),
        shared_s=timing.job_s(plan.shared, prompt, output, threshold_rows),
    )


def _job_rows(plan: MemoryPlan, asked: MemoryQuestion) -> tuple[Ints, Ints]:
    """Return prompts and outputs of some times as many rows as there is KV for, none too long."""
    of_one = max(way.rows(asked.sequence_tokens) for way in (plan.shared, plan.replicated))
    held = asked.size * min(of_one, asked.max_rows)
    rng, half = np.random.default_rng(0), max(1, asked.sequence_tokens // 2)
    shape = (2, max(1, min(_MOST_JOB_ROWS, _JOB_ROWS_PER_PLACE * held)))
    lengths = rng.lognormal(np.log(half) - _SIGMA**2 / 2, _SIGMA, shape)
    lengths *= np.minimum(1.0, asked.sequence_tokens / lengths.sum(axis=0))
    prompt, output = np.maximum(1, np.floor(lengths)).astype(np.int64)
    return prompt, output


@dataclass(frozen=True, kw_only=True, slots=True)
class _Timing:
    """What passes take, by the rates of GPUs.

    Args:
        costs: of a replica that shares weights.
        replicated: of one that has all.
    """

    costs: PassCosts
    replicated: PassCosts
    bounds: BatchBounds
    links: GroupLinks
    layer_bytes: float
    row_bytes: float
    asked: MemoryQuestion

    @classmethod
    def of(cls, spec: ModelSpec, sizes: ModelBytes, rates: GpuRates, asked: MemoryQuestion) -> Self:
        costs = PassCosts.of(
            ModelShape.of(spec, element_bytes=asked.element_bytes),
            rates,
            tp=asked.tp,
            cached_tokens=asked.sequence_tokens,
            module_s=_LAUNCHED_S,
            reduce_s=_REDUCE_S,
            step_s=_STEP_S,
            tile_s=_TILE_S if spec.moe is None else _EXPERTS_TILE_S,
        )
        saved_s = _LAUNCHED_S - _MODULE_S
        attention, ffn = (
            replace(of, fixed_s=of.fixed_s - saved_s) for of in (costs.attention, costs.ffn)
        )
        pass_bytes = copied_bytes(sizes, tp=asked.tp, size=asked.size)
        return cls(
            costs=costs,
            replicated=replace(costs, attention=attention, ffn=ffn),
            bounds=batch_bounds(costs.curve(MOST_ROWS), pass_bytes, rates.link_bytes_per_s),
            links=GroupLinks(bytes_per_s=rates.link_bytes_per_s, latency_s=_COPY_S),
            layer_bytes=max(sizes.ffn_bytes) / asked.tp,
            row_bytes=spec.model_dim * asked.element_bytes,
            asked=asked,
        )

    def _ownership(self, by: ShareBy) -> Ownership:
        return Ownership(size=self.asked.size, num_layers=self.costs.num_layers, by=by)

    def pass_seconds(self, plan: MemoryPlan) -> dict[ShareBy, float]:
        """Return seconds of a pass in the better mode, with the largest batch of both ownerships.

        Empty where one of them has no KV.
        """
        ways: dict[ShareBy, Holding] = {"layer": plan.by_layer, "tile": plan.by_tile}
        if any(way.problem for way in ways.values()):
            return {}
        most = min(way.rows(self.asked.sequence_tokens) for way in ways.values())
        rows = (min(max(1, most), MOST_ROWS),) * self.asked.size
        return {by: self._pass_s(by, way.num_slots, rows) for by, way in ways.items()}

    def _pass_s(self, by: ShareBy, num_slots: int, rows: tuple[int, ...]) -> float:
        ownership = self._ownership(by)
        group = SharedGroup(
            ownership=ownership,
            num_slots=num_slots,
            layer_bytes=self.layer_bytes,
            links=self.links,
            rows=rows,
        )
        return min(simulate_group(self.costs, group).pass_s, self._round_s(ownership, rows))

    def _round_s(self, ownership: Ownership, rows: tuple[int, ...]) -> float:
        return simulate_round(
            self.costs, ownership, rows, row_bytes=self.row_bytes, links=self._hops
        ).seconds

    @property
    def _hops(self) -> GroupLinks:
        return replace(self.links, latency_s=_HOP_S)

    def threshold_rows(self, way: Holding) -> float:
        """Return from how many rows of each rank on copies are better than rounds."""
        assert way.by is not None, "a way to share"
        return round_threshold(
            self.costs,
            self._ownership(way.by),
            self.bounds.copies_s,
            row_bytes=self.row_bytes,
            links=self._hops,
            most=self.asked.max_rows,
            most_round_rows=most_round_rows(self.asked.max_pass_tokens, self.asked.size),
        )

    def job_s(
        self, way: Holding, prompt: Ints, output: Ints, threshold_rows: float | None = None
    ) -> float | None:
        """Return the seconds of a job; None where weights or a row do not fit.

        `threshold_rows` is of a group whose rows travel, None elsewhere.
        """
        if way.problem or way.kv_tokens < self.asked.sequence_tokens:
            return None
        spec = HostSpec(
            way="replicated",
            num_ranks=self.asked.size,
            costs=self.replicated if way.by is None else self.costs,
            kv_tokens=way.kv_tokens,
            max_rows=self.asked.max_rows,
            max_pass_tokens=self.asked.max_pass_tokens,
            row_bytes=self.row_bytes,
            links=self._hops,
        )
        if way.by is not None:
            spec = replace(
                spec,
                way="copies" if threshold_rows is None else "both",
                ownership=self._ownership(way.by),
                copies_s=self.bounds.copies_s,
                threshold_rows=threshold_rows or 0.0,
            )
        return run_job(prompt, output, spec).completion_s


def choose_group(spec: ModelSpec, kind: str, **asked: Any) -> tuple[int | None, str]:  # noqa: ANN401
    """Return how many replicas share weights on a kind of GPU, None for none, and why.

    What is asked are the fields of `MemoryQuestion`, rates among them.

    Raises:
        ConfigError: the model cannot be split or shared so.
    """
    gain = sharing_gain(spec, MemoryQuestion(**asked))
    plan = gain.plan
    group = plan.size if gain.best is plan.shared else None
    if gain.shared_s is None:
        return group, gain.problem_of(plan.shared)
    if gain.replicated_s is None:
        return group, f"alone no replica runs: {gain.problem_of(plan.replicated)}"
    return group, (
        f"a job that was simulated at assumed rates of {kind} takes "
        f"{duration(gain.replicated_s)} replicated and {duration(gain.shared_s)} shared"
    )
