"""How far an engine's steps are off their forecast: what layers and what links take."""

from dataclasses import dataclass

import numpy as np

from raybatch.policy.choose_engine import EngineFacts, EngineWay, kv_buffer
from raybatch.policy.layer_plan import ModuleCosts
from raybatch.policy.step_seconds import StepCounts, step_seconds
from raybatch.records.types import ReplicaStats

# of measured seconds beside the forecast, from which on costs are no longer believed
_MAX_DRIFT = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class StepDrift:
    """By how much measured seconds are a multiple of the forecast ones; 1 where nobody knows."""

    modules: float = 1.0
    links: float = 1.0

    @property
    def is_far(self) -> bool:
        return any(abs(of - 1) > _MAX_DRIFT for of in (self.modules, self.links))


def step_drift(
    facts: EngineFacts,
    way: EngineWay,
    before: ReplicaStats,
    now: ReplicaStats,
    *,
    seconds: float,
    copy_s: float,
) -> StepDrift:
    """Compare the steps between two counts with what rows like those of `facts` would take.

    Args:
        seconds: of these steps, `copy_s` those of copies of KV among them; 0 where copies overlap,
            and cannot be told apart.
    """
    num_steps = now.num_steps - before.num_steps
    if not num_steps or seconds <= 0:
        return StepDrift()
    computed = now.num_prefilled_tokens - before.num_prefilled_tokens
    decoded = now.generated_tokens - before.generated_tokens
    counts = StepCounts.of(
        facts.rows, np.array([decoded / num_steps]), np.array([max(0, computed) / num_steps])
    )
    buffer = kv_buffer(facts) if way.kv_offload else None

    def forecast_s(costs: ModuleCosts) -> float:
        return num_steps * float(
            step_seconds(facts.model, costs, counts, buffer, facts.residence)[0]
        )

    all_s = forecast_s(facts.costs)
    if not 0 < copy_s < seconds:
        return StepDrift(modules=seconds / all_s)
    links_s = all_s - forecast_s(facts.costs.without_links())
    return StepDrift(
        modules=(seconds - copy_s) / max(all_s - links_s, 1e-9), links=copy_s / max(links_s, 1e-9)
    )
