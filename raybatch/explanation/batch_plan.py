"""Says which batch sizes were chosen for a model, where its data lives, and what that costs."""

from collections.abc import Mapping
from dataclasses import dataclass

from raybatch.pictures.document import Section, Table
from raybatch.pictures.wording import amount, count, full, percent
from raybatch.policy.batches.layer_plan import BatchPlan, MemoryBudget, ModuleCosts
from raybatch.policy.batches.search import GateTarget, PricedPlan, SearchResult
from raybatch.policy.batches.step_plan import Phase
from raybatch.policy.cost.roofline import Work
from raybatch.policy.residence import Residence, WeightSizes, pass_time


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
    best = result.best
    facts = [
        ("plan", f"{phase}: {_sizes(best.plan)}"),
        ("parameters", _parameters(best.plan, residence)),
        ("KV", _kv(best.plan)),
        ("memory", _memory(best, memory)),
        ("speed", f"{amount(1 / best.token_s)} tokens/s in all layers" if best.token_s else "-"),
        ("busy", _busy(best)),
    ]
    if target is not None:
        facts.append(("experts", _experts(target)))
    facts.append(
        (
            "fit error",
            f"{percent(costs.attention.fit_error)} of attention, "
            f"{percent(costs.ffn.fit_error)} of the feed-forward block",
        )
    )
    considered = (
        f"{count(result.num_considered, 'plan')} considered, of which memory does not hold "
        f"{full(result.num_infeasible)}"
    )
    return Section(
        title=f"Batch plan, {phase}",
        facts=tuple(facts),
        # of one way there is nothing to compare
        table=_table([best, *result.runners_up], residence) if result.runners_up else None,
        notes=(considered,),
    )


def _table(priced: list[PricedPlan], residence: Residence | None) -> Table:
    kept = "device" if residence is None else "some streamed"
    return Table(
        header=("parameters", "attention", "gate", "device GB", "host GB", "us/token", "KV"),
        rows=tuple(
            (
                kept if p.plan.parameter_buffers is None else "host",
                full(p.plan.attention_tokens),
                full(p.plan.gate_tokens),
                _gigabytes(p.memory.device_bytes),
                _gigabytes(p.memory.host_bytes),
                f"{1e6 * p.token_s:,.3g}",
                "host" if p.plan.has_kv_on_host else "device",
            )
            for p in priced
        ),
    )


def _sizes(plan: BatchPlan) -> str:
    return (
        f"{count(plan.gate_tokens, 'token')} at the gate, attention over "
        f"{full(plan.attention_tokens)} at a time"
    )


def _parameters(plan: BatchPlan, residence: Residence | None) -> str:
    if plan.parameter_buffers is not None:
        return f"experts on the host, streamed through {count(plan.parameter_buffers, 'buffer')}"
    if residence is None:
        return "on the device"
    stays = f"{full(sum(residence.is_resident))} of {full(len(residence.is_resident))} layers"
    buffers = count(residence.num_buffers, "buffer")
    return f"{stays} on the device, the others streamed through {buffers}"


def _kv(plan: BatchPlan) -> str:
    return "on the host, two sub-batches on the device" if plan.has_kv_on_host else "on the device"


def _memory(best: PricedPlan, memory: MemoryBudget) -> str:
    need = best.memory
    return (
        f"{_gigabytes(need.device_bytes)} of {_gigabytes(memory.device_bytes)} GB on the device, "
        f"{_gigabytes(need.host_bytes)} of {_gigabytes(memory.host_bytes)} GB on the host"
    )


def _busy(best: PricedPlan) -> str:
    shares = sorted(best.time.busy_fraction.items())
    return ", ".join(f"{name.replace('_', ' ')} {percent(share, 0)}" for name, share in shares)


def _experts(target: GateTarget) -> str:
    enough = count(target.saturated_tokens, "token")
    if target.bound == "saturation":
        return f"kept busy by {enough}, which fit"
    return f"kept busy by {enough}; limited to {full(target.tokens)} by {target.bound}"


def _gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.3g}"


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamedWeights:
    """Where layers are, and how long a pass takes for that and without copies (`plain_s`)."""

    residence: Residence
    total_bytes: int
    plain_s: Mapping[Phase, float]
    pass_s: Mapping[Phase, float]

    def to_text(self) -> str:
        """Return a line for people."""
        residence = self.residence
        buffers = count(residence.num_buffers, "buffer")
        stays = f"{full(sum(residence.is_resident))} of {full(len(residence.is_resident))} layers"
        longer = ", ".join(
            f"{phase} {1e3 * (self.pass_s[phase] - plain_s):.3g} ms "
            f"({percent(self.pass_s[phase] / plain_s - 1, 0)})"
            for phase, plain_s in self.plain_s.items()
        )
        return (
            f"{stays} stay on the device; a pass copies {residence.pass_bytes / 1e6:,.1f} of "
            f"{self.total_bytes / 1e6:,.1f} MB through {buffers}, and "
            f"takes longer for that: {longer}"
        )


def streamed_weights(
    residence: Residence, sizes: WeightSizes, costs: ModuleCosts, layer_s: Mapping[Phase, float]
) -> StreamedWeights | None:
    """Return what streaming costs, None where all stay; `layer_s` is what one layer computes."""
    if not residence.streamed:
        return None
    num_layers = len(sizes.layer_bytes)
    copy = Work(operations=0.0, moved_bytes=residence.buffer_bytes)
    bytes_per_s = residence.buffer_bytes / max(costs.to_device.seconds(copy), 1e-12)
    return StreamedWeights(
        residence=residence,
        total_bytes=sizes.total_bytes,
        plain_s={phase: num_layers * seconds for phase, seconds in layer_s.items()},
        pass_s={
            phase: pass_time(
                residence,
                sizes,
                layer_s=[seconds] * num_layers,
                bytes_per_s=bytes_per_s,
                copies_overlap=costs.copies_overlap,
            )
            for phase, seconds in layer_s.items()
        },
    )
