"""Counter-based random numbers: a token's number depends on its sequence and position alone.

Nothing here has state, so preemption, migration and the make-up of a batch change no number.
"""

import numpy as np
import numpy.typing as npt

from raybatch.records.hashing import GOLDEN, mix64

Uint64s = npt.NDArray[np.uint64]

_MASK = (1 << 64) - 1


def sequence_key(seed: int, sample_idx: int) -> int:
    """Return the 64-bit key of one sample of one request."""
    words = np.array([seed & _MASK, sample_idx & _MASK], np.uint64)
    first = mix64(words[:1] + GOLDEN)
    return int(mix64(first ^ (words[1:] * GOLDEN + np.uint64(1)))[0])


def uniforms(keys: Uint64s, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return one number in [0, 1) with 53 random bits for each pair of key and position."""
    counters = (positions.astype(np.uint64) + np.uint64(1)) * GOLDEN
    bits = mix64(mix64(keys + counters)) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53
