"""How many replicas a pool has while it works: when further ones start, and when idle ones stop.

A further replica takes its share of the rows from when it is loaded, so it is worth its start where
enough work is left then; and it makes the batches of all others smaller, so beyond some number a
step costs what it costs and nothing ends sooner. An idle replica stays for as long as another start
would take: whatever comes then, keeping or stopping it has cost at most twice the better choice.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from raybatch.policy.pool.rates import StepSeconds

# of a pool that has started no replica yet
USUAL_START_S = 60.0
# an idle replica stays for so long, whatever a start takes
LEAST_IDLE_S = 10.0
# a further replica has to work for so many times as long as it takes to start
_WORK_PER_START = 1.0
# and to save this share of what it would save if rows were work that can be cut anywhere
_LEAST_SHARE = 0.5
# starts that let the pool end sooner by less are not worth it
_LEAST_GAIN, _LEAST_S = 0.05, 1.0


class CrewWork(NamedTuple):
    """What is left to do for all replicas together."""

    num_rows: float
    prompt_tokens: float
    output_tokens: float
    longest: float
    """Tokens to come of the longest row that runs."""

    def times(self, factor: float) -> "CrewWork":
        """Return so many times the rows, none of which is longer."""
        num_rows, prompt, output = (factor * part for part in self[:3])
        return CrewWork(num_rows, prompt, output, self.longest)


@dataclass(frozen=True, kw_only=True, slots=True)
class CrewOptions:
    """The least and the most replicas, both at least 1."""

    min_replicas: int
    max_replicas: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CrewSnapshot:
    """The replicas of a pool, and what is left for them."""

    num_replicas: int
    """That work, or start, or start again."""
    num_starting: int = 0
    unplaced: tuple[int, ...] = ()
    """By id, those that wait for what Ray is to reserve."""
    idle_s: Mapping[int, float] = field(default_factory=dict)
    """By id, how long replicas have asked for rows while they held none."""
    has_waiting: bool = False
    """Rows wait that any replica may take."""
    is_at_work: bool = False
    """Some replica holds rows."""
    work: CrewWork | None = None
    """None while too little is known of the lengths of rows."""
    fed_s: float = 0.0
    """For how long rows have come, 0 where they come no more."""
    seconds: StepSeconds | None = None
    """Of a step of a usual replica; None until steps were measured."""
    num_slots: float = 1.0
    """Rows that a replica runs at once, at most."""
    start_s: float = USUAL_START_S


@dataclass(frozen=True, kw_only=True, slots=True)
class CrewPlan:
    """Replicas to start, or to stop, and why; never both."""

    num_starts: int = 0
    stops: tuple[int, ...] = ()
    reason: str = ""


def plan_crew(crew: CrewSnapshot, options: CrewOptions) -> CrewPlan:
    """Return what to start or stop now; never both, and no further start before others are ready.

    An idle replica shows that rows cannot be shared further, so none starts beside it; and one that
    holds rows never stops. So estimates that go up and down start and stop nothing in turn.
    """
    num_missing = options.min_replicas - crew.num_replicas
    if num_missing > 0:
        return CrewPlan(num_starts=num_missing, reason="pool.min_replicas asks for them")
    if crew.idle_s:
        return _stops(crew, options)
    return CrewPlan() if crew.num_starting else _starts(crew, options)


def seconds_left(
    work: CrewWork, seconds: StepSeconds, *, num_slots: float, num_replicas: int
) -> float:
    """Return how long so many replicas have to work, where they share all rows evenly."""
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


def _starts(crew: CrewSnapshot, options: CrewOptions) -> CrewPlan:
    now, seconds = crew.num_replicas, crew.seconds
    if crew.work is None or seconds is None:
        return CrewPlan()
    left_s = {now: _left_s(crew, crew.work, seconds, now)}
    work = crew.work
    # feeders hand rows over as others end: what has gone on for so long may go on as long again
    if 0 < left_s[now] < crew.fed_s:
        work = work.times(crew.fed_s / left_s[now])
        left_s[now] = crew.fed_s
    if left_s[now] <= crew.start_s:
        return CrewPlan()
    num, end_s = now, left_s[now]
    for wanted in range(now + 1, options.max_replicas + 1):
        before_s, after_s = left_s[wanted - 1], _left_s(crew, work, seconds, wanted)
        left_s[wanted] = after_s
        if before_s - after_s < _LEAST_SHARE * before_s / wanted:
            break
        # those that are there work on while others load
        works_s = after_s * (1 - crew.start_s / left_s[now])
        if works_s < _WORK_PER_START * crew.start_s:
            break
        num, end_s = wanted, crew.start_s + works_s
    if left_s[now] - end_s < max(_LEAST_S, _LEAST_GAIN * left_s[now]):
        return CrewPlan()
    return CrewPlan(
        num_starts=num - now,
        reason=f"{left_s[now]:.0f} s of work are left for {now}, and {end_s:.0f} s for {num} "
        f"where a start takes {crew.start_s:.0f} s",
    )


def _left_s(crew: CrewSnapshot, work: CrewWork, seconds: StepSeconds, num_replicas: int) -> float:
    return seconds_left(work, seconds, num_slots=crew.num_slots, num_replicas=num_replicas)


def _stops(crew: CrewSnapshot, options: CrewOptions) -> CrewPlan:
    if crew.has_waiting or not crew.is_at_work:
        return CrewPlan()
    patience_s = max(LEAST_IDLE_S, crew.start_s)
    idle = [r for r, idle_s in crew.idle_s.items() if idle_s >= patience_s]
    idle.sort(key=lambda replica_id: (-crew.idle_s[replica_id], replica_id))
    # one that is idle does at once what another could do some time
    able = [*crew.unplaced, *idle] if idle else []
    stops = tuple(able[: max(0, crew.num_replicas - options.min_replicas)])
    if not stops:
        return CrewPlan()
    return CrewPlan(stops=stops, reason=f"nothing is left for them for {patience_s:.0f} s now")
