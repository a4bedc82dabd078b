"""What runs did, as sections of a document."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from raybatch.pictures.charts import draw_histogram
from raybatch.pictures.document import Figure, Section, Table
from raybatch.pictures.timeline import Band, Box, LaneRow, Step, draw_bands, draw_boxes, draw_lanes
from raybatch.pictures.wording import count, duration, full, percent
from raybatch.prefix.histogram import Histogram
from raybatch.report.history.records import History, RunRecord, Sample


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


_PARTS = (
    ("at work", "busy_s"),
    ("cold start", "cold_s"),
    ("starvation", "starved_s"),
    ("tail", "tail_s"),
)
_MAX_LANES = 16
_MAX_CELLS = 160
# beyond 3 times of what nearly all units take, and worth a look
_SLOW_FACTOR, _SLOW_S = 3.0, 1.0


def end_of(run: RunRecord) -> str:
    """Say how a run ended."""
    return run.end or "no end in its log: killed, or still running"


def run_section(history: History) -> Section:
    """Return the table of all runs."""
    rows = tuple(
        (
            time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(run.started)),
            duration(run.seconds),
            full(run.units_resumed),
            full(run.units_written),
            full(run.rows_written),
            full(run.units_found),
            full(run.last.restarts),
            f"{end_of(run)} ({run.host})" if run.host else end_of(run),
        )
        for run in history.runs
    )
    header = ("began (UTC)", "took", "units there", "written", "rows", "found", "restarts", "end")
    notes = (
        "units there: written by earlier runs, not done again; found: units that another run wrote "
        "while this one was at them.",
    )
    return Section(title="Runs", table=Table(header=header, rows=rows), notes=notes)


def time_sections(history: History) -> tuple[Section, ...]:
    """Return what happened when, and what engines did with their time."""
    starts = run_starts(history)
    total_s, marks = starts[-1], starts[1:-1]
    if not any(run.samples for run in history.runs):
        return ()
    lanes = lanes_of(history)
    shown = _longest_idle(lanes)
    names = [f"engine {lane.rank}" for lane in shown]
    drawn = [
        LaneRow(name=name, cells=_cells(lane)) for name, lane in zip(names, shown, strict=True)
    ]
    rows = tuple(
        (name, *(duration(lane.total(part)) for _, part in _PARTS), "")
        for name, lane in zip(names, shown, strict=True)
    )
    engines = Section(
        title="Engines",
        facts=idle_facts(lanes),
        table=Table(header=("", *(name for name, _ in _PARTS), ""), rows=rows),
        figures=(
            Figure(
                title="What engines did",
                svg=draw_lanes(drawn, total_s=total_s, marks=marks),
                caption="The height of a colour is its share of that moment. Cold start: not ready "
                "yet, or before the first rows. Starvation: ready, with rows still to come, and "
                "none at hand. Tail: no more rows, while other engines still work.",
                is_wide=True,
            ),
        ),
    )
    timeline = Section(
        title="Timeline",
        figures=(
            Figure(
                title="Tokens, KV cache and requests over time",
                svg=draw_bands(_bands(history, starts), total_s=total_s, marks=marks),
                caption="Prompt tokens count when their row comes back, cached ones included."
                + (" A dashed line is the begin of another run." if marks else ""),
                is_wide=True,
            ),
        ),
    )
    return (timeline, engines, *_unit_sections(history, starts))


def idle_facts(lanes: tuple[Lane, ...]) -> tuple[tuple[str, str], ...]:
    """Say how all engines together shared out their time."""
    totals = {name: sum(lane.total(part) for lane in lanes) for name, part in _PARTS}
    whole = sum(totals.values())
    if not whole:
        return ()
    shares = ", ".join(f"{name} {percent(seconds / whole)}" for name, seconds in totals.items())
    return (("time of engines", f"{shares} (of {duration(whole)}, up to the last work)"),)


def length_section(prompts: Histogram, outputs: Histogram) -> tuple[Section, ...]:
    """Return the histograms of lengths; nothing where they are not known."""
    if not (prompts.counts or outputs.counts):
        return ()
    figures = (
        Figure(title="Prompts", svg=draw_histogram(prompts, x_name="prompt tokens")),
        Figure(title="Outputs", svg=draw_histogram(outputs, x_name="generated tokens")),
    )
    return (Section(title="Lengths", figures=figures),)


def _longest_idle(lanes: tuple[Lane, ...]) -> list[Lane]:
    """Return the lanes that are worth a look, in the order of their ranks."""
    by_idle = sorted(lanes, key=lambda lane: -(lane.total("starved_s") + lane.total("tail_s")))
    return sorted(by_idle[:_MAX_LANES], key=lambda lane: lane.rank)


def _cells(lane: Lane) -> tuple[tuple[float, float, tuple[float, float, float, float]], ...]:
    stretches = lane.stretches
    each = -(-len(stretches) // _MAX_CELLS) or 1
    cells = []
    for first in range(0, len(stretches), each):
        some = stretches[first : first + each]
        busy, cold, starved, tail = (sum(getattr(s, part) for s in some) for _, part in _PARTS)
        cells.append((some[0].start_s, some[-1].end_s, (busy, cold, starved, tail)))
    return tuple(cells)


def _bands(history: History, starts: list[float]) -> tuple[Band, ...]:
    def rate(before: Sample, now: Sample, name: str) -> float:
        growth = float(getattr(now, name) - getattr(before, name))
        return max(0.0, growth) / max(now.seconds, 1e-9)

    def steps(value: Callable[[Sample, Sample], float]) -> tuple[Step, ...]:
        drawn = []
        for run, start_s in zip(history.runs, starts, strict=False):
            before = Sample(end_s=0.0, seconds=0.0)
            for sample in run.samples:
                begin_s = start_s + sample.end_s - sample.seconds
                end_s = start_s + sample.end_s
                drawn.append(Step(start_s=begin_s, end_s=end_s, value=value(before, sample)))
                before = sample
        return tuple(drawn)

    return (
        Band(name="prompt/s", steps=steps(partial(rate, name="prompt_tokens"))),
        Band(name="output/s", steps=steps(partial(rate, name="generated_tokens"))),
        Band(
            name="KV",
            steps=steps(lambda _, now: 100 * now.kv),
            top=100.0,
            suffix=" %",
            is_main=False,
        ),
        Band(name="running", steps=steps(lambda _, now: now.running), is_main=False),
    )


def _unit_sections(history: History, starts: list[float]) -> tuple[Section, ...]:
    written = sum(run.units_written for run in history.runs)
    if not written:
        return ()
    boxes = [
        Box(
            lane=f"{unit.host[-12:]}:{unit.pid}",
            start_s=start_s + max(0.0, unit.start_s),
            end_s=start_s + unit.start_s + unit.seconds,
            title=f"unit {unit.unit}: {count(unit.rows, 'row')} in {duration(unit.seconds)}",
            is_slow=unit.seconds > max(_SLOW_S, _SLOW_FACTOR * run.median_unit_s),
        )
        for run, start_s in zip(history.runs, starts, strict=False)
        for unit in run.units
    ]
    slowest = sorted(
        (unit for run in history.runs for unit in run.slowest), key=lambda unit: -unit.seconds
    )[:5]
    rows = tuple(
        (
            f"{unit.unit}",
            duration(unit.seconds),
            full(unit.rows),
            f"process {unit.pid}, {unit.host}",
        )
        for unit in slowest
    )
    # a run that was killed has none
    typical = max(history.runs, key=lambda run: (run.median_unit_s > 0, run.units_written))
    text = f"{full(written)} written"
    if typical.median_unit_s > 0:
        text += (
            f"; half took up to {duration(typical.median_unit_s)}, 95 % up to "
            f"{duration(typical.p95_unit_s)}"
        )
    figure = Figure(
        title="Units at work",
        svg=draw_boxes(boxes, total_s=starts[-1], marks=starts[1:-1]),
        caption="A box is a unit from its first row to its part, beside the process that had it.",
        is_wide=True,
    )
    return (
        Section(
            title="Units",
            facts=(("units", text),),
            table=Table(header=("slowest", "took", "rows", "where"), rows=rows),
            figures=(figure,),
        ),
    )
