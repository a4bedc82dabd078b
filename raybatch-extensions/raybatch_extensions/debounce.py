"""Confirms decisions that are costly to take back."""

from collections.abc import Hashable

# consecutive boundaries that must want the same
_NUM_BOUNDARIES = 2


class Debounce:
    """Confirms a decision only if it is wanted at consecutive boundaries (times of decision)."""

    def __init__(self) -> None:
        self._wanted: Hashable = None
        self._place, self._num_yes = -1, 0

    def update(self, wanted: Hashable, place: int) -> bool:
        """Return whether enough boundaries in a row wanted `wanted`; a false value wants nothing.

        Args:
            place: number of the boundary, such as that of a measurement; each counts once.
        """
        if not wanted or wanted != self._wanted:
            self._num_yes = 0
        if wanted and (place > self._place or not self._num_yes):
            self._num_yes += 1
        self._wanted, self._place = wanted, place
        return self._num_yes >= _NUM_BOUNDARIES
