"""Parquet files of the whole-job runs: the same input for every peer, and its outputs."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute
import pyarrow.dataset
import pyarrow.parquet
from workloads_e2e import TokenRequest

# raybatch's column, and the column that the peer's script adds
CACHED_COLUMNS = ("num_cached_tokens", "cached_tokens")


class JobOutputError(RuntimeError):
    """A job did not write exactly the rows of its input."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobOutput:
    """Results of a job: tokens by row, and the peer's reports on its engines.

    Args:
        token_ids: tokens of each row.
        window: times of the first queued request and the last token, in seconds; None if unknown.
        cached_tokens: prompt tokens from the prefix cache; None if they are not reported.
    """

    token_ids: list[list[int]]
    window: tuple[float, float] | None
    cached_tokens: int | None


def write_input(
    requests: Sequence[TokenRequest], folder: Path, rows: Sequence[int] | None = None
) -> None:
    """Write one Parquet file with the columns id, tokenized_prompt and output_len.

    Args:
        requests: requests of the job.
        folder: folder to write to.
        rows: order of the requests in the file; None keeps the given order.
    """
    rows = range(len(requests)) if rows is None else rows
    folder.mkdir(parents=True, exist_ok=True)
    table = pa.table(
        {
            "id": pa.array(rows, pa.int64()),
            "tokenized_prompt": pa.array(
                [list(requests[row].prompt_ids) for row in rows], pa.list_(pa.int32())
            ),
            "output_len": pa.array([requests[row].output_len for row in rows], pa.int64()),
        }
    )
    pyarrow.parquet.write_table(table, folder / "prompts.parquet")


def read_output(folder: Path, num_rows: int) -> JobOutput:
    """Read the rows of a job in input order.

    Raises:
        JobOutputError: rows are missing or doubled.
    """
    table = pyarrow.dataset.dataset(folder, format="parquet", exclude_invalid_files=True).to_table()
    ids = table["id"].to_pylist()
    if sorted(ids) != list(range(num_rows)):
        raise JobOutputError(f"{len(ids)} rows of {num_rows} came out, {len(set(ids))} unique")
    by_id = dict(zip(ids, table["generated_tokens"].to_pylist(), strict=True))
    window = None
    if "queued_s" in table.column_names:
        starts, ends = table["queued_s"].to_pylist(), table["finished_s"].to_pylist()
        window = (min(starts), max(ends))
    cached = [name for name in CACHED_COLUMNS if name in table.column_names]
    return JobOutput(
        token_ids=[by_id[i] for i in range(num_rows)],
        window=window,
        cached_tokens=pyarrow.compute.sum(table[cached[0]]).as_py() if cached else None,
    )
