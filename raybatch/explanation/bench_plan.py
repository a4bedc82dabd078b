"""The batch plan of one model on one host: measured or read, searched for, and shown."""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from raybatch.config import EngineConfig
from raybatch.engine.loading.loaded_model import LoadedModel, give_back_freed_memory, load_model
from raybatch.engine.memory.kv_cache import (
    free_memory_bytes,
    host_memory_bytes,
    kv_bytes_per_token,
    num_blocks_for,
    pick_kv_dtype,
)
from raybatch.engine.profile.cached_file import cpu_name
from raybatch.engine.profile.layer_bench import profile_options
from raybatch.engine.profile.module_profile import ModuleProfile, measured_profile
from raybatch.errors import ConfigError
from raybatch.explanation.batch_plan import StreamedWeights, plan_section, streamed_weights
from raybatch.pictures.document import Section, to_text
from raybatch.pictures.wording import count, full, percent
from raybatch.policy.batches.layer_plan import MemoryBudget, ModelShape, ModuleCosts, Workload
from raybatch.policy.batches.search import PlannedBatches, PricedPlan, plan_batches
from raybatch.policy.batches.step_plan import Phase, RowShape, StepPlan, plan_steps

# share of the best rate from which experts count as busy: a larger batch gains less than the rest
_EFFICIENCY = 0.95
# of the time by the clock that a process on a quiet host spends computing
_QUIET_SHARE = 0.85
_PHASES: tuple[Phase, ...] = ("prefill", "decode")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanReport:
    """What `raybatch bench plan` says.

    Args:
        device: that it runs on, such as "cpu, 1 thread".
        cpu_share: CPU seconds per second while one thread of a CPU measured, else None.
        weights: what it costs that some layers do not stay on the device; None where all do.
    """

    model: str
    device: str
    dtype: str
    row: RowShape
    memory: MemoryBudget
    max_batched_tokens: int
    profile: ModuleProfile
    was_read: bool
    cpu_share: float | None
    costs: ModuleCosts
    phases: dict[Phase, PlannedBatches]
    steps: StepPlan
    weights: StreamedWeights | None = None

    def options(self) -> dict[str, int | None]:
        """Return the options of the engine that the plan comes to.

        The token budget is what the plan asks for, and no less than what the engine has: a step
        costs more than its layers, so that fewer tokens only pay where memory is short. Plans with
        KV on the host do not count, which the engine keeps on the device, nor those with experts
        there: it streams whole layers, by `device_weight_bytes`.
        """
        on_device = [_on_device(planned) for planned in self.phases.values()]
        tokens = max((p.plan.gate_tokens for p in on_device if p is not None), default=None)
        bounds = {planned.target.bound for planned in self.phases.values()}
        if tokens is not None and "device memory" not in bounds:
            tokens = max(tokens, self.max_batched_tokens)
        return {
            "max_batched_tokens": tokens,
            "attn_batch_tokens": self.steps.attn_batch_tokens,
            "moe_batch_tokens": None,
        }

    def to_text(self) -> str:
        """Return the plan in lines for people, printable ASCII only."""
        sections = [self._summary()]
        has_experts = self.profile.model.layer.num_experts > 1
        for phase, planned in self.phases.items():
            sections.append(
                plan_section(
                    phase,
                    planned.search,
                    costs=self.costs,
                    memory=self.memory,
                    target=planned.target if has_experts else None,
                    residence=None if self.weights is None else self.weights.residence,
                )
            )
        return to_text(f"Batch plan of {self.model}", sections)

    def to_json(self) -> str:
        """Return everything, with the measurements, as one JSON object."""
        fields = {
            "model": self.model,
            "device": self.device,
            "dtype": self.dtype,
            "row": asdict(self.row),
            "memory": asdict(self.memory),
            "options": self.options(),
            "steps": asdict(self.steps),
            "weights": None if self.weights is None else asdict(self.weights),
            "phases": {phase: _phase_json(planned) for phase, planned in self.phases.items()},
            "costs": asdict(self.costs),
            "was_read": self.was_read,
            "cpu_share": self.cpu_share,
            "profile": asdict(self.profile),
        }
        return json.dumps(fields, indent=1)

    def _summary(self) -> Section:
        options = self.options()
        # as YAML and --set read it
        assigned = ", ".join(
            f"{name}={'null' if value is None else value}" for name, value in options.items()
        )
        runs = "plain forward pass"
        if options["attn_batch_tokens"] is not None:
            runs = f"coroutines, attention over {full(options['attn_batch_tokens'])} tokens"
        source = "read from the cache; --fresh measures again" if self.was_read else "just measured"
        weights = () if self.weights is None else (("weights", self.weights.to_text()),)
        notes = _notes(self.phases)
        if self.cpu_share is not None and self.cpu_share < _QUIET_SHARE:
            notes.append(
                f"the host was busy: this process got {percent(self.cpu_share, 0)} of a CPU while "
                "it measured, so that times are too long; measure again with --fresh"
            )
        rows = f"{full(self.row.prompt_tokens)} prompt and {full(self.row.output_tokens)} output"
        return Section(
            title="Engine",
            facts=(
                ("model", f"{_shape(self.profile.model)}, {self.dtype}"),
                ("costs", f"of {self.device}; {source}"),
                ("rows", f"{rows} tokens each"),
                ("steps", f"{runs}: {self.steps.reason}"),
                ("options", assigned),
                *weights,
            ),
            notes=tuple(notes),
        )


def plan_report(
    source: str,
    config: EngineConfig,
    row: RowShape | None = None,
    *,
    fresh: bool = False,
    folder: Path | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> PlanReport:
    """Load a model, measure its layers unless that was done before, and plan its batches.

    Without `row` rows have `RowShape`'s defaults as far as the model goes. With `fresh` the layers
    are measured also where a profile is in the cache; `folder` stands for that of the cache. `tell`
    is called with what is done next.

    Raises:
        ConfigError: the model cannot be run, rows are longer than it allows, or memory holds no
            plan; the message says what would fit.
        CapacityError: the memory for KV does not hold a block.
    """
    tell(f"loading {source}")
    model = load_model(source, config)
    row = _row_within(row, model, config)
    began, cpu_began = time.perf_counter(), time.process_time()
    profile, was_read = measured_profile(
        model.spec,
        model.weights,
        profile_options(config),
        fresh=fresh,
        folder=folder,
        tell=lambda what: tell(f"measuring {what}"),
    )
    cpu_share = None
    if not was_read:
        if model.device.type == "cpu" and config.num_threads == 1:
            cpu_share = (time.process_time() - cpu_began) / (time.perf_counter() - began)
        give_back_freed_memory(model.device)
    tell("searching")
    memory = _memory(model, config, profile.model)
    costs = profile.costs()
    phases = {
        phase: _planned(
            profile.model, costs, row.workload(phase, waiting_sequences=config.max_num_seqs), memory
        )
        for phase in _PHASES
    }
    layer_s = {phase: _computed_s(planned) for phase, planned in phases.items()}
    return PlanReport(
        model=source if source == "demo" else model.name,
        device=_device(model, config),
        dtype=str(model.dtype).removeprefix("torch."),
        row=row,
        memory=memory,
        max_batched_tokens=config.max_batched_tokens,
        profile=profile,
        was_read=was_read,
        cpu_share=cpu_share,
        costs=costs,
        phases=phases,
        steps=plan_steps(profile.layers, row),
        weights=streamed_weights(model.residence, model.sizes, costs, layer_s),
    )


def _row_within(row: RowShape | None, model: LoadedModel, config: EngineConfig) -> RowShape:
    most = min(model.spec.max_model_len, config.max_model_len or model.spec.max_model_len)
    row = row or RowShape.within(most)
    if row.prompt_tokens + row.output_tokens > most:
        raise ConfigError(
            f"rows of {row.prompt_tokens} prompt and {row.output_tokens} output tokens are longer "
            f"than the {most} tokens of {model.name}; give shorter ones (--prompt-tokens, "
            "--output-tokens)"
        )
    return row


def _memory(model: LoadedModel, config: EngineConfig, shape: ModelShape) -> MemoryBudget:
    """Return what plans may take: the weights that are loaded, what is free, and KV as configured.

    On a CPU there is no other memory to put anything into.
    """
    free, residence = free_memory_bytes(model.device), model.residence
    if residence.streamed:
        # the ring is not there yet
        free = max(0, free - residence.num_buffers * residence.buffer_bytes)
    dtype = pick_kv_dtype(config.kv_cache_dtype, model.dtype)
    num_blocks = num_blocks_for(
        config,
        model.spec,
        dtype=dtype,
        device=model.device,
        free_bytes=free,
        host_bytes=host_memory_bytes(),
    )
    block_bytes = kv_bytes_per_token(model.spec, dtype) * config.block_size_tokens
    layer = shape.layer
    loaded = shape.other_bytes + shape.num_layers * (layer.attention_bytes + layer.ffn_bytes)
    if residence.streamed:
        loaded = residence.device_bytes
    has_host = model.device.type != "cpu" and config.kv_cache_bytes is None
    return MemoryBudget(
        device_bytes=loaded + free,
        host_bytes=free_memory_bytes(torch.device("cpu")) if has_host else 0,
        kv_bytes=None if has_host else num_blocks * block_bytes,
    )


def _planned(
    shape: ModelShape, costs: ModuleCosts, workload: Workload, memory: MemoryBudget
) -> PlannedBatches:
    try:
        return plan_batches(shape, costs, workload, memory, efficiency=_EFFICIENCY)
    except ConfigError as error:
        raise ConfigError(
            f"{error}; raise engine.kv_cache_bytes, or plan for shorter rows (--prompt-tokens, "
            "--output-tokens)"
        ) from error


def _computed_s(planned: PlannedBatches) -> float:
    """Return the seconds that one layer of the plan takes without copies."""
    priced = _on_device(planned) or planned.search.best
    return max(priced.time.layer_s, 1e-9)


def _on_device(planned: PlannedBatches) -> PricedPlan | None:
    """Return the best plan that the engine can carry out; None where the device holds none."""
    search = planned.search
    for priced in (search.best, *search.runners_up):
        if priced.plan.parameter_buffers is None and not priced.plan.has_kv_on_host:
            return priced
    return None


def _notes(phases: Mapping[Phase, PlannedBatches]) -> list[str]:
    """Say where the best plan is none that the engine carries out."""
    return [
        f"{phase}: the best plan needs the host; the engine keeps KV on the device, and streams "
        "whole layers where engine.device_weight_bytes asks for it"
        for phase, planned in phases.items()
        if _on_device(planned) is not planned.search.best
    ]


def _phase_json(planned: PlannedBatches) -> dict[str, Any]:
    search = planned.search
    best, *others = (
        {**asdict(priced), "token_s": priced.token_s}
        for priced in (search.best, *search.runners_up)
    )
    return {
        "best": best,
        "runners_up": others,
        "target": asdict(planned.target),
        "num_considered": search.num_considered,
        "num_infeasible": search.num_infeasible,
    }


def _device(model: LoadedModel, config: EngineConfig) -> str:
    if model.device.type == "cpu":
        return f"{cpu_name()}, {count(config.num_threads, 'thread')}"
    return torch.cuda.get_device_name(model.device)


def _shape(model: ModelShape) -> str:
    layer = model.layer
    layers = count(model.num_layers, "layer")
    if layer.num_experts > 1:
        return f"{layers} of {full(layer.num_experts)} experts, {full(layer.top_k)} for a token"
    return f"{layers} without experts"
