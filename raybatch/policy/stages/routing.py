"""In which stage a sequence belongs: the earliest whose range covers its length."""

import numpy as np
import numpy.typing as npt

from raybatch.records.arrays import Ints


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
