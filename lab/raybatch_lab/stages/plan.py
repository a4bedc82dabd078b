"""Stages: ranges of lengths with the replicas for each; those that end first; who runs where."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from raybatch.errors import ConfigError
from raybatch.records.arrays import Bools, Floats, Ints
from raybatch_lab.stages.lengths import RowLengths
from raybatch_lab.stages.replica_seconds import StagePool, stage_seconds

# of the average of its stage, from which on a replica sends rows to others of it
_OVERLOAD = 1.25
# lengths that a plan of several stages may cut at
_NUM_CUTS = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """Replicas for sequences of more than `above` tokens and at most `up_to`."""

    above: int
    up_to: int
    num_replicas: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePlan:
    """The stages of a pool by ascending lengths; replicas are numbered from the first stage on.

    Args:
        seconds: forecast seconds of the slowest stage.
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
            raise ConfigError("a stage has no replica; every stage must have at least 1")

    @property
    def bounds(self) -> tuple[int, ...]:
        """Return the lengths between stages, ascending: the `up_to` of each stage but the last."""
        return tuple(stage.up_to for stage in self.stages[:-1])

    @property
    def stage_of_replica(self) -> Ints:
        """Return the stage of each replica, [E]."""
        counts = [stage.num_replicas for stage in self.stages]
        return np.repeat(np.arange(len(counts)), counts)


def length_cuts(longest: int) -> Ints:
    """Return 0 and the powers of two up to the first one that is at least `longest`.

    Example:
        >>> length_cuts(5).tolist()
        [0, 1, 2, 4, 8]
    """
    return np.array([0, *(2**i for i in range((longest - 1).bit_length() + 1))])


def plan_exactly(pool: StagePool, lengths: RowLengths, cuts: Ints | None = None) -> StagePlan:
    """Return the plan, of any number of stages, whose slowest stage takes the least time.

    Of equal plans one with few stages is taken. A plan of one stage is among them, so the result
    is never worse than no stages.

    Dynamic programming: the least makespan S(b, e) of lengths up to cut b on e replicas is the
    minimum of max(S(a, e - d), seconds of (a, b] on d replicas) over all cuts a < b and numbers d
    of replicas. O(E^2 K^2) for E replicas and K cuts, with arrays of [K, E, E].

    Args:
        cuts: lengths at which stages may end: ascending from 0, the last at least the longest
            row; powers of two by default.

    Source: CascadeInfer, section 4.2. It minimises the sum of latencies, while a job waits for its
    slowest stage; so S does not depend on the number of stages.
    """
    cuts = length_cuts(lengths.longest) if cuts is None else cuts
    num_replicas, num_cuts = pool.num_replicas, len(cuts)
    used, given = np.arange(num_replicas + 1)[:, None], np.arange(1, num_replicas + 1)
    others = used - given
    # from one cut to a later one on 1 to E replicas
    stage_s = stage_seconds(pool, lengths, cuts[:, None, None], cuts[None, :, None], given)
    # [cut, replicas]; only 0 replicas make nothing of nothing
    least = np.full((num_cuts, num_replicas + 1), np.inf)
    least[0, 0] = 0.0
    before = np.zeros((num_cuts, num_replicas + 1, 2), np.int64)
    for b in range(1, num_cuts):
        least[b], before[b] = _best_before(least[:b], stage_s[:b, b], others)
    stages: list[Stage] = []
    b, left = num_cuts - 1, num_replicas
    while b:
        a, fewer = before[b, left].tolist()
        stages.append(Stage(above=int(cuts[a]), up_to=int(cuts[b]), num_replicas=fewer + 1))
        b, left = a, left - fewer - 1
    return StagePlan(stages=tuple(reversed(stages)), seconds=float(least[-1, num_replicas]))


def plan_stages(pool: StagePool, lengths: RowLengths, num_stages: int) -> StagePlan:
    """Return the best plan of exactly `num_stages` stages, even if they do not pay.

    Stages may end at quantiles of the prompt and final lengths. A stage may get no rows.

    Raises:
        ConfigError: there are fewer replicas than stages.
    """
    if not 1 <= num_stages <= pool.num_replicas:
        raise ConfigError(
            f"cannot plan {num_stages} stages for {pool.num_replicas} replicas; the number of "
            "stages must be from 1 to the number of replicas"
        )
    cuts = _even_cuts(lengths, num_stages)
    num_replicas, num_cuts = pool.num_replicas, len(cuts)
    given = np.arange(1, num_replicas + 1)
    others = np.arange(num_replicas + 1)[:, None] - given
    stage_s = stage_seconds(pool, lengths, cuts[:, None, None], cuts[None, :, None], given)
    least = np.full((num_cuts, num_replicas + 1), np.inf)
    least[0, 0] = 0.0
    choices = []
    for _ in range(num_stages):
        earlier, least = least, np.full_like(least, np.inf)
        before = np.zeros((num_cuts, num_replicas + 1, 2), np.int64)
        for b in range(1, num_cuts):
            least[b], before[b] = _best_before(earlier[:b], stage_s[:b, b], others)
        choices.append(before)
    stages: list[Stage] = []
    b, left = num_cuts - 1, num_replicas
    for before in reversed(choices):
        a, fewer = before[b, left].tolist()
        stages.append(Stage(above=int(cuts[a]), up_to=int(cuts[b]), num_replicas=fewer + 1))
        b, left = a, left - fewer - 1
    return StagePlan(stages=tuple(reversed(stages)), seconds=float(least[-1, num_replicas]))


def _best_before(least: Floats, stage_s: Floats, others: Ints) -> tuple[Floats, Ints]:
    """Return the least makespans up to a cut, [E + 1], and by which earlier cut, [E + 1, 2].

    Args:
        least: up to each earlier cut, by number of replicas, [b, E + 1].
        stage_s: from each earlier cut to this one on 1 to E replicas, [b, E].
        others: replicas that are left for the earlier cuts, [E + 1, E]; below 0 where none are.
    """
    earlier = np.where(others >= 0, least[:, np.maximum(others, 0)], np.inf)
    # [cut a, replicas up to b, replicas of (a, b]]
    slowest = np.maximum(earlier, stage_s[:, None, :])
    flat = slowest.transpose(1, 0, 2).reshape(len(others), -1)
    best = flat.argmin(axis=1)
    before = np.stack(np.divmod(best, others.shape[1]), axis=1)
    return flat[np.arange(len(others)), best], before


def _even_cuts(lengths: RowLengths, num_stages: int) -> Ints:
    """Return 0 and ascending lengths for `num_stages` stages, the last that of the longest."""
    shares = np.linspace(0.0, 1.0, _NUM_CUTS + 1)
    both = np.concatenate([lengths.prompt_lens, lengths.final_lens])
    least = np.arange(1, num_stages + 1)
    cuts = np.unique(np.concatenate([np.quantile(both, shares).astype(np.int64), least]))
    return np.append(0, cuts[cuts <= max(lengths.longest, num_stages)])


def stage_for(bounds: npt.ArrayLike, lengths: Ints) -> Ints:
    """Return the stage of each sequence by its length, [N]; for sequences that do not run yet.

    Args:
        bounds: lengths between stages, ascending; each is the last length of its stage.
        lengths: current tokens, [N].

    Source: CascadeInfer, section 3.2.
    """
    return np.searchsorted(np.asarray(bounds, float), lengths, side="left")


def next_stage(bounds: npt.ArrayLike, lengths: Ints, stages: Ints) -> Ints:
    """Return the stage in which each running sequence should continue, never an earlier one, [N].

    `stages` has the current stage of each. See `stage_for` for the other arguments.
    """
    return np.maximum(stages, stage_for(bounds, lengths))


def is_overloaded(loads: Floats) -> Bools:
    """Return which replicas of a stage hold at least a quarter more than the stage's average, [E].

    Args:
        loads: KV tokens of the rows of each replica of the stage, [E].

    Source: CascadeInfer, section 4.4.
    """
    if not loads.sum() > 0:
        return np.zeros(len(loads), bool)
    return np.asarray(loads >= _OVERLOAD * loads.mean())
