"""What a plan gives engines to do, as totals."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

from raybatch.errors import ConfigError
from raybatch.policy.cost.cost_model import prompt_pairs
from raybatch.records.arrays import Floats, Ints

_PAIRS = ("pairs", "past_pairs")
# what replicas share evenly, beside rows and what these generate
SUMS = ("computed_tokens", "context_reads", "shared_pairs", "shared_reads", *_PAIRS)
_SAMPLE_SIZE = 128
_MERGED_SIZE = 1 << 14


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkTotals:
    """Sums over all rows; a row with n samples counts as n rows that share their prompt."""

    num_rows: int
    computed_tokens: float  # prompt tokens that are computed
    pairs: float  # sum over the computed tokens of the computed ones that each attends to
    generated_tokens: float
    context_reads: float
    past_pairs: float = 0.0  # sum over the computed tokens of the cached ones before them
    shared_pairs: float = 0.0  # KV tokens that decoding rows read and share, over all steps
    shared_reads: float = 0.0  # the same, counted once for all rows that read them in a step
    # outputs of rows that stand for all, evenly over their distribution
    output_lengths: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "output_lengths" and not 0 <= value < float("inf"):
                raise ConfigError(f"WorkTotals.{field.name} is {value}")
        if self.generated_tokens < self.num_rows:
            raise ConfigError(
                f"{self.num_rows} rows generate {self.generated_tokens} tokens; each generates at "
                "least one"
            )

    def actual(
        self, *, computed_tokens: float, generated_tokens: float, num_rows: int | None = None
    ) -> "WorkTotals":
        """Return the totals of what was done, for a comparison with the time that it took.

        Sums that engines do not count are those of the plan, scaled. Computed tokens are prompt
        tokens less cached ones; what is computed again after KV memory ran out is forecast, as for
        a plan. Without a number of rows, those of the plan generated.
        """
        num_rows = self.num_rows if num_rows is None else num_rows
        prefill = computed_tokens / max(1.0, self.computed_tokens)
        decode = generated_tokens / max(1.0, self.generated_tokens)
        length = decode * self.num_rows / max(1, num_rows)
        return replace(
            self,
            num_rows=num_rows,
            computed_tokens=computed_tokens,
            **{name: getattr(self, name) * prefill for name in _PAIRS},
            generated_tokens=max(generated_tokens, num_rows),
            context_reads=self.context_reads * decode,
            shared_pairs=self.shared_pairs * decode,
            shared_reads=self.shared_reads * decode,
            output_lengths=tuple(length * n for n in self.output_lengths),
        )

    def with_cache(self, computed_tokens: float) -> "WorkTotals":
        """Return the totals where the beginnings of prompts are in a cache.

        More `computed_tokens` than there are prompt tokens change nothing.
        """
        left = min(1.0, computed_tokens / max(1.0, self.computed_tokens))
        return replace(
            self,
            computed_tokens=self.computed_tokens * left,
            pairs=self.pairs * left**2,
            past_pairs=self.past_pairs * left + 2 * self.pairs * left * (1 - left),
        )


def merge_work(parts: Sequence[WorkTotals]) -> WorkTotals:
    """Return the totals of all parts together; at least one part."""
    sums = {
        field.name: sum(getattr(part, field.name) for part in parts)
        for field in fields(WorkTotals)
        if field.name != "output_lengths"
    }
    # every length stands for as many rows as the others of its part
    lengths = np.concatenate([np.array(part.output_lengths) for part in parts])
    weights = np.concatenate(
        [np.full(n, part.num_rows / n) for part in parts if (n := len(part.output_lengths))]
        or [np.zeros(0)]
    )
    copies = np.ceil(weights * _MERGED_SIZE / max(1.0, weights.sum())).astype(np.int64)
    sample = output_sample(np.repeat(lengths, copies))
    return WorkTotals(**sums, output_lengths=sample)


def work_totals(
    prompt_tokens: Ints,
    output_tokens: npt.ArrayLike,
    *,
    cached_tokens: Ints | None = None,
    shared_tokens: Ints | None = None,
    num_members: Ints | None = None,
) -> WorkTotals:
    """Sum up rows. O(R log R).

    Cached are prompt tokens with KV from another row. Shared are leading tokens that a row shares
    with the rows of its group, the row that computes them included; they need `num_members`.
    """
    outputs = np.maximum(np.asarray(output_tokens, float), 1.0)
    none = np.zeros(len(prompt_tokens))
    if shared_tokens is not None and num_members is None:
        raise ConfigError("work_totals: shared_tokens needs num_members")
    prompts = prompt_tokens.astype(float)
    cached = none if cached_tokens is None else cached_tokens.astype(float)
    shared = none if shared_tokens is None else shared_tokens.astype(float)
    members = none + 1 if num_members is None else np.maximum(num_members, 1).astype(float)
    for name, values in {"output": outputs, "cached": cached, "shared": shared}.items():
        if values.shape != prompts.shape:
            raise ConfigError(f"{len(values)} {name} lengths for {len(prompts)} rows")
    shared = np.where(members > 1, shared, 0.0)
    # the step of the prompt gives the first token, which reads nothing more
    decodes = outputs - 1
    own = decodes * (prompts - shared) + decodes * (decodes + 1) / 2
    return WorkTotals(
        num_rows=len(prompts),
        computed_tokens=float((prompts - cached).sum()),
        **prompt_pairs(prompts - cached, cached),
        generated_tokens=float(outputs.sum()),
        context_reads=float(own.sum()),
        shared_pairs=float((decodes * shared).sum()),
        shared_reads=float((decodes * shared / members).sum()),
        output_lengths=output_sample(outputs),
    )


def output_sample(output_tokens: Floats, size: int = _SAMPLE_SIZE) -> tuple[float, ...]:
    """Return at most `size` lengths, ascending, each the mean of an equal share of the rows."""
    if not len(output_tokens):
        return ()
    ordered = np.sort(output_tokens)
    size = min(size, len(ordered))
    sums = np.concatenate(([0.0], np.cumsum(ordered)))
    # borders between shares may fall inside a row
    borders = np.interp(np.linspace(0, len(ordered), size + 1), np.arange(len(sums)), sums)
    return tuple((np.diff(borders) * size / len(ordered)).tolist())
