"""How many tokens steps of a slow device have: of a few seconds, where that costs nothing.

What a run tells of itself, a cancel, a row that comes or moves: all of it waits for the end of a
step. So steps grow while they are short, and beyond that only where larger ones are measured to
compute more tokens a second. A model of 180 million weights has steps of 3.8 s for 7.8 on one core,
and takes 0.98 of the CPU time (`benchmarks/step_size.py`, 2026-11-28).
"""

# steps that would take no longer may double without a question
MAX_STEP_S = 4.0
# of tokens a second, that a longer step is worth
_LEAST_GAIN = 0.02
# steps that are as full as this tell the speed of their size
_FULL = 0.9
_FULL_STEPS = 2


class StepSize:
    """The most tokens of the next step, from `first` up to `most`."""

    def __init__(self, first: int, most: int) -> None:
        self.tokens = min(first, most)
        self._most = most
        self._is_settled = False
        # of full steps of this size: how many, and tokens a second
        self._num_full, self._rate = 0, 0.0
        # the size that this one is to beat, and its rate; None where it need not
        self._beside: tuple[int, float] | None = None

    def note(self, num_tokens: int, seconds: float) -> None:
        """Learn from a step that computed prompts."""
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
