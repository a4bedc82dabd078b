"""Limits the tokens of a step on slow devices to a few seconds, if that costs no throughput.

Progress reports, cancels, new rows and migrations wait for the end of a step. So steps grow while
they are short, and beyond that only if larger ones are measured to have more tokens per second. For
a model of 180 million weights on one core, steps take 3.8 s instead of 7.8 s, with 0.98 of the CPU
time (`benchmarks/step_size.py`, 2026-11-28).
"""

# steps forecast to be shorter may double without further checks
MAX_STEP_S = 4.0
# minimum gain in tokens per second for a longer step
_LEAST_GAIN = 0.02
# steps filled at least this much count for the rate of their size
_FULL = 0.9
_FULL_STEPS = 2


class StepSize:
    """Controls the token limit of steps, `tokens`: it grows from `first` up to `most`."""

    def __init__(self, first: int, most: int) -> None:
        self.tokens = min(first, most)
        self._most = most
        self._is_settled = False
        # full steps of this size: number, and tokens per second
        self._num_full, self._rate = 0, 0.0
        # size to compare with, and its rate; None if no comparison is needed
        self._beside: tuple[int, float] | None = None

    def note(self, num_tokens: int, seconds: float) -> None:
        """Note a step that computed prompts: its tokens and seconds; it may change the limit."""
        if self._is_settled or num_tokens < _FULL * self.tokens or seconds <= 0:
            return
        self._num_full += 1
        self._rate = max(self._rate, num_tokens / seconds)
        if self._beside is not None:
            tokens, rate = self._beside
            if self._rate < (1 + _LEAST_GAIN) * rate:
                self.tokens, self._is_settled = tokens, True
                return
            self._beside = None
        self._is_settled = self.tokens == self._most
        is_short = 2 * seconds <= MAX_STEP_S
        if self._is_settled or not (is_short or self._num_full >= _FULL_STEPS):
            return
        self._beside = None if is_short else (self.tokens, self._rate)
        self._num_full, self._rate = 0, 0.0
        self.tokens = min(2 * self.tokens, self._most)
