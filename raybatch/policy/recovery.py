"""Brings the KV of a sequence back: by copying it, or by computing it again."""

from dataclasses import dataclass
from typing import Literal

from raybatch.errors import ConfigError
from raybatch.policy.cost.cost_model import CostModel, MeasuredStep
from raybatch.policy.cost.roofline import Roofline, Work


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovery:
    """How a sequence gets its KV back."""

    way: Literal["transfer", "recompute"]
    transfer_s: float
    recompute_s: float

    @property
    def seconds(self) -> float:
        return min(self.transfer_s, self.recompute_s)


def choose_recovery(*, kv_bytes: float, link: Roofline, recompute_s: float) -> Recovery:
    """Return the quicker way; a copy wins a tie, as it leaves the processor to others.

    Args:
        link: cost of a copy from where the KV is to where the sequence goes on.
        recompute_s: predicted time of computing the KV again, see `recompute_time`.
    """
    if kv_bytes < 0 or recompute_s < 0:
        raise ConfigError(
            f"kv_bytes is {kv_bytes} and recompute_s {recompute_s}; both must be at least 0"
        )
    transfer_s = link.seconds(Work(operations=0.0, moved_bytes=kv_bytes))
    return Recovery(
        way="transfer" if transfer_s <= recompute_s else "recompute",
        transfer_s=transfer_s,
        recompute_s=recompute_s,
    )


def recompute_time(costs: CostModel, num_tokens: int) -> float:
    """Return the seconds of computing the KV of so many tokens again.

    They are priced as steps of the engine's token budget, in which chunks of other prompts are not.
    """
    budget = costs.limits.max_batched_tokens or num_tokens
    seconds = 0.0
    for start in range(0, num_tokens, max(budget, 1)):
        tokens = min(budget, num_tokens - start)
        # every token of the chunk sees those before the chunk, and half of the chunk
        pairs = tokens * start + tokens * (tokens + 1) / 2
        seconds += costs.predict(MeasuredStep(seconds=0.0, tokens=tokens, rows=0, pairs=pairs))
    return seconds
