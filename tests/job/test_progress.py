"""The progress display: figures from snapshots, lines and panel."""

import io
import logging
import sys

import pytest

from raybatch.job.progress import ProgressPrinter, ProgressSnapshot, measure, progress_line
from raybatch.records.pool_stats import OpenUnit, PoolStats
from raybatch.records.types import ReplicaStats
from raybatch.report.recorder import UnitProgress
from raybatch.stages.quiet_ray import StderrHandler


def stats(rows_done=0, rows_received=0, prompt=0, generated=0, **changes):
    """A pool whose rows have 10 prompt tokens each by default."""
    values = {
        "num_replicas": 2,
        "num_ready": 2,
        "rows_received": rows_received,
        "rows_done": rows_done,
        "prompt_tokens_received": max(10 * rows_received, prompt),
        "prompt_tokens": prompt,
        "generated_tokens": generated,
        "max_tokens_left": 1_000_000,
    }
    return PoolStats(**{**values, **changes})


def snapshot(time_s, rows_total=100, **changes):
    return ProgressSnapshot(time_s=time_s, rows_total=rows_total, stats=stats(**changes))


def test_rates_are_of_the_recent_window_and_of_the_whole_run():
    history = [
        snapshot(0.0),
        snapshot(100.0, prompt=1000, generated=100),
        snapshot(110.0, prompt=3000, generated=200),
    ]
    progress = measure(history)
    assert (progress.recent.prompt, progress.recent.output) == (200.0, 10.0)
    assert progress.mean.prompt == pytest.approx(3000 / 110)


def test_mean_rates_leave_the_start_of_the_engines_out():
    starting = snapshot(90.0, rows_received=100, num_ready=0)
    history = [snapshot(0.0), starting, snapshot(100.0, prompt=1000, generated=50)]
    progress = measure(history)
    assert (progress.mean.prompt, progress.mean.output) == (100.0, 5.0)


def test_eta_comes_from_tokens_not_rows():
    # half of the rows are done, but the other half has 9 times as many prompt tokens
    done = snapshot(
        10.0, rows_total=10, rows_done=5, rows_received=10, prompt=100, prompt_tokens_received=1000
    )
    assert measure([snapshot(0.0, rows_total=10), done]).eta_s == pytest.approx(90.0)


def test_eta_counts_rows_that_the_pool_has_not_seen():
    done = snapshot(10.0, rows_total=100, rows_done=10, rows_received=20, prompt=100)
    assert measure([snapshot(0.0), done]).eta_s == pytest.approx(90.0)


def test_eta_bounds_outputs_by_what_the_rows_may_generate():
    changes = {"rows_done": 10, "rows_received": 20, "prompt": 200, "generated": 100}
    done = snapshot(10.0, rows_total=20, max_tokens_left=50, **changes)
    assert measure([snapshot(0.0), done]).eta_s == pytest.approx(5.0)


@pytest.mark.parametrize(
    "last",
    [
        snapshot(10.0, rows_total=None, rows_done=5, rows_received=9, prompt=50),
        snapshot(10.0, rows_done=0, rows_received=9),
        snapshot(0.0, rows_done=5, rows_received=9, prompt=50),
    ],
    ids=["total-unknown", "nothing-done", "no-time"],
)
def test_eta_is_unknown_without_a_base(last):
    assert measure([snapshot(0.0), last]).eta_s is None


def test_eta_is_zero_at_the_end():
    done = snapshot(10.0, rows_done=100, rows_received=100, prompt=1000, max_tokens_left=0)
    assert measure([snapshot(0.0), done]).eta_s == 0.0


def test_rates_are_of_tokens_that_engines_compute_before_a_row_is_back():
    engine = ReplicaStats(prompt_tokens=700, cached_tokens=200, generated_tokens=50)
    running = snapshot(10.0, rows_received=100, num_ready=1, replicas=(engine,))
    rates = measure([snapshot(0.0), running]).mean
    assert (rates.rows, rates.computed, rates.generated) == (0.0, 50.0, 5.0)
    # engines that are gone are known by their rows
    done = snapshot(20.0, rows_done=100, prompt=1000, generated=100, cached_tokens=400)
    rates = measure([snapshot(0.0), running, done]).mean
    assert (rates.computed, rates.generated) == (30.0, 5.0)


def test_line_shows_every_figure():
    replica = ReplicaStats(num_running=3, num_waiting=4, kv_used_fraction=0.25)
    last = snapshot(
        125.0,
        rows_done=50,
        rows_received=100,
        prompt=500,
        generated=250,
        cached_tokens=100,
        errors={"InvalidPrompt": 2, "PromptTooLong": 1},
        num_ready=1,
        restarts=1,
        replicas=(replica, replica),
    )
    assert progress_line([snapshot(0.0), last]) == (
        "rows 50/100 | errors 3 (2 InvalidPrompt, 1 PromptTooLong) | rows/s 0.0 | "
        "prompt tok/s 0 (mean 3) | output tok/s 0 (mean 2) | cached 20 % | elapsed 2:05 | "
        "ETA 2:05 | KV 25 % | running 6 | waiting 8 | replicas 1 ready, 1 starting | restarts 1"
    )


def test_line_counts_rows_and_units_of_earlier_runs_as_done():
    units = UnitProgress(total=9, done=4, resumed=3, rows_resumed=30, planned_hit_rate=0.5)
    last = ProgressSnapshot(
        time_s=10.0,
        stats=stats(rows_done=20, num_open_units=2, prompt=100, cached_tokens=40),
        rows_total=60,
        units=units,
    )
    line = progress_line([snapshot(0.0), last])
    assert "rows 50/90 | units 4/9 (2 at work) | resumed 3 units, 30 rows | " in line
    assert "cached 40 % (plan 50 %)" in line


def test_line_before_the_plan_counts_rows_of_earlier_runs():
    units = UnitProgress(total=0, done=0, resumed=0, rows_resumed=30)
    line = progress_line([ProgressSnapshot(time_s=0.0, stats=stats(), rows_total=60, units=units)])
    assert line.startswith("rows 30/90 | errors 0")


def test_line_names_the_slowest_unit():
    oldest = OpenUnit(unit=7, age_s=61.0, host="h", pid=12)
    line = progress_line([snapshot(0.0, oldest_unit=oldest)])
    assert "slowest unit 7 for 1:01 (process 12 on h)" in line


def test_line_tells_a_restart_from_a_start():
    line = progress_line([snapshot(0.0, num_replicas=5, num_ready=2, num_restarting=1)])
    assert "replicas 2 ready, 2 starting, 1 restarting" in line


def test_line_of_an_empty_pool_is_ascii():
    assert progress_line([ProgressSnapshot(time_s=0.0, stats=PoolStats())]).isascii()


class Clock:
    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


def printed_lines(times_s):
    stream, clock = io.StringIO(), Clock()
    with ProgressPrinter(stream=stream, clock=clock) as printer:
        for clock.now_s in times_s:
            printer.update(stats(), 100)
    return stream.getvalue().splitlines()


def test_a_line_comes_every_ten_seconds_and_at_the_end():
    lines = printed_lines([0.0, 4.0, 9.0, 10.0, 15.0])
    assert [line.split("elapsed ")[1][:4] for line in lines] == ["0:00", "0:10", "0:15"]


def test_the_last_state_is_not_printed_twice():
    assert len(printed_lines([0.0, 10.0])) == 2


def test_mean_rates_count_from_the_first_row_in_an_engine_not_from_the_first_finished_one():
    working = snapshot(60.0, rows_received=100)
    history = [snapshot(0.0), snapshot(50.0), working, snapshot(100.0, prompt=1000)]
    assert measure(history).mean.prompt == 20.0


def test_a_note_comes_once_before_the_first_line():
    stream = io.StringIO()
    with ProgressPrinter(stream=stream, note="look here") as printer:
        assert stream.getvalue() == ""
        printer.update(stats(), 100)
        printer.update(stats(), 100)
    assert [line.split(":")[0] for line in stream.getvalue().splitlines()] == [
        "look here",
        "raybatch",
        "raybatch",
    ]


def test_a_job_without_updates_prints_nothing():
    assert printed_lines([]) == []


def test_old_snapshots_leave_the_window_but_not_the_mean():
    stream, clock = io.StringIO(), Clock()
    with ProgressPrinter(stream=stream, clock=clock) as printer:
        for second in range(0, 200, 5):
            clock.now_s = float(second)
            printer.update(stats(prompt=19 * max(0, second - 100)), 100)
    # work began at 100 s, which has left the window of 60 s when the last line comes
    line = stream.getvalue().splitlines()[-1]
    assert "prompt tok/s 19 (mean 19)" in line
    assert "elapsed 3:15" in line


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_gets_a_panel(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with ProgressPrinter("my job", stream=stream) as printer:
        printer.update(stats(rows_done=7), 100)
    assert "my job" in stream.getvalue()
    assert "7/100" in stream.getvalue()


@pytest.mark.parametrize(("width", "times"), [(80, 0), (60, 0), (30, 1), (12, 3)])
def test_a_panel_that_a_narrower_terminal_has_wrapped_is_erased_as_a_whole(
    monkeypatch, width, times
):
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with ProgressPrinter(stream=stream) as printer:
        printer.update(stats(rows_done=7), 100)
        num_lines = stream.getvalue().count("\n") + 1
        before = len(stream.getvalue())
        printer._console.width = width
        printer.update(stats(rows_done=8), 100)
        rows_up = stream.getvalue()[before:].count("\x1b[1A")
    assert num_lines > 10
    assert rows_up == num_lines - 1 + times * num_lines


def test_a_log_line_between_two_panels_leaves_no_piece_of_the_first(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    handler = StderrHandler()
    with ProgressPrinter() as printer:
        printer.update(stats(rows_done=7), 100)
        before = len(stream.getvalue())
        handler.emit(logging.makeLogRecord({"msg": "a word between"}))
        shown = stream.getvalue()[before:]
    erased, _, drawn = shown.partition("a word between")
    assert erased.count("\x1b[2K") == drawn.count("\n")
    assert "7/100" in drawn


def test_a_dumb_terminal_gets_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    with ProgressPrinter(stream=stream) as printer:
        printer.update(stats(rows_done=7), 100)
    assert stream.getvalue().startswith("raybatch: rows 7/100 | ")
