"""Estimates of a plan: engine seconds, wall time, and money."""

from dataclasses import dataclass, replace

import numpy as np

from raybatch.errors import ConfigError, range_text
from raybatch.policy.cost.cost_model import CostModel, MeasuredStep
from raybatch.policy.cost.step_forecast import forecast_steps
from raybatch.policy.cost.work import SUMS, WorkTotals

# minimum relative error of estimates of whole runs, regardless of the fit
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
    """Estimated engine time, without engine start, reading and writing.

    The range reflects the error of the cost model, not the uncertainty of output lengths; estimate
    again with other totals for that.

    Args:
        engine_s: seconds that engines compute, summed over replicas.
        wall_s: wall seconds, with the work spread evenly over the replicas.
        low_s, high_s: `wall_s` at the lower and the upper end of the range.
        origin: basis of the estimate, such as "measured on this host".
    """

    engine_s: float
    wall_s: float
    low_s: float
    high_s: float
    num_replicas: int
    origin: str = ""

    def engine_range(self) -> tuple[float, float, float]:
        """Return (expected, low, high) seconds that engines compute, summed over replicas."""
        share = self.engine_s / max(self.wall_s, 1e-12)
        return self.engine_s, share * self.low_s, share * self.high_s


def estimate(
    model: CostModel, totals: WorkTotals, num_replicas: int = 1, *, core_share: float = 1.0
) -> TimeEstimate:
    """Estimate the time of the work `totals`, spread evenly over `num_replicas` engines.

    `core_share` is the share of a core per engine thread, at most 1; see `core_share_of`.
    """
    num_rows = -(-totals.num_rows // num_replicas)
    # with more replicas than rows some are idle
    factor = num_rows / totals.num_rows if totals.num_rows else 1.0
    share = replace(
        totals,
        num_rows=num_rows,
        # at least one token per row, despite rounding
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
    """Return the seconds of one engine with a core per thread."""
    forecast = forecast_steps(work, model.limits)
    prefill, weight = forecast.prefill_tokens, forecast.weight
    # a prompt above the step budget is chunked, and later chunks attend to KV
    budget = model.limits.max_batched_tokens or np.inf
    in_chunk = work.pairs * min(1.0, budget * work.num_rows / max(1.0, work.computed_tokens))
    # recomputed tokens attend to as much as others
    again = 1 + forecast.recomputed_tokens / max(1.0, work.computed_tokens)
    # not all members of a large group run at once
    reads = work.shared_pairs / max(1.0, forecast.mean_decode_rows)
    sums = MeasuredStep(
        seconds=0.0,
        tokens=0.0,
        rows=work.generated_tokens,
        pairs=again * in_chunk,
        past_pairs=again * (work.past_pairs + work.pairs - in_chunk),
        context_reads=work.context_reads,
        shared_pairs=work.shared_pairs,
        cascade_reads=max(work.cascade_reads, reads),
    )
    return (
        model.step_s * forecast.num_steps
        + model.prompt_step_s * float(weight @ (prefill > 0))
        + float(weight @ model.tokens_s(forecast.decode_rows + prefill))
        + model.counts_s(sums)
    )


def core_share_of(num_cores: int, num_engines: int, num_threads: int) -> float:
    """Return how much of a core each engine thread of one host gets, at most 1.

    Models contention for cores, not for memory bandwidth: two engines on two cores took 2 to 5 %
    more CPU seconds.
    """
    return min(1.0, num_cores / max(1, num_engines * num_threads))


def money(wall_s: float, num_replicas: int, price_per_engine_hour: float) -> float:
    """Return the price of a run, in the currency of `price_per_engine_hour`.

    Every replica is billed for the wall time of the run, even while it is idle.
    """
    if not 0 <= price_per_engine_hour < float("inf"):
        raise ConfigError(
            f"price_per_engine_hour must be {range_text('at least 0', price_per_engine_hour)}, "
            f"got {price_per_engine_hour}"
        )
    return wall_s * num_replicas * price_per_engine_hour / 3600


def band(expected: float, error: float) -> Band:
    """Return an expected value with its range: `error`, a share of it, below and above."""
    return Band(expected=expected, low=expected * (1 - error), high=expected * (1 + error))
