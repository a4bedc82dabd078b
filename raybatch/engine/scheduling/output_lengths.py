"""How long a running output is likely to become, learned from those that have ended."""

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]
Float64s = npt.NDArray[np.float64]


class OutputLengths:
    """The distribution of output lengths, from outputs that ended and outputs still running.

    Those that end first are the short ones, so a mean over ended outputs would be far too low
    while the first ones end. A running output therefore counts as one that is longer than it is
    now (the product-limit estimate of survival analysis). What is longer than all that ended is
    taken to reach its upper bound.

    Args:
        size: ended outputs that are remembered.
    """

    def __init__(self, size: int = 512) -> None:
        self._ring: Int64s = np.zeros(size, np.int64)
        self._num_noted = 0
        self._ended: Int64s = np.zeros(0, np.int64)
        self._survival: Float64s = np.ones(1)
        self._tail: Float64s = np.zeros(1)

    @property
    def is_known(self) -> bool:
        """Whether more than half of the outputs are of a length that has been seen."""
        return float(self._survival[-1]) < 0.5

    def note(self, length: int) -> None:
        """Remember an output that ended by itself."""
        self._ring[self._num_noted % len(self._ring)] = length
        self._num_noted += 1

    def update(self, running: Int64s) -> None:
        """Estimate anew, with the tokens that running sequences have generated so far."""
        ended = np.sort(self._ring[: self._num_noted])
        num_longer = len(running) - np.searchsorted(np.sort(running), ended)
        num_at_risk = len(ended) - np.arange(len(ended)) + num_longer
        self._ended = ended
        self._survival = np.concatenate(([1.0], np.cumprod(1 - 1 / num_at_risk)))
        weighted = ended * -np.diff(self._survival)
        self._tail = np.append(np.cumsum(weighted[::-1])[::-1], 0.0)

    def expect(self, num_generated: Int64s, max_generated: Int64s) -> Float64s:
        """Return the mean final length of outputs that have come to `num_generated` tokens."""
        first = np.searchsorted(self._ended, num_generated, side="right")
        alive = self._survival[first]
        total = self._tail[first] + self._survival[-1] * max_generated
        mean = np.divide(total, alive, out=max_generated.astype(np.float64), where=alive > 0)
        bounded: Float64s = np.minimum(mean, max_generated)
        return bounded
