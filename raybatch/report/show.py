"""What runs did, as sections of a document."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate

from raybatch.pictures.charts import draw_histogram
from raybatch.pictures.document import Figure, Section, Table
from raybatch.pictures.timeline import Band, Box, Cell, Step, draw_bands, draw_boxes, draw_lanes
from raybatch.pictures.wording import count, duration, full, percent
from raybatch.prefix.histogram import Histogram
from raybatch.report.history import History, RunRecord, Sample

# in the order of the seconds of a cell
_PARTS = ("at work", "cold start", "starvation", "tail")
_MAX_LANES = 16
_MAX_CELLS = 160
# outputs from which on shares of them say something
_MIN_PREDICTED = 100
# beyond 3 times of what nearly all units take, and worth a look
_SLOW_FACTOR, _SLOW_S = 3.0, 1.0


def end_of(run: RunRecord) -> str:
    return run.end or "no end in its log: killed, or still running"


def lanes_of(history: History) -> dict[int, list[Cell]]:
    """Return how each rank shared out its time, up to the last work of each run.

    A rank may have been several engines, one after the other. Seconds of a cell: of steps; before
    it was ready, and before the first engine of the run had rows; ready without a step, with rows
    still to come; after its last row, while other engines worked.
    """
    lanes: dict[int, list[Cell]] = {}
    for run, start_s in zip(history.runs, _run_starts(history), strict=False):
        if run.work_span is None:
            continue
        first_s, last_s = run.work_span
        samples = [sample for sample in run.samples if sample.end_s <= last_s]
        for rank in {rank for sample in run.samples for rank, _, _ in sample.engines}:
            lanes.setdefault(rank, []).extend(_cells(samples, rank, first_s, start_s))
    return dict(sorted(lanes.items()))


def _cells(samples: Sequence[Sample], rank: int, first_work_s: float, start_s: float) -> list[Cell]:
    of_rank = [
        next(((busy, ready) for r, busy, ready in sample.engines if r == rank), (0.0, 0.0))
        for sample in samples
    ]
    worked = [place for place, (busy_s, _) in enumerate(of_rank) if busy_s > 0]
    last = worked[-1] if worked else len(samples)
    cells = []
    for place, (sample, (busy_s, ready_s)) in enumerate(zip(samples, of_rank, strict=True)):
        busy_s, ready_s = min(busy_s, sample.seconds), min(ready_s, sample.seconds)
        cold_s, starved_s, tail_s = sample.seconds - max(busy_s, ready_s), 0.0, 0.0
        idle_s = max(0.0, ready_s - busy_s)
        begin_s = sample.end_s - sample.seconds
        if begin_s <= first_work_s:
            cold_s += idle_s
        elif place >= last:
            tail_s = idle_s
        else:
            starved_s = idle_s
        parts = (busy_s, cold_s, starved_s, tail_s)
        cells.append((start_s + begin_s, start_s + sample.end_s, parts))
    return cells


def _run_starts(history: History) -> list[float]:
    """Return where each run begins on an axis with all runs one after the other, and the end."""
    return list(accumulate((run.seconds for run in history.runs), initial=0.0))


def _totals(cells: Sequence[Cell]) -> tuple[float, float, float, float]:
    busy, cold, starved, tail = map(sum, zip(*(seconds for _, _, seconds in cells), strict=True))
    return busy, cold, starved, tail


def idle_facts(lanes: dict[int, list[Cell]]) -> tuple[tuple[str, str], ...]:
    cells = [cell for lane in lanes.values() for cell in lane]
    totals = _totals(cells) if cells else ()
    whole = sum(totals)
    if not whole:
        return ()
    shares = ", ".join(
        f"{name} {percent(seconds / whole)}" for name, seconds in zip(_PARTS, totals, strict=True)
    )
    return (("time of engines", f"{shares} (of {duration(whole)}, up to the last work)"),)


def run_section(history: History) -> Section:
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
    header = ("began (UTC)", "took", "units there", "written", "rows", "others", "restarts", "end")
    notes = (
        "units there: written by earlier runs, not done again; others: units that another run "
        "wrote while this one was at them.",
    )
    return Section(title="Runs", table=Table(header=header, rows=rows), notes=notes)


def time_sections(history: History) -> tuple[Section, ...]:
    if not any(run.samples for run in history.runs):
        return ()
    starts = _run_starts(history)
    total_s, marks = starts[-1], starts[1:-1]
    lanes = lanes_of(history)
    totals = {rank: _totals(cells) for rank, cells in lanes.items()}
    # the longest idle ones
    shown = sorted(sorted(lanes, key=lambda rank: -sum(totals[rank][2:]))[:_MAX_LANES])
    drawn = {}
    for rank in shown:
        each = -(-len(lanes[rank]) // _MAX_CELLS) or 1
        parts = [lanes[rank][first : first + each] for first in range(0, len(lanes[rank]), each)]
        drawn[f"engine {rank}"] = [(some[0][0], some[-1][1], _totals(some)) for some in parts]
    rows = tuple((f"engine {rank}", *map(duration, totals[rank]), "") for rank in shown)
    engines = Section(
        title="Engines",
        facts=idle_facts(lanes),
        table=Table(header=("", *_PARTS, ""), rows=rows),
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
    bands = Figure(
        title="Tokens, KV cache and requests over time",
        svg=draw_bands(_bands(history, starts), total_s=total_s, marks=marks),
        caption="Prompt tokens count when their row comes back, cached ones included."
        + (" A dashed line is the begin of another run." if marks else ""),
        is_wide=True,
    )
    timeline = Section(title="Timeline", figures=(bands,))
    return (timeline, engines, *_unit_sections(history, starts))


def coverage_facts(history: History) -> tuple[tuple[str, str], ...]:
    """Return how good the lengths were that the pool predicted; none where they were few.

    Where many rows had just the predicted length, as where a limit ends them, a share is a range.
    """
    num_rows, below, at_most = Counter[float](), Counter[float](), Counter[float]()
    for one in (one for run in history.runs for one in run.last.length_coverage):
        num_rows[one.share] += one.num_rows
        below[one.share] += one.num_below
        at_most[one.share] += one.num_at_most
    most = max(num_rows.values(), default=0)
    if most < _MIN_PREDICTED:
        return ()
    texts = []
    for share, total in sorted(num_rows.items()):
        ends = dict.fromkeys(percent(some[share] / total) for some in (below, at_most))
        texts.append(f"of {percent(share)}: {' to '.join(ends)}")
    facts = f"of {full(most)} outputs, within the predicted length {', '.join(texts)}"
    return (("output lengths", facts),)


def length_section(prompts: Histogram, outputs: Histogram, history: History) -> tuple[Section, ...]:
    if not (prompts.counts or outputs.counts):
        return ()
    figures = (
        Figure(title="Prompts", svg=draw_histogram(prompts, x_name="prompt tokens")),
        Figure(title="Outputs", svg=draw_histogram(outputs, x_name="generated tokens")),
    )
    return (Section(title="Lengths", facts=coverage_facts(history), figures=figures),)


def _bands(history: History, starts: list[float]) -> tuple[Band, ...]:
    def steps(value: Callable[[Sample, Sample], float]) -> tuple[Step, ...]:
        drawn = []
        for run, start_s in zip(history.runs, starts, strict=False):
            before = Sample(end_s=0.0, seconds=0.0)
            for sample in run.samples:
                end_s = start_s + sample.end_s
                drawn.append(Step(end_s - sample.seconds, end_s, value(before, sample)))
                before = sample
        return tuple(drawn)

    def rates(name: str) -> tuple[Step, ...]:
        return steps(
            lambda before, now: (
                max(0.0, float(getattr(now, name) - getattr(before, name))) / max(now.seconds, 1e-9)
            )
        )

    kv = steps(lambda _, now: 100 * now.kv)
    return (
        Band(name="prompt/s", steps=rates("prompt_tokens")),
        Band(name="output/s", steps=rates("generated_tokens")),
        Band(name="KV", steps=kv, top=100.0, suffix=" %", is_main=False),
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
    )
    rows = tuple(
        (str(one.unit), duration(one.seconds), full(one.rows), f"process {one.pid}, {one.host}")
        for one in slowest[:5]
    )
    # a run that was killed has none
    typical = max(history.runs, key=lambda run: (run.median_unit_s > 0, run.units_written))
    text = f"{full(written)} written"
    if typical.median_unit_s > 0:
        half, most = duration(typical.median_unit_s), duration(typical.p95_unit_s)
        text += f"; half took up to {half}, 95 % up to {most}"
    figure = Figure(
        title="Units at work",
        svg=draw_boxes(boxes, total_s=starts[-1], marks=starts[1:-1]),
        caption="A box is a unit from its first row to its part, beside the process that had it.",
        is_wide=True,
    )
    table = Table(header=("slowest", "took", "rows", "where"), rows=rows)
    section = Section(title="Units", facts=(("units", text),), table=table, figures=(figure,))
    return (section,)
