"""Plans the batches of a model from measured costs: how large they should be, then what is best."""

from contextlib import suppress
from dataclasses import dataclass
from itertools import product

from raybatch.errors import ConfigError
from raybatch.policy.batches.layer_plan import BatchPlan, ModelShape, ModuleCosts, memory_need
from raybatch.policy.batches.layer_work import Workload
from raybatch.policy.batches.saturation import (
    GateTarget,
    gate_target,
    hiding_tokens,
    saturating_tokens,
)
from raybatch.policy.batches.search import MemoryBudget, PlanGrid, SearchResult, search_plans


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedBatches:
    """What was chosen, and what keeps it from being larger.

    Args:
        search: the best plan and its rivals.
        target: tokens at the gate that residence and sub-batches of the best plan allow.
    """

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

    Tried are powers of two up to what keeps the experts busy, and the largest batches that memory
    holds. Where it does not hold the experts, batches may be so large that computing hides them
    being streamed. It takes about a second.

    Args:
        model: whose batches are planned.
        costs: of its modules.
        workload: what the sequences of this phase are like.
        memory: of device and host.
        efficiency: share of their best rate from which experts count as busy.

    Raises:
        ConfigError: memory does not hold one token of any plan.
    """
    enough = saturating_tokens(model.layer, costs.ffn, efficiency=efficiency)
    one_token = BatchPlan(attention_tokens=1, gate_tokens=1, has_kv_on_host=True)
    if memory_need(model, one_token, workload).device_bytes > memory.device_bytes:
        enough = max(enough, hiding_tokens(model.layer, costs))
    powers = PlanGrid.up_to(enough, num_pieces=model.num_pieces)
    largest = set()
    for buffers, on_host in product((None, model.num_pieces), powers.kv_on_host):
        plan = BatchPlan(
            attention_tokens=1, gate_tokens=1, parameter_buffers=buffers, has_kv_on_host=on_host
        )
        # what does not hold one token is no plan
        with suppress(ConfigError):
            found = gate_target(model, plan, workload, memory, saturated_tokens=enough)
            largest.add(found.tokens)
    tokens = tuple(sorted({*powers.gate_tokens, *largest}))
    grid = PlanGrid(
        attention_tokens=tokens,
        gate_tokens=tokens,
        parameter_buffers=powers.parameter_buffers,
    )
    search = search_plans(model, costs, workload, memory, grid)
    target = gate_target(model, search.best.plan, workload, memory, saturated_tokens=enough)
    return PlannedBatches(search=search, target=target)
