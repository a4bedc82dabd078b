"""Bounds between stages that follow the lengths that are running."""

from collections.abc import Sequence

import numpy as np

from raybatch.errors import ConfigError
from raybatch.records.arrays import Floats, Ints
from raybatch_lab.stages.heterogeneity import MixCurve
from raybatch_lab.stages.quality import StepQuality, decode_seconds

# the weight of what is found; what was found before has the rest
_SMOOTHING = 0.2
# of fewer rows one that ends changes everything
_MIN_ROWS = 5


def refine_bounds(
    bounds: Floats,
    running: Sequence[Sequence[Ints]],
    quality: StepQuality,
    curve: MixCurve,
    *,
    smoothing: float = _SMOOTHING,
) -> Floats:
    """Return the bounds of stages after a look at the sequences that are running.

    At each bound a replica of the stage before meets one of the stage after, both with an average
    part of their stage's rows, and the bound goes towards where both take equally long. It stays
    where the two have fewer than five rows. Bounds stay in ascending order.

    Args:
        bounds: ascending, [stages - 1]; those of the plan at first.
        running: lengths of the rows of each replica, by stages; O(rows log rows).
        smoothing: weight of the bound found, within 0..1.

    Source: CascadeInfer, section 4.3.
    """
    parts = [even_part(np.concatenate(stage), len(stage)) for stage in running]
    refined = bounds.copy()
    for i, bound in enumerate(bounds):
        rows = np.sort(np.concatenate([parts[i], parts[i + 1]]))
        if len(rows) >= _MIN_ROWS:
            found = float(rows[best_split(rows, quality, curve)])
            refined[i] = bound + smoothing * (found - bound)
        # by a token at least, so that each stage has a range
        refined[i] = max(refined[i], (refined[i - 1] if i else 0.0) + 1.0)
    return refined


def best_split(lengths: Ints, quality: StepQuality, curve: MixCurve) -> int:
    """Return i such that iterations of `lengths[:i]` and of `lengths[i:]` take the least time.

    Both run at once, so the longer one counts; the paper adds them up, as it weighs latency.

    Args:
        lengths: ascending, [N].
    """
    first = np.stack([np.arange(len(lengths) + 1.0), *_running(lengths)])[:, :-1]
    rest = np.array([len(lengths), lengths.sum(), (lengths.astype(float) ** 2).sum()])
    slower = np.maximum(
        decode_seconds(first, quality, curve), decode_seconds(rest[:, None] - first, quality, curve)
    )
    return int(slower.argmin())


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


def _running(lengths: Ints) -> Floats:
    values = lengths.astype(float)
    return np.pad(np.cumsum(np.stack([values, values**2]), axis=1), ((0, 0), (1, 0)))
