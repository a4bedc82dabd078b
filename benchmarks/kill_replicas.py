"""Kill an engine at 30 % and at 60 % of a job on the native engine; every row must come out once.

python benchmarks/kill_replicas.py            # 20,000 rows, two replicas
python benchmarks/kill_replicas.py --rows 2000

Kills are triggered by progress, never by time, and hit one process with SIGKILL. The counts that
are printed at the end come from the written files.
"""

import argparse
import os
import signal
import sys
import tempfile
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.dataset as pads

import raybatch
from raybatch.demo.run import write_dataset
from raybatch.demo.task import PROMPT
from raybatch.records.pool_stats import PoolStats

QUESTIONS_PER_DOCUMENT = 16
KILL_AT_FRACTIONS = (0.3, 0.6)


class Killer:
    """A progress callback that kills one engine each time a fraction of the rows is done."""

    def __init__(self, stage: type) -> None:
        self._pool = stage.pool
        self._left = list(KILL_AT_FRACTIONS)
        self.killed: list[tuple[int, int]] = []

    def __call__(self, stats: PoolStats, rows_total: int) -> None:
        if not self._left or stats.rows_done < self._left[0] * rows_total:
            return
        pids = self._pool.state().pids
        if not pids:
            return  # both are still starting; the next call finds one
        self._left.pop(0)
        os.kill(pids[0], signal.SIGKILL)
        self.killed.append((stats.rows_done, pids[0]))
        print(f"killed the engine with pid {pids[0]} after {stats.rows_done} of {rows_total} rows")


def run(folder: Path, *, rows: int, replicas: int) -> bool:
    """Write the dataset, run the job with kills, print the counts; True if all rows are right."""
    prompts, answers = folder / "prompts", folder / "answers"
    write_dataset(
        prompts,
        num_documents=-(-rows // QUESTIONS_PER_DOCUMENT),
        questions_per_document=QUESTIONS_PER_DOCUMENT,
        seed=1,
        num_files=8,
        include_bad_rows=False,
    )
    stage = raybatch.LLMStage(
        "demo",
        prompt=PROMPT,
        sampling=raybatch.Sampling(temperature=0, max_tokens=64),
        pool=raybatch.PoolConfig(replicas=replicas),
    )
    killer = Killer(stage)
    report = raybatch.Job(prompts, answers, stage).run(progress=killer)
    table = pads.dataset(answers, format="parquet", exclude_invalid_files=False).to_table(
        columns=["row_id", "__inference_error__", "attempts"]
    )
    distinct = pc.count_distinct(table.column("row_id")).as_py()
    errors = pc.sum(pc.not_equal(table.column("__inference_error__"), "")).as_py()
    again = pc.sum(pc.greater(table.column("attempts"), 1)).as_py()
    print(report.to_text())
    print(f"engines killed: {len(killer.killed)}, rows done again: {again}, error rows: {errors}")
    print(f"unique rows: {distinct} of {report.rows_in} in, {table.num_rows} out")
    is_complete = distinct == report.rows_in == table.num_rows
    return is_complete and not errors and len(killer.killed) == len(KILL_AT_FRACTIONS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=20_000, help="a multiple of 16")
    parser.add_argument("--replicas", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="raybatch-kill-") as folder:
        is_well = run(Path(folder), rows=args.rows, replicas=args.replicas)
    print("every row came out once" if is_well else "FAILED")
    sys.exit(not is_well)


if __name__ == "__main__":
    main()
