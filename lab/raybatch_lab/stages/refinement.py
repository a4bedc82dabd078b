"""Bounds between stages that follow the lengths that are running."""

from collections.abc import Sequence

import numpy as np

from raybatch.errors import ConfigError
from raybatch.records.arrays import Floats, Ints
from raybatch_lab.stages.heterogeneity import MixCurve
from raybatch_lab.stages.quality import StepQuality, decode_seconds

# the weight of the newest estimate; the earlier one has the rest
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
    """Return the bounds of stages, moved towards a balance of the currently running sequences.

    Each bound moves towards the length at which an average replica of the stage before it and one
    of the stage after it would take equally long. It stays if the two have fewer than five rows.
    Bounds stay in ascending order. O(rows log rows).

    Args:
        bounds: lengths between stages, ascending, [stages - 1].
        running: lengths of the running rows of each replica, `running[stage][replica]`.
        smoothing: weight of the newly found bound, 0 to 1; the current bound has the rest.

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
    """Return the index i at which to split lengths between two replicas, `[:i]` and `[i:]`.

    It minimises the seconds of the slower replica's step; the paper minimises the sum of both.

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
    """Return an even sample of about `1 / num_parts` of the lengths, ascending.

    It has every `num_parts`-th of the sorted lengths, from index `num_parts // 2` on. So it is
    empty if there are at most `num_parts // 2` lengths.

    Example:
        >>> even_part(np.array([5, 1, 4, 2, 3, 6]), 3).tolist()
        [2, 5]

    Source: CascadeInfer, section 4.2.
    """
    if num_parts < 1:
        raise ConfigError(f"num_parts of a sample must be at least 1, got {num_parts}")
    return np.sort(lengths)[num_parts // 2 :: num_parts]


def _running(lengths: Ints) -> Floats:
    values = lengths.astype(float)
    return np.pad(np.cumsum(np.stack([values, values**2]), axis=1), ((0, 0), (1, 0)))
