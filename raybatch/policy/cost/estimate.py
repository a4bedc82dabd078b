"""What a plan will cost: engine seconds, time by the clock, and money."""

from dataclasses import dataclass, replace

import numpy as np

from raybatch.errors import ConfigError, range_text
from raybatch.policy.cost.cost_model import CostModel
from raybatch.policy.cost.step_forecast import forecast_steps
from raybatch.policy.cost.work import SUMS, WorkTotals

# estimates of whole runs are off by so much, however well the model fits single steps
_MIN_ERROR = 0.075
# standard errors on each side of the expected value
_BAND_ERRORS = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Band:
    expected: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True, slots=True)
class CostEstimate:
    """Time that engines need; starts of engines, reading and writing are extra.

    The ranges are those of the cost model's own error. What is not known about output lengths is
    not in them: estimate again with other totals for that. Parts, steps and tokens are of the
    expected engine seconds, summed over replicas.
    """

    engine_s: Band  # seconds in steps, summed over replicas
    wall_s: Band  # seconds by the clock, with the work spread evenly over the replicas
    prefill_s: float
    decode_s: float
    overhead_s: float  # what steps cost whatever they compute
    num_replicas: int
    num_steps: float
    mean_decode_rows: float  # sequences that decode in a step of one replica, on average
    recomputed_tokens: float  # computed again after KV memory ran out


def estimate(
    model: CostModel, totals: WorkTotals, num_replicas: int = 1, *, core_share: float = 1.0
) -> CostEstimate:
    """Estimate what `totals` cost on `num_replicas` engines that share them evenly.

    `core_share`: of a core for each thread of an engine, at most 1; see `core_share_of`.
    """
    if num_replicas < 1:
        raise ConfigError(f"an estimate for {num_replicas} replicas; it takes at least one")
    if not 0 < core_share <= 1:
        raise ConfigError(f"core_share must be above 0 and at most 1, got {core_share}")
    num_rows = -(-totals.num_rows // num_replicas)
    # with more replicas than rows some have nothing to do
    factor = num_rows / totals.num_rows if totals.num_rows else 1.0
    share = replace(
        totals,
        num_rows=num_rows,
        # where each row generates one token, the product may be less than that by rounding
        generated_tokens=max(totals.generated_tokens * factor, num_rows),
        **{name: getattr(totals, name) * factor for name in SUMS},
    )
    forecast = forecast_steps(share, model.limits)
    prefill, tokens = forecast.prefill_tokens, forecast.decode_rows + forecast.prefill_tokens
    tokens_s = forecast.weight * model.tokens_s(tokens)
    of_prefill = np.divide(prefill, tokens, out=np.zeros(len(tokens)), where=tokens > 0)
    # a token that is computed again attends to as much as any other
    again = 1 + forecast.recomputed_tokens / max(1.0, share.computed_tokens)
    prefill_s = float(tokens_s @ of_prefill) + again * _prompts_s(model, share)
    prefill_s += model.prompt_step_s * float(forecast.weight @ (prefill > 0))
    # members of a large group cannot all run at once
    reads = share.shared_pairs / max(1.0, forecast.mean_decode_rows)
    decode_s = (
        float(tokens_s @ (1 - of_prefill))
        + model.row_s * share.generated_tokens
        + model.context_s * share.context_reads
        + model.shared_pair_s * share.shared_pairs
        + model.shared_read_s * max(share.shared_reads, reads)
    )
    overhead_s = model.step_s * forecast.num_steps
    prefill_s, decode_s, overhead_s = (
        seconds / core_share for seconds in (prefill_s, decode_s, overhead_s)
    )
    wall_s = prefill_s + decode_s + overhead_s
    error = min(0.9, _BAND_ERRORS * max(_MIN_ERROR, model.fit_error))
    return CostEstimate(
        engine_s=band(wall_s / factor, error),
        wall_s=band(wall_s, error),
        prefill_s=prefill_s / factor,
        decode_s=decode_s / factor,
        overhead_s=overhead_s / factor,
        num_replicas=num_replicas,
        num_steps=forecast.num_steps / factor,
        mean_decode_rows=forecast.mean_decode_rows,
        recomputed_tokens=forecast.recomputed_tokens / factor,
    )


def core_share_of(num_cores: int, num_engines: int, num_threads: int) -> float:
    """Return the share of a core that each thread of the engines of one host has.

    Engines of a host contend for its cores where these are fewer than threads. What they take of
    each other through memory is not in it: two engines on two cores took 2 to 5 % more CPU seconds.
    """
    return min(1.0, num_cores / max(1, num_engines * num_threads))


def _prompts_s(model: CostModel, work: WorkTotals) -> float:
    """Return the seconds of attention of prompts."""
    # a prompt above the budget of a step is cut, and the rest of it attends to KV
    budget = model.limits.max_batched_tokens or np.inf
    in_chunk = work.pairs * min(1.0, budget * work.num_rows / max(1.0, work.computed_tokens))
    past_pairs = work.past_pairs + work.pairs - in_chunk
    return model.pair_s * in_chunk + model.past_pair_s * past_pairs


def money(wall_s: float, num_replicas: int, price_per_engine_hour: float) -> float:
    """Return the price of a run, in the currency of the argument.

    A replica costs from the beginning of a run to its end, also while it waits for others, so it
    is the time by the clock that counts, on every replica.
    """
    if not 0 <= price_per_engine_hour < float("inf"):
        raise ConfigError(
            f"price_per_engine_hour must be {range_text('at least 0', price_per_engine_hour)}, "
            f"got {price_per_engine_hour}"
        )
    return wall_s * num_replicas * price_per_engine_hour / 3600


def band(expected: float, error: float) -> Band:
    """Return a range around a value that may be wrong by a share of it."""
    return Band(expected=expected, low=expected * (1 - error), high=expected * (1 + error))
