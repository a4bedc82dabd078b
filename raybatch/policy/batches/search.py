"""Chooses batch sizes and residence: of all plans that memory holds, the least time per token."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from raybatch.errors import ConfigError
from raybatch.policy.batches.forward_dag import ForwardTime, forward_time
from raybatch.policy.batches.layer_plan import (
    BatchPlan,
    MemoryNeed,
    ModelShape,
    ModuleCosts,
    memory_need,
)
from raybatch.policy.batches.layer_work import Workload


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryBudget:
    """What a plan may take.

    Args:
        device_bytes: for parameters, KV and working memory.
        host_bytes: for parameters that are streamed and KV that is kept there.
        kv_bytes: for KV, wherever it is; None where the two above alone bound it.

    Raises:
        ConfigError: a budget is negative.
    """

    device_bytes: int
    host_bytes: int = 0
    kv_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.kv_bytes is not None and self.kv_bytes < 0:
            raise ConfigError(f"memory of {self.kv_bytes} bytes for KV; it must be at least 0")
        if self.device_bytes < 0 or self.host_bytes < 0:
            raise ConfigError(
                f"memory of {self.device_bytes} bytes on the device and {self.host_bytes} on the "
                "host; both must be at least 0"
            )

    def holds(self, need: MemoryNeed) -> bool:
        """Return whether all budgets are large enough."""
        return (
            need.device_bytes <= self.device_bytes
            and need.host_bytes <= self.host_bytes
            and self.holds_kv(need)
        )

    def holds_kv(self, need: MemoryNeed) -> bool:
        """Return whether the budget for KV is large enough."""
        return self.kv_bytes is None or need.kv_bytes <= self.kv_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanGrid:
    """The values that are tried, each with each.

    Left out is attention over more tokens than are at the gate, or in too many runs.

    Args:
        attention_tokens: of one run of attention.
        gate_tokens: of one run of the experts.
        parameter_buffers: see `BatchPlan`.
        kv_on_host: whether KV is on the host.
        max_attention_runs: of one layer; a graph of more takes long, and each costs a fixed time.

    Raises:
        ConfigError: one of them is empty, or there is no run of attention.
    """

    attention_tokens: tuple[int, ...]
    gate_tokens: tuple[int, ...]
    parameter_buffers: tuple[int | None, ...] = (None,)
    kv_on_host: tuple[bool, ...] = (False, True)
    max_attention_runs: int = 32

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if not getattr(self, name):
                raise ConfigError(f"a grid of plans has no {name}; give at least one value")

    @classmethod
    def up_to(cls, max_tokens: int, *, num_pieces: int = 1) -> "PlanGrid":
        """Return powers of two up to `max_tokens`, and that itself; 1 to 2 layers of buffers."""
        tokens = sorted({*_powers_of_two(max_tokens), max_tokens})
        buffers = sorted({*_powers_of_two(2 * num_pieces), num_pieces, 2 * num_pieces})
        return cls(
            attention_tokens=tuple(tokens),
            gate_tokens=tuple(tokens),
            parameter_buffers=(None, *buffers),
        )

    def plans(self) -> Iterator[BatchPlan]:
        """Give every plan once, in a fixed order."""
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
    """A plan with what it takes.

    Args:
        plan: what was priced.
        time: of one forward pass.
        memory: that it needs.
    """

    plan: BatchPlan
    time: ForwardTime
    memory: MemoryNeed

    @property
    def token_s(self) -> float:
        """Return the seconds of a forward pass per token of it."""
        return self.time.seconds / self.plan.gate_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchResult:
    """The best plan, and the best of each other residence.

    Args:
        best: least seconds per token.
        runners_up: for every other way to place parameters and KV its best plan, best first.
        num_considered: plans of the grid that the sequences there are can fill.
        num_infeasible: of these, plans that memory does not hold.
    """

    best: PricedPlan
    runners_up: tuple[PricedPlan, ...]
    num_considered: int
    num_infeasible: int


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
    model: ModelShape,
    costs: ModuleCosts,
    workload: Workload,
    memory: MemoryBudget,
    grid: PlanGrid,
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
    priced.sort(key=_preference)
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


def _preference(priced: PricedPlan) -> tuple[float, int, int]:
    # sums of other numbers of runs differ in their last digits
    token_s = float(f"{priced.token_s:.9g}")
    return token_s, priced.memory.device_bytes, -priced.plan.attention_tokens


def _no_room(needs: list[MemoryNeed], memory: MemoryBudget) -> str:
    least = min(
        needs,
        key=lambda need: (
            max(0, need.device_bytes - memory.device_bytes)
            + max(0, need.host_bytes - memory.host_bytes)
            + (0 if memory.kv_bytes is None else max(0, need.kv_bytes - memory.kv_bytes))
        ),
    )
    told = (
        f"memory holds none of {len(needs)} plans: the nearest needs {least.device_bytes} bytes on "
        f"the device and {least.host_bytes} on the host, and there are {memory.device_bytes} and "
        f"{memory.host_bytes}"
    )
    if memory.holds_kv(least):
        return told
    return f"{told}; of these {least.kv_bytes} are for KV, which may have {memory.kv_bytes}"


def _powers_of_two(limit: int) -> list[int]:
    return [1 << exponent for exponent in range(limit.bit_length())]
