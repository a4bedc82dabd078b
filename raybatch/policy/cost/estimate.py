"""What a plan will cost: engine seconds, time by the clock, and money."""

from collections import deque
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from raybatch.errors import ConfigError, range_text
from raybatch.policy.cost.cost_model import CostModel, EngineLimits
from raybatch.policy.cost.work import WorkTotals, output_sample
from raybatch.records.arrays import Floats

# enough for many waves of a full batch
_MIN_ROWS, _WAVES = 2048, 8
# few enough for a fraction of a second; long outputs in small batches take many steps for few rows
_MAX_STEPS, _LEAST_ROWS = 200_000, 16
# admission leaves the blocks free that running sequences will need within so many steps
_MAX_SPARE_STEPS = 4
_GOLDEN = 0.6180339887
# tokens that are nothing but the error of sums
_ROUNDING = 1e-6
# totals that replicas share evenly
_SHARED_SUMS = ("computed_tokens", "pairs", "context_reads", "shared_pairs", "shared_reads")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepForecast:
    """Steps of one engine; prefill tokens count those computed again."""

    decode_rows: Floats  # [steps]
    prefill_tokens: Floats  # [steps]
    weight: Floats  # [steps], how many steps of the run this one stands for
    recomputed_tokens: float

    @property
    def num_steps(self) -> float:
        return float(self.weight.sum())

    @property
    def mean_decode_rows(self) -> float:
        """Sequences that decode in a step, on average over steps in which any does."""
        weight = self.weight * (self.decode_rows > 0)
        return float(weight @ self.decode_rows / max(1e-9, float(weight.sum())))


class _Row(NamedTuple):
    """A row that waits; with the KV that it holds once it starts, and tokens not computed yet."""

    tokens: float
    outputs: int
    held: float
    left: float
    has_started: bool = False  # it was preempted before


class _Running(NamedTuple):
    row: _Row
    start: int
    end: int


def forecast_steps(work: WorkTotals, limits: EngineLimits) -> StepForecast:
    """Return the steps of one engine that does all of `work`.

    A long run is forecast from fewer rows: the steps of its middle stand for all that are alike.
    """
    if not work.num_rows:
        none = np.zeros(0)
        return StepForecast(
            decode_rows=none, prefill_tokens=none, weight=none, recomputed_tokens=0.0
        )
    prompt, output = (n / work.num_rows for n in (work.computed_tokens, work.generated_tokens))
    # rows are half way through their outputs on average
    batch = min(limits.max_num_seqs, max(1.0, limits.kv_tokens / (prompt + output / 2)))
    # as many waves as steps allow, and some rows at least
    in_steps = max(_MAX_STEPS * batch / output, _WAVES * batch, _LEAST_ROWS)
    most = max(_MIN_ROWS, _WAVES * limits.max_num_seqs)
    num_rows = min(work.num_rows, most, int(in_steps))
    return _Simulation(work, limits, num_rows).run(work)


class _Simulation:
    def __init__(self, work: WorkTotals, limits: EngineLimits, num_rows: int) -> None:
        tokens = work.computed_tokens / work.num_rows
        # half a block of every sequence is empty on average
        held = tokens + limits.block_size / 2
        self._waiting = deque(_Row(tokens, n, held, tokens) for n in _outputs(work, num_rows))
        self._limits = limits
        self._budget = float(limits.max_batched_tokens or np.inf)
        self._running: list[_Running] = []
        # sequences by the step after which they end, and the KV that they give back then
        self._ending: dict[int, tuple[int, float]] = {}
        self._num_running = 0
        self._used = 0.0
        self._num_decoding = 0
        self._num_rows = num_rows
        self.decode_rows: list[float] = []
        self.prefill_tokens: list[float] = []
        self.ended: list[int] = []
        self.recomputed: list[float] = []

    def run(self, work: WorkTotals) -> StepForecast:
        while self._waiting or self._num_running:
            self._step()
        weight = np.ones(len(self.decode_rows))
        decode_rows, ended = np.array(self.decode_rows), np.cumsum(self.ended)
        if work.num_rows > self._num_rows:
            first, last = np.searchsorted(ended, (self._num_rows / 3, 2 * self._num_rows / 3))
            between = slice(first + 1, last + 1)
            # rows of the middle may be longer or shorter than others, so tokens are counted
            done, num_between = float(decode_rows.sum()), float(decode_rows[between].sum())
            left = work.generated_tokens - work.num_rows - done
            if num_between == 0 or left <= 0:
                left = work.num_rows - self._num_rows
                num_between = max(1, int(ended[last] - ended[first]))
            weight[between] += left / num_between
        return StepForecast(
            decode_rows=decode_rows,
            prefill_tokens=np.array(self.prefill_tokens),
            weight=weight,
            recomputed_tokens=float(weight @ np.array(self.recomputed)),
        )

    def _step(self) -> None:
        step = len(self.decode_rows)
        self._used += self._num_decoding
        has_preempted = False
        while self._used > self._limits.kv_tokens and self._num_running > 1:
            self._preempt(step)
            has_preempted = True
        num_decoding = self._num_decoding
        budget = self._budget - num_decoding
        spent, recomputed = 0.0, 0.0
        while self._waiting and budget > spent and not has_preempted and self._has_room():
            row = self._waiting[0]
            chunk = min(row.left, budget - spent)
            spent += chunk
            if row.left - chunk > _ROUNDING:
                self._waiting[0] = row._replace(left=row.left - chunk)
                break
            self._start(self._waiting.popleft(), step)
            recomputed += row.tokens if row.has_started else 0.0
        self.decode_rows.append(float(num_decoding))
        self.prefill_tokens.append(spent)
        self.recomputed.append(recomputed)
        ended, freed = self._ending.pop(step, (0, 0.0))
        self.ended.append(ended)
        self._num_running -= ended
        self._used -= freed
        self._num_decoding = self._num_running

    def _has_room(self) -> bool:
        if not self._num_running:
            return True
        block_size = self._limits.block_size
        spare_steps = min(_MAX_SPARE_STEPS, max(1, block_size // 4))
        reserve = self._num_running * spare_steps // block_size * block_size
        fits = self._used + self._waiting[0].held + reserve <= self._limits.kv_tokens
        return fits and self._num_running < self._limits.max_num_seqs

    def _start(self, row: _Row, step: int) -> None:
        # the step of the prompt gives the first token
        end = step + row.outputs - 1
        self._running.append(_Running(row, step, end))
        num_ending, freed = self._ending.get(end, (0, 0.0))
        self._ending[end] = num_ending + 1, freed + row.held + row.outputs - 1
        self._num_running += 1
        self._used += row.held

    def _preempt(self, step: int) -> None:
        """Give up the sequence that started last; the step in which it would decode is lost."""
        while self._running[-1].end < step:
            self._running.pop()
        row, start, end = self._running.pop()
        num_ending, freed = self._ending[end]
        self._ending[end] = num_ending - 1, freed - row.held - row.outputs + 1
        generated = step - start
        self._num_running -= 1
        self._num_decoding -= 1
        self._used -= row.held + generated
        tokens, held = row.tokens + generated, row.held + generated
        self._waiting.appendleft(_Row(tokens, row.outputs - generated, held, tokens, True))


def _outputs(work: WorkTotals, num_rows: int) -> list[int]:
    """Return outputs of rows in an order without trend, whole numbers with the right mean."""
    sample = np.asarray(work.output_lengths or (work.generated_tokens / work.num_rows,))
    # fewer rows than lengths stand for all of them
    sample = np.asarray(output_sample(sample, num_rows))
    order = np.argsort(np.arange(len(sample)) * _GOLDEN % 1.0)
    lengths = np.resize(sample[order], num_rows)
    # what is cut off one length is given to the next
    ends = np.rint(np.cumsum(lengths))
    outputs: list[int] = np.maximum(np.diff(ends, prepend=0.0), 1).astype(np.int64).tolist()
    return outputs


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


def estimate(model: CostModel, totals: WorkTotals, num_replicas: int = 1) -> CostEstimate:
    """Estimate what `totals` cost on `num_replicas` engines that share them evenly."""
    if num_replicas < 1:
        raise ConfigError(f"an estimate for {num_replicas} replicas; it takes at least one")
    num_rows = -(-totals.num_rows // num_replicas)
    # with more replicas than rows some have nothing to do
    factor = num_rows / totals.num_rows if totals.num_rows else 1.0
    share = replace(
        totals,
        num_rows=num_rows,
        # where each row generates one token, the product may be less than that by rounding
        generated_tokens=max(totals.generated_tokens * factor, num_rows),
        **{name: getattr(totals, name) * factor for name in _SHARED_SUMS},
    )
    forecast = forecast_steps(share, model.limits)
    prefill, tokens = forecast.prefill_tokens, forecast.decode_rows + forecast.prefill_tokens
    tokens_s = forecast.weight * model.tokens_s(tokens)
    of_prefill = np.divide(prefill, tokens, out=np.zeros(len(tokens)), where=tokens > 0)
    # what is computed again attends to as much as the rest does
    again = 1 + forecast.recomputed_tokens / max(1.0, share.computed_tokens)
    prefill_s = float(tokens_s @ of_prefill) + model.pair_s * share.pairs * again
    # members of a large group cannot all run at once
    reads = share.shared_pairs / max(1.0, forecast.mean_decode_rows)
    # half of each sequence's last block is empty on average, and read all the same
    num_decodes = share.generated_tokens - share.num_rows
    context_reads = share.context_reads + num_decodes * model.limits.block_size / 2
    decode_s = (
        float(tokens_s @ (1 - of_prefill))
        + model.row_s * share.generated_tokens
        + model.context_s * context_reads
        + model.shared_pair_s * share.shared_pairs
        + model.shared_read_s * max(share.shared_reads, reads)
    )
    overhead_s = model.step_s * forecast.num_steps
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
