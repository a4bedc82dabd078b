"""Gain of sharing weights between the replicas of a host: memory for KV, and job time.

Memory is computed (`memory_plan`); passes and jobs are simulated at given GPU rates.
"""

from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from raybatch.models.config import ModelSpec
from raybatch.pictures.wording import duration
from raybatch.policy.cost.layers import ModelShape
from raybatch.records.arrays import Ints
from raybatch_extensions.sharing.decode_times import GpuRates
from raybatch_extensions.sharing.modes import max_exchange_rows
from raybatch_extensions.sharing.ownership import Ownership, ShareBy
from raybatch_lab.sharing.memory_plan import (
    DEFAULT_UTILISATION,
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
from raybatch_lab.sharing.pass_costs import PassCosts
from raybatch_lab.sharing.shared_exchange import exchange_threshold, simulate_exchange
from raybatch_lab.sharing.shared_job import HostSpec, run_job
from raybatch_lab.sharing.shared_weights import GroupLinks, SharedGroup, simulate_group

# assumed seconds: fixed time per module with CUDA graphs, its launches without graphs (as with
# shared weights), its all-reduce, and the host time of a step
_MODULE_S, _LAUNCHED_S, _REDUCE_S, _STEP_S = 10e-6, 40e-6, 10e-6, 1e-3
# launches of one more dense shard, and of one of experts, with routing, sorting and summing
_SHARD_S, _EXPERTS_SHARD_S = 15e-6, 35e-6
# latency of a weight fetch, and of a hop of rows
_COPY_S, _HOP_S = 10e-6, 40e-6
# rows of the largest simulated pass
MOST_ROWS = 1024
# most rows of a simulated job, rows per row of KV capacity, and sigma of the log-normal lengths
_MOST_JOB_ROWS, _JOB_ROWS_PER_PLACE, _SIGMA = 2000, 4, 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryQuery:
    """A configuration of replicas on a host, for `sharing_gain`.

    Args:
        tp: GPUs of a replica.
        size: replicas of the host, which may share weights.
        sequence_tokens: tokens of the longest row of a job, half of them prompt; also the cached
            tokens of each row in a simulated pass.
        num_slots: buffers for fetched weights on a replica; None chooses the number.
        rates: achieved GPU rates; None computes no times.
        element_bytes: bytes of a weight or KV element.
        shares_shards: whether engines support weight shards and activation exchange.
        max_rows: largest batch of a replica.
        max_pass_tokens: largest sum of decoding rows and prompt tokens in a pass.
    """

    budget: GpuBudget
    tp: int
    size: int
    sequence_tokens: int
    num_slots: int | None = None
    rates: GpuRates | None = None
    element_bytes: int = 2
    shares_shards: bool = True
    max_rows: int = MOST_ROWS
    max_pass_tokens: int = 2048


@dataclass(frozen=True, kw_only=True, slots=True)
class SharingGain:
    """Result of `sharing_gain`: memory plan of a model, and simulated times if rates were given.

    Args:
        bounds: bounds of a replica's batch; None without rates.
        pass_s: simulated seconds of a forward pass with the largest batch, by ownership ("layer"
            or "shard"), with weight fetch or activation exchange, whichever is faster.
        threshold_rows: rows per rank below which activation exchange is faster than weight fetch;
            None if never, or without rates.
        job_rows: rows of a simulated job.
        replicated_s, shared_s: seconds of this job with replicated and with shared weights; None
            if they do not fit, or without rates.
    """

    query: MemoryQuery
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
        """Return the best possible layout, None if there is none.

        That is the one with the least simulated job time, or without rates the most KV tokens.
        """
        if self.bounds is None:
            layouts = (self.plan.replicated, self.plan.shared)
            able = [layout for layout in layouts if not self.problem_of(layout)]
            return max(able, key=lambda layout: layout.kv_tokens, default=None)
        if self.shared_s is None:
            return None if self.replicated_s is None else self.plan.replicated
        return self.plan.shared if pays(self.replicated_s, self.shared_s) else self.plan.replicated

    def problem_of(self, layout: Holding) -> str:
        """Return why a layout is not possible for the longest rows; "" if it is."""
        tokens = self.query.sequence_tokens
        if layout.problem or layout.kv_tokens >= tokens:
            return layout.problem
        return f"KV memory for {layout.kv_tokens:,} tokens, but rows may have {tokens:,}"


def sharing_gain(spec: ModelSpec, query: MemoryQuery) -> SharingGain:
    """Plan the memory of a model's replicas, and simulate passes and a job if rates are given.

    Raises:
        ConfigError: the model cannot be split or shared.
    """
    num_bytes = query.element_bytes
    sizes = ModelBytes.of(spec, element_bytes=num_bytes, kv_element_bytes=num_bytes)
    timing = None if query.rates is None else _Timing.of(spec, sizes, query.rates, query)
    plan = plan_memory(
        sizes,
        query.budget,
        tp=query.tp,
        size=query.size,
        num_slots=query.num_slots,
        shares_shards=query.shares_shards,
    )
    pass_s = {} if timing is None else timing.pass_seconds(plan)
    gain = SharingGain(query=query, sizes=sizes, plan=plan, bounds=None, pass_s=pass_s)
    if timing is None:
        return gain
    prompt, output = _job_rows(plan, query)
    threshold_rows = timing.threshold_rows(plan.shared) if query.shares_shards else None
    return replace(
        gain,
        bounds=timing.bounds,
        threshold_rows=threshold_rows,
        job_rows=len(prompt),
        replicated_s=timing.job_s(plan.replicated, prompt, output),
        shared_s=timing.job_s(plan.shared, prompt, output, threshold_rows),
    )


def _job_rows(plan: MemoryPlan, query: MemoryQuery) -> tuple[Ints, Ints]:
    """Return prompt and output lengths of a job of several times the KV capacity."""
    of_one = max(layout.rows(query.sequence_tokens) for layout in (plan.shared, plan.replicated))
    held = query.size * min(of_one, query.max_rows)
    rng, half = np.random.default_rng(0), max(1, query.sequence_tokens // 2)
    shape = (2, max(1, min(_MOST_JOB_ROWS, _JOB_ROWS_PER_PLACE * held)))
    lengths = rng.lognormal(np.log(half) - _SIGMA**2 / 2, _SIGMA, shape)
    lengths *= np.minimum(1.0, query.sequence_tokens / lengths.sum(axis=0))
    prompt, output = np.maximum(1, np.floor(lengths)).astype(np.int64)
    return prompt, output


@dataclass(frozen=True, kw_only=True, slots=True)
class _Timing:
    """Computes times of passes and jobs from GPU rates.

    Args:
        costs: of a replica that shares weights.
        replicated: of a replica with all weights.
    """

    costs: PassCosts
    replicated: PassCosts
    bounds: BatchBounds
    links: GroupLinks
    layer_bytes: float
    row_bytes: float
    query: MemoryQuery

    @classmethod
    def of(cls, spec: ModelSpec, sizes: ModelBytes, rates: GpuRates, query: MemoryQuery) -> Self:
        costs = PassCosts.of(
            ModelShape.of(spec, element_bytes=query.element_bytes),
            rates,
            tp=query.tp,
            cached_tokens=query.sequence_tokens,
            module_s=_LAUNCHED_S,
            reduce_s=_REDUCE_S,
            step_s=_STEP_S,
            shard_s=_SHARD_S if spec.moe is None else _EXPERTS_SHARD_S,
        )
        saved_s = _LAUNCHED_S - _MODULE_S
        attention, ffn = (
            replace(of, fixed_s=of.fixed_s - saved_s) for of in (costs.attention, costs.ffn)
        )
        pass_bytes = copied_bytes(sizes, tp=query.tp, size=query.size)
        return cls(
            costs=costs,
            replicated=replace(costs, attention=attention, ffn=ffn),
            bounds=batch_bounds(costs.curve(MOST_ROWS), pass_bytes, rates.link_bytes_per_s),
            links=GroupLinks(bytes_per_s=rates.link_bytes_per_s, latency_s=_COPY_S),
            layer_bytes=max(sizes.ffn_bytes) / query.tp,
            row_bytes=spec.model_dim * query.element_bytes,
            query=query,
        )

    def _ownership(self, by: ShareBy) -> Ownership:
        return Ownership(size=self.query.size, num_layers=self.costs.num_layers, by=by)

    def pass_seconds(self, plan: MemoryPlan) -> dict[ShareBy, float]:
        """Return the seconds of a forward pass by ownership, in the faster mode of each.

        All have the largest batch that fits with any of them. Empty if one does not fit.
        """
        layouts: dict[ShareBy, Holding] = {"layer": plan.by_layer, "shard": plan.by_shard}
        if any(layout.problem for layout in layouts.values()):
            return {}
        most = min(layout.rows(self.query.sequence_tokens) for layout in layouts.values())
        rows = (min(max(1, most), MOST_ROWS),) * self.query.size
        return {by: self._pass_s(by, layout.num_slots, rows) for by, layout in layouts.items()}

    def _pass_s(self, by: ShareBy, num_slots: int, rows: tuple[int, ...]) -> float:
        ownership = self._ownership(by)
        group = SharedGroup(
            ownership=ownership,
            num_slots=num_slots,
            layer_bytes=self.layer_bytes,
            links=self.links,
            rows=rows,
        )
        return min(simulate_group(self.costs, group).pass_s, self._exchange_s(ownership, rows))

    def _exchange_s(self, ownership: Ownership, rows: tuple[int, ...]) -> float:
        return simulate_exchange(
            self.costs, ownership, rows, row_bytes=self.row_bytes, links=self._hops
        ).seconds

    @property
    def _hops(self) -> GroupLinks:
        return replace(self.links, latency_s=_HOP_S)

    def threshold_rows(self, layout: Holding) -> float:
        """Return the rows per rank from which weight fetch is faster than activation exchange."""
        assert layout.by is not None, "the layout is not shared"
        return exchange_threshold(
            self.costs,
            self._ownership(layout.by),
            self.bounds.fetch_s,
            row_bytes=self.row_bytes,
            links=self._hops,
            most=self.query.max_rows,
            max_exchange_rows=max_exchange_rows(self.query.max_pass_tokens, self.query.size),
        )

    def job_s(
        self, layout: Holding, prompt: Ints, output: Ints, threshold_rows: float | None = None
    ) -> float | None:
        """Return the simulated seconds of a job; None if the weights or the longest row do not fit.

        Args:
            prompt, output: tokens of each row.
            threshold_rows: rows per rank below which activation exchange replaces weight fetch;
                None for weight fetch only.
        """
        if layout.problem or layout.kv_tokens < self.query.sequence_tokens:
            return None
        spec = HostSpec(
            sharing="replicated",
            num_ranks=self.query.size,
            costs=self.replicated if layout.by is None else self.costs,
            kv_tokens=layout.kv_tokens,
            max_rows=self.query.max_rows,
            max_pass_tokens=self.query.max_pass_tokens,
            row_bytes=self.row_bytes,
            links=self._hops,
        )
        if layout.by is not None:
            spec = replace(
                spec,
                sharing="fetch" if threshold_rows is None else "both",
                ownership=self._ownership(layout.by),
                fetch_s=self.bounds.fetch_s,
                threshold_rows=threshold_rows or 0.0,
            )
        return run_job(prompt, output, spec).completion_s


def choose_group(
    spec: ModelSpec,
    kind: str,
    *,
    gpu_bytes: int,
    utilisation: float | None,
    **query: Any,  # noqa: ANN401
) -> tuple[int | None, str]:
    """Return the number of replicas that should share weights, None for no sharing, and the reason.

    `kind` names the GPU in the reason. `utilisation` is the share of its memory for an engine; None
    takes the default. `query` has the other fields of `MemoryQuery`, including rates.

    Raises:
        ConfigError: the model cannot be split or shared.
    """
    budget = GpuBudget(gpu_bytes=gpu_bytes, utilisation=utilisation or DEFAULT_UTILISATION)
    gain = sharing_gain(spec, MemoryQuery(budget=budget, **query))
    plan = gain.plan
    group = plan.size if gain.best is plan.shared else None
    if gain.shared_s is None:
        return group, gain.problem_of(plan.shared)
    if gain.replicated_s is None:
        return group, f"replicated weights do not fit: {gain.problem_of(plan.replicated)}"
    return group, (
        f"simulated job at assumed rates of {kind}: {duration(gain.replicated_s)} replicated, "
        f"{duration(gain.shared_s)} shared"
    )
