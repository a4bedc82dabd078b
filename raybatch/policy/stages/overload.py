"""When a replica has so much more than its stage that it gives rows to others of the stage."""

import numpy as np

from raybatch.records.arrays import Bools, Floats

_OVERLOAD = 1.25


def is_overloaded(loads: Floats) -> Bools:
    """Return which replicas of one stage hold at least a quarter more than their average.

    Args:
        loads: KV tokens that the rows of each replica need, [E].

    Source: CascadeInfer, section 4.4.
    """
    if not loads.sum() > 0:
        return np.zeros(len(loads), bool)
    return np.asarray(loads >= _OVERLOAD * loads.mean())
