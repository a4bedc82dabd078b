"""Names of NumPy arrays of one dimension by what they hold."""

import numpy as np
import numpy.typing as npt

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Uint64s = npt.NDArray[np.uint64]
