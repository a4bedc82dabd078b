"""The batch plan of one model on one host: measured or read, searched for, and shown."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from raybatch.backends.cost_cache import QUIET_SHARE
from raybatch.config import EngineConfig
from raybatch.engine.loading.loaded_model import LoadedModel, give_back_freed_memory, load_model
from raybatch.engine.memory.kv_cache import (
    free_memory_bytes,
    host_memory_bytes,
    kv_bytes_per_token,
    num_blocks_for,
)
from raybatch.engine.profile.cached_file import cpu_name
from raybatch.engine.profile.layer_bench import profile_options
from raybatch.engine.profile.module_profile import ModuleProfile, measured_profile
from raybatch.errors import ConfigError
from raybatch.pictures.document import Section, Table, to_text
from raybatch.pictures.wording import amount, count, full, percent
from raybatch.policy.batches.layer_plan import MemoryBudget, ModelShape, ModuleCosts
from raybatch.policy.batches.row_shape import Phase, RowShape
from raybatch.policy.batches.search import (
    GateTarget,
    PlannedBatches,
    PricedPlan,
    SearchResult,
    plan_batches,
)
from raybatch.policy.residence import Residence, WeightSizes, pass_seconds

# share of the best rate from which experts count as busy: a larger batch gains less than the rest
_EFFICIENCY = 0.95
_PHASES: tuple[Phase, ...] = ("prefill", "decode")


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamedWeights:
    """Where layers are, and how long a pass takes for that and without copies (`plain_s`)."""

    residence: Residence
    total_bytes: int
    plain_s: Mapping[Phase, float]
    pass_s: Mapping[Phase, float]

    def to_text(self) -> str:
        residence = self.residence
        longer = ", ".join(
            f"{phase} {1e3 * (self.pass_s[phase] - plain_s):.3g} ms "
            f"({percent(self.pass_s[phase] / plain_s - 1, 0)})"
            for phase, plain_s in self.plain_s.items()
        )
        return (
            f"{_resident(residence)} stay on the device; a pass copies "
            f"{residence.pass_bytes / 1e6:,.1f} of {self.total_bytes / 1e6:,.1f} MB through "
            f"{count(residence.num_buffers, 'buffer')}, and takes longer for that: {longer}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanReport:
    """What `raybatch bench plan` says.

    `cpu_share` is CPU seconds per second while one thread of a CPU measured, else None; `weights`
    are what it costs that some layers do not stay on the device, None where all do.
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
    weights: StreamedWeights | None = None

    def options(self) -> dict[str, int | None]:
        """Return the options of the engine that the plan comes to.

        The token budget is no less than what the engine has: a step costs more than its layers, so
        that fewer tokens only pay where memory is short. Plans with KV on the host do not count,
        which the engine keeps on the device, nor those with experts there: it streams whole layers.
        """
        on_device = filter(None, map(_on_device, self.phases.values()))
        tokens = max((priced.plan.gate_tokens for priced in on_device), default=None)
        bounds = {planned.target.bound for planned in self.phases.values()}
        if tokens is not None and "device memory" not in bounds:
            tokens = max(tokens, self.max_batched_tokens)
        return {"max_batched_tokens": tokens}

    def to_text(self) -> str:
        """Return the plan in lines for people, printable ASCII only."""
        has_experts = self.profile.model.layer.num_experts > 1
        residence = None if self.weights is None else self.weights.residence
        section = partial(plan_section, costs=self.costs, memory=self.memory, residence=residence)
        phases = (
            section(phase, planned.search, target=planned.target if has_experts else None)
            for phase, planned in self.phases.items()
        )
        return to_text(f"Batch plan of {self.model}", [self._summary(), *phases])

    def to_json(self) -> str:
        fields = asdict(self) | {
            "options": self.options(),
            "phases": {phase: _phase_json(planned) for phase, planned in self.phases.items()},
        }
        del fields["max_batched_tokens"]  # of the options
        return json.dumps(fields, indent=1)

    def _summary(self) -> Section:
        options, shape, layer = self.options(), self.profile.model, self.profile.model.layer
        # as YAML and --set read it
        assigned = ", ".join(
            f"{name}={'null' if value is None else value}" for name, value in options.items()
        )
        source = "read from the cache; --fresh measures again" if self.was_read else "just measured"
        notes = [
            f"{phase}: the best plan needs the host; the engine keeps KV on the device, and "
            "streams whole layers where engine.device_weight_bytes asks for it, or they do not fit"
            for phase, planned in self.phases.items()
            if _on_device(planned) is not planned.search.best
        ]
        if self.cpu_share is not None and self.cpu_share < QUIET_SHARE:
            notes.append(
                f"the host was busy: this process got {percent(self.cpu_share, 0)} of a CPU while "
                "it measured, so that times are too long; measure again with --fresh"
            )
        experts = "without experts"
        if layer.num_experts > 1:
            experts = f"of {full(layer.num_experts)} experts, {full(layer.top_k)} for a token"
        rows = f"{full(self.row.prompt_tokens)} prompt and {full(self.row.output_tokens)} output"
        facts = [
            ("model", f"{count(shape.num_layers, 'layer')} {experts}, {self.dtype}"),
            ("costs", f"of {self.device}; {source}"),
            ("rows", f"{rows} tokens each"),
            ("options", assigned),
        ]
        if self.weights is not None:
            facts.append(("weights", self.weights.to_text()))
        return Section(title="Engine", facts=tuple(facts), notes=tuple(notes))


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
    is_cpu = model.device.type == "cpu"
    most = model.resolved.max_model_len
    row = row or RowShape.within(most)
    if row.prompt_tokens + row.output_tokens > most:
        raise ConfigError(
            f"rows of {row.prompt_tokens} prompt and {row.output_tokens} output tokens are longer "
            f"than the {most} tokens of {model.name}; give shorter ones (--prompt-tokens, "
            "--output-tokens)"
        )
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
        if is_cpu and config.num_threads == 1:
            cpu_share = (time.process_time() - cpu_began) / (time.perf_counter() - began)
        give_back_freed_memory(model.device)
    tell("searching")
    memory, costs = _memory(model, config, profile.model), profile.costs()
    phases = _planned_phases(row, config, profile.model, costs, memory)
    # what one layer of each plan computes without copies
    best = {phase: _on_device(planned) or planned.search.best for phase, planned in phases.items()}
    layer_s = {phase: max(priced.time.layer_s, 1e-9) for phase, priced in best.items()}
    threads = f"{cpu_name()}, {count(config.num_threads, 'thread')}"
    return PlanReport(
        model=source if source == "demo" else model.name,
        device=threads if is_cpu else torch.cuda.get_device_name(model.device),
        dtype=str(model.dtype).removeprefix("torch."),
        row=row,
        memory=memory,
        max_batched_tokens=config.token_budget,
        profile=profile,
        was_read=was_read,
        cpu_share=cpu_share,
        costs=costs,
        phases=phases,
        weights=_streamed_weights(model.residence, model.sizes, costs, layer_s),
    )


def _planned_phases(
    row: RowShape, config: EngineConfig, shape: ModelShape, costs: ModuleCosts, memory: MemoryBudget
) -> dict[Phase, PlannedBatches]:
    phases: dict[Phase, PlannedBatches] = {}
    for phase in _PHASES:
        work = row.workload(phase, waiting_sequences=config.max_num_seqs)
        try:
            phases[phase] = plan_batches(shape, costs, work, memory, efficiency=_EFFICIENCY)
        except ConfigError as error:
            raise ConfigError(
                f"{error}; raise engine.kv_cache_bytes, or plan for shorter rows (--prompt-tokens, "
                "--output-tokens)"
            ) from error
    return phases


def _memory(model: LoadedModel, config: EngineConfig, shape: ModelShape) -> MemoryBudget:
    """Return what plans may take: the weights that are loaded, what is free, and KV as configured.

    On a CPU there is no other memory to put anything into.
    """
    free, residence, layer = free_memory_bytes(model.device), model.residence, shape.layer
    loaded = shape.other_bytes + shape.num_layers * (layer.attention_bytes + layer.ffn_bytes)
    if residence.streamed:
        # the ring is not there yet
        free = max(0, free - residence.num_buffers * residence.buffer_bytes)
        loaded = residence.device_bytes
    dtype = model.resolved.kv_dtype
    num_blocks = num_blocks_for(
        config,
        model.spec,
        dtype=dtype,
        device=model.device,
        free_bytes=free,
        host_bytes=host_memory_bytes(),
    )
    block_bytes = kv_bytes_per_token(model.spec, dtype) * config.block_size_tokens
    has_host = model.device.type != "cpu" and config.kv_cache_bytes is None
    return MemoryBudget(
        device_bytes=loaded + free,
        host_bytes=free_memory_bytes(torch.device("cpu")) if has_host else 0,
        kv_bytes=None if has_host else num_blocks * block_bytes,
    )


def _on_device(planned: PlannedBatches) -> PricedPlan | None:
    """Return the best plan that the engine can carry out; None where the device holds none."""
    every = (planned.search.best, *planned.search.runners_up)
    return next((p for p in every if not (p.plan.parameter_buffers or p.plan.has_kv_on_host)), None)


def _phase_json(planned: PlannedBatches) -> dict[str, Any]:
    search = planned.search
    plans = [asdict(one) | {"token_s": one.token_s} for one in (search.best, *search.runners_up)]
    return {
        "best": plans[0],
        "runners_up": plans[1:],
        "target": asdict(planned.target),
        "num_considered": search.num_considered,
        "num_infeasible": search.num_infeasible,
    }


def _streamed_weights(
    residence: Residence, sizes: WeightSizes, costs: ModuleCosts, layer_s: Mapping[Phase, float]
) -> StreamedWeights | None:
    """Return what streaming costs, None where all stay; `layer_s` is what one layer computes."""
    if not residence.streamed:
        return None
    num_layers = len(sizes.layer_bytes)
    plain_s = {phase: num_layers * seconds for phase, seconds in layer_s.items()}
    pass_s = pass_seconds(residence, np.array(list(plain_s.values())), costs)
    return StreamedWeights(
        residence=residence,
        total_bytes=sizes.total_bytes,
        plain_s=plain_s,
        pass_s=dict(zip(plain_s, pass_s.tolist(), strict=True)),
    )


def plan_section(
    phase: str,
    result: SearchResult,
    *,
    costs: ModuleCosts,
    memory: MemoryBudget,
    target: GateTarget | None = None,
    residence: Residence | None = None,
) -> Section:
    """Return the chosen plan as facts, and in a table beside the best of every other residence.

    `target` is how many tokens would keep the experts busy; None for a dense model. `residence` is
    that of the layers where some are streamed; None where all stay on the device.
    """
    best, plan = result.best, result.best.plan
    parameters = "on the device"
    if plan.parameter_buffers is not None:
        buffers = count(plan.parameter_buffers, "buffer")
        parameters = f"experts on the host, streamed through {buffers}"
    elif residence is not None:
        buffers = count(residence.num_buffers, "buffer")
        parameters = f"{_resident(residence)} on the device, the others streamed through {buffers}"
    held = ", ".join(
        f"{need / 1e9:,.3g} of {has / 1e9:,.3g} GB on the {where}"
        for where, need, has in (
            ("device", best.memory.device_bytes, memory.device_bytes),
            ("host", best.memory.host_bytes, memory.host_bytes),
        )
    )
    busy = sorted(best.time.busy_fraction.items())
    gate, attention = count(plan.gate_tokens, "token"), full(plan.attention_tokens)
    on_host = "on the host, two sub-batches on the device"
    facts = [
        ("plan", f"{phase}: {gate} at the gate, attention over {attention} at a time"),
        ("parameters", parameters),
        ("KV", on_host if plan.has_kv_on_host else "on the device"),
        ("memory", held),
        ("speed", f"{amount(1 / best.token_s)} tokens/s in all layers" if best.token_s else "-"),
        (
            "busy",
            ", ".join(f"{what.replace('_', ' ')} {percent(share, 0)}" for what, share in busy),
        ),
    ]
    if target is not None:
        limit = f"; limited to {full(target.tokens)} by {target.bound}"
        limit = ", which fit" if target.bound == "saturation" else limit
        facts.append(("experts", f"kept busy by {count(target.saturated_tokens, 'token')}{limit}"))
    errors = percent(costs.attention.fit_error), percent(costs.ffn.fit_error)
    facts.append(("fit error", "{} of attention, {} of the feed-forward block".format(*errors)))
    considered = f"{count(result.num_considered, 'plan')} considered, of which memory does not hold"
    # of one way there is nothing to compare
    table = _table([best, *result.runners_up], residence) if result.runners_up else None
    return Section(
        title=f"Batch plan, {phase}",
        facts=tuple(facts),
        table=table,
        notes=(f"{considered} {full(result.num_infeasible)}",),
    )


def _table(priced: Sequence[PricedPlan], residence: Residence | None) -> Table:
    kept = "device" if residence is None else "some streamed"
    rows = tuple(
        (
            kept if p.plan.parameter_buffers is None else "host",
            full(p.plan.attention_tokens),
            full(p.plan.gate_tokens),
            f"{p.memory.device_bytes / 1e9:,.3g}",
            f"{p.memory.host_bytes / 1e9:,.3g}",
            f"{1e6 * p.token_s:,.3g}",
            "host" if p.plan.has_kv_on_host else "device",
        )
        for p in priced
    )
    header = ("parameters", "attention", "gate", "device GB", "host GB", "us/token", "KV")
    return Table(header=header, rows=rows)


def _resident(residence: Residence) -> str:
    return f"{full(sum(residence.is_resident))} of {full(len(residence.is_resident))} layers"
