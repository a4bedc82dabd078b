"""Chooses batch sizes and residence: of all plans that memory holds, the least time per token.

Tried are batches up to the tokens at the gate that keep the experts busy, where memory and those
that wait allow as many.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

from raybatch.errors import ConfigError
from raybatch.policy.batches.forward_dag import ForwardTime, forward_time
from raybatch.policy.batches.layer_plan import (
    BatchPlan,
    LayerShape,
    MemoryBudget,
    MemoryNeed,
    ModelShape,
    ModuleCosts,
    Workload,
    memory_need,
)
from raybatch.policy.cost.roofline import Roofline

GateBound = Literal[
    "saturation", "waiting sequences", "memory for KV", "host memory", "device memory"
]


_MANY_TOKENS = 1 << 40


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanGrid:
    """The values that are tried, each with each.

    Left out is attention over more tokens than are at the gate, or in too many runs.
    """

    attention_tokens: tuple[int, ...]
    gate_tokens: tuple[int, ...]
    parameter_buffers: tuple[int | None, ...] = (None,)
    kv_on_host: tuple[bool, ...] = (False, True)
    # of one layer; a graph of more takes long, and each costs a fixed time
    max_attention_runs: int = 32

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if not getattr(self, name):
                raise ConfigError(f"a grid of plans has no {name}; give at least one value")

    @classmethod
    def up_to(cls, max_tokens: int, *, num_pieces: int) -> "PlanGrid":
        """Return powers of two up to `max_tokens`, and that itself; 1 to 2 layers of buffers."""
        tokens, buffers = (
            {limit, *(1 << exponent for exponent in range(limit.bit_length()))}
            for limit in (max_tokens, 2 * num_pieces)
        )
        return cls(
            attention_tokens=tuple(sorted(tokens)),
            gate_tokens=tuple(sorted(tokens)),
            parameter_buffers=(None, *sorted({*buffers, num_pieces})),
        )

    def plans(self) -> Iterator[BatchPlan]:
        for gate, attention, buffers, on_host in product(
            sorted(set(self.gate_tokens)),
            sorted(set(self.attention_tokens)),
            dict.fromkeys(self.parameter_buffers),
            dict.fromkeys(self.kv_on_host),
        ):
            if attention <= gate <= attention * self.max_attention_runs:
                yield BatchPlan(
                    attention_tokens=attention,
                    gate_tokens=gate,
                    parameter_buffers=buffers,
                    has_kv_on_host=on_host,
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class PricedPlan:
    plan: BatchPlan
    time: ForwardTime
    memory: MemoryNeed

    @property
    def token_s(self) -> float:
        return self.time.seconds / self.plan.gate_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchResult:
    """The best plan, and the best of each other residence, best first."""

    best: PricedPlan
    runners_up: tuple[PricedPlan, ...]
    num_considered: int  # plans of the grid that the sequences there are can fill
    num_infeasible: int  # of these, plans that memory does not hold


def price_plan(
    model: ModelShape, costs: ModuleCosts, plan: BatchPlan, workload: Workload
) -> PricedPlan:
    """Return a plan with its time and memory, whether memory holds it or not."""
    return PricedPlan(
        plan=plan,
        time=forward_time(model, costs, plan, workload),
        memory=memory_need(model, plan, workload),
    )


def search_plans(
    model: ModelShape, costs: ModuleCosts, workload: Workload, memory: MemoryBudget, grid: PlanGrid
) -> SearchResult:
    """Return the plan of the grid with the least seconds per token that memory holds.

    Least per token and not per pass: the shortest pass is that of the smallest batch. Among equals
    the one that takes less memory of the device wins, then the one with the fewest runs of
    attention, then the first of the grid. Every plan that memory holds is priced.

    Raises:
        ConfigError: memory holds no plan of the grid, or there are too few sequences for any.
    """
    waiting = workload.waiting_sequences
    plans = [
        plan
        for plan in grid.plans()
        if waiting is None or workload.num_sequences(plan.gate_tokens) <= waiting
    ]
    if not plans:
        raise ConfigError(f"no plan of the grid is small enough for {waiting} waiting sequences")
    needs = [memory_need(model, plan, workload) for plan in plans]
    feasible = [plan for plan, need in zip(plans, needs, strict=True) if memory.holds(need)]
    if not feasible:
        raise ConfigError(_no_room(needs, memory))
    priced = [price_plan(model, costs, plan, workload) for plan in feasible]
    # sums of other numbers of runs differ in their last digits
    priced.sort(
        key=lambda one: (
            float(f"{one.token_s:.9g}"),
            one.memory.device_bytes,
            -one.plan.attention_tokens,
        )
    )
    best_of: dict[tuple[bool, bool], PricedPlan] = {}
    for candidate in priced:
        plan = candidate.plan
        best_of.setdefault((plan.parameter_buffers is None, plan.has_kv_on_host), candidate)
    best, *others = best_of.values()
    return SearchResult(
        best=best,
        runners_up=tuple(others),
        num_considered=len(plans),
        num_infeasible=len(plans) - len(feasible),
    )


def _no_room(needs: list[MemoryNeed], memory: MemoryBudget) -> str:
    least = min(
        needs,
        key=lambda need: (
            max(0, need.device_bytes - memory.device_bytes)
            + max(0, need.host_bytes - memory.host_bytes)
            + (0 if memory.kv_bytes is None else max(0, need.kv_bytes - memory.kv_bytes))
        ),
    )
    message = (
        f"memory holds none of {len(needs)} plans: the nearest needs {least.device_bytes} bytes on "
        f"the device and {least.host_bytes} on the host, and there are {memory.device_bytes} and "
        f"{memory.host_bytes}"
    )
    if memory.holds_kv(least):
        return message
    return f"{message}; of these {least.kv_bytes} are for KV, which may have {memory.kv_bytes}"


@dataclass(frozen=True, kw_only=True, slots=True)
class GateTarget:
    """How many tokens are to meet at the gate, and what they are limited by."""

    tokens: int
    saturated_tokens: int
    bound: GateBound


def saturating_tokens(shape: LayerShape, cost: Roofline, *, efficiency: float = 0.8) -> int:
    """Return the fewest tokens at which experts reach a share of their best rate.

    The best rate is that of an endless batch. Time per token only falls with the batch, so the
    answer is found by bisection.
    """
    if not 0 < efficiency < 1:
        raise ConfigError(f"efficiency is {efficiency}; it must be above 0 and below 1")
    if not (cost.operation_s or cost.byte_s):
        raise ConfigError("experts that cost nothing have no batch that keeps them busy")
    best_s = cost.seconds(shape.ffn_work(_MANY_TOKENS)) / _MANY_TOKENS

    def is_enough(tokens: int) -> bool:
        return cost.seconds(shape.ffn_work(tokens)) / tokens <= best_s / efficiency

    return _first(is_enough)


def hiding_tokens(shape: LayerShape, costs: ModuleCosts) -> int:
    """Return the fewest tokens whose experts run as long as their parameters take to be streamed.

    With fewer, the device waits for the link whatever else is planned.
    """
    load_s = costs.to_device.copy_s(shape.ffn_bytes)
    return _first(lambda tokens: costs.ffn.seconds(shape.ffn_work(tokens)) >= load_s)


def _first(is_enough: Callable[[int], bool]) -> int:
    """Return the smallest number that is enough, where all above it are."""
    low, high = 0, 1
    while not is_enough(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def gate_target(
    model: ModelShape,
    plan: BatchPlan,
    workload: Workload,
    memory: MemoryBudget,
    *,
    saturated_tokens: int,
) -> GateTarget:
    """Return the tokens that can be at the gate, at most enough of them, and what bounds them.

    Of the plan, tokens at the gate are not read; for what is enough see `saturating_tokens`.

    Raises:
        ConfigError: memory does not hold one token.
    """
    waiting = saturated_tokens
    if workload.waiting_sequences is not None:
        waiting = workload.waiting_sequences * workload.tokens_per_sequence

    def need(tokens: int) -> MemoryNeed:
        attention_tokens = min(plan.attention_tokens, tokens)
        changed = replace(plan, attention_tokens=attention_tokens, gate_tokens=tokens)
        return memory_need(model, changed, workload)

    def most(fits: Callable[[MemoryNeed], bool]) -> int:
        return _first(lambda tokens: tokens > saturated_tokens or not fits(need(tokens))) - 1

    bounds: tuple[tuple[int, GateBound], ...] = (
        (saturated_tokens, "saturation"),
        (waiting, "waiting sequences"),
        (most(memory.holds_kv), "memory for KV"),
        (most(lambda n: n.host_bytes <= memory.host_bytes), "host memory"),
        (most(lambda n: n.device_bytes <= memory.device_bytes), "device memory"),
    )
    # the first of equal bounds is the one that no more memory would move
    tokens, bound = min(bounds, key=lambda pair: pair[0])
    if tokens < 1:
        raise ConfigError(f"the {bound} does not hold one token of the plan {plan}")
    return GateTarget(tokens=tokens, saturated_tokens=saturated_tokens, bound=bound)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedBatches:
    """What was chosen, and how many tokens its residence and sub-batches allow at the gate."""

    search: SearchResult
    target: GateTarget


def plan_batches(
    model: ModelShape,
    costs: ModuleCosts,
    workload: Workload,
    memory: MemoryBudget,
    *,
    efficiency: float = 0.8,
) -> PlannedBatches:
    """Choose the batches of one phase, such as decoding.

    Tried are powers of two up to what keeps the experts busy, at a share of their best rate, and
    the largest batches that memory holds. Where it does not hold the experts, batches may be so
    large that computing hides them being streamed. It takes about a second.

    Raises:
        ConfigError: memory does not hold one token of any plan.
    """
    enough = saturating_tokens(model.layer, costs.ffn, efficiency=efficiency)
    one_token = BatchPlan(attention_tokens=1, gate_tokens=1, has_kv_on_host=True)
    if memory_need(model, one_token, workload).device_bytes > memory.device_bytes:
        enough = max(enough, hiding_tokens(model.layer, costs))
    powers, largest = PlanGrid.up_to(enough, num_pieces=model.num_pieces), set[int]()
    for buffers, on_host in product((None, model.num_pieces), powers.kv_on_host):
        plan = BatchPlan(
            attention_tokens=1, gate_tokens=1, parameter_buffers=buffers, has_kv_on_host=on_host
        )
        # what does not hold one token is no plan
        with suppress(ConfigError):
            allowed = gate_target(model, plan, workload, memory, saturated_tokens=enough)
            largest.add(allowed.tokens)
    tokens = tuple(sorted({*powers.gate_tokens, *largest}))
    grid = replace(powers, attention_tokens=tokens, gate_tokens=tokens)
    search = search_plans(model, costs, workload, memory, grid)
    target = gate_target(model, search.best.plan, workload, memory, saturated_tokens=enough)
    return PlannedBatches(search=search, target=target)
