"""Rounds of a workload: each is a job whose prompts follow from answers, all on one warm pool.

Jobs with equal stages share their engines. A stopped round resumes, and a complete one does not run
again, so after a crash you start the script of the workload again.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from raybatch import Job, RunReport


def run_round(
    folder: Path, rows: Sequence[dict[str, Any]], stage: type, **options: object
) -> tuple[list[dict[str, Any]], RunReport]:
    """Answer rows with columns `id` and those of the prompt, and return them by `id`."""
    source = folder / "prompts" / "part-00000.parquet"
    source.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(rows)), source)
    report = Job(source.parent, folder / "answers", stage, **options).run()
    if report.rows_todo:
        raise SystemExit(f"{folder} is not complete: {report.stopped}; rerun to resume")
    answers = pq.read_table(folder / "answers" / "data").to_pylist()
    return sorted(answers, key=lambda row: row["id"]), report


def summary_of(name: str, reports: Sequence[RunReport]) -> str:
    """Return rows, prompt tokens computed of all, and rows per second from begin to end."""
    rows = sum(report.rows_out for report in reports)
    logical = sum(report.prompt_tokens for report in reports)
    computed = logical - sum(report.cached_tokens for report in reports)
    generated = sum(report.generated_tokens for report in reports)
    seconds = sum(report.total_s for report in reports)
    return (
        f"{name}: {rows} rows, {computed} of {logical} prompt tokens computed, "
        f"{generated} generated, {rows / max(seconds, 1e-3):.1f} rows/s"
    )
