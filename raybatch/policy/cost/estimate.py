"""What a plan will cost: engine seconds, time by the clock, and money."""

from dataclasses import dataclass, replace

import numpy as np

from raybatch.errors import ConfigError, range_text
from raybatch.policy.cost.cost_model import CostModel, MeasuredStep
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
class TimeEstimate:
    """Time that engines need; their start, reading and writing come on top.

    The range is that of the cost model's own error. What is not known about output lengths is not
    in it: estimate again with other totals for that.

    Args:
        engine_s: seconds of work, summed over replicas.
        wall_s: seconds by the clock, with the work spread evenly over the replicas.
        low_s: `wall_s` at the lower end of the likely range.
        origin: what the estimate rests on, such as "measured on this host".
    """

    engine_s: float
    wall_s: float
    low_s: float
    high_s: float
    num_replicas: int
    origin: str = ""

    def engine_range(self) -> tuple[float, float, float]:
        """Return the seconds of work: expected, low and high."""
        share = self.engine_s / max(self.wall_s, 1e-12)
        return self.engine_s, share * self.low_s, share * self.high_s


def estimate(
    model: CostModel, totals: WorkTotals, num_replicas: int = 1, *, core_share: float = 1.0
) -> TimeEstimate:
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
    wall_s = _seconds_of_one(model, share) / core_share
    error = min(0.9, _BAND_ERRORS * max(_MIN_ERROR, model.fit_error))
    likely = band(wall_s, error)
    return TimeEstimate(
        engine_s=wall_s / factor,
        wall_s=wall_s,
        low_s=likely.low,
        high_s=likely.high,
        num_replicas=num_replicas,
        origin="from measured steps of this model",
    )


def _seconds_of_one(model: CostModel, work: WorkTotals) -> float:
    """Return the seconds of one engine that has a core for each of its threads."""
    forecast = forecast_steps(work, model.limits)
    prefill, weight = forecast.prefill_tokens, forecast.weight
    # a prompt above the budget of a step is cut, and the rest of it attends to KV
    budget = model.limits.max_batched_tokens or np.inf
    in_chunk = work.pairs * min(1.0, budget * work.num_rows / max(1.0, work.computed_tokens))
    # a token that is computed again attends to as much as any other
    again = 1 + forecast.recomputed_tokens / max(1.0, work.computed_tokens)
    # members of a large group cannot all run at once
    reads = work.shared_pairs / max(1.0, forecast.mean_decode_rows)
    sums = MeasuredStep(
        seconds=0.0,
        tokens=0.0,
        rows=work.generated_tokens,
        pairs=again * in_chunk,
        past_pairs=again * (work.past_pairs + work.pairs - in_chunk),
        context_reads=work.context_reads,
        shared_pairs=work.shared_pairs,
        shared_reads=max(work.shared_reads, reads),
    )
    return (
        model.step_s * forecast.num_steps
        + model.prompt_step_s * float(weight @ (prefill > 0))
        + float(weight @ model.tokens_s(forecast.decode_rows + prefill))
        + model.counts_s(sums)
    )


def core_share_of(num_cores: int, num_engines: int, num_threads: int) -> float:
    """Return the share of a core that each thread of the engines of one host has.

    Engines of a host contend for its cores where these are fewer than threads. What they take of
    each other through memory is not in it: two engines on two cores took 2 to 5 % more CPU seconds.
    """
    return min(1.0, num_cores / max(1, num_engines * num_threads))


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
