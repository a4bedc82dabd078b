"""Whether the last rows of a pool end sooner when idle engines take part in every step of them.

Source: BatchGen (arXiv:2606.21712), PARTITION (section 4.2) and ONLONGTAIL (5.1), with the gain
test of its design document; that a team's step may be estimated from one measured sum of its ranks
is this library's.
"""

from dataclasses import dataclass

# of the room that the smallest pool has, and blocks that a row may grow by meanwhile
_FULL_FRACTION, _SPARE_BLOCKS = 0.9, 2
# what a switch has to gain, and steps over which it has to
_GAIN_FRACTION, _MIN_STEPS = 0.10, 128
_NUM_BOUNDARIES = 2
# collectives of a step beside the two sums of every layer: its message, and its logits
_SUMS_OF_LAYER, _OTHER_CALLS = 2, 2


@dataclass(frozen=True, kw_only=True, slots=True)
class TailFacts:
    """A pool at a boundary between steps, with a team that might take its last rows.

    Args:
        num_active: rows that run in the whole pool.
        num_engines: of the pool; each idle one could take a row of its own.
        num_open: rows that are queued, in their prompt, on hold or loading, anywhere.
        is_sealed: no more rows will come.
        leads_rows: rows of the engine that would lead.
        used_blocks, next_blocks: KV that its rows have, and what their next extension takes.
        room_blocks: of each rank, with the heads of its part.
        why_not: of the model and the engines, "" where they can form a team.
    """

    num_active: int
    num_engines: int
    num_open: int
    is_sealed: bool
    leads_rows: int
    used_blocks: int
    next_blocks: int
    room_blocks: tuple[int, ...]
    why_not: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class SwitchTimes:
    """Seconds of a step alone and in a team, those of the switch, and the steps that are left."""

    alone_s: float
    team_s: float
    switch_s: float
    steps_left: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What a boundary said, and at how many in a row it was yes."""

    reason: str
    num_yes: int = 0

    @property
    def switches(self) -> bool:
        return self.num_yes >= _NUM_BOUNDARIES


NO_VERDICT = Verdict(reason="no boundary was looked at")


def why_not_eligible(facts: TailFacts) -> str:
    """Return why these rows cannot be partitioned now, "" where they can."""
    if facts.why_not:
        return facts.why_not
    if not 0 < facts.num_active < facts.num_engines:
        return f"{facts.num_active} rows run on {facts.num_engines} engines"
    if not facts.is_sealed or facts.num_open:
        return "more rows will come" if not facts.is_sealed else f"{facts.num_open} rows wait"
    if facts.leads_rows < 1 or len(facts.room_blocks) < 2:
        return "there is no row to lead, or no engine to follow"
    needed = facts.used_blocks + _SPARE_BLOCKS + facts.next_blocks
    room = _FULL_FRACTION * min(facts.room_blocks)
    if needed > room:
        return f"{needed} blocks are needed, and a rank has room for {room:.0f}"
    return ""


def gain_s(times: SwitchTimes) -> float:
    """Return the seconds that a switch saves beyond the tenth that it has to; negative: none."""
    wanted = times.steps_left * times.alone_s * (1 - _GAIN_FRACTION)
    return wanted - times.switch_s - times.steps_left * times.team_s


def look(before: Verdict, facts: TailFacts, times: SwitchTimes) -> Verdict:
    """Return the verdict of a boundary that follows the one of `before`.

    A team is formed where `Verdict.switches` is true: after two boundaries in a row that said yes.
    """
    reason = why_not_eligible(facts)
    if not reason and times.steps_left < _MIN_STEPS:
        reason = f"{times.steps_left} steps are left, fewer than {_MIN_STEPS}"
    if not reason and gain_s(times) <= 0:
        alone_ms, team_ms = 1e3 * times.alone_s, 1e3 * times.team_s
        reason = (
            f"{times.steps_left} steps of {alone_ms:.2f} ms alone, or of {team_ms:.2f} ms in a "
            f"team after a switch of {times.switch_s:.2f} s"
        )
    if reason:
        return Verdict(reason=reason)
    saved = times.steps_left * (times.alone_s - times.team_s) - times.switch_s
    return Verdict(reason=f"a team saves {saved:.2f} s", num_yes=before.num_yes + 1)


def estimated_team_step_s(
    *, step_s: float, fixed_s: float, sum_s: float, num_layers: int, size: int
) -> float:
    """Return the seconds of a team's step that nobody has measured.

    Args:
        step_s, fixed_s: of a step alone with as many rows, and what of it is no product of weights
            or KV, which every rank does by itself.
        sum_s: measured, of one sum over the ranks of the hidden states of those rows.
    """
    num_calls = _SUMS_OF_LAYER * num_layers + _OTHER_CALLS
    return fixed_s + max(0.0, step_s - fixed_s) / size + num_calls * sum_s


def estimated_switch_s(
    *, slice_bytes: int, kv_bytes: int, copy_bytes_per_s: float, connect_s: float
) -> float:
    """Return the seconds of forming a team, from what each rank copies and a measured link.

    KV is copied there and back, and read once more for its checksums.
    """
    return connect_s + (slice_bytes + 3 * kv_bytes) / copy_bytes_per_s
