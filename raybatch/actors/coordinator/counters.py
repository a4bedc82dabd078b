"""Rows, tokens and shared prefixes of each client of a pool; no Ray, time passed in."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from raybatch.actors.wire.records import Submission
from raybatch.prefix.block_keys import BlockKeys, DistinctKeys
from raybatch.records.counts import TOKEN_COUNTS
from raybatch.records.types import OpenUnit, PoolStats

Rows = npt.NDArray[np.integer[Any]]

# less is not worth a word, nor is a smaller change worth another one
_MIN_GAP = 0.01
# as they are in `PoolStats`
_REPORTED = (
    "rows_received",
    "rows_done",
    "prompt_tokens_received",
    *TOKEN_COUNTS,
    "cost",
    "max_tokens_left",
)


@dataclass(slots=True)
class Sharing:
    """The prompts that one client has handed over without a plan, summed up in bounded memory."""

    _distinct: DistinctKeys = field(default_factory=DistinctKeys)
    _num_tokens: int = 0
    _reported_tokens: int = 0
    _reported: tuple[float, float] = (0.0, 0.0)

    def received(self, keys: BlockKeys) -> None:
        self._distinct.add(keys)
        self._num_tokens += int(keys.num_tokens.sum())

    def message(self, cached_tokens: int, num_tokens: int) -> str:
        """Return what a plan would save; "" without a gap, or when that was reported before.

        It is reported again for twice as many tokens, where the shares differ.

        Args:
            cached_tokens: prompt tokens of the rows that are done whose KV was shared.
            num_tokens: prompt tokens of the rows that are done.
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
            f"all rows would save up to {possible:.0%} (a raybatch.Job makes such a plan)"
        )


@dataclass(slots=True)
class ClientCounters:
    """Rows and tokens of one client since its first row."""

    rows_received: int = 0
    rows_done: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    prompt_tokens_received: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    cost: float = 0.0
    max_tokens_left: int = 0
    first_received: float | None = None
    first_done: float | None = None
    sharing: Sharing = field(default_factory=Sharing)
    units_written: int = 0
    # no further unit of commit may start
    is_stopped: bool = False
    # number to begin, host and process
    open_units: dict[int, tuple[float, str, int]] = field(default_factory=dict)

    def received(self, submission: Submission, now: float) -> None:
        """Note new rows, with their prompt tokens and longest outputs."""
        self.rows_received += len(submission.prompt_tokens)
        self.prompt_tokens_received += int(submission.prompt_tokens.sum())
        self.max_tokens_left += int(submission.max_new_tokens.sum())
        if self.first_received is None:
            self.first_received = now
        if submission.block_keys is not None:
            self.sharing.received(submission.block_keys)

    def dropped(self, submission: Submission, rows: Rows) -> None:
        """Uncount rows that nobody waits for any more."""
        self.rows_received -= len(rows)
        self.prompt_tokens_received -= int(submission.prompt_tokens[rows].sum())
        self.max_tokens_left -= int(submission.max_new_tokens[rows].sum())

    def finished(
        self, submission: Submission, rows: Rows, results: pa.RecordBatch, now: float
    ) -> None:
        """Note finished rows, with the tokens and errors of their results."""
        self.rows_done += len(rows)
        self.prompt_tokens += _prompt_tokens(submission, rows, results)
        self.max_tokens_left -= int(submission.max_new_tokens[rows].sum())
        if self.first_done is None:
            self.first_done = now
        counted = results.column("num_generated_tokens")
        generated = pc.coalesce(counted, pc.list_value_length(results.column("token_ids")))
        self.generated_tokens += pc.sum(generated).as_py() or 0
        self.cost += pc.sum(results.column("cost")).as_py() or 0.0
        self.cached_tokens += pc.sum(results.column("num_cached_tokens")).as_py() or 0
        errors = results.column("error")
        is_error = pc.not_equal(errors, "")
        if pc.any(is_error).as_py():
            texts = errors.filter(is_error).to_pylist()
            self.errors.update(text.partition(":")[0] for text in texts)

    def outside(self, num_rows: int, errors: Mapping[str, int]) -> None:
        """Note rows that never reach the pool as handed over and done, and errors found outside."""
        self.rows_received += num_rows
        self.rows_done += num_rows
        self.errors.update(errors)

    def unit_opened(self, unit: int, host: str, pid: int, now: float) -> None:
        """Note a unit whose rows a feeder begins to hand over; one that is begun again is young."""
        self.open_units[unit] = now, host, pid

    def unit_closed(self, unit: int, now: float, *, is_written: bool = True) -> float | None:
        """Note that a unit is at work no more; return its seconds, None where they are unknown."""
        self.units_written += is_written
        began, _, _ = self.open_units.pop(unit, (None, "", 0))
        return None if began is None else now - began

    def sharing_message(self) -> str:
        """Return what one plan would have saved in addition, "" when that is known or little."""
        return self.sharing.message(self.cached_tokens, self.prompt_tokens)

    def stats(self, *, now: float, **pool: Any) -> PoolStats:  # noqa: ANN401 - fields of PoolStats
        """Return the counters with the state of the pool."""
        first_row_s = None
        if self.first_done is not None and self.first_received is not None:
            first_row_s = self.first_done - self.first_received
        return PoolStats(
            **pool,
            **{name: getattr(self, name) for name in _REPORTED},
            errors=dict(self.errors),
            first_row_s=first_row_s,
            num_units_written=self.units_written,
            num_open_units=len(self.open_units),
            oldest_unit=self._oldest_unit(now),
        )

    def _oldest_unit(self, now: float) -> OpenUnit | None:
        if not self.open_units:
            return None
        unit, (began, host, pid) = min(self.open_units.items(), key=lambda item: item[1][0])
        return OpenUnit(unit=unit, age_s=now - began, host=host, pid=pid)


def _prompt_tokens(submission: Submission, rows: Rows, results: pa.RecordBatch) -> int:
    """Return the prompt tokens of finished rows, as the backend counts them where it does."""
    total = int(submission.prompt_tokens[rows].sum())
    counted = results.column("num_input_tokens")
    if counted.null_count == len(counted):
        return total
    known = results.filter(counted.is_valid())
    expected = submission.prompt_tokens[known.column("row").to_numpy()]
    return total + int(known.column("num_input_tokens").to_numpy().sum() - expected.sum())
