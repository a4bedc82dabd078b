"""Autoscaling of a pool: when to start further replicas, and when to stop idle ones.

A further replica pays off if enough work is left once it has loaded. It also shrinks the batches of
the others, so beyond some number of replicas the pool does not finish sooner. An idle replica stays
for as long as a start takes: then keeping or stopping it costs at most twice the better choice.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from raybatch.policy.pool.throughput import StepSeconds

# start time before the first start was measured
USUAL_START_S = 60.0
# least idle time before a stop
LEAST_IDLE_S = 10.0
# least working time of a further replica, in start times
_WORK_PER_START = 1.0
# and its least saving, as a share of that of perfectly divisible work
_LEAST_SHARE = 0.5
# least forecast saving of all starts, as a share and in seconds
_LEAST_GAIN, _LEAST_S = 0.05, 1.0


class RemainingWork(NamedTuple):
    """Remaining work of all replicas together."""

    num_rows: float
    prompt_tokens: float
    output_tokens: float
    longest: float
    """Remaining tokens of the longest running row."""

    def times(self, factor: float) -> "RemainingWork":
        """Return the work of `factor` times as many rows; the longest one stays the same."""
        num_rows, prompt, output = (factor * part for part in self[:3])
        return RemainingWork(num_rows, prompt, output, self.longest)


@dataclass(frozen=True, kw_only=True, slots=True)
class AutoscaleOptions:
    """The least and the most replicas, both at least 1."""

    min_replicas: int
    max_replicas: int


@dataclass(frozen=True, kw_only=True, slots=True)
class AutoscaleSnapshot:
    """The replicas of a pool and their remaining work."""

    num_replicas: int
    """Replicas that work, start or restart."""
    num_starting: int = 0
    unplaced: tuple[int, ...] = ()
    """Ids of replicas that wait for resources of Ray."""
    idle_s: Mapping[int, float] = field(default_factory=dict)
    """By id, how long idle replicas have pulled in vain."""
    has_waiting: bool = False
    """Rows wait that any replica may take."""
    is_at_work: bool = False
    """Some replica holds rows."""
    work: RemainingWork | None = None
    """None while too few lengths are known."""
    fed_s: float = 0.0
    """How long rows have been arriving, 0 if they have stopped."""
    seconds: StepSeconds | None = None
    """Step costs of an average replica; None until measured."""
    num_slots: float = 1.0
    """Most concurrent rows of a replica."""
    start_s: float = USUAL_START_S


@dataclass(frozen=True, kw_only=True, slots=True)
class AutoscalePlan:
    """Replicas to start or to stop, never both, and the reason."""

    num_starts: int = 0
    stops: tuple[int, ...] = ()
    reason: str = ""


def plan_autoscaling(pool: AutoscaleSnapshot, options: AutoscaleOptions) -> AutoscalePlan:
    """Return what to start or stop now; nothing starts before earlier starts are ready.

    An idle replica shows that rows cannot be split further, so nothing starts then. A replica with
    rows never stops. So fluctuating estimates cannot start and stop replicas in turn.
    """
    num_missing = options.min_replicas - pool.num_replicas
    if num_missing > 0:
        return AutoscalePlan(
            num_starts=num_missing, reason=f"pool.min_replicas={options.min_replicas}"
        )
    if pool.idle_s:
        return _stops(pool, options)
    return AutoscalePlan() if pool.num_starting else _starts(pool, options)


def seconds_left(
    work: RemainingWork, seconds: StepSeconds, *, num_slots: float, num_replicas: int
) -> float:
    """Return the seconds until `num_replicas` finish the work, if they share its rows evenly.

    `num_slots` are the most concurrent rows of a replica.
    """
    if not work.num_rows:
        return 0.0
    rows_each = work.num_rows / num_replicas
    batch = max(1.0, min(num_slots, rows_each))
    num_steps = work.output_tokens / num_replicas / batch
    decode_s = num_steps * (seconds.step_s + seconds.row_s * batch)
    prefill_s = work.prompt_tokens / num_replicas * seconds.token_s
    # the longest row runs on alone
    tail_s = max(0.0, work.longest - num_steps) * (seconds.step_s + seconds.row_s)
    return decode_s + prefill_s + tail_s


def _starts(pool: AutoscaleSnapshot, options: AutoscaleOptions) -> AutoscalePlan:
    now, seconds = pool.num_replicas, pool.seconds
    if pool.work is None or seconds is None:
        return AutoscalePlan()
    left_s = {now: _left_s(pool, pool.work, seconds, now)}
    work = pool.work
    # feeders submit rows as others finish: input is expected to last as long again
    if 0 < left_s[now] < pool.fed_s:
        work = work.times(pool.fed_s / left_s[now])
        left_s[now] = pool.fed_s
    if left_s[now] <= pool.start_s:
        return AutoscalePlan()
    num, end_s = now, left_s[now]
    for wanted in range(now + 1, options.max_replicas + 1):
        before_s, after_s = left_s[wanted - 1], _left_s(pool, work, seconds, wanted)
        left_s[wanted] = after_s
        if before_s - after_s < _LEAST_SHARE * before_s / wanted:
            break
        # running replicas work while others load
        works_s = after_s * (1 - pool.start_s / left_s[now])
        if works_s < _WORK_PER_START * pool.start_s:
            break
        num, end_s = wanted, pool.start_s + works_s
    if left_s[now] - end_s < max(_LEAST_S, _LEAST_GAIN * left_s[now]):
        return AutoscalePlan()
    return AutoscalePlan(
        num_starts=num - now,
        reason=f"{left_s[now]:.0f} s of work left with {now}, {end_s:.0f} s with {num}, including "
        f"{pool.start_s:.0f} s to start",
    )


def _left_s(
    pool: AutoscaleSnapshot, work: RemainingWork, seconds: StepSeconds, num_replicas: int
) -> float:
    return seconds_left(work, seconds, num_slots=pool.num_slots, num_replicas=num_replicas)


def _stops(pool: AutoscaleSnapshot, options: AutoscaleOptions) -> AutoscalePlan:
    if pool.has_waiting or not pool.is_at_work:
        return AutoscalePlan()
    patience_s = max(LEAST_IDLE_S, pool.start_s)
    idle = [r for r, idle_s in pool.idle_s.items() if idle_s >= patience_s]
    idle.sort(key=lambda replica_id: (-pool.idle_s[replica_id], replica_id))
    # an idle replica does at once what an unplaced one could do later
    able = [*pool.unplaced, *idle] if idle else []
    stops = tuple(able[: max(0, pool.num_replicas - options.min_replicas)])
    if not stops:
        return AutoscalePlan()
    return AutoscalePlan(stops=stops, reason=f"idle for {patience_s:.0f} s")
