"""What else is done about a run that dies: append and run again, or Ray Data's own checkpoint.

python -m faultlab.peers append|checkpoint FOLDER
"""

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from faultlab.drivers import Driver, wait_until
from faultlab.rig import NUM_ROWS, NUM_UNITS, Rig

OURS = "raybatch"
PEERS = (OURS, "append", "checkpoint")

_BATCH_ROWS = NUM_ROWS // NUM_UNITS
_BATCH_S = 0.25
_OBJECT_STORE_BYTES = 100 << 20
_TIMEOUT_S = 90.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """Rows that one way of resuming leaves after a kill and a second run, and after a third.

    Args:
        rows_done: that were generated when everything was killed.
        lost: of the input, not in the output then.
        resume_s: of the second run; None where it did not end in 90 s.
        written_by_third: rows that a third run added, which had nothing to do.
    """

    system: str
    rows_expected: int
    rows_done: int
    rows_written: int
    lost: int
    duplicated: int
    rows_redone: int
    resume_s: float | None
    written_by_third: int

    @property
    def is_right(self) -> bool:
        """Return whether every row was there once, and a third run added none."""
        is_whole = self.rows_written == self.rows_expected and self.resume_s is not None
        return is_whole and not (self.lost or self.duplicated or self.written_by_third)


def compare(folder: Path, system: str) -> Compared:
    """Kill the process tree of a run when half of its rows are generated; run it again twice."""
    rig = Rig(folder=folder)
    rig.prepare()
    start = rig.start if system == OURS else partial(_start, folder, system)
    driver = start()
    try:
        wait_until(lambda: rig.num_generated() >= NUM_ROWS // 2, driver)
    finally:
        driver.kill_tree()
    rows_done = rig.num_generated()
    resume_s = _run(start)
    numbers = _numbers(folder / "out")
    rows_redone = rig.num_generated() - NUM_ROWS
    _run(start)
    return Compared(
        system=system,
        rows_expected=NUM_ROWS,
        rows_done=rows_done,
        rows_written=len(numbers),
        lost=NUM_ROWS - len(set(numbers)),
        duplicated=len(numbers) - len(set(numbers)),
        rows_redone=rows_redone,
        resume_s=resume_s,
        written_by_third=len(_numbers(folder / "out")) - len(numbers),
    )


def _start(folder: Path, system: str) -> Driver:
    return Driver.start(system, folder, os.environ, module="faultlab.peers")


def _run(start: Callable[[], Driver]) -> float | None:
    """Run to the end; return the seconds of the whole process, None where it hangs."""
    began, driver = time.monotonic(), start()
    try:
        wait_until(lambda: False, driver, timeout_s=_TIMEOUT_S)
    except TimeoutError:
        return None
    finally:
        driver.kill_tree()
    return time.monotonic() - began


def _numbers(out: Path) -> list[int]:
    """Return the input rows that readable files of an output hold."""
    numbers: list[int] = []
    for path in sorted(out.rglob("*.parquet")):
        # a row cut off in the middle of a write does not count
        try:
            numbers += pq.read_table(path, columns=["number"]).column(0).to_pylist()
        except pa.ArrowInvalid:
            continue
    return numbers


class _Answer:
    """Takes the time of an engine, and counts rows where the fake backend counts them."""

    def __init__(self, finished_log: str) -> None:
        self._finished_log = finished_log

    def __call__(self, batch: pa.Table) -> pa.Table:
        time.sleep(_BATCH_S)
        with open(self._finished_log, "ab") as file:
            file.write(b"." * batch.num_rows)
        return batch


def main(system: str, folder: str) -> None:
    """Run the job as Ray Data does it by itself."""
    import ray  # slow to load, and the parent does without

    ray.init(
        "local",
        num_cpus=8,
        include_dashboard=False,
        object_store_memory=_OBJECT_STORE_BYTES,
        log_to_driver=False,
        _temp_dir=folder,
    )
    context = ray.data.DataContext.get_current()
    if system == "checkpoint":
        from ray.data.checkpoint import CheckpointConfig

        context.checkpoint_config = CheckpointConfig(
            id_column="number", checkpoint_path=f"{folder}/checkpoint"
        )
    rows: Any = ray.data.read_parquet(f"{folder}/in", override_num_blocks=NUM_UNITS)
    # by themselves so few rows are one block, of which all is lost with a part
    answered = rows.repartition(target_num_rows_per_block=_BATCH_ROWS).map_batches(
        _Answer,
        fn_constructor_args=[f"{folder}/finished"],
        batch_size=None,
        batch_format="pyarrow",
        concurrency=2,
    )
    answered.write_parquet(f"{folder}/out")


if __name__ == "__main__":
    main(*sys.argv[1:])
