"""What a plan will cost: engine seconds, time by the clock, and money."""

from dataclasses import dataclass, replace

import numpy as np

from raybatch.errors import ConfigError, range_text
from raybatch.policy.cost.cost_model import CostModel
from raybatch.policy.cost.step_forecast import forecast_steps
from raybatch.policy.cost.work import WorkTotals

# estimates of whole runs are off by so much, however well the model fits single steps
_MIN_ERROR = 0.075
# standard errors on each side of the expected value
_BAND_ERRORS = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Band:
    """A value with the range in which it is likely to lie."""

    expected: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True, slots=True)
class CostEstimate:
    """Time that engines need; starts of engines, reading and writing are extra.

    The ranges are those of the cost model's own error. What is not known about output lengths is
    not in them: estimate again with other totals for that.

    Args:
        engine_s: seconds in steps, summed over replicas.
        wall_s: seconds by the clock, with the work spread evenly over the replicas.
        prefill_s: of `engine_s.expected`, for prompt tokens and their attention.
        decode_s: the same for generated tokens.
        overhead_s: the same for what a step costs whatever it computes.
        num_replicas: that share the work.
        num_steps: summed over replicas.
        mean_decode_rows: sequences that decode in a step of one replica, on average.
        recomputed_tokens: computed again after KV memory ran out, summed over replicas.
    """

    engine_s: Band
    wall_s: Band
    prefill_s: float
    decode_s: float
    overhead_s: float
    num_replicas: int
    num_steps: float
    mean_decode_rows: float
    recomputed_tokens: float


def estimate(model: CostModel, totals: WorkTotals, num_replicas: int = 1) -> CostEstimate:
    """Estimate what `totals` cost on `num_replicas` engines that share them evenly."""
    if num_replicas < 1:
        raise ConfigError(f"an estimate for {num_replicas} replicas; it takes at least one")
    num_rows = -(-totals.num_rows // num_replicas)
    # with more replicas than rows some have nothing to do
    factor = num_rows / totals.num_rows if totals.num_rows else 1.0
    share = _scaled(totals, num_rows, factor)
    forecast = forecast_steps(share, model.limits)
    weight = forecast.weight
    tokens = forecast.decode_rows + forecast.prefill_tokens
    tokens_s = weight * model.tokens_s(tokens)
    of_prefill = np.divide(
        forecast.prefill_tokens, tokens, out=np.zeros(len(tokens)), where=tokens > 0
    )
    # what is computed again attends to as much as the rest does
    again = 1 + forecast.recomputed_tokens / max(1.0, share.computed_tokens)
    prefill_s = float(tokens_s @ of_prefill) + model.pair_s * share.pairs * again
    decode_s = float(tokens_s @ (1 - of_prefill))
    decode_s += _attend_s(model, share, forecast.mean_decode_rows)
    overhead_s = model.step_s * forecast.num_steps
    wall_s = prefill_s + decode_s + overhead_s
    error = min(0.9, _BAND_ERRORS * max(_MIN_ERROR, model.fit_error))
    return CostEstimate(
        engine_s=_band(wall_s / factor, error),
        wall_s=_band(wall_s, error),
        prefill_s=prefill_s / factor,
        decode_s=decode_s / factor,
        overhead_s=overhead_s / factor,
        num_replicas=num_replicas,
        num_steps=forecast.num_steps / factor,
        mean_decode_rows=forecast.mean_decode_rows,
        recomputed_tokens=forecast.recomputed_tokens / factor,
    )


def _attend_s(model: CostModel, share: WorkTotals, mean_decode_rows: float) -> float:
    """Return the time for sampling rows and for the KV that decoding ones read."""
    # members of a large group cannot all run at once
    reads = max(share.shared_reads, share.shared_pairs / max(1.0, mean_decode_rows))
    # half of each sequence's last block is empty on average, and read all the same
    num_decodes = share.generated_tokens - share.num_rows
    context_reads = share.context_reads + num_decodes * model.limits.block_size / 2
    return (
        model.row_s * share.generated_tokens
        + model.context_s * context_reads
        + model.shared_pair_s * share.shared_pairs
        + model.shared_read_s * reads
    )


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


def _scaled(totals: WorkTotals, num_rows: int, factor: float) -> WorkTotals:
    return replace(
        totals,
        num_rows=num_rows,
        computed_tokens=totals.computed_tokens * factor,
        pairs=totals.pairs * factor,
        # where each row generates one token, the product may be less than that by rounding
        generated_tokens=max(totals.generated_tokens * factor, num_rows),
        context_reads=totals.context_reads * factor,
        shared_pairs=totals.shared_pairs * factor,
        shared_reads=totals.shared_reads * factor,
    )


def _band(expected: float, error: float) -> Band:
    return Band(expected=expected, low=expected * (1 - error), high=expected * (1 + error))
