"""What unlike lengths cost an engine: steps of as many KV tokens, of rows more and less alike.

Any backend will do, as only its steps are timed. Of a step, the part beyond that of short rows
counts as attention.
"""

import statistics
from collections.abc import Callable

import numpy as np

from raybatch.backends.base import Backend
from raybatch.backends.cost_cache import MIN_VOCAB_SIZE
from raybatch.errors import MeasureError
from raybatch.policy.cost.cost_model import EngineLimits
from raybatch.records.arrays import Ints
from raybatch.records.types import Request, Sampling
from raybatch_lab.stages.heterogeneity import MixCurve

# standard deviations over means
_VARIATIONS = (0.0, 0.5, 1.0, 1.5)
# rows of a batch, their mean length at most, and that of the longest beside it
_NUM_ROWS, _MAX_MEAN, _LONGEST = 16, 512, 6.0
_SHORT_LEN, _NUM_STEPS = 8, 8


def measure_curve(
    backend: Backend, limits: EngineLimits, clock: Callable[[], float], *, num_rounds: int = 3
) -> MixCurve:
    """Measure how much longer attention takes for a batch of unequal lengths than of equal ones.

    Batches of different mixes take turns, so that other load on the host disturbs all alike. The
    backend must be idle, and is idle afterwards. Raises MeasureError if the backend is too small,
    or a step of long rows takes no longer than one of short rows.
    """
    max_len = backend.capacity().max_model_len
    num_rows = min(_NUM_ROWS, limits.max_num_seqs)
    mean = min(
        _MAX_MEAN, int(max_len / _LONGEST) - 2 * _NUM_STEPS, limits.kv_tokens // 4 // num_rows
    )
    if mean <= 2 * _SHORT_LEN or num_rows < 2:
        raise MeasureError(f"an engine with {limits} is too small for rows of unequal lengths")
    mixes = [np.full(num_rows, _SHORT_LEN)]
    mixes += [lengths_of(num_rows, mean, variation) for variation in _VARIATIONS]
    steps = _Steps(backend, limits, clock)
    seconds: list[list[float]] = [[] for _ in mixes]
    for number in range(num_rounds + 1):
        for lengths, own in zip(mixes, seconds, strict=True):
            taken = steps.decode(lengths)
            # memory is used for the first time in the first round
            if number:
                own.append(taken)
    short_s, *others = [statistics.median(own) for own in seconds]
    attention = [each - short_s for each in others]
    if min(attention) <= 0:
        raise MeasureError(
            "decode steps of long rows take no longer than those of short rows, so the time of "
            "attention cannot be measured"
        )
    found = [float(lengths.std() / lengths.mean()) for lengths in mixes[1:]]
    return MixCurve.of_seconds(found, attention)


def lengths_of(num_rows: int, mean: int, variation: float) -> Ints:
    """Return whole lengths of exactly this mean, from a log-normal distribution, [num_rows].

    `variation` is the coefficient of variation of the distribution.
    """
    sigma = np.sqrt(np.log1p(variation**2))
    normal = statistics.NormalDist()
    places = [normal.inv_cdf((i + 0.5) / num_rows) for i in range(num_rows)]
    drawn = np.exp(sigma * np.array(places))
    lengths: Ints = np.maximum(1, np.round(drawn * mean / drawn.mean())).astype(np.int64)
    # rounding is given to the longest row
    lengths[-1] += num_rows * mean - lengths.sum()
    return np.random.default_rng(0).permutation(lengths)


class _Steps:
    """Measures steps of an engine, one batch after the other."""

    def __init__(self, backend: Backend, limits: EngineLimits, clock: Callable[[], float]) -> None:
        self._backend, self._clock = backend, clock
        self._budget = limits.max_batched_tokens or limits.kv_tokens
        self._random, self._next_id = np.random.default_rng(2), 0

    def decode(self, lengths: Ints) -> float:
        """Return the median seconds of a step that decodes one token for a row of each length."""
        # rows that have their prompts decode while those of others are computed
        max_tokens = -(-int(lengths.sum()) // self._budget) + len(lengths) + 2 * _NUM_STEPS
        requests = [self._request(length, max_tokens) for length in lengths.tolist()]
        self._backend.submit(requests)
        seconds: list[float] = []
        num_full = 0
        while len(seconds) < _NUM_STEPS and self._backend.num_unfinished():
            before, began = self._backend.stats().generated_tokens, self._clock()
            failed = [done.error for done in self._backend.poll() if done.error]
            taken = self._clock() - began
            if failed:
                raise MeasureError(f"the backend failed a measured prompt: {failed[0]}")
            # the first step in which every row gets a token still computes prompts
            is_full = self._backend.stats().generated_tokens - before == len(lengths)
            num_full += is_full
            if is_full and num_full > 1:
                seconds.append(taken)
        self._backend.abort([request.request_id for request in requests])
        if not seconds:
            raise MeasureError(
                "the engine never decoded all rows of a batch in the same step, so its speed is "
                "unknown; measure fewer rows, or longer outputs"
            )
        return statistics.median(seconds)

    def _request(self, length: int, max_tokens: int) -> Request:
        self._next_id += 1
        ids = self._random.integers(0, MIN_VOCAB_SIZE, length).astype(np.int32)
        return Request(
            request_id=self._next_id,
            row_id=f"unlike-{self._next_id}",
            prompt_token_ids=ids,
            sampling=Sampling(max_tokens=max_tokens, ignore_eos=True),
        )
