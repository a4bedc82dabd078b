"""Lengths of rows, summed so that what they do within any range of lengths is a difference.

A sequence grows from its prompt to its final length and makes each token at the length that it then
has. It is charged in every range it passes through, for what it does there. CascadeInfer's program
(section 4.2) charges a request whole, where it ends.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from raybatch.errors import ConfigError
from raybatch.records.arrays import Floats, Ints
from raybatch_lab.stages.heterogeneity import variation


@dataclass(frozen=True, kw_only=True, slots=True)
class RangeWork:
    """Work of rows while their lengths are within ranges; arrays have one entry per range."""

    tokens: Floats  # decoded
    contexts: Floats  # KV tokens that these attend to
    square_contexts: Floats  # the same, each squared
    starts: Floats  # rows whose prompt ends in the range
    prompt_tokens: Floats  # of these
    prompt_pairs: Floats  # of these: tokens times those that each attends to

    @classmethod
    def of_sums(cls, sums: Floats) -> Self:
        """Return the work of `sums`, [6, ...], whose first axis is in the order of the fields."""
        tokens, contexts, square_contexts, starts, prompt_tokens, prompt_pairs = sums
        return cls(
            tokens=tokens,
            contexts=contexts,
            square_contexts=square_contexts,
            starts=starts,
            prompt_tokens=prompt_tokens,
            prompt_pairs=prompt_pairs,
        )

    @property
    def mean_len(self) -> Floats:
        """Return the mean length of the sequences in a batch; 0 where nothing is decoded."""
        return np.divide(
            self.contexts, self.tokens, out=np.zeros_like(self.contexts), where=self.tokens > 0
        )

    @property
    def variation(self) -> Floats:
        """Return the coefficient of variation of lengths in a batch of rows at random progress."""
        return variation(self.tokens, self.contexts, self.square_contexts)


class RowLengths:
    """Prompt and final lengths of the N rows of a job, with fast sums over ranges of lengths.

    Args:
        prompt_lens: prompt tokens, [N], at least 1; not copied.
        output_lens: expected output tokens, [N], at least 1.

    Raises:
        ConfigError: there are no rows, or a length is below 1.
    """

    def __init__(self, prompt_lens: Ints, output_lens: Ints) -> None:
        if not len(prompt_lens) or len(prompt_lens) != len(output_lens):
            raise ConfigError(
                f"got {len(prompt_lens)} prompt lengths and {len(output_lens)} output lengths; "
                "the numbers must be equal, and at least 1"
            )
        for name, lens in (("prompt", prompt_lens), ("output", output_lens)):
            if lens.min() < 1:
                raise ConfigError(f"{name} lengths must be at least 1 token, got {lens.min()}")
        self.prompt_lens = np.asarray(prompt_lens, np.int64)
        self.final_lens = self.prompt_lens + np.asarray(output_lens, np.int64)
        self._prompts, self._finals = np.sort(self.prompt_lens), np.sort(self.final_lens)
        self._prompt_sums, self._final_sums = _running(self._prompts), _running(self._finals)

    def __len__(self) -> int:
        return len(self.prompt_lens)

    @property
    def longest(self) -> int:
        return int(self._finals[-1])

    def below(self, bounds: npt.ArrayLike) -> Floats:
        """Return the work of all rows while their lengths are at most `bounds`, [6, ...].

        The first axis is in the order of the fields of `RangeWork`. The work in the range
        (low, high] is `below(high) - below(low)`. O(log N) for each bound.
        """
        bounds = np.asarray(bounds, float)
        ended = _clipped(self._finals, self._final_sums, bounds)
        begun = _clipped(self._prompts, self._prompt_sums, bounds)
        started = np.searchsorted(self._prompts, bounds, side="right")
        # from sums of x, x^2 and x^3 to those of 1, x and x^2 over 1..x
        per_step = _over_steps(ended) - _over_steps(begun)
        prompts = self._prompt_sums[:, started]
        pairs = (prompts[1] + prompts[0]) / 2
        return np.stack([*per_step, started.astype(float), prompts[0], pairs])

    def crossing(self, bounds: npt.ArrayLike) -> Floats:
        """Return the number of rows that grow past each of `bounds`, and so move on there."""
        bounds = np.asarray(bounds, float)
        begun = np.searchsorted(self._prompts, bounds, side="right")
        ended = np.searchsorted(self._finals, bounds, side="right")
        return (begun - ended).astype(float)


def _powers(values: Floats) -> Floats:
    return np.stack([values, values**2, values**3])


def _running(ascending: Ints) -> Floats:
    """Return [3, N + 1]: sums of the first values, of their squares and cubes."""
    return np.pad(np.cumsum(_powers(ascending.astype(float)), axis=1), ((0, 0), (1, 0)))


def _clipped(ascending: Ints, sums: Floats, bounds: Floats) -> Floats:
    """Return [3, ...]: sums of min(value, bound), of its square and its cube."""
    place = np.searchsorted(ascending, bounds, side="right")
    clipped: Floats = sums[:, place] + (len(ascending) - place) * _powers(bounds)
    return clipped


def _over_steps(powers: Floats) -> Floats:
    """Return sums of 1, of the length and of its square, over all lengths from 1 to x."""
    first, second, third = powers
    return np.stack([first, (second + first) / 2, (2 * third + 3 * second + first) / 6])
