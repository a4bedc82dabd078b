"""Chooses how an engine runs its rows: where their KV lives, and how many meet at the experts.

Pure: what was measured and what there is go in, one record with every choice and its reason comes
out. With KV on the device, as many rows decode together as it holds. With KV in host memory, as
many as that holds: attention runs over those whose KV of one layer fits a buffer, which costs a
copy of all KV in every step, and feed-forward layers run once for all.
"""

from dataclasses import dataclass

from raybatch.errors import CapacityError
from raybatch.policy.batches.forward_dag import forward_time
from raybatch.policy.batches.layer_plan import (
    KV_SLOTS,
    BatchPlan,
    ModelShape,
    ModuleCosts,
    Workload,
)
from raybatch.policy.batches.step_plan import LEAST_GAIN, RowShape
from raybatch.policy.residence import Residence, streamed_s

# what a step costs beside its layers: scheduling, batches, head and sampling; of a step, and of a
# row that gets a token (AMD EPYC, models of 8M and 100M with 1,024 tokens in their vocabulary)
_STEP_S, _ROW_S = 1e-3, 2e-5


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineFacts:
    """A model, its measured modules and links, memory for KV, bounds of a step, and the rows.

    `num_rows` are those of the job; None where there are always more. `residence` is that of the
    weights; None keeps all on the device.
    """

    model: ModelShape
    costs: ModuleCosts
    device_kv_bytes: int
    host_kv_bytes: int
    max_num_seqs: int
    max_batched_tokens: int
    row: RowShape
    num_rows: int | None = None
    residence: Residence | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineWay:
    """A way to run rows, and the output tokens per second that it promises."""

    kv_offload: bool
    rows_together: int  # that decode in one step, and meet at the experts
    rows_attending: int  # at once; all of them where KV lives on the device
    tokens_per_s: float

    def to_text(self) -> str:
        if not self.kv_offload:
            return f"KV on the device, {self.rows_together:,} rows at once"
        return (
            f"KV in host memory, {self.rows_together:,} rows at once of which "
            f"{self.rows_attending:,} attend together"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineChoice:
    """The way that is taken, the other one where there is one, and why, as a sentence."""

    best: EngineWay
    runner_up: EngineWay | None
    reason: str


def choose_engine(facts: EngineFacts) -> EngineChoice:
    """Return the way with the most output tokens per second; the device wins near ties.

    Prompts cost the same share of a full step either way, and are counted, so that short answers
    choose what suits prompts. Where one memory does not hold a row, the other is taken.

    Raises:
        CapacityError: neither memory holds a row.

    Source: BatchGen (arXiv:2606.21712), sections 5.1 and 5.4, by this library's costs.
    """
    ways = [way for way in (_on_device(facts), _in_host_memory(facts)) if way is not None]
    if not ways:
        row = facts.row
        raise CapacityError(
            f"a row of {row.prompt_tokens} prompt and {row.output_tokens} output tokens fits "
            "neither the device's memory for KV nor the host's; raise engine.kv_cache_bytes",
            needed_tokens=row.prompt_tokens + row.output_tokens,
            available_tokens=facts.device_kv_bytes // _token_bytes(facts),
        )
    if len(ways) == 1:
        (only,) = ways
        return EngineChoice(best=only, runner_up=None, reason=_only_reason(facts, only))
    device, host = ways
    gain = host.tokens_per_s / device.tokens_per_s - 1
    best, other = (host, device) if gain >= LEAST_GAIN else (device, host)
    ratio = best.tokens_per_s / other.tokens_per_s - 1
    reason = (
        f"{best.to_text()}: {best.tokens_per_s:,.0f} output tokens/s are forecast, and "
        f"{other.tokens_per_s:,.0f} with {other.to_text()}"
    )
    if best is device and ratio < 0:
        reason += f"; less than {100 * LEAST_GAIN:.0f} % is not worth the copies"
    return EngineChoice(best=best, runner_up=other, reason=reason)


def _token_bytes(facts: EngineFacts) -> int:
    return facts.model.layer.kv_bytes_per_token * facts.model.num_layers


def _rows_held(facts: EngineFacts, num_bytes: int) -> int:
    """Return how many rows memory holds at their ends, at most as many as a step may have."""
    row_tokens = facts.row.prompt_tokens + facts.row.output_tokens - 1
    held = num_bytes // (max(1, row_tokens) * _token_bytes(facts))
    bounds = [held, facts.max_num_seqs, facts.max_batched_tokens]
    if facts.num_rows is not None:
        bounds.append(facts.num_rows)
    return min(bounds)


def _on_device(facts: EngineFacts) -> EngineWay | None:
    rows = _rows_held(facts, facts.device_kv_bytes)
    return _way(facts, kv_offload=False, rows=rows, attending=rows) if rows else None


def _in_host_memory(facts: EngineFacts) -> EngineWay | None:
    rows = _rows_held(facts, facts.host_kv_bytes)
    layer_bytes = facts.model.layer.kv_bytes_per_token
    buffer_tokens = facts.device_kv_bytes // KV_SLOTS // layer_bytes
    if not rows or buffer_tokens < facts.row.prompt_tokens + facts.row.output_tokens - 1:
        return None
    # half way through their output
    context = facts.row.prompt_tokens + facts.row.output_tokens // 2
    return _way(facts, kv_offload=True, rows=rows, attending=min(rows, buffer_tokens // context))


def _way(facts: EngineFacts, *, kv_offload: bool, rows: int, attending: int) -> EngineWay:
    row, most = facts.row, facts.max_batched_tokens
    # rows that wait are computed beside those that decode, up to the tokens of a step
    prompt_tokens = min(most, rows * row.prompt_tokens)
    in_buffer = min(prompt_tokens, attending * row.prompt_tokens)
    prefill = BatchPlan(
        attention_tokens=in_buffer, gate_tokens=prompt_tokens, has_kv_on_host=kv_offload
    )
    decode = BatchPlan(attention_tokens=attending, gate_tokens=rows, has_kv_on_host=kv_offload)
    prefill_s = _token_s(facts, prefill, row.workload("prefill"))
    decode_s = _token_s(facts, decode, row.workload("decode"))
    decode_s += _STEP_S / rows + _ROW_S
    row_s = row.prompt_tokens * prefill_s + row.output_tokens * decode_s
    return EngineWay(
        kv_offload=kv_offload,
        rows_together=rows,
        rows_attending=attending,
        tokens_per_s=row.output_tokens / max(row_s, 1e-12),
    )


def _token_s(facts: EngineFacts, plan: BatchPlan, workload: Workload) -> float:
    forward = forward_time(facts.model, facts.costs, plan, workload)
    if facts.residence is None:
        return forward.seconds / plan.gate_tokens
    return streamed_s(facts.residence, forward, facts.costs) / plan.gate_tokens


def _only_reason(facts: EngineFacts, only: EngineWay) -> str:
    if only.kv_offload:
        return f"{only.to_text()}, as the device does not hold all layers of a row"
    if not facts.host_kv_bytes:
        return f"{only.to_text()}, as there is no host memory for KV (engine.host_kv_bytes)"
    return f"{only.to_text()}, as a buffer of one layer, or host memory, does not hold a row"
