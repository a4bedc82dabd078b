"""Stages: ranges of lengths, and the replicas that run sequences within each."""

from dataclasses import dataclass

import numpy as np

from raybatch.errors import ConfigError
from raybatch.records.arrays import Ints


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """Replicas for sequences of more than `above` tokens and at most `up_to`."""

    above: int
    up_to: int
    num_replicas: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePlan:
    """Stages by ascending lengths; replicas are numbered through all of them.

    Args:
        seconds: that the slowest stage takes, by the forecast.
    """

    stages: tuple[Stage, ...]
    seconds: float

    def __post_init__(self) -> None:
        bounds = [stage.above for stage in self.stages] + [self.stages[-1].up_to]
        joins = all(
            before.up_to == after.above
            for before, after in zip(self.stages, self.stages[1:], strict=False)
        )
        if not joins or sorted(set(bounds)) != bounds:
            raise ConfigError(f"stages have bounds of {bounds}; they must ascend without gaps")
        if min(stage.num_replicas for stage in self.stages) < 1:
            raise ConfigError("a stage has no replica; each must have at least 1")

    @property
    def bounds(self) -> tuple[int, ...]:
        """Return the lengths between stages, ascending; one fewer than stages."""
        return tuple(stage.up_to for stage in self.stages[:-1])

    @property
    def stage_of_replica(self) -> Ints:
        """Return the stage of each replica, [E]."""
        counts = [stage.num_replicas for stage in self.stages]
        return np.repeat(np.arange(len(counts)), counts)


def length_cuts(longest: int) -> Ints:
    """Return 0 and all powers of two up to the first that is no less than `longest`.

    Example:
        >>> length_cuts(5).tolist()
        [0, 1, 2, 4, 8]
    """
    return np.array([0, *(2**i for i in range((longest - 1).bit_length() + 1))])
