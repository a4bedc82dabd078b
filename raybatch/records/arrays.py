"""Names of NumPy arrays of one dimension by what they hold."""

from typing import TypeVar

import numpy as np
import numpy.typing as npt

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]
Uint64s = npt.NDArray[np.uint64]
Number = TypeVar("Number", np.int64, np.float64)
