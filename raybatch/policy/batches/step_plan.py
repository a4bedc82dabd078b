"""Decides how an engine runs its steps: as one forward pass, or as coroutines of parts.

One step on one device has all its tokens at the experts either way, so parts pay only where
attention over fewer tokens at once is faster. A roofline cannot show this, because it only falls
with the size of a batch; the decision goes by layers that were measured both ways.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from raybatch.errors import ConfigError
from raybatch.policy.batches.layer_plan import Workload

Phase = Literal["prefill", "decode"]

# share of the time that parts must save: below it the noise of a measurement would decide, and
# batches are built part by part, which no measured layer contains
LEAST_GAIN = 0.05
# a share that would be printed as 0 %
_ALIKE = 0.005


@dataclass(frozen=True, kw_only=True, slots=True)
class RowShape:
    """What the rows of a job are like, on average; prompt tokens are those to compute."""

    prompt_tokens: int = 512
    output_tokens: int = 128

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} of a row is {getattr(self, name)}; it must be >= 1")

    @classmethod
    def within(cls, max_model_len: int) -> "RowShape":
        """Return the default, shortened to what a model of so many tokens takes."""
        usual = cls()
        output_tokens = max(1, min(usual.output_tokens, max_model_len // 5))
        prompt_tokens = max(1, min(usual.prompt_tokens, max_model_len - output_tokens))
        return cls(prompt_tokens=prompt_tokens, output_tokens=output_tokens)

    def workload(self, phase: Phase, *, waiting_sequences: int | None = None) -> Workload:
        """Return what sequences are like in a phase; they decode half way through their output."""
        if phase == "prefill":
            return Workload(
                tokens_per_sequence=self.prompt_tokens,
                reserved_tokens=self.output_tokens,
                waiting_sequences=waiting_sequences,
            )
        done = self.output_tokens // 2
        return Workload(
            cached_tokens=self.prompt_tokens + done,
            # one is the token of the step itself
            reserved_tokens=self.output_tokens - done - 1,
            waiting_sequences=waiting_sequences,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredLayer:
    """One layer over the tokens of a step, attention in parts and then the experts for all.

    A part as large as all tokens at the gate is the layer of the plain forward pass.
    """

    phase: Phase
    gate_tokens: int
    attention_tokens: int
    seconds: float

    @property
    def is_plain(self) -> bool:
        return self.attention_tokens >= self.gate_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """How steps run, and what was measured, as a sentence.

    Where they run as coroutines, so many tokens attend at once, and feed-forward blocks wait for
    all tokens of the step; None for the plain forward pass.
    """

    attn_batch_tokens: int | None
    reason: str


def plan_steps(layers: Sequence[MeasuredLayer], row: RowShape) -> StepPlan:
    """Return the parts with the least time in layers for one row, if they save `LEAST_GAIN`.

    A step mixes prompts and decoding rows, and one size of parts holds for both; so both count,
    each with its tokens of a row.
    """
    plain_s = _row_s(layers, row, None)
    sizes = sorted({layer.attention_tokens for layer in layers if not layer.is_plain}, reverse=True)
    if not sizes:
        return StepPlan(attn_batch_tokens=None, reason="no layer was measured in parts")
    # of equal ones the largest parts, which are the fewest
    seconds, tokens = min(((_row_s(layers, row, size), size) for size in sizes), key=lambda p: p[0])
    gain = 1 - seconds / plain_s
    if abs(gain) < _ALIKE:
        verb = "take as long as plain ones"
    else:
        verb = f"take {100 * abs(gain):.0f} % {'less' if gain > 0 else 'more'} time than plain ones"
    reason = f"layers with attention over {tokens:,} tokens at a time {verb}"
    if gain < LEAST_GAIN:
        least = f", and coroutines are for {100 * LEAST_GAIN:.0f} % and more"
        return StepPlan(attn_batch_tokens=None, reason=reason + least * (gain >= _ALIKE))
    return StepPlan(attn_batch_tokens=tokens, reason=reason)


def _row_s(layers: Sequence[MeasuredLayer], row: RowShape, part_tokens: int | None) -> float:
    """Return the seconds of a row in one layer, its share of the steps that were measured."""
    return sum(
        num_tokens * _token_s([layer for layer in layers if layer.phase == phase], part_tokens)
        for phase, num_tokens in (("prefill", row.prompt_tokens), ("decode", row.output_tokens))
    )


def _token_s(layers: Sequence[MeasuredLayer], part_tokens: int | None) -> float:
    plain = next((layer for layer in layers if layer.is_plain), None)
    if plain is None:
        raise ConfigError("steps are planned from a layer of the plain forward pass in each phase")
    parts = [layer for layer in layers if not layer.is_plain]
    measured = plain
    if part_tokens is not None and part_tokens < plain.gate_tokens and parts:
        # parts hold whole prompts, so that small ones are as large as the smallest measured
        sizes = [layer.attention_tokens for layer in parts]
        size = max((size for size in sizes if size <= part_tokens), default=min(sizes))
        measured = parts[sizes.index(size)]
    return measured.seconds / measured.gate_tokens
