"""What a deadline lets of a job be done, as a record, and the section that shows it."""

from dataclasses import dataclass

from raybatch.pictures.document import Section, Table
from raybatch.pictures.wording import count, duration, full
from raybatch.policy.deadline import EngineChoice


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsInTime:
    """How many rows are predicted to be done by a deadline, on the engines of the job.

    Args:
        start_s: seconds until engines take rows; those below count from the same begin.
        done_after_s: of the rows in time; where there are none, of the first unit.
        num_possible: units that would be in time at the quick end of the likely range.
        row_s: seconds per row of all engines together.
    """

    deadline_s: float
    start_s: float
    num_rows: int
    rows_in_time: int
    num_units: int
    units_in_time: int
    num_possible: int
    done_after_s: float
    first_unit_rows: int
    row_s: float

    def __str__(self) -> str:
        limit = duration(self.deadline_s)
        start = f", {duration(self.start_s)} of them before the first row"
        if not self.units_in_time:
            return (
                f"no row is predicted to be done within {limit}: the first unit of "
                f"{count(self.first_unit_rows, 'row')} takes {duration(self.done_after_s)}{start}"
            )
        after = f"after {duration(self.done_after_s)} of {limit}{start}"
        if self.rows_in_time == self.num_rows:
            return f"all {full(self.num_rows)} rows are predicted to be done {after}"
        return (
            f"{full(self.rows_in_time)} of {full(self.num_rows)} rows are predicted to be done "
            f"{after}; the others stay open for the next run"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class DeadlineOutlook:
    """What is known of a job's deadline before it runs.

    Args:
        rows: None where nothing is predicted.
        choices: numbers of engines, and of rows at once, that were compared.
        chosen: the cheapest that does all rows in time; None where none does.
    """

    deadline_s: float
    rows: RowsInTime | None = None
    choices: tuple[EngineChoice, ...] = ()
    chosen: EngineChoice | None = None

    def section(self, no_time: str) -> Section:
        """Return what there is to say; `no_time` is why nothing is predicted."""
        if self.rows is None:
            text = f"{duration(self.deadline_s)}; nothing is predicted: {no_time}"
            then = "a run starts rows by the rate that it measures, and keeps what is done"
            return Section(title="Deadline", facts=(("deadline", text), ("run", then)))
        header = ("replicas", "rows at once", "done after", "engine-hours", "")
        rows = tuple(
            (
                full(one.num_replicas),
                full(one.max_num_seqs),
                duration(one.done_after_s),
                f"{one.engine_hours:.3g}",
                self._mark(one),
            )
            for one in self.choices
        )
        note = "for all rows; engine-hours count from the begin of the run, start included"
        if self.chosen is None and self.choices:
            best = min(self.choices, key=lambda one: one.done_after_s)
            note += (
                f". None meets the deadline: the quickest takes {duration(best.done_after_s)} on "
                f"{count(best.num_replicas, 'replica')}"
            )
        return Section(
            title="Deadline",
            facts=(("deadline", str(self.rows)),),
            table=Table(header=header, rows=rows),
            notes=(note,),
        )

    def _mark(self, one: EngineChoice) -> str:
        if one == self.chosen:
            return "the cheapest in time"
        return "" if one.done_after_s <= self.deadline_s else "too late"
