"""How many tokens at the gate keep the experts busy, and what keeps a batch from having them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from raybatch.errors import ConfigError
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
from raybatch.policy.cost.roofline import Roofline, Work

GateBound = Literal[
    "saturation", "waiting sequences", "memory for KV", "host memory", "device memory"
]

_MANY_TOKENS = 1 << 40


@dataclass(frozen=True, kw_only=True, slots=True)
class GateTarget:
    """How many tokens are to meet at the gate.

    Args:
        bound: what `tokens` is limited by.
    """

    tokens: int
    saturated_tokens: int
    bound: GateBound


def saturating_tokens(shape: LayerShape, cost: Roofline, *, efficiency: float = 0.8) -> int:
    """Return the fewest tokens at which experts reach a share of their best rate.

    The best rate is that of an endless batch. Time per token only falls with the batch, so the
    answer is found by bisection.

    Args:
        efficiency: the share, above 0 and below 1.
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
    load = Work(operations=0.0, moved_bytes=shape.ffn_bytes)
    load_s = costs.to_device.seconds(load)
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

    Args:
        plan: residence and sub-batches of attention; its tokens at the gate are not read.
        saturated_tokens: that would be enough, see `saturating_tokens`.

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
        low, high = 0, saturated_tokens + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(need(middle)) else (low, middle)
        return low

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
