"""One part of a set that is divided evenly, in place of the average over all parts."""

import numpy as np

from raybatch.errors import ConfigError
from raybatch.records.arrays import Ints


def even_part(lengths: Ints, num_parts: int) -> Ints:
    """Return one of so many even parts: of the sorted values every n-th, from the n/2-th on.

    Of fewer values than parts it has one if they are more than half as many, and none otherwise.

    Example:
        >>> even_part(np.array([5, 1, 4, 2, 3, 6]), 3).tolist()
        [2, 5]

    Source: CascadeInfer, section 4.2.
    """
    if num_parts < 1:
        raise ConfigError(f"a set is divided into {num_parts} parts; it must be at least 1")
    return np.sort(lengths)[num_parts // 2 :: num_parts]
