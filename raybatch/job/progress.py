"""What a person sees while a job runs: a live panel on a terminal, else a line every ten seconds.

The figures are a pure function of the last snapshots; only `ProgressPrinter` knows the clock and
the stream.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self, TextIO

from rich.console import Console, ConsoleDimensions
from rich.control import Control
from rich.live import Live
from rich.panel import Panel
from rich.segment import ControlType
from rich.table import Table

from raybatch.job.pool_watch import ProgressCallback, is_working
from raybatch.records.types import PoolStats
from raybatch.report.recorder import UnitsSoFar

WINDOW_S = 60.0
_ONE_LESS_ROW = Control((ControlType.ERASE_IN_LINE, 2), (ControlType.CURSOR_UP, 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """The state of a pool at one moment.

    Args:
        time_s: any clock that only goes forward.
        rows_total: rows to be done in this run; None while it is not known.
    """

    time_s: float
    stats: PoolStats
    rows_total: int | None = None
    units: UnitsSoFar | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """The figures of the last snapshot and the rates since earlier ones.

    Args:
        mean_prompt_rate: the same since a ready engine had rows, engine starts left out.
        cached_fraction: share of the prompt tokens done that came from the prefix cache.
        eta_s: seconds to the end, from remaining tokens; None while nothing is known.
    """

    last: Snapshot
    elapsed_s: float
    row_rate: float
    prompt_rate: float
    output_rate: float
    mean_prompt_rate: float
    mean_output_rate: float
    cached_fraction: float
    eta_s: float | None


def measure(history: Sequence[Snapshot]) -> Progress:
    """Derive the figures to show from snapshots in time order, at least one of them."""
    first, last = history[0], history[-1]
    start = _work_start(history)
    in_window = next(s for s in history if last.time_s - s.time_s <= WINDOW_S)
    recent = max(start, in_window, key=lambda snapshot: snapshot.time_s)
    row_rate, prompt_rate, output_rate = _rates(recent, last)
    _, mean_prompt_rate, mean_output_rate = _rates(start, last)
    stats = last.stats
    return Progress(
        last=last,
        elapsed_s=last.time_s - first.time_s,
        row_rate=row_rate,
        prompt_rate=prompt_rate,
        output_rate=output_rate,
        mean_prompt_rate=mean_prompt_rate,
        mean_output_rate=mean_output_rate,
        cached_fraction=stats.cached_fraction,
        eta_s=_eta_s(last, prompt_rate or mean_prompt_rate, output_rate or mean_output_rate),
    )


def progress_line(history: Sequence[Snapshot]) -> str:
    """Return the one-line account of snapshots in time order, in ASCII."""
    return " | ".join(f"{name} {value}" for name, value in _cells(measure(history)))


class ProgressPrinter:
    """Shows the progress of one job; use as a context manager.

    Args:
        note: one line that is shown once, when the work begins.
        stream: where to write; standard error by default.
        interval_s: seconds between two lines where no terminal is attached.
        clock: seconds that only go forward.
    """

    def __init__(
        self,
        title: str = "raybatch",
        *,
        note: str = "",
        stream: TextIO | None = None,
        interval_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._title = title
        self._note = note
        self._console = Console(file=stream or sys.stderr, highlight=False, markup=False)
        self._interval_s = interval_s
        self._clock = clock
        self._history: list[Snapshot] = []
        self._last_line_s: float | None = None
        is_live = self._console.is_terminal and not self._console.is_dumb_terminal
        # drawn when there is something new, so that nobody draws while the terminal is measured
        self._live = Live(console=self._console, auto_refresh=False) if is_live else None
        self._drawn = ConsoleDimensions(0, 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
        elif self._history and self._last_line_s != self._history[-1].time_s:
            self._write_line()

    def update(
        self, stats: PoolStats, rows_total: int | None, units: UnitsSoFar | None = None
    ) -> None:
        """Take a new state; it is shown when it is due."""
        if not self._history:
            self._begin()
        now_s = self._clock()
        snapshot = Snapshot(time_s=now_s, stats=stats, rows_total=rows_total, units=units)
        self._history.append(snapshot)
        self._forget()
        if self._live is not None:
            self._draw(self._live)
            return
        if self._last_line_s is None or now_s - self._last_line_s >= self._interval_s:
            self._write_line()

    def _begin(self) -> None:
        if self._note:
            self._console.print(self._note, soft_wrap=True)
        if self._live is not None:
            self._live.start()

    def _forget(self) -> None:
        """Keep the first snapshot, the one at which work began, and the recent window."""
        kept = (self._history[0], _work_start(self._history))
        oldest_s = self._history[-1].time_s - WINDOW_S
        self._history = [
            s for s in self._history if s.time_s >= oldest_s or any(s is k for k in kept)
        ]

    def _write_line(self) -> None:
        self._last_line_s = self._history[-1].time_s
        self._console.print(f"raybatch: {progress_line(self._history)}", soft_wrap=True)

    def _draw(self, live: Live) -> None:
        """Draw the panel over the last one, also where a narrower terminal has wrapped that."""
        panel = self._panel()
        width = self._console.width
        for _ in range(_wrapped_rows(self._drawn, width)):
            self._console.control(_ONE_LESS_ROW)
        live.update(panel, refresh=True)
        lines = self._console.render_lines(panel, pad=False)
        widest = max(sum(piece.cell_length for piece in line) for line in lines)
        self._drawn = ConsoleDimensions(widest, min(len(lines), self._console.height))

    def _panel(self) -> Panel:
        grid = Table.grid(padding=(0, 2))
        for name, value in _cells(measure(self._history)):
            grid.add_row(name, value)
        return Panel(grid, title=self._title, expand=False, safe_box=True)


@contextmanager
def shown(
    progress: ProgressCallback | ProgressPrinter | None,
    units: Callable[[], UnitsSoFar | None] = lambda: None,
) -> Iterator[ProgressCallback]:
    """Return a callback, or that of a display that lasts as long as the context.

    Args:
        progress: a callback, a display, or None for one of the usual kind.
        units: says how far the units are; displays alone show it.
    """
    if progress is not None and not isinstance(progress, ProgressPrinter):
        yield progress
        return
    with progress or ProgressPrinter() as printer:
        yield lambda stats, rows_total: printer.update(stats, rows_total, units())


def _wrapped_rows(drawn: ConsoleDimensions, width: int) -> int:
    """Return the rows that a drawing takes beyond its lines, once a terminal is so wide."""
    rows_per_line = max(1, -(-drawn.width // max(1, width)))
    return drawn.height * (rows_per_line - 1)


def _work_start(history: Sequence[Snapshot]) -> Snapshot:
    """The last snapshot before a ready engine had rows, else the first; as the report counts."""
    working = (i for i, s in enumerate(history) if is_working(s.stats))
    return history[max(0, next(working, len(history)) - 1)]


def _rates(start: Snapshot, end: Snapshot) -> tuple[float, float, float]:
    """Return rows, prompt tokens and generated tokens per second between two snapshots."""
    seconds = end.time_s - start.time_s
    if seconds <= 0:
        return 0.0, 0.0, 0.0
    rows = end.stats.rows_done - start.stats.rows_done
    prompt = end.stats.prompt_tokens - start.stats.prompt_tokens
    output = end.stats.generated_tokens - start.stats.generated_tokens
    return max(0, rows) / seconds, max(0, prompt) / seconds, max(0, output) / seconds


def _eta_s(last: Snapshot, prompt_rate: float, output_rate: float) -> float | None:
    """Seconds until the tokens still to come are done, at the given rates.

    Rows that are not handed over yet count with the mean prompt length of those that are; the
    outputs still to come with the mean output length so far, at most what the rows may generate.
    """
    stats = last.stats
    if last.rows_total is None or stats.rows_done == 0:
        return None
    in_flight = max(0, stats.rows_received - stats.rows_done)
    unseen = max(0, last.rows_total - stats.rows_received)
    mean_prompt = stats.prompt_tokens_received / max(1, stats.rows_received)
    mean_output = stats.generated_tokens / stats.rows_done
    prompt_left = stats.prompt_tokens_received - stats.prompt_tokens + unseen * mean_prompt
    output_left = min(in_flight * mean_output, stats.max_tokens_left) + unseen * mean_output
    if (prompt_left and not prompt_rate) or (output_left and not output_rate):
        return None
    by_prompt = prompt_left / prompt_rate if prompt_left else 0.0
    by_output = output_left / output_rate if output_left else 0.0
    return max(by_prompt, by_output)


def _cells(progress: Progress) -> list[tuple[str, str]]:
    stats, units = progress.last.stats, progress.last.units
    replicas = stats.replicas
    kv_used = max((r.kv_used_fraction for r in replicas), default=0.0)
    return [
        *_done(progress),
        ("errors", _errors(stats)),
        ("rows/s", f"{progress.row_rate:.1f}"),
        ("prompt tok/s", f"{progress.prompt_rate:.0f} (mean {progress.mean_prompt_rate:.0f})"),
        ("output tok/s", f"{progress.output_rate:.0f} (mean {progress.mean_output_rate:.0f})"),
        ("cached", _hit_rate(progress.cached_fraction, units)),
        ("elapsed", _duration(progress.elapsed_s)),
        ("ETA", "?" if progress.eta_s is None else _duration(progress.eta_s)),
        ("KV", f"{100 * kv_used:.0f} %"),
        ("running", str(sum(r.num_running for r in replicas))),
        ("waiting", str(sum(r.num_waiting for r in replicas))),
        ("replicas", _replicas(stats)),
        ("restarts", str(stats.num_restarts)),
        *_slowest(stats),
    ]


def _done(progress: Progress) -> list[tuple[str, str]]:
    """Rows and units; those of earlier runs count as done."""
    stats, units = progress.last.stats, progress.last.units
    resumed = 0 if units is None else units.rows_resumed
    rows_total = progress.last.rows_total
    total = "?" if rows_total is None else str(rows_total + resumed)
    cells = [("rows", f"{stats.rows_done + resumed}/{total}")]
    if units is not None and units.total:
        at_work = f" ({stats.num_open_units} at work)" if stats.num_open_units else ""
        cells.append(("units", f"{units.done}/{units.total}{at_work}"))
        if units.resumed:
            cells.append(("resumed", f"{units.resumed} units, {units.rows_resumed} rows"))
    return cells


def _hit_rate(measured: float, units: UnitsSoFar | None) -> str:
    text = f"{100 * measured:.0f} %"
    if units is None or units.planned_hit_rate is None:
        return text
    return f"{text} (plan {100 * units.planned_hit_rate:.0f} %)"


def _replicas(stats: PoolStats) -> str:
    missing = stats.num_replicas - stats.num_ready - stats.num_restarting - stats.num_given_up
    text = f"{stats.num_ready} ready, {max(0, missing)} starting"
    if stats.num_restarting:
        text += f", {stats.num_restarting} restarting"
    return text + (f", {stats.num_given_up} given up" if stats.num_given_up else "")


def _slowest(stats: PoolStats) -> list[tuple[str, str]]:
    oldest = stats.oldest_unit
    if oldest is None:
        return []
    where = f"process {oldest.pid} on {oldest.host}"
    return [("slowest unit", f"{oldest.unit} for {_duration(oldest.age_s)} ({where})")]


def _errors(stats: PoolStats) -> str:
    total = sum(stats.errors.values())
    if not total:
        return "0"
    worst = sorted(stats.errors.items(), key=lambda item: (-item[1], item[0]))[:3]
    return f"{total} ({', '.join(f'{n} {name}' for name, n in worst)})"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
