"""What sharing among the rows in flight has saved, beside what one plan over all rows would."""

from dataclasses import dataclass, field

from raybatch.prefix.block_keys import BlockKeys
from raybatch.prefix.distinct import DistinctKeys

# less is not worth a word, nor is a smaller change worth another one
_MIN_GAP = 0.01


@dataclass(slots=True)
class Sharing:
    """The prompts that one client has handed over without a plan, summed up in bounded memory."""

    _distinct: DistinctKeys = field(default_factory=DistinctKeys)
    _num_tokens: int = 0
    _told_tokens: int = 0
    _told: tuple[float, float] = (0.0, 0.0)

    def received(self, keys: BlockKeys) -> None:
        """Note rows that came in."""
        self._distinct.add(keys)
        self._num_tokens += int(keys.num_tokens.sum())

    def news(self, cached_tokens: int, num_tokens: int) -> str:
        """Return what to tell the user; "" without a gap, or when it was told before.

        It is told again when there are twice as many tokens and the shares are others.

        Args:
            cached_tokens: prompt tokens of the rows that are done whose KV was shared.
            num_tokens: prompt tokens of the rows that are done.
        """
        if not self._num_tokens or not num_tokens or num_tokens < 2 * self._told_tokens:
            return ""
        saved = cached_tokens / num_tokens
        possible = 1 - self._distinct.computed_tokens() / self._num_tokens
        change = max(abs(saved - self._told[0]), abs(possible - self._told[1]))
        if possible - saved < _MIN_GAP or change < _MIN_GAP:
            return ""
        self._told, self._told_tokens = (saved, possible), num_tokens
        return (
            f"row sharing in flight saved {saved:.0%} of {num_tokens} prompt tokens; one plan over "
            f"all rows would save up to {possible:.0%} (a raybatch.Job makes such a plan)"
        )
