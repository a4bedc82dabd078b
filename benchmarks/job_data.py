"""Parquet files of the whole-job runs: the same input for every peer, and what came out."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet
from workloads_e2e import TokenRequest


class JobOutputError(RuntimeError):
    """A job wrote other rows than it was given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobOutput:
    """What a job wrote: tokens by row, and the engine's window where the peer stamps it."""

    token_ids: list[list[int]]
    window: tuple[float, float] | None


def write_input(requests: Sequence[TokenRequest], folder: Path) -> None:
    """Write one Parquet file with the columns id, tokenized_prompt and output_len."""
    folder.mkdir(parents=True, exist_ok=True)
    table = pa.table(
        {
            "id": pa.array(range(len(requests)), pa.int64()),
            "tokenized_prompt": pa.array(
                [list(request.prompt_ids) for request in requests], pa.list_(pa.int32())
            ),
            "output_len": pa.array([request.output_len for request in requests], pa.int64()),
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
    return JobOutput(token_ids=[by_id[i] for i in range(num_rows)], window=window)
