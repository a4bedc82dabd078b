"""Chooses how an engine runs: location of KV, step size, and drafts (speculative decoding).

Pure: takes measured costs and memory, returns one record with all candidates and the reason. With
KV on the device, its memory limits the rows that decode together. With KV in host memory, more rows
fit: every step copies the KV of all rows to the device, a layer and a buffer of rows at a time, and
feed-forward layers run once for all rows. Each mode is forecast step by step over the
coming rows with the scheduler's rules; `step_drift` compares the forecast with measured steps.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from raybatch.config import DEFAULT_STEP_TOKENS
from raybatch.errors import CapacityError, ConfigError
from raybatch.policy.cost.cost_model import EngineLimits
from raybatch.policy.cost.layers import (
    KV_SLOTS,
    KVBuffer,
    ModelShape,
    ModuleCosts,
    RowsAhead,
    RowShape,
    StepCounts,
    step_seconds,
)
from raybatch.policy.cost.step_forecast import StepForecast, forecast_steps
from raybatch.policy.cost.work import WorkTotals
from raybatch.policy.memory_budget import (
    MemoryBudget,
    WeightMemory,
    WeightPlacement,
    weight_placements,
)
from raybatch.records.arrays import Floats
from raybatch.records.types import ReplicaStats

# gain by which a later candidate must be better; ties go to the first one
LEAST_GAIN = 0.01
# the same on a GPU for a mode whose forecast has not been confirmed by measured steps
UNPROVEN_GAIN = 0.2
# further candidates for the step tokens on a GPU
_LARGER_STEPS = (4096, 8192, 16384)
# assumed number of rows, in multiples of those that fit at once, if unknown
_WAVES = 4
# lower bound of the acceptance rate for rows that repeat their prompt
_LIKELY_RIGHT = 0.5
_MAX_DRAFT_ROWS = 256
# relative deviation of measured seconds from which costs are corrected
_MAX_DRIFT = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineInputs:
    """Inputs of `choose_engine`: model, measured costs, memory for KV, step limits, and rows.

    `kv_offload` of None leaves the location of KV open, and one of `token_budgets` is chosen. Each
    token of a larger budget takes `activation_bytes` from the memory for KV. `placement` is that of
    the weights; None has all on the device. To replace a simpler mode, a mode must be faster by the
    share `least_gain`; by `LEAST_GAIN` if it is in `proven`, as (KV on the host, token budget).
    """

    model: ModelShape
    costs: ModuleCosts
    device_kv_bytes: int
    host_kv_bytes: int
    max_num_seqs: int
    token_budgets: tuple[int, ...]
    rows: RowsAhead
    block_size: int = 16
    activation_bytes: int = 0
    placement: WeightPlacement | None = None
    kv_offload: bool | None = None
    may_draft: bool = True
    may_swap: bool = True  # preempted rows to host memory, if there is any
    least_gain: float = LEAST_GAIN
    proven: frozenset[tuple[bool, int]] = frozenset()

    @classmethod
    def of(
        cls, budget: MemoryBudget, model: ModelShape, costs: ModuleCosts, rows: RowsAhead
    ) -> Self:
        """Return the inputs for an engine with this memory budget."""
        config, layer = budget.config, model.layer
        token_budgets: tuple[int, ...] = (config.token_budget,)
        if budget.may_choose and budget.has_larger_steps:
            token_budgets = (DEFAULT_STEP_TOKENS, *_LARGER_STEPS)
        # hidden states and intermediate activations of one module
        widest = max(layer.projected_dim, layer.top_k * (2 * layer.ffn_dim + layer.model_dim))
        activation_bytes = (2 * layer.model_dim + widest) * layer.element_bytes
        return cls(
            model=model,
            costs=costs,
            device_kv_bytes=budget.device_kv_bytes,
            host_kv_bytes=budget.host_kv_bytes,
            max_num_seqs=config.max_num_seqs,
            token_budgets=token_budgets,
            block_size=config.block_size_tokens,
            activation_bytes=activation_bytes if budget.is_gpu else 0,
            rows=rows,
            placement=budget.placement,
            kv_offload=budget.kv_offload,
            may_swap=config.host_kv_bytes != "auto",
            least_gain=UNPROVEN_GAIN if budget.is_gpu else LEAST_GAIN,
            proven=budget.proven,
            may_draft=config.speculative_tokens == "auto" and not budget.is_gpu,
        )

    def least_gain_of(self, mode: "ExecutionMode") -> float:
        return LEAST_GAIN if mode.key in self.proven else self.least_gain


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutionMode:
    """An execution mode (location of KV, step size), and its forecast for the coming rows."""

    kv_offload: bool
    max_batched_tokens: int
    rows_together: int  # rows that fit at once and share feed-forward passes
    rows_attending: int  # rows that attend at once; all if KV is on the device
    seconds: float  # of all rows
    tokens_per_s: float  # of output
    # tokens of preempted rows that are recomputed, or swapped if that is faster
    recomputed_tokens: float = 0.0
    copies_preempted: bool = False

    @property
    def key(self) -> tuple[bool, int]:
        """(KV is on the host, most tokens of a step): an engine is rebuilt to change them."""
        return self.kv_offload, self.max_batched_tokens

    def to_text(self) -> str:
        if not self.kv_offload:
            return f"KV on device, {self.rows_together:,} rows at once"
        return (
            f"KV in host memory, {self.rows_together:,} rows at once, "
            f"{self.rows_attending:,} of them attending together"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineChoice:
    """Selected mode, runner-up, all candidates, and a one-sentence reason.

    Speculation pays while at most `draft_rows` rows decode; 0 if it never does or is not possible.
    `placement` is that of the weights, if it was chosen.
    """

    best: ExecutionMode
    runner_up: ExecutionMode | None
    reason: str
    candidates: tuple[ExecutionMode, ...]
    draft_rows: int
    placement: WeightPlacement | None = None

    def notes(self) -> tuple[str, ...]:
        """Return a phrase for each further choice: step size, preempted rows, speculation."""
        best = self.best
        notes = [f"steps of up to {best.max_batched_tokens:,} tokens"]
        if best.recomputed_tokens:
            how = "swapped to host memory" if best.copies_preempted else "recomputed"
            notes.append(f"about {best.recomputed_tokens:,.0f} tokens of preempted rows are {how}")
        if self.draft_rows:
            notes.append(f"speculation while at most {self.draft_rows:,} rows decode")
        return tuple(notes)

    def to_text(self) -> str:
        """Return the reason and all notes."""
        return "; ".join((self.reason, *self.notes()))


@dataclass(frozen=True, kw_only=True, slots=True)
class StepDrift:
    """Ratios of measured to forecast seconds, 1 if unknown.

    `modules` is that of attention and feed-forward, `links` that of KV copies.
    """

    modules: float = 1.0
    links: float = 1.0

    @property
    def is_far(self) -> bool:
        return any(abs(of - 1) > _MAX_DRIFT for of in (self.modules, self.links))


def choose_engine(inputs: EngineInputs) -> EngineChoice:
    """Return the fastest mode by forecast; ties go to KV on the device and small steps.

    If some mode can finish the longest row, only such modes are chosen. If `rows.longest_tokens` is
    known, it counts up to what the larger of the memories holds.

    Raises:
        CapacityError: no memory holds a block, or a row of usual length.

    Source: BatchGen (arXiv:2606.21712), sections 5.1 and 5.4, with this library's costs.
    """
    most, rows = _most_row_tokens(inputs), inputs.rows
    if rows.longest_tokens:
        # which rows end by capacity must not depend on speed
        inputs = replace(inputs, rows=_held(rows, most))
    of_place = [
        found for place in _places(inputs) if (found := _candidates(inputs, is_on_host=place))
    ]
    if not of_place:
        row = rows.shape
        raise CapacityError(
            f"a row of {row.prompt_tokens} prompt and {row.output_tokens} output tokens fits "
            "neither device nor host memory for KV; raise engine.kv_cache_bytes",
            needed_tokens=row.prompt_tokens + row.output_tokens,
            available_tokens=most,
        )
    # per location of KV, the smallest steps that no larger ones beat
    finalists = [_first_best(found, inputs) for found in of_place]
    best = _first_best(finalists, inputs)
    candidates = sorted((m for found in of_place for m in found), key=lambda m: m.seconds)
    others = [mode for mode in finalists if mode is not best]
    runner_up = others[0] if others else None
    return EngineChoice(
        best=best,
        runner_up=runner_up,
        reason=_reason(inputs, best, runner_up),
        candidates=tuple(candidates),
        draft_rows=0 if best.kv_offload or not inputs.may_draft else _draft_rows(inputs),
    )


def choose_weight_placement(inputs: EngineInputs, memory: WeightMemory) -> EngineChoice:
    """Return the best mode over all numbers of resident layers; ties go to more resident layers.

    A streamed layer is copied once per step for all rows, so streaming needs many rows; a resident
    one takes memory from KV. All layers stay resident if the KV of a few rows fits next to them.

    Args:
        inputs: its `placement` and `device_kv_bytes` are ignored.

    Raises:
        ConfigError: no placement leaves memory for a row.
    """
    rows, row = inputs.rows, inputs.rows.shape
    row_bytes = (row.prompt_tokens + row.output_tokens) * _token_bytes(inputs)
    tried = weight_placements(memory.sizes, memory.weight_buffers)
    tried = tried[:1] if memory.holds_all(row_bytes) else tried
    kv_bytes = [memory.left_for_kv(one.device_bytes) for one in tried]
    # compare all placements on the same rows
    num_rows = _num_rows(replace(inputs, device_kv_bytes=max(kv_bytes)))
    inputs = replace(inputs, rows=replace(rows, num_rows=num_rows))
    found = []
    for one, device_bytes in zip(tried, kv_bytes, strict=True):
        on_host = one.pass_bytes + inputs.host_kv_bytes
        if device_bytes and on_host <= memory.host_bytes:
            held = replace(inputs, device_kv_bytes=device_bytes, placement=one)
            with suppress(CapacityError):
                found.append(replace(choose_engine(held), placement=one))
    if not found:
        least = min(one.device_bytes for one in tried)
        raise ConfigError(
            f"no memory is left for a row of {row.prompt_tokens} prompt and {row.output_tokens} "
            f"output tokens: weights need {memory.sizes.total_bytes} bytes ({least} if layers are "
            f"streamed) and a step {memory.step_bytes} of the {memory.device_bytes} bytes of the "
            f"device; the host has {memory.host_bytes} bytes for streamed layers and "
            "engine.host_kv_bytes; set engine.quantization or lower engine.max_batched_tokens"
        )
    best = max(found, key=lambda choice: choice.best.tokens_per_s)
    reason = _forecast_text(best)
    if best is not found[0]:
        reason += f"; with the most layers that fit: {_forecast_text(found[0])}"
    return replace(best, reason=reason)


def _forecast_text(choice: EngineChoice) -> str:
    assert choice.placement is not None, "no placement was chosen"
    layers = choice.placement.is_resident
    return (
        f"{sum(layers)} of {len(layers)} layers on the device, {choice.best.to_text()}: "
        f"{choice.best.tokens_per_s:,.0f} output tokens/s forecast"
    )


def step_drift(
    inputs: EngineInputs,
    mode: ExecutionMode,
    before: ReplicaStats,
    now: ReplicaStats,
    *,
    seconds: float,
    copy_s: float,
) -> StepDrift:
    """Compare the steps between two counters with the forecast for rows like those of `inputs`.

    Args:
        seconds: measured for these steps, including `copy_s`.
        copy_s: seconds of KV copies; 0 if they overlap with computation.
    """
    num_steps = now.num_steps - before.num_steps
    if not num_steps or seconds <= 0:
        return StepDrift()
    computed = now.num_prefilled_tokens - before.num_prefilled_tokens
    decoded = now.generated_tokens - before.generated_tokens
    counts = StepCounts.of(
        inputs.rows, np.array([decoded / num_steps]), np.array([max(0, computed) / num_steps])
    )
    buffer = _kv_buffer(inputs) if mode.kv_offload else None
    all_s = num_steps * float(_step_seconds(inputs, counts, buffer)[0])
    if not 0 < copy_s < seconds:
        return StepDrift(modules=seconds / all_s)
    free = replace(inputs, costs=inputs.costs.without_links())
    links_s = all_s - num_steps * float(_step_seconds(free, counts, buffer)[0])
    return StepDrift(
        modules=(seconds - copy_s) / max(all_s - links_s, 1e-9), links=copy_s / max(links_s, 1e-9)
    )


def _first_best(candidates: Sequence[ExecutionMode], inputs: EngineInputs) -> ExecutionMode:
    """Return the first candidate that no later one beats by its least gain."""
    best = candidates[0]
    for mode in candidates[1:]:
        if best.seconds >= (1 + inputs.least_gain_of(mode)) * mode.seconds:
            best = mode
    return best


def _candidates(inputs: EngineInputs, *, is_on_host: bool) -> list[ExecutionMode]:
    """Return the modes with KV in one location, by ascending step size, in which a row fits."""
    budgets = sorted(inputs.token_budgets)
    candidates = []
    for budget in budgets:
        device_bytes = inputs.device_kv_bytes - (budget - budgets[0]) * inputs.activation_bytes
        mode = _mode(replace(inputs, device_kv_bytes=device_bytes), budget, is_on_host=is_on_host)
        if mode is not None:
            candidates.append(mode)
    return candidates


def _places(inputs: EngineInputs) -> list[bool]:
    """Return the possible locations of KV; True is the host."""
    return [False, True] if inputs.kv_offload is None else [inputs.kv_offload]


def _token_bytes(inputs: EngineInputs) -> int:
    return inputs.model.layer.kv_bytes_per_token * inputs.model.num_layers


def _kv_buffer(inputs: EngineInputs) -> KVBuffer:
    """Return the device buffer for one layer of KV, with KV in host memory."""
    num_tokens = inputs.device_kv_bytes // KV_SLOTS // inputs.model.layer.kv_bytes_per_token
    return KVBuffer(num_tokens=num_tokens, num_buffers=KV_SLOTS, block_size=inputs.block_size)


def _room(inputs: EngineInputs, *, is_on_host: bool) -> tuple[int, KVBuffer | None]:
    """Return the KV tokens of a location, and its device buffer (None on the device)."""
    if not is_on_host:
        return inputs.device_kv_bytes // _token_bytes(inputs), None
    return inputs.host_kv_bytes // _token_bytes(inputs), _kv_buffer(inputs)


def _row_tokens(inputs: EngineInputs, *, is_on_host: bool) -> int:
    """Return the most tokens of one row in a location of KV, in whole blocks."""
    tokens, buffer = _room(inputs, is_on_host=is_on_host)
    tokens = tokens if buffer is None else min(tokens, buffer.num_tokens)
    return tokens // inputs.block_size * inputs.block_size


def _most_row_tokens(inputs: EngineInputs) -> int:
    """Return the KV tokens of the longest row that some location holds."""
    return max(_row_tokens(inputs, is_on_host=place) for place in _places(inputs))


def _held(rows: RowsAhead, most: int) -> RowsAhead:
    """Return rows limited to `most` KV tokens; the last token of a row has no KV."""
    rows = replace(rows, longest_tokens=min(rows.longest_tokens, most + 1))
    shape = rows.shape
    if shape.prompt_tokens + shape.output_tokens - 1 <= most:
        return rows
    prompt_tokens = max(1, min(shape.prompt_tokens, most))
    output_tokens = max(1, min(shape.output_tokens, most + 1 - prompt_tokens))
    cut = RowShape(prompt_tokens=prompt_tokens, output_tokens=output_tokens)
    return RowsAhead(shape=cut, num_rows=rows.num_rows, longest_tokens=rows.longest_tokens)


def _mode(inputs: EngineInputs, budget: int, *, is_on_host: bool) -> ExecutionMode | None:
    row = inputs.rows.shape
    # the last token of a row has no KV
    row_tokens = max(1, row.prompt_tokens + row.output_tokens - 1)
    if _row_tokens(inputs, is_on_host=is_on_host) < max(row_tokens, inputs.rows.longest_tokens - 1):
        return None
    kv_tokens, buffer = _room(inputs, is_on_host=is_on_host)
    together = min(kv_tokens // row_tokens, inputs.max_num_seqs, budget)
    if inputs.rows.num_rows is not None:
        together = min(together, max(1, inputs.rows.num_rows))
    limits = EngineLimits(
        kv_tokens=kv_tokens,
        max_num_seqs=min(inputs.max_num_seqs, budget),
        block_size=inputs.block_size,
        max_batched_tokens=budget,
    )
    work = _work(inputs)
    forecast = forecast_steps(work, limits)
    seconds, copies_preempted = _forecast_s(inputs, forecast, buffer)
    attending = together
    if buffer is not None:
        # halfway through their output on average
        context = row.prompt_tokens + row.output_tokens // 2
        attending = min(together, max(1, buffer.num_tokens // context))
    return ExecutionMode(
        kv_offload=is_on_host,
        max_batched_tokens=budget,
        rows_together=together,
        rows_attending=attending,
        seconds=seconds,
        tokens_per_s=work.generated_tokens / max(seconds, 1e-12),
        recomputed_tokens=forecast.recomputed_tokens,
        copies_preempted=copies_preempted,
    )


def _num_rows(inputs: EngineInputs) -> int:
    """Return the number of rows of the forecasts, equal for all modes."""
    row = inputs.rows.shape
    if inputs.rows.num_rows is not None:
        return inputs.rows.num_rows
    most = max(inputs.host_kv_bytes, inputs.device_kv_bytes) // _token_bytes(inputs)
    together = most // max(1, row.prompt_tokens + row.output_tokens - 1)
    return _WAVES * max(1, min(together, inputs.max_num_seqs))


def _work(inputs: EngineInputs) -> WorkTotals:
    row, num_rows = inputs.rows.shape, _num_rows(inputs)
    shared_pairs = 0.0
    if inputs.rows.group_rows > 1:
        shared_pairs = inputs.rows.prefix_tokens * num_rows * (row.output_tokens - 1)
    return WorkTotals(
        num_rows=num_rows,
        computed_tokens=float(num_rows * row.prompt_tokens),
        pairs=0.0,
        generated_tokens=float(num_rows * row.output_tokens),
        context_reads=0.0,
        shared_pairs=shared_pairs,
        cascade_reads=shared_pairs / inputs.rows.group_rows,
        output_lengths=inputs.rows.output_lengths,
    )


def _forecast_s(
    inputs: EngineInputs, forecast: StepForecast, buffer: KVBuffer | None
) -> tuple[float, bool]:
    """Return the seconds of all steps, and whether preempted rows are swapped, not recomputed.

    An engine decides by measured copies; here the faster is assumed if there is host memory.
    """
    counts = StepCounts.of(inputs.rows, forecast.decode_rows, forecast.prefill_tokens)
    seconds = float(forecast.weight @ _step_seconds(inputs, counts, buffer))
    again = forecast.recomputed_tokens
    if buffer is not None or not again or not (inputs.host_kv_bytes and inputs.may_swap):
        return seconds, False
    moved = again * _token_bytes(inputs)
    copied_s = inputs.costs.to_device.copy_s(moved) + inputs.costs.to_host.copy_s(moved)
    prefill = float(forecast.weight @ forecast.prefill_tokens)
    kept = replace(counts, prefill_tokens=counts.prefill_tokens * (1 - again / max(again, prefill)))
    copied_s += float(forecast.weight @ _step_seconds(inputs, kept))
    return min(seconds, copied_s), copied_s < seconds


def _step_seconds(
    inputs: EngineInputs, steps: StepCounts, buffer: KVBuffer | None = None
) -> Floats:
    return step_seconds(inputs.model, inputs.costs, steps, buffer, inputs.placement)


def _draft_rows(inputs: EngineInputs) -> int:
    """Return the most rows for which a draft costs less than its expected gain."""
    rows = 2.0 ** np.arange(np.log2(2 * _MAX_DRAFT_ROWS) + 1)
    counts = StepCounts.of(inputs.rows, rows, np.zeros(len(rows)))
    seconds = _step_seconds(inputs, counts)
    # cost of one draft per row, relative to a step without drafts
    break_even = seconds[1:] / seconds[:-1] - 1
    return int(max(rows[:-1][break_even < _LIKELY_RIGHT], default=0))


def _reason(inputs: EngineInputs, best: ExecutionMode, other: ExecutionMode | None) -> str:
    if other is not None:
        reason = (
            f"{best.to_text()}: {best.tokens_per_s:,.0f} output tokens/s forecast, "
            f"{other.tokens_per_s:,.0f} with {other.to_text()}"
        )
        if other.seconds < best.seconds:
            reason += (
                f"; a gain below {100 * inputs.least_gain_of(other):.0f} % is not worth the copies"
            )
        return reason
    if inputs.kv_offload is not None:
        return f"{best.to_text()}: set by the options"
    if best.kv_offload:
        return f"{best.to_text()}: the device does not hold all layers of a row"
    if not inputs.host_kv_bytes:
        return f"{best.to_text()}: engine.host_kv_bytes is 0"
    return f"{best.to_text()}: a buffer of one layer, or host memory, does not hold a row"
