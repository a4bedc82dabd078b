"""Counts of a pool: rows, tokens and shared prefixes of each client, and its metrics.

Metrics are counters and gauges on the metrics ports of Ray, as `ray_raybatch_*`. No decision reads
them; no Ray, time is passed in.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raybatch.actors.coordinator.learned_lengths import Coverage
from raybatch.actors.wire.columns import generated_lengths, has_error, total
from raybatch.actors.wire.records import Submission
from raybatch.prefix.block_keys import BlockKeys, DistinctKeys
from raybatch.records.pool_stats import OpenUnit, PoolCounts, PoolStats
from raybatch.records.types import TOKEN_COUNTS, ReplicaStats, counter, metrics_of

Rows = npt.NDArray[np.integer[Any]]

# smallest gap to report, and smallest change to report again
_MIN_GAP = 0.01
# as they are in `PoolStats`
_REPORTED = (
    *("rows_received", "rows_done", "prompt_tokens_received", *TOKEN_COUNTS, "cost"),
    "max_tokens_left",
)


@dataclass(slots=True)
class Sharing:
    """Measures how many prompt tokens a plan would save for unplanned rows; O(1) memory."""

    _distinct: DistinctKeys = field(default_factory=DistinctKeys)
    _num_tokens: int = 0
    _reported_tokens: int = 0
    _reported: tuple[float, float] = (0.0, 0.0)

    def received(self, keys: BlockKeys) -> None:
        self._distinct.add(keys)
        self._num_tokens += int(keys.num_tokens.sum())

    def message(self, cached_tokens: int, num_tokens: int) -> str:
        """Return a message about the share of tokens that a plan would save; "" if there is none.

        There is one if a plan would save more, and again after twice as many tokens if the shares
        have changed.

        Args:
            cached_tokens: prompt tokens of finished rows whose KV was cached.
            num_tokens: prompt tokens of finished rows.
        """
        if not self._num_tokens or not num_tokens or num_tokens < 2 * self._reported_tokens:
            return ""
        saved = cached_tokens / num_tokens
        possible = 1 - self._distinct.computed_tokens() / self._num_tokens
        change = max(abs(saved - self._reported[0]), abs(possible - self._reported[1]))
        if possible - saved < _MIN_GAP or change < _MIN_GAP:
            return ""
        self._reported, self._reported_tokens = (saved, possible), num_tokens
        return (
            f"row sharing in flight saved {saved:.0%} of {num_tokens} prompt tokens; one plan over "
            f"all rows would save up to {possible:.0%} (made by a raybatch.Job, or by plan=True)"
        )


@dataclass(slots=True)
class ClientCounters:
    """Counts rows and tokens of one client since its first row."""

    rows_received: int = 0
    rows_done: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    prompt_tokens_received: int = 0
    prompt_tokens: int = counter("Prompt tokens of the rows that are back.")
    cached_tokens: int = counter("Prompt tokens with KV from another request.")
    generated_tokens: int = counter("Generated tokens of the rows that are back.")
    cost: float = counter("What an endpoint's answers have cost.", default=0.0)
    max_tokens_left: int = 0
    sharing: Sharing = field(default_factory=Sharing)
    coverage: Coverage = field(default_factory=Coverage)
    units_written: int = 0
    # no further commit unit may start
    is_stopped: bool = False
    # by number: start time, host and process
    open_units: dict[int, tuple[float, str, int]] = field(default_factory=dict)

    def received(self, submission: Submission) -> None:
        self.rows_received += _num_rows(submission, np.arange(len(submission.prompt_tokens)))
        self.prompt_tokens_received += int(submission.prompt_tokens.sum())
        self.max_tokens_left += int(submission.max_new_tokens.sum())
        if submission.block_keys is not None:
            self.sharing.received(submission.block_keys)

    def dropped(self, submission: Submission, rows: Rows) -> None:
        """Subtract unfinished rows of a cancelled batch from the counts."""
        self.rows_received -= _num_rows(submission, rows)
        self.prompt_tokens_received -= int(submission.prompt_tokens[rows].sum())
        self.max_tokens_left -= int(submission.max_new_tokens[rows].sum())

    def finished(self, submission: Submission, rows: Rows, results: pa.RecordBatch) -> None:
        self.rows_done += _num_rows(submission, rows)
        self.prompt_tokens += _prompt_tokens(submission, rows, results)
        self.max_tokens_left -= int(submission.max_new_tokens[rows].sum())
        self.generated_tokens += int(generated_lengths(results).sum())
        self.cost += total(results.column("cost"))
        self.cached_tokens += int(total(results.column("num_cached_tokens")))
        if not (is_error := has_error(results)).any():
            return
        failed = results.filter(pa.array(is_error))
        texts = failed.column("error").to_pylist()
        for row, text in zip(failed.column("row").to_numpy(), texts, strict=True):
            self.errors[text.partition(":")[0]] += _num_rows(submission, np.array([row]))

    def copied(self, submission: Submission, row: int, results: pa.RecordBatch) -> None:
        """Count a row that got the results of an identical row, and so cost no tokens."""
        rows = np.array([row])
        self.rows_done += _num_rows(submission, rows)
        self.max_tokens_left -= int(submission.max_new_tokens[row])
        if error := results.column("error")[0].as_py():
            self.errors[error.partition(":")[0]] += _num_rows(submission, rows)

    def outside(self, num_rows: int, errors: Mapping[str, int]) -> None:
        """Count rows that finished without the pool, such as invalid ones, and errors by class."""
        self.rows_received += num_rows
        self.rows_done += num_rows
        self.errors.update(errors)

    def unit_opened(self, unit: int, host: str, pid: int, now: float) -> None:
        """Note that a feeder (`host`, `pid`) opens a commit unit; reopening it resets its age."""
        self.open_units[unit] = now, host, pid

    def unit_closed(self, unit: int, now: float, *, is_written: bool = True) -> float | None:
        """Note that a commit unit is closed; return the seconds since it was opened, or None."""
        self.units_written += is_written
        began, _, _ = self.open_units.pop(unit, (None, "", 0))
        return None if began is None else now - began

    def stats(self, *, now: float, **pool: Any) -> PoolStats:  # noqa: ANN401 - fields of PoolStats
        oldest = None
        if self.open_units:
            unit, (began, host, pid) = min(self.open_units.items(), key=lambda item: item[1][0])
            oldest = OpenUnit(unit=unit, age_s=now - began, host=host, pid=pid)
        return PoolStats(
            **pool,
            **{name: getattr(self, name) for name in _REPORTED},
            errors=dict(self.errors),
            length_coverage=self.coverage.quantiles(),
            num_units_written=self.units_written,
            num_open_units=len(self.open_units),
            oldest_unit=oldest,
        )


def _num_rows(submission: Submission, rows: Rows) -> int:
    """Return the number of rows, duplicates included."""
    return len(rows) + (0 if submission.copies is None else int(submission.copies[rows].sum()))


def _prompt_tokens(submission: Submission, rows: Rows, results: pa.RecordBatch) -> int:
    """Return the prompt tokens of finished rows, by the count of the backend if it has one."""
    total = int(submission.prompt_tokens[rows].sum())
    counted = results.column("num_input_tokens")
    if counted.null_count == len(counted):
        return total
    known = results.filter(counted.is_valid())
    expected = submission.prompt_tokens[known.column("row").to_numpy()]
    return total + int(known.column("num_input_tokens").to_numpy().sum() - expected.sum())


_UNIT_SECONDS = [1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14_400.0]
# 0 where an engine has no such thing
_SHOWN_ABOVE_ZERO = ("concurrency", "num_graphs")


class _Rising:
    """A metrics counter that follows a growing total; it ignores a total that falls back."""

    def __init__(self, registry: Any, name: str, description: str, *tags: str) -> None:  # noqa: ANN401
        self._counter = registry.Counter(name, description=description, tag_keys=tags)
        self._highest: dict[tuple[str, ...], float] = {}

    def follow(self, total: float, **tags: str) -> None:
        key = tuple(tags.values())
        more = total - self._highest.get(key, 0)
        if more > 0:
            self._highest[key] = total
            self._counter.inc(more, tags=tags)


def _rising(registry: Any, record: type, *tags: str) -> dict[str, _Rising]:  # noqa: ANN401
    """Return the metrics counters of a record, by field."""
    return {
        name: _Rising(registry, f"raybatch_{metric}_total", text, *tags)
        for name, (metric, text) in metrics_of(record, "counter").items()
    }


class PoolMetrics:
    """Metrics of the coordinator: rows, tokens, commit units, restarts."""

    def __init__(self, registry: Any) -> None:  # noqa: ANN401 - a module, or a fake of it
        self._rows = _Rising(registry, "raybatch_rows_total", "Rows back.", "stage", "status")
        self._tokens = _rising(registry, ClientCounters, "stage")
        self._counts = _rising(registry, PoolCounts)
        self._units = registry.Counter(
            "raybatch_units_total", description="Units of commit.", tag_keys=("state",)
        )
        self._unit_seconds = registry.Histogram(
            "raybatch_unit_seconds",
            description="From the first row of a unit to its part.",
            boundaries=_UNIT_SECONDS,
            tag_keys=(),
        )

    def update(self, clients: Mapping[str, ClientCounters], counts: Mapping[str, int]) -> None:
        """Update from the counts of clients, and of the pool by their names in `PoolCounts`."""
        for stage, counters in clients.items():
            failed = sum(counters.errors.values())
            self._rows.follow(counters.rows_done - failed, stage=stage, status="ok")
            self._rows.follow(failed, stage=stage, status="error")
            for name, series in self._tokens.items():
                series.follow(getattr(counters, name), stage=stage)
        for name, series in self._counts.items():
            series.follow(counts[name])

    def unit(self, state: str, seconds: float | None) -> None:
        self._units.inc(1, tags={"state": state})
        if state == "written" and seconds is not None:
            self._unit_seconds.observe(seconds)


class ReplicaMetrics:
    """Metrics of one engine."""

    def __init__(self, replica_id: int, registry: Any) -> None:  # noqa: ANN401
        self._replica = str(replica_id)
        self._gauges = {
            name: registry.Gauge(f"raybatch_{metric}", description=text, tag_keys=("replica",))
            for name, (metric, text) in metrics_of(ReplicaStats, "gauge").items()
        }
        self._counters = _rising(registry, ReplicaStats, "replica")
        text = "Steps without a CUDA graph, by why, where there are graphs."
        self._eager_steps = _Rising(
            registry, "raybatch_eager_steps_total", text, "replica", "reason"
        )

    def update(self, stats: ReplicaStats) -> None:
        for name, gauge in self._gauges.items():
            value = getattr(stats, name)
            if value or name not in _SHOWN_ABOVE_ZERO:
                gauge.set(value, tags={"replica": self._replica})
        for name, series in self._counters.items():
            series.follow(getattr(stats, name), replica=self._replica)
        for reason, count in stats.eager_steps.items():
            self._eager_steps.follow(count, replica=self._replica, reason=reason)
