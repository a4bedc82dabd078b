"""The report of `raybatch bench plan`: the choice of one model's engine on this host."""

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from raybatch.backends.cost_cache import QUIET_SHARE
from raybatch.config import EngineConfig
from raybatch.engine.loading.prepared import PreparedModel
from raybatch.engine.profile.cached_file import cpu_name
from raybatch.engine.profile.module_profile import ModuleProfile
from raybatch.errors import CapacityError, ConfigError
from raybatch.pictures.document import Section, Table, to_text
from raybatch.pictures.wording import amount, count, full, percent
from raybatch.policy.choose_engine import EngineChoice, EngineInputs, choose_engine
from raybatch.policy.cost.layers import RowsAhead, RowShape, StepCounts, step_seconds
from raybatch.policy.memory_budget import WeightPlacement, WeightSizes


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamedWeights:
    """Which layers stream their weights, and what that costs.

    Seconds of a step, by phase: `plain_s` with all weights on the device, `streamed_s` with copies.
    `total_bytes` are those of all weights.
    """

    placement: WeightPlacement
    total_bytes: int
    plain_s: Mapping[str, float]
    streamed_s: Mapping[str, float]

    def to_text(self) -> str:
        placement = self.placement
        longer = ", ".join(
            f"{phase} {1e3 * (self.streamed_s[phase] - plain_s):.3g} ms "
            f"({percent(self.streamed_s[phase] / plain_s - 1, 0)})"
            for phase, plain_s in self.plain_s.items()
        )
        kept = f"{full(sum(placement.is_resident))} of {full(len(placement.is_resident))} layers"
        return (
            f"{kept} stay on the device; a step copies "
            f"{placement.pass_bytes / 1e6:,.1f} of {self.total_bytes / 1e6:,.1f} MB through "
            f"{count(placement.num_buffers, 'buffer')}, which costs: {longer}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanReport:
    """The result of `raybatch bench plan`.

    Args:
        choice: the execution mode of the engine, why it was chosen, and the modes compared with it.
        not_asked: why an engine uses its default mode without this comparison; "" if it compares.
        with_host: what an engine would choose with `with_host_bytes` of host memory for KV; None if
            it has such memory already, or may not have any.
        was_read: the measurements are from the cache.
        cpu_share: share of a CPU core that the measuring thread got; None if the measurements are
            from the cache, or not of one CPU thread.
        weights: cost of layers whose weights do not stay on the device; None if all stay.
    """

    model: str
    device: str
    dtype: str
    inputs: EngineInputs
    choice: EngineChoice
    not_asked: str
    with_host: EngineChoice | None
    with_host_bytes: int
    profile: ModuleProfile
    was_read: bool
    cpu_share: float | None
    weights: StreamedWeights | None

    def to_text(self) -> str:
        """Return the report as text in printable ASCII."""
        section = Section(
            title="Engine", facts=tuple(self._facts()), table=self._table(), notes=self._notes()
        )
        return to_text(f"The engine of {self.model}", [section])

    def to_json(self) -> str:
        return json.dumps(_without_infinities(asdict(self)), indent=1, allow_nan=False)

    def _facts(self) -> list[tuple[str, str]]:
        inputs, layer, rows = self.inputs, self.inputs.model.layer, self.inputs.rows
        experts = "without experts"
        if layer.num_experts > 1:
            experts = f"of {full(layer.num_experts)} experts, {full(layer.top_k)} for a token"
        source = "read from the cache; --fresh measures again" if self.was_read else "just measured"
        errors = ", ".join(
            f"{percent(cost.fit_error)} of {name}"
            for name, cost in (
                ("attention", inputs.costs.attention),
                ("prompts", inputs.costs.prompts),
                ("the feed-forward block", inputs.costs.ffn),
            )
            if cost is not None
        )
        token_bytes = layer.kv_bytes_per_token * inputs.model.num_layers
        memory = ", ".join(
            f"{num_bytes / 1e6:,.1f} MB on the {place} ({amount(num_bytes // token_bytes)} tokens)"
            for place, num_bytes in (
                ("device", inputs.device_kv_bytes),
                ("host", inputs.host_kv_bytes),
            )
        )
        lengths = f"{full(rows.shape.prompt_tokens)} prompt and {full(rows.shape.output_tokens)}"
        number = "unlimited" if rows.num_rows is None else full(rows.num_rows)
        pairs = [
            ("model", f"{count(inputs.model.num_layers, 'layer')} {experts}, {self.dtype}"),
            ("costs", f"of {self.device}; {source}"),
            ("fit error", errors),
            ("KV memory", memory),
            ("rows", f"{lengths} output tokens each, {number}"),
            ("engine", self.choice.reason),
            ("with", "; ".join(self.choice.notes())),
        ]
        if self.weights is not None:
            pairs.append(("weights", self.weights.to_text()))
        return pairs

    def _table(self) -> Table:
        header = ("step tokens", "at once", "attending", "tokens/s", "seconds", "preempted", "KV")
        rows = tuple(
            (
                full(mode.max_batched_tokens),
                full(mode.rows_together),
                full(mode.rows_attending),
                f"{mode.tokens_per_s:,.0f}",
                f"{mode.seconds:,.3g}",
                full(round(mode.recomputed_tokens)),
                "host" if mode.kv_offload else "device",
            )
            for mode in self.choice.candidates
        )
        return Table(header=header, rows=rows)

    def _notes(self) -> tuple[str, ...]:
        best, output_tokens = self.choice.best, self.inputs.rows.shape.output_tokens
        num_rows = round(best.tokens_per_s * best.seconds / output_tokens)
        notes = [
            f"rows at once, and of them attending together; seconds and preempted tokens of "
            f"{count(num_rows, 'row')}"
        ]
        if self.not_asked:
            notes.append(f"the engine measures nothing for this: {self.not_asked}")
        if (other := self.with_host) is not None:
            gain = "more" if other.best.kv_offload else "no more"
            notes.append(
                f"--set engine.host_kv_bytes={self.with_host_bytes} would give {gain} tokens/s: "
                f"{other.reason}"
            )
        if self.cpu_share is not None and self.cpu_share < QUIET_SHARE:
            notes.append(
                f"the host was busy: this process got {percent(self.cpu_share, 0)} of a CPU while "
                "measuring, so times are too long; measure again with --fresh"
            )
        return tuple(notes)


def plan_report(
    source: str,
    config: EngineConfig,
    row: RowShape | None = None,
    *,
    num_rows: int | None = None,
    fresh: bool = False,
    tell: Callable[[str], None] = lambda _: None,
) -> PlanReport:
    """Load a model, measure its layers, and return how an engine would run rows of one shape.

    `row` is the shape; None: `RowShape`'s defaults, cut to the model's limit. `num_rows` is their
    number; None: unlimited. Measurements are cached, unless `fresh`. `tell` is called with a text
    on each step before it starts.

    Raises:
        ConfigError: the model cannot be run, or rows are longer than it allows.
        CapacityError: the KV memory does not hold a block, or no memory holds a row.
    """
    tell(f"loading {source}")
    prepared = PreparedModel.load(source, config)
    model, is_cpu = prepared.model, prepared.model.device.type == "cpu"
    most = model.resolved.max_model_len
    shape = row or prepared.usual_rows().shape
    if shape.prompt_tokens + shape.output_tokens > most:
        raise ConfigError(
            f"rows of {shape.prompt_tokens} prompt and {shape.output_tokens} output tokens are "
            f"longer than the context of {model.name}, {most} tokens; lower --prompt-tokens or "
            "--output-tokens"
        )
    began, cpu_began = time.perf_counter(), time.process_time()
    prepared.profile, was_read = prepared.measured(
        fresh=fresh, tell=lambda what: tell(f"measuring {what}")
    )
    cpu_share = None
    if not was_read and is_cpu and config.num_threads == 1:
        cpu_share = (time.process_time() - cpu_began) / (time.perf_counter() - began)
    inputs = prepared.inputs(RowsAhead(shape=shape, num_rows=num_rows))
    assert inputs is not None, "layers that were measured"
    choice, host_bytes, with_host = choose_engine(inputs), 0, None
    budget = prepared.budget
    if not budget.host_kv_bytes and budget.kv_offload is None:
        # upper bound of concurrent rows
        together = min(num_rows or inputs.max_num_seqs, inputs.max_num_seqs)
        row_tokens = shape.prompt_tokens + shape.output_tokens + inputs.block_size
        token_bytes = inputs.model.layer.kv_bytes_per_token * inputs.model.num_layers
        host_bytes = min(budget.may_take_bytes, together * row_tokens * token_bytes)
        with_host = _with_host(inputs, host_bytes)
    threads = f"{cpu_name()}, {count(config.num_threads, 'thread')}"
    return PlanReport(
        model=source if source == "demo" else model.name,
        device=threads if is_cpu else torch.cuda.get_device_name(model.device),
        dtype=str(model.dtype).removeprefix("torch."),
        inputs=inputs,
        choice=choice,
        not_asked="" if budget.may_choose else budget.plain_reason(),
        with_host=with_host,
        with_host_bytes=host_bytes,
        profile=prepared.profile,
        was_read=was_read,
        cpu_share=cpu_share,
        weights=_streamed_weights(model.placement, model.sizes, inputs, choice),
    )


def _without_infinities(value: Any) -> Any:  # noqa: ANN401
    """Return a record for strict JSON readers, with None for infinity."""
    if isinstance(value, Mapping):
        return {key: _without_infinities(each) for key, each in value.items()}
    if isinstance(value, frozenset):
        value = sorted(value)
    if isinstance(value, list | tuple):
        return [_without_infinities(each) for each in value]
    return None if isinstance(value, float) and math.isinf(value) else value


def _with_host(inputs: EngineInputs, free_bytes: int) -> EngineChoice | None:
    """Return the choice with host memory for KV; None if KV cannot be in host memory."""
    try:
        found = choose_engine(replace(inputs, host_kv_bytes=free_bytes))
    except CapacityError:
        return None
    return None if found.runner_up is None else found


def _streamed_weights(
    placement: WeightPlacement, sizes: WeightSizes, inputs: EngineInputs, choice: EngineChoice
) -> StreamedWeights | None:
    """Return the cost of streaming for decode and for prompt steps; None if all layers stay."""
    if not placement.streamed:
        return None
    sizes_of = [[choice.best.max_batched_tokens, 0], [0, choice.best.rows_together]]
    prompts, rows = np.array(sizes_of, float).T
    steps = StepCounts.of(inputs.rows, rows, prompts)
    step_s = partial(step_seconds, inputs.model, inputs.costs, steps)
    plain_s, streamed_s = (
        dict(zip(("prefill", "decode"), step_s(placement=one).tolist(), strict=True))
        for one in (None, placement)
    )
    return StreamedWeights(
        placement=placement, total_bytes=sizes.total_bytes, plain_s=plain_s, streamed_s=streamed_s
    )
