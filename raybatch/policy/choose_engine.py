"""Chooses how an engine runs its rows: where their KV lives, how large steps are, and who drafts.

Pure: what was measured and what there is go in, one record with every choice and its reason comes
out. With KV on the device, as many rows decode together as it holds. With KV in host memory, as
many as that holds: attention runs over those whose KV of one layer fits a buffer, which costs a
copy of all KV in every step, and feed-forward layers run once for all. Each way is forecast over
the rows that are to come, step by step, with the scheduler's own rules; `step_drift` tells how far
steps that have run are off that.
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
from raybatch.policy.memory_budget import MemoryBudget, Residence, WeightMemory, residences
from raybatch.records.arrays import Floats
from raybatch.records.types import ReplicaStats

# share by which the forecast of a later way must be better; less is a tie, which the first one wins
LEAST_GAIN = 0.01
# the same on a GPU for a way whose steps have not yet taken the time that was forecast
UNPROVEN_GAIN = 0.2
# of steps on a GPU, beside the one that is usual
_LARGER_STEPS = (4096, 8192, 16384)
# of the rows that fit at once, how many come where nobody knows their number
_WAVES = 4
# share of drafts that are right among rows that repeat their prompt, at the least
_LIKELY_RIGHT = 0.5
_MAX_DRAFT_ROWS = 256
# of measured seconds beside the forecast, from which on costs are no longer believed
_MAX_DRIFT = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineFacts:
    """A model, its measured modules and links, memory for KV, bounds of a step, and the rows.

    What an option sets has one value: `kv_offload` of None leaves the place of KV open, and of
    several `token_budgets` one is chosen. A token of a larger budget takes `activation_bytes` off
    the memory for KV. `residence` is that of the weights; None has all on the device. A way must be
    better by `least_gain`; one of the `proven` (places of KV, by whether that is on the host, and
    token budgets) by `LEAST_GAIN`.
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
    residence: Residence | None = None
    kv_offload: bool | None = None
    may_draft: bool = True
    may_swap: bool = True  # preempted rows to host memory, where there is some
    least_gain: float = LEAST_GAIN
    proven: frozenset[tuple[bool, int]] = frozenset()

    @classmethod
    def of(
        cls, budget: MemoryBudget, model: ModelShape, costs: ModuleCosts, rows: RowsAhead
    ) -> Self:
        """Return what an engine with this budget goes by."""
        config, layer = budget.config, model.layer
        token_budgets: tuple[int, ...] = (config.token_budget,)
        if budget.may_choose and budget.has_larger_steps:
            token_budgets = (DEFAULT_STEP_TOKENS, *_LARGER_STEPS)
        # hidden states, and what one run of a module makes on the way
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
            residence=budget.residence,
            kv_offload=budget.kv_offload,
            may_swap=config.host_kv_bytes != "auto",
            least_gain=UNPROVEN_GAIN if budget.is_gpu else LEAST_GAIN,
            proven=budget.proven,
            may_draft=config.speculative_tokens == "auto" and not budget.is_gpu,
        )

    def least_gain_of(self, way: "EngineWay") -> float:
        return LEAST_GAIN if way.key in self.proven else self.least_gain


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineWay:
    """A way to run rows, and what it promises for those that are to come."""

    kv_offload: bool
    max_batched_tokens: int
    rows_together: int  # that fit at once, and meet at the experts
    rows_attending: int  # at once; all of them where KV lives on the device
    seconds: float  # of all rows
    tokens_per_s: float  # of output
    # of preempted rows, tokens that are computed again, or copied where that is quicker
    recomputed_tokens: float = 0.0
    copies_preempted: bool = False

    @property
    def key(self) -> tuple[bool, int]:
        """What an engine is built for: the place of KV, and the tokens of a step."""
        return self.kv_offload, self.max_batched_tokens

    def to_text(self) -> str:
        if not self.kv_offload:
            return f"KV on the device, {self.rows_together:,} rows at once"
        return (
            f"KV in host memory, {self.rows_together:,} rows at once of which "
            f"{self.rows_attending:,} attend together"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineChoice:
    """The way that is taken, the best of the others, all ways, and why, as a sentence.

    Up to `draft_rows` rows that decode together, guessed tokens cost so little that they are worth
    a try; 0 where they are not, or where an engine makes none. `residence` is that of the weights,
    as far as it was chosen.
    """

    best: EngineWay
    runner_up: EngineWay | None
    reason: str
    ways: tuple[EngineWay, ...]
    draft_rows: int
    residence: Residence | None = None

    def notes(self) -> tuple[str, ...]:
        """Return what else was chosen, a sentence each."""
        best = self.best
        notes = [f"steps of up to {best.max_batched_tokens:,} tokens"]
        if best.recomputed_tokens:
            how = "copied to host memory and back" if best.copies_preempted else "computed again"
            notes.append(f"about {best.recomputed_tokens:,.0f} tokens of preempted rows are {how}")
        if self.draft_rows:
            notes.append(f"drafts while at most {self.draft_rows:,} rows decode")
        return tuple(notes)

    def to_text(self) -> str:
        """Return the reason and all notes."""
        return "; ".join((self.reason, *self.notes()))


@dataclass(frozen=True, kw_only=True, slots=True)
class StepDrift:
    """By how much measured seconds are a multiple of the forecast ones; 1 where nobody knows."""

    modules: float = 1.0
    links: float = 1.0

    @property
    def is_far(self) -> bool:
        return any(abs(of - 1) > _MAX_DRIFT for of in (self.modules, self.links))


def choose_engine(facts: EngineFacts) -> EngineChoice:
    """Return the way that takes the least time; KV on the device, and small steps, win near ties.

    A way that ends a row which another one would finish is not taken. Rows that were seen, so that
    `longest_tokens` are known, end where the memory does that holds most of them.

    Raises:
        CapacityError: no memory holds a block, or a row of usual length.

    Source: BatchGen (arXiv:2606.21712), sections 5.1 and 5.4, by this library's costs.
    """
    most, rows = _most_row_tokens(facts), facts.rows
    if rows.longest_tokens:
        # which row ends by capacity must not depend on what is quicker
        facts = replace(facts, rows=_held(rows, most))
    of_place = [found for place in _places(facts) if (found := _ways(facts, is_on_host=place))]
    if not of_place:
        row = rows.shape
        raise CapacityError(
            f"a row of {row.prompt_tokens} prompt and {row.output_tokens} output tokens fits "
            "neither the device's memory for KV nor the host's; raise engine.kv_cache_bytes",
            needed_tokens=row.prompt_tokens + row.output_tokens,
            available_tokens=most,
        )
    # in each place the smallest steps that no larger ones beat
    finalists = [_first_best(found, facts) for found in of_place]
    best = _first_best(finalists, facts)
    ways = sorted((way for found in of_place for way in found), key=lambda way: way.seconds)
    others = [way for way in finalists if way is not best]
    runner_up = others[0] if others else None
    return EngineChoice(
        best=best,
        runner_up=runner_up,
        reason=_reason(facts, best, runner_up),
        ways=tuple(ways),
        draft_rows=0 if best.kv_offload or not facts.may_draft else _draft_rows(facts),
    )


def choose_residence(facts: EngineFacts, memory: WeightMemory) -> EngineChoice:
    """Return the best way over all numbers of resident layers, of equal ones that with the most.

    A streamed layer is copied once in a step for all its rows, so streaming wants many rows; a
    resident one takes the memory of KV. All stay where the KV of a few rows fits beside them.

    Args:
        facts: all but the residence and what it leaves for KV on the device.

    Raises:
        ConfigError: a row fits with no residence.
    """
    rows, row = facts.rows, facts.rows.shape
    row_bytes = (row.prompt_tokens + row.output_tokens) * _token_bytes(facts)
    tried = residences(memory.sizes, memory.weight_buffers)
    tried = tried[:1] if memory.holds_all(row_bytes) else tried
    kv_bytes = [memory.left_for_kv(one.device_bytes) for one in tried]
    # the same rows for all
    num_rows = _num_rows(replace(facts, device_kv_bytes=max(kv_bytes)))
    facts = replace(facts, rows=replace(rows, num_rows=num_rows))
    found = []
    for one, device_bytes in zip(tried, kv_bytes, strict=True):
        on_host = one.pass_bytes + facts.host_kv_bytes
        if device_bytes and on_host <= memory.host_bytes:
            held = replace(facts, device_kv_bytes=device_bytes, residence=one)
            with suppress(CapacityError):
                found.append(replace(choose_engine(held), residence=one))
    if not found:
        least = min(one.device_bytes for one in tried)
        raise ConfigError(
            f"weights take {memory.sizes.total_bytes} bytes, {least} where layers are streamed, "
            f"and a step {memory.step_bytes}: no row of {row.prompt_tokens} prompt and "
            f"{row.output_tokens} output tokens fits beside them in {memory.device_bytes} of the "
            f"device, with layers and engine.host_kv_bytes in {memory.host_bytes} of the host; set "
            "engine.quantization or lower engine.max_batched_tokens"
        )
    best = max(found, key=lambda choice: choice.best.tokens_per_s)
    reason = _forecast_text(best)
    if best is not found[0]:
        reason += f"; {_forecast_text(found[0])}, the most layers that fit"
    return replace(best, reason=reason)


def _forecast_text(choice: EngineChoice) -> str:
    assert choice.residence is not None, "no residence was chosen"
    layers = choice.residence.is_resident
    return (
        f"{sum(layers)} of {len(layers)} layers on the device, {choice.best.to_text()}: "
        f"{choice.best.tokens_per_s:,.0f} output tokens/s are forecast"
    )


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
    buffer = _kv_buffer(facts) if way.kv_offload else None
    all_s = num_steps * float(_step_seconds(facts, counts, buffer)[0])
    if not 0 < copy_s < seconds:
        return StepDrift(modules=seconds / all_s)
    free = replace(facts, costs=facts.costs.without_links())
    links_s = all_s - num_steps * float(_step_seconds(free, counts, buffer)[0])
    return StepDrift(
        modules=(seconds - copy_s) / max(all_s - links_s, 1e-9), links=copy_s / max(links_s, 1e-9)
    )


def _first_best(ways: Sequence[EngineWay], facts: EngineFacts) -> EngineWay:
    """Return the first way that no later one beats by more than a tie."""
    best = ways[0]
    for way in ways[1:]:
        if best.seconds >= (1 + facts.least_gain_of(way)) * way.seconds:
            best = way
    return best


def _ways(facts: EngineFacts, *, is_on_host: bool) -> list[EngineWay]:
    """Return the ways with KV in one place, by growing steps; none where a row does not fit."""
    budgets = sorted(facts.token_budgets)
    ways = []
    for budget in budgets:
        device_bytes = facts.device_kv_bytes - (budget - budgets[0]) * facts.activation_bytes
        way = _way(replace(facts, device_kv_bytes=device_bytes), budget, is_on_host=is_on_host)
        if way is not None:
            ways.append(way)
    return ways


def _places(facts: EngineFacts) -> list[bool]:
    """Return where KV may live, by whether that is on the host."""
    return [False, True] if facts.kv_offload is None else [facts.kv_offload]


def _token_bytes(facts: EngineFacts) -> int:
    return facts.model.layer.kv_bytes_per_token * facts.model.num_layers


def _kv_buffer(facts: EngineFacts) -> KVBuffer:
    """Return what holds one layer of the rows that attend together, with KV in host memory."""
    num_tokens = facts.device_kv_bytes // KV_SLOTS // facts.model.layer.kv_bytes_per_token
    return KVBuffer(num_tokens=num_tokens, num_buffers=KV_SLOTS, block_size=facts.block_size)


def _room(facts: EngineFacts, *, is_on_host: bool) -> tuple[int, KVBuffer | None]:
    """Return the tokens that a place for KV holds, and the buffer of rows that attend together."""
    if not is_on_host:
        return facts.device_kv_bytes // _token_bytes(facts), None
    return facts.host_kv_bytes // _token_bytes(facts), _kv_buffer(facts)


def _row_tokens(facts: EngineFacts, *, is_on_host: bool) -> int:
    """Return the tokens of one row that a place for KV holds, in whole blocks as an engine does."""
    tokens, buffer = _room(facts, is_on_host=is_on_host)
    tokens = tokens if buffer is None else min(tokens, buffer.num_tokens)
    return tokens // facts.block_size * facts.block_size


def _most_row_tokens(facts: EngineFacts) -> int:
    """Return the tokens with KV of the longest row that some place holds."""
    return max(_row_tokens(facts, is_on_host=place) for place in _places(facts))


def _held(rows: RowsAhead, most: int) -> RowsAhead:
    """Return rows cut to `most` tokens with KV; the last token of a row has none."""
    rows = replace(rows, longest_tokens=min(rows.longest_tokens, most + 1))
    shape = rows.shape
    if shape.prompt_tokens + shape.output_tokens - 1 <= most:
        return rows
    prompt_tokens = max(1, min(shape.prompt_tokens, most))
    output_tokens = max(1, min(shape.output_tokens, most + 1 - prompt_tokens))
    cut = RowShape(prompt_tokens=prompt_tokens, output_tokens=output_tokens)
    return RowsAhead(shape=cut, num_rows=rows.num_rows, longest_tokens=rows.longest_tokens)


def _way(facts: EngineFacts, budget: int, *, is_on_host: bool) -> EngineWay | None:
    row = facts.rows.shape
    # the last token of a row has no KV
    row_tokens = max(1, row.prompt_tokens + row.output_tokens - 1)
    if _row_tokens(facts, is_on_host=is_on_host) < max(row_tokens, facts.rows.longest_tokens - 1):
        return None
    kv_tokens, buffer = _room(facts, is_on_host=is_on_host)
    together = min(kv_tokens // row_tokens, facts.max_num_seqs, budget)
    if facts.rows.num_rows is not None:
        together = min(together, max(1, facts.rows.num_rows))
    limits = EngineLimits(
        kv_tokens=kv_tokens,
        max_num_seqs=min(facts.max_num_seqs, budget),
        block_size=facts.block_size,
        max_batched_tokens=budget,
    )
    work = _work(facts)
    forecast = forecast_steps(work, limits)
    seconds, copies_preempted = _forecast_s(facts, forecast, buffer)
    attending = together
    if buffer is not None:
        # half way through their output
        context = row.prompt_tokens + row.output_tokens // 2
        attending = min(together, max(1, buffer.num_tokens // context))
    return EngineWay(
        kv_offload=is_on_host,
        max_batched_tokens=budget,
        rows_together=together,
        rows_attending=attending,
        seconds=seconds,
        tokens_per_s=work.generated_tokens / max(seconds, 1e-12),
        recomputed_tokens=forecast.recomputed_tokens,
        copies_preempted=copies_preempted,
    )


def _num_rows(facts: EngineFacts) -> int:
    """Return the rows that ways are forecast over, the same for all however many each holds."""
    row = facts.rows.shape
    if facts.rows.num_rows is not None:
        return facts.rows.num_rows
    most = max(facts.host_kv_bytes, facts.device_kv_bytes) // _token_bytes(facts)
    together = most // max(1, row.prompt_tokens + row.output_tokens - 1)
    return _WAVES * max(1, min(together, facts.max_num_seqs))


def _work(facts: EngineFacts) -> WorkTotals:
    row, num_rows = facts.rows.shape, _num_rows(facts)
    shared_pairs = 0.0
    if facts.rows.group_rows > 1:
        shared_pairs = facts.rows.prefix_tokens * num_rows * (row.output_tokens - 1)
    return WorkTotals(
        num_rows=num_rows,
        computed_tokens=float(num_rows * row.prompt_tokens),
        pairs=0.0,
        generated_tokens=float(num_rows * row.output_tokens),
        context_reads=0.0,
        shared_pairs=shared_pairs,
        shared_reads=shared_pairs / facts.rows.group_rows,
        output_lengths=facts.rows.output_lengths,
    )


def _forecast_s(
    facts: EngineFacts, forecast: StepForecast, buffer: KVBuffer | None
) -> tuple[float, bool]:
    """Return the seconds of all steps, and whether preempted rows are copied rather than computed.

    Copies are measured by an engine as it runs; here the quicker of both is taken where host memory
    is there.
    """
    counts = StepCounts.of(facts.rows, forecast.decode_rows, forecast.prefill_tokens)
    seconds = float(forecast.weight @ _step_seconds(facts, counts, buffer))
    again = forecast.recomputed_tokens
    if buffer is not None or not again or not (facts.host_kv_bytes and facts.may_swap):
        return seconds, False
    moved = again * _token_bytes(facts)
    copied_s = facts.costs.to_device.copy_s(moved) + facts.costs.to_host.copy_s(moved)
    prefill = float(forecast.weight @ forecast.prefill_tokens)
    kept = replace(counts, prefill_tokens=counts.prefill_tokens * (1 - again / max(again, prefill)))
    copied_s += float(forecast.weight @ _step_seconds(facts, kept))
    return min(seconds, copied_s), copied_s < seconds


def _step_seconds(facts: EngineFacts, steps: StepCounts, buffer: KVBuffer | None = None) -> Floats:
    return step_seconds(facts.model, facts.costs, steps, buffer, facts.residence)


def _draft_rows(facts: EngineFacts) -> int:
    """Return up to how many rows a guessed token costs less than it is likely to save."""
    rows = 2.0 ** np.arange(np.log2(2 * _MAX_DRAFT_ROWS) + 1)
    counts = StepCounts.of(facts.rows, rows, np.zeros(len(rows)))
    seconds = _step_seconds(facts, counts)
    # of a step with a draft for each row, beside its share of a step without
    break_even = seconds[1:] / seconds[:-1] - 1
    return int(max(rows[:-1][break_even < _LIKELY_RIGHT], default=0))


def _reason(facts: EngineFacts, best: EngineWay, other: EngineWay | None) -> str:
    if other is not None:
        reason = (
            f"{best.to_text()}: {best.tokens_per_s:,.0f} output tokens/s are forecast, and "
            f"{other.tokens_per_s:,.0f} with {other.to_text()}"
        )
        if other.seconds < best.seconds:
            reason += (
                f"; less than {100 * facts.least_gain_of(other):.0f} % is not worth the copies"
            )
        return reason
    if facts.kv_offload is not None:
        return f"{best.to_text()}, as the options say"
    if best.kv_offload:
        return f"{best.to_text()}, as the device does not hold all layers of a row"
    if not facts.host_kv_bytes:
        return f"{best.to_text()}, as there is no host memory for KV (engine.host_kv_bytes)"
    return f"{best.to_text()}, as a buffer of one layer, or host memory, does not hold a row"
