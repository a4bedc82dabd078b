"""Progress of a running job: a live panel on a terminal, else a line every ten seconds.

The figures are a pure function of the last snapshots; only `ProgressPrinter` reads a clock and
writes to a stream.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Self, TextIO

from rich.console import Console, ConsoleDimensions
from rich.control import Control
from rich.live import Live
from rich.panel import Panel
from rich.segment import ControlType
from rich.table import Table

from raybatch.job.watching import ProgressCallback, is_working
from raybatch.records.pool_stats import PoolStats
from raybatch.report.recorder import UnitProgress

WINDOW_S = 60.0
_ONE_LESS_ROW = Control((ControlType.ERASE_IN_LINE, 2), (ControlType.CURSOR_UP, 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgressSnapshot:
    """The state of a pool at the time `time_s` of a monotonic clock."""

    time_s: float
    stats: PoolStats
    rows_total: int | None = None
    """Rows to be done in this run; None while unknown."""
    units: UnitProgress | None = None


class Rates(NamedTuple):
    """Rates per second.

    `rows`, `prompt` and `output` are finished rows and their prompt and output tokens; `computed`
    and `generated` are prompt and output tokens of the engines, of all rows.
    """

    rows: float
    prompt: float
    output: float
    computed: float
    generated: float


class ProgressFigures(NamedTuple):
    """The figures of the last snapshot and the rates since earlier ones."""

    last: ProgressSnapshot
    elapsed_s: float
    recent: Rates
    mean: Rates
    """Since a ready engine first had rows, without engine starts."""
    eta_s: float | None
    """Seconds to the end, from remaining tokens; None while unknown."""


def measure(history: Sequence[ProgressSnapshot]) -> ProgressFigures:
    """Derive the figures to show from one or more snapshots in time order."""
    last, start = history[-1], _work_start(history)
    in_window = next(s for s in history if last.time_s - s.time_s <= WINDOW_S)
    recent = _rates(max(start, in_window, key=lambda snapshot: snapshot.time_s), last)
    mean = _rates(start, last)
    eta_s = _eta_s(last, recent.prompt or mean.prompt, recent.output or mean.output)
    return ProgressFigures(last, last.time_s - history[0].time_s, recent, mean, eta_s)


def progress_line(history: Sequence[ProgressSnapshot]) -> str:
    """Return the progress in one line of ASCII, from snapshots in time order."""
    return " | ".join(f"{name} {value}" for name, value in _cells(measure(history)))


class ProgressPrinter:
    """Show the progress of one job; use as a context manager and call `update`.

    `note` is printed once, at the start; without a terminal a line of figures is printed every
    `interval_s` seconds.
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
        self._history: list[ProgressSnapshot] = []
        self._last_line_s: float | None = None
        is_live = self._console.is_terminal and not self._console.is_dumb_terminal
        # drawn by `update` alone, so that no thread draws while the terminal is measured
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
        self, stats: PoolStats, rows_total: int | None, units: UnitProgress | None = None
    ) -> None:
        """Record a new state, and show it if due."""
        if not self._history and self._note:
            self._console.print(self._note, soft_wrap=True)
        if not self._history and self._live is not None:
            self._live.start()
        now_s = self._clock()
        snapshot = ProgressSnapshot(time_s=now_s, stats=stats, rows_total=rows_total, units=units)
        history = [*self._history, snapshot]
        # keep the first snapshot, the start of work, and the recent window
        kept = (id(history[0]), id(_work_start(history)))
        self._history = [s for s in history if now_s - s.time_s <= WINDOW_S or id(s) in kept]
        if self._live is not None:
            self._draw(self._live)
        elif self._last_line_s is None or now_s - self._last_line_s >= self._interval_s:
            self._write_line()

    def _write_line(self) -> None:
        self._last_line_s = self._history[-1].time_s
        self._console.print(f"raybatch: {progress_line(self._history)}", soft_wrap=True)

    def _draw(self, live: Live) -> None:
        """Draw the panel over the last one, also if a narrower terminal has wrapped it."""
        grid = Table.grid(padding=(0, 2))
        for name, value in _cells(measure(self._history)):
            grid.add_row(name, value)
        panel = Panel(grid, title=self._title, expand=False, safe_box=True)
        rows_per_line = max(1, -(-self._drawn.width // max(1, self._console.width)))
        for _ in range(self._drawn.height * (rows_per_line - 1)):
            self._console.control(_ONE_LESS_ROW)
        live.update(panel, refresh=True)
        lines = self._console.render_lines(panel, pad=False)
        widest = max(sum(piece.cell_length for piece in line) for line in lines)
        self._drawn = ConsoleDimensions(widest, min(len(lines), self._console.height))


# None makes a default display
Progress = ProgressCallback | ProgressPrinter | None


@contextmanager
def shown(
    progress: Progress, units: Callable[[], UnitProgress | None] = lambda: None
) -> Iterator[ProgressCallback]:
    """Yield a function that reports progress: `progress` itself, or one that updates a display.

    None makes a default display. A display is closed with the context; only displays show the
    progress of units, which `units` returns.
    """
    if progress is not None and not isinstance(progress, ProgressPrinter):
        yield progress
        return
    with progress or ProgressPrinter() as printer:
        yield lambda stats, rows_total: printer.update(stats, rows_total, units())


def _work_start(history: Sequence[ProgressSnapshot]) -> ProgressSnapshot:
    """Return the last snapshot before a ready engine had rows, else the first, as reports do."""
    working = (i for i, s in enumerate(history) if is_working(s.stats))
    return history[max(0, next(working, len(history)) - 1)]


def _rates(start: ProgressSnapshot, end: ProgressSnapshot) -> Rates:
    seconds = end.time_s - start.time_s
    if seconds <= 0:
        return Rates(0.0, 0.0, 0.0, 0.0, 0.0)
    names = ("rows_done", "prompt_tokens", "generated_tokens", "cached_tokens")
    rows, prompt, output, cached = (
        getattr(end.stats, name) - getattr(start.stats, name) for name in names
    )
    computed, generated = (
        now - before
        for now, before in zip(_of_engines(end.stats), _of_engines(start.stats), strict=True)
    )
    # counters of engines include running rows, those of rows include engines that have stopped
    done = rows, prompt, output, max(computed, prompt - cached), max(generated, output)
    return Rates(*(max(0, number) / seconds for number in done))


def _of_engines(stats: PoolStats) -> tuple[int, int]:
    """Return the prompt tokens that engines computed, and the tokens that they generated."""
    computed = sum(replica.num_prefilled_tokens for replica in stats.replicas)
    return computed, sum(replica.generated_tokens for replica in stats.replicas)


def _eta_s(last: ProgressSnapshot, prompt_rate: float, output_rate: float) -> float | None:
    """Return the seconds until the remaining tokens are done at these rates; None while unknown.

    Rows that the pool has not received count with the mean prompt length of received rows;
    remaining outputs with the mean output length so far, at most the rows' max_tokens.
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


def _cells(progress: ProgressFigures) -> list[tuple[str, str]]:
    stats, units = progress.last.stats, progress.last.units
    recent, mean, replicas = progress.recent, progress.mean, stats.replicas
    kv_used = max((r.kv_used_fraction for r in replicas), default=0.0)
    cached = f"{100 * stats.cached_fraction:.0f} %"
    if units is not None and units.planned_hit_rate is not None:
        cached += f" (plan {100 * units.planned_hit_rate:.0f} %)"
    num_errors = sum(stats.errors.values())
    worst = sorted(stats.errors.items(), key=lambda item: (-item[1], item[0]))[:3]
    kinds = f" ({', '.join(f'{n} {name}' for name, n in worst)})" if num_errors else ""
    missing = stats.num_replicas - stats.num_ready - stats.num_restarting - stats.num_given_up
    states = f"{stats.num_ready} ready, {max(0, missing)} starting"
    states += f", {stats.num_restarting} restarting" if stats.num_restarting else ""
    states += f", {stats.num_given_up} given up" if stats.num_given_up else ""
    slowest = []
    if (oldest := stats.oldest_unit) is not None:
        where = f"process {oldest.pid} on {oldest.host}"
        slowest = [("slowest unit", f"{oldest.unit} for {_duration(oldest.age_s)} ({where})")]
    return [
        *_done(progress.last),
        ("errors", f"{num_errors}{kinds}"),
        ("rows/s", f"{recent.rows:.1f}"),
        ("prompt tok/s", f"{recent.computed:.0f} (mean {mean.computed:.0f})"),
        ("output tok/s", f"{recent.generated:.0f} (mean {mean.generated:.0f})"),
        ("cached", cached),
        ("elapsed", _duration(progress.elapsed_s)),
        ("ETA", "?" if progress.eta_s is None else _duration(progress.eta_s)),
        ("KV", f"{100 * kv_used:.0f} %"),
        ("running", str(sum(r.num_running for r in replicas))),
        ("waiting", str(sum(r.num_waiting for r in replicas))),
        ("replicas", states),
        ("restarts", str(stats.restarts)),
        *([("hung", str(stats.hung))] if stats.hung else ()),
        *slowest,
    ]


def _done(last: ProgressSnapshot) -> list[tuple[str, str]]:
    """Return rows and units; those of earlier runs count as done."""
    stats, units = last.stats, last.units
    resumed = 0 if units is None else units.rows_resumed
    total = "?" if last.rows_total is None else str(last.rows_total + resumed)
    cells = [("rows", f"{stats.rows_done + resumed}/{total}")]
    if units is not None and units.total:
        at_work = f" ({stats.num_open_units} at work)" if stats.num_open_units else ""
        cells.append(("units", f"{units.done}/{units.total}{at_work}"))
        if units.resumed:
            cells.append(("resumed", f"{units.resumed} units, {units.rows_resumed} rows"))
    return cells


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
