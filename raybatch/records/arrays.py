"""Names of NumPy arrays of one dimension by what they hold, and the mixing of 64-bit words."""

from typing import TypeVar

import numpy as np
import numpy.typing as npt

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]
Uint64s = npt.NDArray[np.uint64]
Number = TypeVar("Number", np.int64, np.float64)

# odd, and its multiples spread evenly over 64 bits
GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix64(words: Uint64s) -> Uint64s:
    """Mix 64-bit words bijectively, so that regular inputs give uniform outputs.

    For random numbers, block keys and row seeds.

    Source: the finalizer of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number
    generators, 2014).
    """
    mixed = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
