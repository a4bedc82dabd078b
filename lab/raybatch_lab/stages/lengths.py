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
    """What rows do within ranges of lengths; the arrays have one shape, one entry per range."""

    tokens: Floats  # decoded
    contexts: Floats  # KV tokens that these attend to
    square_contexts: Floats  # the same, each squared
    starts: Floats  # rows whose prompt ends in the range
    prompt_tokens: Floats  # of these
    prompt_pairs: Floats  # of these: tokens times those that each attends to

    @classmethod
    def of_sums(cls, sums: Floats) -> Self:
        """Return work of sums in the order of the fields, [6, ...]."""
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
        """Return the coefficient of variation of lengths in a batch, rows at any progress."""
        return variation(self.tokens, self.contexts, self.square_contexts)


class RowLengths:
    """Prompt and final lengths of rows, and sums over both in ascending order.

    Args:
        prompt_lens: tokens, [N], at least 1; read only.
        output_lens: expected tokens, [N], at least 1; read only.

    Raises:
        ConfigError: there are no rows, or a length is below 1.
    """

    def __init__(self, prompt_lens: Ints, output_lens: Ints) -> None:
        if not len(prompt_lens) or len(prompt_lens) != len(output_lens):
            raise ConfigError(
                f"there are {len(prompt_lens)} lengths of prompts and {len(output_lens)} of "
                "outputs; they must be as many, and at least one"
            )
        for name, lens in (("prompt", prompt_lens), ("output", output_lens)):
            if lens.min() < 1:
                raise ConfigError(f"an {name} has {lens.min()} tokens; it must have at least 1")
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
        """Return sums of what is done at lengths of at most `bounds`, [6, ...]; O(log N) for each.

        What is done in (low, high] is `below(high) - below(low)`, in the order of `RangeWork`.
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
        """Return how many rows decode at lengths of `bounds` and beyond: those that move there."""
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
