"""Total work of a plan."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

from raybatch.policy.cost.cost_model import prompt_pairs
from raybatch.records.arrays import Floats, Ints

_PAIRS = ("pairs", "past_pairs")
# totals that replicas divide evenly, besides rows and generated tokens
SUMS = ("computed_tokens", "context_reads", "shared_pairs", "cascade_reads", *_PAIRS)
_SAMPLE_SIZE = 128
_MERGED_SIZE = 1 << 14


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkTotals:
    """Work summed over all rows; a row with n samples counts as n rows that share their prompt."""

    num_rows: int
    computed_tokens: float  # computed prompt tokens
    pairs: float  # sum over the computed tokens of the computed ones that each attends to
    generated_tokens: float
    context_reads: float
    past_pairs: float = 0.0  # sum over the computed tokens of the cached ones before them
    shared_pairs: float = 0.0  # KV tokens that decoding rows read and share, over all steps
    cascade_reads: float = 0.0  # the same, counted once per step for all rows
    # samples of the output lengths, evenly over their distribution
    output_lengths: tuple[float, ...] = ()

    def actual(
        self, *, computed_tokens: float, generated_tokens: float, num_rows: int | None = None
    ) -> "WorkTotals":
        """Return the totals of the work that engines have done, to compare with its time.

        These totals are those of the plan, from which the sums that engines do not count are
        scaled. `computed_tokens` are prompt tokens without cached and recomputed ones; `num_rows`
        is by default that of the plan.
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
            cascade_reads=self.cascade_reads * decode,
            output_lengths=tuple(length * n for n in self.output_lengths),
        )

    def with_cache(self, computed_tokens: float) -> "WorkTotals":
        """Return the totals if prompts are cached except for `computed_tokens` in all.

        No effect if `computed_tokens` exceeds the current ones.
        """
        left = min(1.0, computed_tokens / max(1.0, self.computed_tokens))
        return replace(
            self,
            computed_tokens=self.computed_tokens * left,
            pairs=self.pairs * left**2,
            past_pairs=self.past_pairs * left + 2 * self.pairs * left * (1 - left),
        )


def merge_work(parts: Sequence[WorkTotals]) -> WorkTotals:
    """Return the sum of the totals of all parts; at least one part."""
    sums = {
        field.name: sum(getattr(part, field.name) for part in parts)
        for field in fields(WorkTotals)
        if field.name != "output_lengths"
    }
    # every length represents an equal share of its part's rows
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
    """Sum the work of rows, given by arrays [R]. O(R log R).

    `cached_tokens` have KV from another row. `shared_tokens` are the leading ones that all rows of
    a group have, also of the row that computes them; they need `num_members`, the rows of the
    group of each row.
    """
    outputs = np.maximum(np.asarray(output_tokens, float), 1.0)
    none = np.zeros(len(prompt_tokens))
    prompts = prompt_tokens.astype(float)
    cached = none if cached_tokens is None else cached_tokens.astype(float)
    shared = none if shared_tokens is None else shared_tokens.astype(float)
    members = none + 1 if num_members is None else np.maximum(num_members, 1).astype(float)
    shared = np.where(members > 1, shared, 0.0)
    # the step that finishes the prompt samples the first token without further reads
    decodes = outputs - 1
    own = decodes * (prompts - shared) + decodes * (decodes + 1) / 2
    return WorkTotals(
        num_rows=len(prompts),
        computed_tokens=float((prompts - cached).sum()),
        **prompt_pairs(prompts - cached, cached),
        generated_tokens=float(outputs.sum()),
        context_reads=float(own.sum()),
        shared_pairs=float((decodes * shared).sum()),
        cascade_reads=float((decodes * shared / members).sum()),
        output_lengths=output_sample(outputs),
    )


def output_sample(output_tokens: Floats, size: int = _SAMPLE_SIZE) -> tuple[float, ...]:
    """Return at most `size` lengths, ascending, each the mean of an equal share of the rows."""
    if not len(output_tokens):
        return ()
    ordered = np.sort(output_tokens)
    size = min(size, len(ordered))
    sums = np.concatenate(([0.0], np.cumsum(ordered)))
    # boundaries between shares may fall inside a row
    borders = np.interp(np.linspace(0, len(ordered), size + 1), np.arange(len(sums)), sums)
    return tuple((np.diff(borders) * size / len(ordered)).tolist())
