"""Learns from ended outputs how much host memory to reserve for the output of a sequence."""

import math

from raybatch.errors import ConfigError

_WEIGHT = 0.1
_SAFETY = 1.5


class AdaptiveHostChunk:
    """Learns for how many tokens to reserve host pages when a sequence is prefilled.

    `observe` ended outputs and read `tokens`: an exponential average of the lengths of ended
    outputs (weight 0.1 for the newest), times 1.5, within bounds and rounded up to whole pages.

    Args:
        page_tokens: tokens of one page.
        first_tokens: tokens reserved until `min_observed` outputs have ended.
        min_tokens: fewest tokens reserved once the average counts.
        max_tokens: most tokens reserved once the average counts.
        min_observed: outputs that have to end before their average counts.

    Raises:
        ConfigError: a count is below 1, or `min_tokens` is above `max_tokens`.

    Example:
        >>> chunk = AdaptiveHostChunk(min_observed=1, min_tokens=64)
        >>> chunk.tokens
        8192
        >>> chunk.observe(100)
        >>> chunk.tokens
        192

    Source:
        BatchGen's released code, except that the first length starts the average.
    """

    def __init__(
        self,
        *,
        page_tokens: int = 64,
        first_tokens: int = 8192,
        min_tokens: int = 1024,
        max_tokens: int = 65536,
        min_observed: int = 10,
    ) -> None:
        counts = {
            "page_tokens": page_tokens,
            "first_tokens": first_tokens,
            "min_tokens": min_tokens,
            "min_observed": min_observed,
        }
        for name, value in counts.items():
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        if max_tokens < min_tokens:
            raise ConfigError(f"max_tokens={max_tokens} is below min_tokens={min_tokens}")
        self._page_tokens, self._first_tokens = page_tokens, first_tokens
        self._min_tokens, self._max_tokens = min_tokens, max_tokens
        self._min_observed = min_observed
        self._num_observed = 0
        self._average = 0.0

    def observe(self, output_tokens: int) -> None:
        """Count the length of an output that has ended."""
        self._num_observed += 1
        if self._num_observed == 1:
            self._average = float(output_tokens)
        self._average += _WEIGHT * (output_tokens - self._average)

    @property
    def tokens(self) -> int:
        """Tokens to reserve pages for."""
        if self._num_observed < self._min_observed:
            wanted = self._first_tokens
        else:
            wanted = math.ceil(self._average * _SAFETY)
            wanted = min(max(wanted, self._min_tokens), self._max_tokens)
        return -(-wanted // self._page_tokens) * self._page_tokens
