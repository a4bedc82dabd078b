"""Where a sequence runs: in the earliest stage that covers its length; and when it leaves it."""

import numpy as np
import numpy.typing as npt

from raybatch.records.arrays import Bools, Floats, Ints

_OVERLOAD = 1.25


def stage_for(bounds: npt.ArrayLike, lengths: Ints) -> Ints:
    """Return the stage of each sequence that no replica runs.

    Args:
        bounds: ascending; the range of a stage ends with its bound, the last has none.
        lengths: tokens so far, [N].

    Source: CascadeInfer, section 3.2.
    """
    return np.searchsorted(np.asarray(bounds, float), lengths, side="left")


def next_stage(bounds: npt.ArrayLike, lengths: Ints, stages: Ints) -> Ints:
    """Return where sequences that run in `stages` go on; never an earlier stage.

    Bounds that were moved up after a sequence had outgrown them leave it where it is.
    """
    return np.maximum(stages, stage_for(bounds, lengths))


def is_overloaded(loads: Floats) -> Bools:
    """Return which replicas of one stage hold at least a quarter more than their average.

    Args:
        loads: KV tokens that the rows of each replica need, [E].

    Source: CascadeInfer, section 4.4.
    """
    if not loads.sum() > 0:
        return np.zeros(len(loads), bool)
    return np.asarray(loads >= _OVERLOAD * loads.mean())
