"""How many different block keys there were among any number of them, in bounded memory."""

import numpy as np
import numpy.typing as npt

from raybatch.prefix.block_keys import BlockKeys

_ALL = 1 << 64
_MAX_KEYS = 1 << 16

Uint64s = npt.NDArray[np.uint64]


class DistinctKeys:
    """Estimates what one plan over all rows would compute.

    Keys are uniform, so those below a limit are a fair sample of the distinct ones. The limit is
    halved when the sample grows too large. Up to `max_keys` distinct keys are counted exactly;
    beyond that the standard error is at most sqrt(2 / max_keys), 0.6 % as it stands.

    Source: adaptive sampling (Wegman; Flajolet, On adaptive sampling, 1990).
    """

    def __init__(self, max_keys: int = _MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._limit = _ALL
        self._sample: Uint64s = np.empty(0, np.uint64)
        self._new: list[Uint64s] = []
        self._num_new = 0
        self._tail_tokens = 0
        self._block_size = 0

    def add(self, keys: BlockKeys) -> None:
        """Note rows; linear in their keys, apart from a sort now and then."""
        self._block_size = keys.block_size
        # a prompt always computes its last token
        tails = keys.num_tokens - keys.num_blocks * keys.block_size
        self._tail_tokens += int(np.maximum(tails, np.minimum(keys.num_tokens, 1)).sum())
        new = keys.keys if self._limit == _ALL else keys.keys[keys.keys < np.uint64(self._limit)]
        self._new.append(np.unique(new))
        self._num_new += len(self._new[-1])
        if self._num_new > self._max_keys // 4:
            self._merge()

    def num_distinct(self) -> float:
        self._merge()
        return len(self._sample) * (_ALL / self._limit)

    def computed_tokens(self) -> float:
        """Return the estimated prompt tokens to compute when every block is computed once."""
        return self.num_distinct() * self._block_size + self._tail_tokens

    def _merge(self) -> None:
        self._sample = np.unique(np.concatenate([self._sample, *self._new]))
        self._new.clear()
        self._num_new = 0
        while len(self._sample) > self._max_keys:
            self._limit //= 2
            self._sample = self._sample[: np.searchsorted(self._sample, np.uint64(self._limit))]
