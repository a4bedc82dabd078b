"""What is kept of a run: frozen records of bounded size, however long it was."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

from raybatch.records.types import TokenCounts

# begins the end of a run that a limit has ended
STOPPED = "stopped by "


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample(TokenCounts):
    """The state of a run at the end of a stretch of time; tokens and rows count from its start.

    Args:
        end_s: since the run began.
        cost: of all answers since the run began, where they have prices.
        kv: share of the KV caches that is in use.
        restarts: of engines, since the run began.
        preemptions: of requests, since the run began.
        engines: rank, seconds at work and seconds ready of each engine in this stretch.
    """

    end_s: float
    seconds: float
    rows: int = 0
    cost: float = 0.0
    running: float = 0.0
    waiting: float = 0.0
    kv: float = 0.0
    num_ready: int = 0
    restarts: int = 0
    preemptions: int = 0
    engines: tuple[tuple[int, float, float], ...] = ()

    @property
    def busy_s(self) -> float:
        """Seconds at work of all engines."""
        return sum(busy_s for _, busy_s, _ in self.engines)


def merged(first: Sample, second: Sample) -> Sample:
    """Return the sample of two stretches, one after the other."""
    seconds = first.seconds + second.seconds

    def mean(before: float, after: float) -> float:
        return (before * first.seconds + after * second.seconds) / max(seconds, 1e-9)

    engines: dict[int, tuple[float, float]] = {}
    for rank, busy_s, ready_s in first.engines + second.engines:
        busy_before, ready_before = engines.get(rank, (0.0, 0.0))
        engines[rank] = busy_before + busy_s, ready_before + ready_s
    return dataclasses.replace(
        second,
        seconds=seconds,
        running=mean(first.running, second.running),
        waiting=mean(first.waiting, second.waiting),
        kv=mean(first.kv, second.kv),
        engines=tuple((rank, *of_rank) for rank, of_rank in sorted(engines.items())),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitTime:
    """When a unit was at work, in seconds since the run began, and in which feeder."""

    unit: int
    start_s: float
    seconds: float
    rows: int
    host: str
    pid: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """One run of a job, as its log tells it.

    Args:
        started: in seconds since 1970.
        seconds: from its start to the last line of its log.
        end: "finished", "incomplete", "stopped by ..." with the limit or SIGTERM, "interrupted", or
            "failed: ..."; "" where the log has no end.
        backend_reason: why it was that one; "" where the user named it.
        executor: of its engines, "local" or "ray"; "" where the log does not say.
        units_found: units that another run had written when this one came to them.
        median_unit_s: half of its units took no longer.
        p95_unit_s: 95 % of its units took no longer.
        units: all units, where they are few.
        samples: of equal importance, a few hundred at most.
    """

    run_id: str
    started: float
    seconds: float
    end: str = ""
    host: str = ""
    source: str = ""
    model: str = ""
    backend: str = ""
    backend_reason: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    executor: str = ""
    units_resumed: int = 0
    rows_resumed: int = 0
    units_written: int = 0
    rows_written: int = 0
    units_found: int = 0
    median_unit_s: float = 0.0
    p95_unit_s: float = 0.0
    slowest: tuple[UnitTime, ...] = ()
    units: tuple[UnitTime, ...] = ()
    samples: tuple[Sample, ...] = ()

    @property
    def limit(self) -> str:
        """The limit that ended it early; "" where none did."""
        return self.end.removeprefix(STOPPED) if self.end.startswith(STOPPED) else ""

    @property
    def last(self) -> Sample:
        """The last sample; one of zeros where there is none."""
        return self.samples[-1] if self.samples else Sample(end_s=0.0, seconds=0.0)

    @property
    def work_span(self) -> tuple[float, float] | None:
        """Begin and end of the stretches in which an engine worked; None where none did."""
        busy = [sample for sample in self.samples if sample.busy_s > 0]
        return (busy[0].end_s - busy[0].seconds, busy[-1].end_s) if busy else None


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """All runs of a job that have left a log, the first one first."""

    runs: tuple[RunRecord, ...] = ()

    @property
    def total_s(self) -> float:
        """Seconds of all runs."""
        return sum(run.seconds for run in self.runs)
