"""What each engine did with its time: worked, started, waited for rows, or had no more to do."""

from collections.abc import Sequence
from dataclasses import dataclass

from raybatch.report.history.records import History, Sample


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """A stretch of time of one engine; the four parts add up to its length.

    Args:
        start_s: on an axis with all runs one after the other.
        busy_s: seconds of steps.
        cold_s: seconds before it was ready, and before the first engine of the run had rows.
        starved_s: seconds ready without a step, with rows still to come.
        tail_s: seconds after its last row, while other engines worked.
    """

    start_s: float
    end_s: float
    busy_s: float = 0.0
    cold_s: float = 0.0
    starved_s: float = 0.0
    tail_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Lane:
    """One rank over all runs; it may have been several engines, one after the other."""

    rank: int
    stretches: tuple[Stretch, ...]

    def total(self, part: str) -> float:
        """Return the seconds of one part, such as "busy_s", over all stretches."""
        return float(sum(getattr(stretch, part) for stretch in self.stretches))


def run_starts(history: History) -> list[float]:
    """Return where each run begins on an axis with all runs one after the other, and the end."""
    starts = [0.0]
    for run in history.runs:
        starts.append(starts[-1] + run.seconds)
    return starts


def lanes_of(history: History) -> tuple[Lane, ...]:
    """Return the lane of every rank, up to the last work of each run."""
    lanes: dict[int, list[Stretch]] = {}
    for run, start_s in zip(history.runs, run_starts(history), strict=False):
        span = run.work_span
        if span is None:
            continue
        samples = [sample for sample in run.samples if sample.end_s <= span[1]]
        for rank in sorted({rank for sample in run.samples for rank, _, _ in sample.engines}):
            lanes.setdefault(rank, []).extend(_stretches(samples, rank, span[0], start_s))
    return tuple(Lane(rank=rank, stretches=tuple(lanes[rank])) for rank in sorted(lanes))


def _stretches(
    samples: Sequence[Sample], rank: int, first_work_s: float, start_s: float
) -> list[Stretch]:
    of_rank = [
        next(((busy, ready) for r, busy, ready in sample.engines if r == rank), (0.0, 0.0))
        for sample in samples
    ]
    worked = [place for place, (busy_s, _) in enumerate(of_rank) if busy_s > 0]
    last = worked[-1] if worked else len(samples)
    stretches = []
    for place, (sample, (busy_s, ready_s)) in enumerate(zip(samples, of_rank, strict=True)):
        busy_s, ready_s = min(busy_s, sample.seconds), min(ready_s, sample.seconds)
        idle_s = max(0.0, ready_s - busy_s)
        begins = sample.end_s - sample.seconds <= first_work_s
        is_tail = not begins and place >= last
        stretches.append(
            Stretch(
                start_s=start_s + sample.end_s - sample.seconds,
                end_s=start_s + sample.end_s,
                busy_s=busy_s,
                cold_s=sample.seconds - max(busy_s, ready_s) + (idle_s if begins else 0.0),
                starved_s=0.0 if begins or is_tail else idle_s,
                tail_s=idle_s if is_tail else 0.0,
            )
        )
    return stretches
