"""Cost model of one engine step, fitted to measured steps.

A step has a fixed time, another one if it computes prompts, a time for the tokens of its forward
batch, and times for sampled rows and attention. The time of tokens is piecewise linear between
knots: few tokens share the reads of the weights, and with experts each token reads more of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from raybatch.errors import ConfigError
from raybatch.policy.cost.roofline import solve_nonnegative
from raybatch.records.arrays import Floats, Ints

# batch sizes in tokens at which the slope may change
TOKEN_KNOTS = (4.0, 8.0, 16.0, 32.0, 64.0, 256.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineLimits:
    """Limits of one engine's batch; some backends have no token budget per step."""

    kv_tokens: int
    max_num_seqs: int
    block_size: int
    max_batched_tokens: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredStep:
    """Counts and measured seconds of one step."""

    seconds: float
    tokens: float  # of the forward batch: prompt tokens and one per decoding sequence
    rows: float  # sequences that got a token
    pairs: float = 0.0  # prompt tokens times the tokens of the same chunk that each attends to
    past_pairs: float = 0.0  # prompt tokens times the KV tokens before their chunk
    context_reads: float = 0.0  # KV tokens that only one decoding sequence reads
    shared_pairs: float = 0.0  # decoding sequences times KV tokens that they share with others
    cascade_reads: float = 0.0  # shared KV tokens, counted once for all that share them


# further costs, and the count that each multiplies
_COUNT_OF = {
    "row_s": "rows",
    "pair_s": "pairs",
    "past_pair_s": "past_pairs",
    "context_s": "context_reads",
    "shared_pair_s": "shared_pairs",
    "shared_read_s": "cascade_reads",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class CostModel:
    """Costs of a step in seconds, and the limits of the batch."""

    step_s: float  # fixed seconds per step
    knots: tuple[float, ...]  # tokens at which the slope changes, ascending
    # per token of the forward batch, one slope below each knot and one above the last
    token_s: tuple[float, ...]
    row_s: float  # per sampled token
    pair_s: float  # per prompt token and token of the same chunk that it attends to
    past_pair_s: float  # per prompt token and KV token before its chunk
    context_s: float  # per KV token that only one decoding sequence reads
    shared_pair_s: float  # per decoding sequence and shared KV token
    shared_read_s: float  # per shared KV token and step
    fit_error: float  # root mean square of the relative errors over the measured steps
    limits: EngineLimits
    # further fixed seconds of a step with prompts: their attention is separate
    prompt_step_s: float = 0.0
    start_s: float = 0.0  # start of an engine in a running process; 0 if not measured

    def __post_init__(self) -> None:
        if len(self.token_s) != len(self.knots) + 1:
            raise ConfigError(
                f"a cost model with {len(self.knots)} knots needs {len(self.knots) + 1} slopes "
                f"(token_s), got {len(self.token_s)}"
            )
        for cost in (*self._costs(), self.fit_error, self.start_s):
            if not 0 <= cost < float("inf"):
                raise ConfigError(f"costs of a cost model must be at least 0, got {cost}")

    def _costs(self) -> Floats:
        others = [getattr(self, name) for name in _COUNT_OF]
        return np.array([self.step_s, self.prompt_step_s, *self.token_s, *others])

    def tokens_s(self, tokens: npt.ArrayLike) -> Floats:
        """Return the seconds of forward batches by their tokens, without the fixed `step_s`."""
        seconds: Floats = _segments(np.asarray(tokens, float), self.knots) @ np.array(self.token_s)
        return seconds

    def counts_s(self, step: MeasuredStep) -> float:
        """Return the seconds that depend on the counts of a step other than its tokens."""
        counts = np.array([getattr(step, name) for name in _COUNT_OF.values()], float)
        return float(counts @ self._costs()[-len(counts) :])

    def predict(self, step: MeasuredStep) -> float:
        return float((_features([step], self.knots) @ self._costs())[0])


def fit(
    steps: Sequence[MeasuredStep], limits: EngineLimits, *, for_sums: bool = False
) -> CostModel:
    """Fit costs to measured steps, weighting the relative error of each equally.

    With `for_sums` the errors are weighted by the seconds of the steps, for a good total of a run.

    A knot without measurements before or beyond it is dropped. If no step had KV before a prompt
    chunk, attention to such KV is taken to cost as much as that to the chunk's own tokens.
    """
    if not steps:
        raise ConfigError("a cost model needs measured steps, got none")
    seconds = np.array([step.seconds for step in steps])
    if not (seconds > 0).all():
        raise ConfigError(f"seconds of a measured step must be above 0, got {seconds.min()}")
    # steps of prefix groups cannot determine slope and sharing costs at the same time
    sizes = {step.tokens for step in steps if not step.shared_pairs}
    measured = [0.0]
    for knot in TOKEN_KNOTS:
        if any(measured[-1] < size <= knot for size in sizes) and knot < max(sizes):
            measured.append(knot)
    knots = tuple(measured[1:])
    features = _features(steps, knots)
    weights = seconds ** (-0.5 if for_sums else -1.0)
    costs = solve_nonnegative(features * weights[:, None], seconds * weights)
    error = features @ costs / seconds - 1.0
    num_slopes = len(knots) + 1
    others = dict(zip(_COUNT_OF, costs[2 + num_slopes :].tolist(), strict=True))
    if not any(step.past_pairs for step in steps):
        others["past_pair_s"] = others["pair_s"]
    return CostModel(
        step_s=float(costs[0]),
        prompt_step_s=float(costs[1]),
        knots=knots,
        token_s=tuple(costs[2 : 2 + num_slopes].tolist()),
        **others,
        fit_error=float(np.sqrt(np.mean(error**2))),
        limits=limits,
    )


def prompt_pairs(lens: Floats | Ints, starts: npt.ArrayLike = 0) -> dict[str, float]:
    """Return `pairs` and `past_pairs` of a `MeasuredStep` that computes prompt chunks.

    Chunk i has `lens[i]` tokens and begins at token `starts[i]` of its prompt. Attention is causal:
    a token attends to half of its chunk on average.
    """
    lens = np.asarray(lens, float)
    return {
        "pairs": float((lens * (lens + 1) / 2).sum()),
        "past_pairs": float((lens * np.asarray(starts, float)).sum()),
    }


def _features(steps: Sequence[MeasuredStep], knots: tuple[float, ...]) -> Floats:
    tokens = np.array([step.tokens for step in steps], float)
    has_prompts = np.array([step.pairs + step.past_pairs > 0 for step in steps], float)
    others = np.array([[getattr(step, name) for name in _COUNT_OF.values()] for step in steps])
    return np.column_stack((np.ones(len(steps)), has_prompts, _segments(tokens, knots), others))


def _segments(tokens: Floats, knots: tuple[float, ...]) -> Floats:
    """Return [..., K + 1]: the number of tokens between neighbouring knots."""
    lower, upper = np.array((0.0, *knots)), np.array((*knots, np.inf))
    between: Floats = np.clip(tokens[..., None], lower, upper) - lower
    return between


def recompute_time(costs: CostModel, num_tokens: int) -> float:
    """Return the seconds to recompute the KV of `num_tokens`.

    They are counted as full steps of the engine's token budget.
    """
    budget = costs.limits.max_batched_tokens or num_tokens
    seconds = 0.0
    for start in range(0, num_tokens, max(budget, 1)):
        tokens = min(budget, num_tokens - start)
        pairs = prompt_pairs(np.array([tokens]), start)
        seconds += costs.predict(MeasuredStep(seconds=0.0, tokens=tokens, rows=0, **pairs))
    return seconds
