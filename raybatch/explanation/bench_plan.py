"""What the engine of one model on this host chooses: measured or read, forecast, and shown."""

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
from raybatch.policy.choose_engine import EngineChoice, EngineFacts, choose_engine
from raybatch.policy.cost.layers import RowsAhead, RowShape, StepCounts, step_seconds
from raybatch.policy.memory_budget import Residence, WeightSizes


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamedWeights:
    """Where layers are, and how long a step takes for that and without copies (`plain_s`)."""

    residence: Residence
    total_bytes: int
    plain_s: Mapping[str, float]
    streamed_s: Mapping[str, float]

    def to_text(self) -> str:
        residence = self.residence
        longer = ", ".join(
            f"{phase} {1e3 * (self.streamed_s[phase] - plain_s):.3g} ms "
            f"({percent(self.streamed_s[phase] / plain_s - 1, 0)})"
            for phase, plain_s in self.plain_s.items()
        )
        kept = f"{full(sum(residence.is_resident))} of {full(len(residence.is_resident))} layers"
        return (
            f"{kept} stay on the device; a step copies "
            f"{residence.pass_bytes / 1e6:,.1f} of {self.total_bytes / 1e6:,.1f} MB through "
            f"{count(residence.num_buffers, 'buffer')}, and takes longer for that: {longer}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanReport:
    """What `raybatch bench plan` says.

    Args:
        choice: with its reason and all other ways.
        not_asked: why the engine takes this way without asking; "" where it asks.
        with_host: the choice if KV had so much host memory as `with_host_bytes`; None where there
            is some, or KV may not be there.
        cpu_share: CPU seconds per second while one thread of a CPU measured, else None.
        weights: what it costs that some layers do not stay on the device; None where all do.
    """

    model: str
    device: str
    dtype: str
    facts: EngineFacts
    choice: EngineChoice
    not_asked: str
    with_host: EngineChoice | None
    with_host_bytes: int
    profile: ModuleProfile
    was_read: bool
    cpu_share: float | None
    weights: StreamedWeights | None

    def to_text(self) -> str:
        """Return the choice in lines for people, printable ASCII only."""
        section = Section(
            title="Engine", facts=tuple(self._facts()), table=self._table(), notes=self._notes()
        )
        return to_text(f"The engine of {self.model}", [section])

    def to_json(self) -> str:
        return json.dumps(_without_infinities(asdict(self)), indent=1, allow_nan=False)

    def _facts(self) -> list[tuple[str, str]]:
        facts, layer, rows = self.facts, self.facts.model.layer, self.facts.rows
        experts = "without experts"
        if layer.num_experts > 1:
            experts = f"of {full(layer.num_experts)} experts, {full(layer.top_k)} for a token"
        source = "read from the cache; --fresh measures again" if self.was_read else "just measured"
        errors = ", ".join(
            f"{percent(cost.fit_error)} of {name}"
            for name, cost in (
                ("attention", facts.costs.attention),
                ("prompts", facts.costs.prompts),
                ("the feed-forward block", facts.costs.ffn),
            )
            if cost is not None
        )
        token_bytes = layer.kv_bytes_per_token * facts.model.num_layers
        memory = ", ".join(
            f"{num_bytes / 1e6:,.1f} MB on the {place} ({amount(num_bytes // token_bytes)} tokens)"
            for place, num_bytes in (
                ("device", facts.device_kv_bytes),
                ("host", facts.host_kv_bytes),
            )
        )
        lengths = f"{full(rows.shape.prompt_tokens)} prompt and {full(rows.shape.output_tokens)}"
        number = "as many as come" if rows.num_rows is None else full(rows.num_rows)
        told = [
            ("model", f"{count(facts.model.num_layers, 'layer')} {experts}, {self.dtype}"),
            ("costs", f"of {self.device}; {source}"),
            ("fit error", errors),
            ("KV memory", memory),
            ("rows", f"{lengths} output tokens each, {number}"),
            ("engine", self.choice.reason),
            ("with", "; ".join(self.choice.notes())),
        ]
        if self.weights is not None:
            told.append(("weights", self.weights.to_text()))
        return told

    def _table(self) -> Table:
        header = ("step tokens", "at once", "attending", "tokens/s", "seconds", "preempted", "KV")
        rows = tuple(
            (
                full(way.max_batched_tokens),
                full(way.rows_together),
                full(way.rows_attending),
                f"{way.tokens_per_s:,.0f}",
                f"{way.seconds:,.3g}",
                full(round(way.recomputed_tokens)),
                "host" if way.kv_offload else "device",
            )
            for way in self.choice.ways
        )
        return Table(header=header, rows=rows)

    def _notes(self) -> tuple[str, ...]:
        best, output_tokens = self.choice.best, self.facts.rows.shape.output_tokens
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
                "it measured, so that times are too long; measure again with --fresh"
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
    """Load a model, measure its layers unless that was done before, and ask as its engine does.

    Without `row` rows have `RowShape`'s defaults as far as the model goes; `num_rows` of None has
    always more of them. With `fresh` layers are measured also where a profile is in the cache.
    `tell` is called with what is done next.

    Raises:
        ConfigError: the model cannot be run, or rows are longer than it allows.
        CapacityError: the memory for KV does not hold a block, or no memory holds a row.
    """
    tell(f"loading {source}")
    prepared = PreparedModel.load(source, config)
    model, is_cpu = prepared.model, prepared.model.device.type == "cpu"
    most = model.resolved.max_model_len
    shape = row or prepared.usual_rows().shape
    if shape.prompt_tokens + shape.output_tokens > most:
        raise ConfigError(
            f"rows of {shape.prompt_tokens} prompt and {shape.output_tokens} output tokens are "
            f"longer than the {most} tokens of {model.name}; give shorter ones (--prompt-tokens, "
            "--output-tokens)"
        )
    began, cpu_began = time.perf_counter(), time.process_time()
    prepared.profile, was_read = prepared.measured(
        fresh=fresh, tell=lambda what: tell(f"measuring {what}")
    )
    cpu_share = None
    if not was_read and is_cpu and config.num_threads == 1:
        cpu_share = (time.process_time() - cpu_began) / (time.perf_counter() - began)
    facts = prepared.facts(RowsAhead(shape=shape, num_rows=num_rows))
    assert facts is not None, "layers that were measured"
    choice, host_bytes, with_host = choose_engine(facts), 0, None
    budget = prepared.budget
    if not budget.host_kv_bytes and budget.kv_offload is None:
        # more rows do not run at once
        together = min(num_rows or facts.max_num_seqs, facts.max_num_seqs)
        row_tokens = shape.prompt_tokens + shape.output_tokens + facts.block_size
        token_bytes = facts.model.layer.kv_bytes_per_token * facts.model.num_layers
        host_bytes = min(budget.may_take_bytes, together * row_tokens * token_bytes)
        with_host = _with_host(facts, host_bytes)
    threads = f"{cpu_name()}, {count(config.num_threads, 'thread')}"
    return PlanReport(
        model=source if source == "demo" else model.name,
        device=threads if is_cpu else torch.cuda.get_device_name(model.device),
        dtype=str(model.dtype).removeprefix("torch."),
        facts=facts,
        choice=choice,
        not_asked="" if budget.may_choose else budget.plain_reason(),
        with_host=with_host,
        with_host_bytes=host_bytes,
        profile=prepared.profile,
        was_read=was_read,
        cpu_share=cpu_share,
        weights=_streamed_weights(model.residence, model.sizes, facts, choice),
    )


def _without_infinities(value: Any) -> Any:  # noqa: ANN401
    """Return a record for strict readers: what is never reached is None."""
    if isinstance(value, Mapping):
        return {key: _without_infinities(each) for key, each in value.items()}
    if isinstance(value, frozenset):
        value = sorted(value)
    if isinstance(value, list | tuple):
        return [_without_infinities(each) for each in value]
    return None if isinstance(value, float) and math.isinf(value) else value


def _with_host(facts: EngineFacts, free_bytes: int) -> EngineChoice | None:
    """Return what would be chosen with host memory for KV; None where KV could not be there."""
    try:
        found = choose_engine(replace(facts, host_kv_bytes=free_bytes))
    except CapacityError:
        return None
    return None if found.runner_up is None else found


def _streamed_weights(
    residence: Residence, sizes: WeightSizes, facts: EngineFacts, choice: EngineChoice
) -> StreamedWeights | None:
    """Return what streaming costs steps of decodes or of prompts alone; None where all stay."""
    if not residence.streamed:
        return None
    sizes_of = [[choice.best.max_batched_tokens, 0], [0, choice.best.rows_together]]
    prompts, rows = np.array(sizes_of, float).T
    steps = StepCounts.of(facts.rows, rows, prompts)
    step_s = partial(step_seconds, facts.model, facts.costs, steps)
    plain_s, streamed_s = (
        dict(zip(("prefill", "decode"), step_s(residence=one).tolist(), strict=True))
        for one in (None, residence)
    )
    return StreamedWeights(
        residence=residence, total_bytes=sizes.total_bytes, plain_s=plain_s, streamed_s=streamed_s
    )
