"""A whole job that dies at each labelled point in turn, and is run again."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from faultlab.drivers import wait_until
from faultlab.rig import JOINED_BYTES, NUM_ROWS, NUM_UNITS, Answers, Checked, Rig
from raybatch.durable.fault_points import POINTS

_OF_UNITS = frozenset(
    {"before_unit", "after_rows", "before_publish", "after_publish", "before_done"}
)
_OF_FRAGMENTS = frozenset({"before_fragment", "after_fragment"})
_OF_JOINS = frozenset({"before_join", "after_join", "after_join_record"})
_OF_TABLES = frozenset({"before_table", "in_table", "after_table"})
_HAS_TABLES = find_spec("raybatch_tables") is not None
SWEPT = tuple(point for point in POINTS if _HAS_TABLES or point not in _OF_TABLES)
_UNIT = NUM_UNITS // 2


@dataclass(frozen=True, kw_only=True, slots=True)
class PointResult:
    """What became of a job that died at a point.

    Args:
        point: where.
        parts_kept: units that were in the output when it died.
        rows_redone: rows that engines finished more than once.
    """

    point: str
    is_reached: bool
    parts_kept: int
    rows_redone: int
    resume_s: float
    checked: Checked

    @property
    def is_right(self) -> bool:
        """Return whether the job died where it should and lost nothing."""
        return self.is_reached and self.checked.is_right


@dataclass(frozen=True, kw_only=True, slots=True)
class Baseline:
    """A run without faults.

    Args:
        rerun_s: of a second one, that finds nothing to do.
    """

    answers: Answers
    seconds: float
    rerun_s: float
    is_right: bool


def baseline(folder: Path) -> Baseline:
    """Run the job without faults, and once more."""
    rig = Rig(folder=folder)
    rig.prepare()
    _, seconds = rig.finish()
    _, rerun_s = rig.finish()
    answers = rig.answers()
    return Baseline(
        answers=answers,
        seconds=seconds,
        rerun_s=rerun_s,
        is_right=rig.check(answers).is_right and len(answers) == NUM_ROWS,
    )


def sweep(folder: Path, point: str, expected: Answers) -> PointResult:
    """Run a job that dies at a point, then run it again."""
    has_fragments = point in _OF_FRAGMENTS
    # rows of a unit go to the journal where others of it still run: then all rows are one unit
    # units of an output that is laid out by columns are committed by records
    rig = Rig(
        folder=folder,
        unit_rows=NUM_ROWS if has_fragments else NUM_ROWS // NUM_UNITS,
        partition_by=("third",) if point == "before_done" else (),
        output_file_bytes=JOINED_BYTES if point in _OF_JOINS | _OF_TABLES else None,
        publish=f"delta:{folder}/table" if point in _OF_TABLES else None,
    )
    rig.prepare()
    driver = rig.start(fault=f"{point}:unit={_UNIT}" if point in _OF_UNITS else point)
    try:
        wait_until(driver.has_reached, driver)
        is_reached = driver.has_reached()
    finally:
        # Ray starts a feeder again, which dies again: the whole job ends with the first
        driver.kill_tree()
    parts_kept = rig.num_parts()
    _, resume_s = rig.finish()
    return PointResult(
        point=point,
        is_reached=is_reached,
        parts_kept=parts_kept,
        rows_redone=rig.num_redone(),
        resume_s=resume_s,
        checked=rig.check(expected),
    )
