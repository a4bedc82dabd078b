"""What the output of a run holds: rows, statuses, errors and tokens, counted from its files."""

import dataclasses
from dataclasses import dataclass

import fsspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from raybatch.stages.schema import ERROR_COLUMN, OutputSchema, error_class, row_status

MAX_ROW_IDS_PER_ERROR = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorCount:
    """How often one class of row error happened.

    Args:
        error_class: the part of `__inference_error__` before the colon.
        rows: rows that carry it.
        row_ids: the first few of them.
        message: the whole error of the first one.
    """

    error_class: str
    rows: int
    row_ids: tuple[str, ...] = ()
    message: str = ""


class RowTally:
    """Counts output rows, one Arrow table after the other.

    Memory: the row ids of all tables, because lost and repeated rows are counted from them.
    """

    def __init__(self) -> None:
        self._row_ids: list[pa.Array] = []
        self._statuses: dict[str, int] = {}
        self._errors: dict[str, ErrorCount] = {}
        self.rows_out = 0

    def add(self, table: pa.Table) -> None:
        """Count the rows of `table` by its row_id, finish_reason and __inference_error__."""
        self.rows_out += table.num_rows
        self._row_ids.extend(table.column("row_id").cast(pa.string()).chunks)
        keys = table.select(["finish_reason", ERROR_COLUMN])
        for group in keys.group_by(keys.column_names).aggregate([([], "count_all")]).to_pylist():
            reason, error = group["finish_reason"] or "", group[ERROR_COLUMN] or ""
            status = row_status(reason, error)
            self._statuses[status] = self._statuses.get(status, 0) + group["count_all"]
        failed = table.select(["row_id", ERROR_COLUMN])
        failed = failed.filter(pc.not_equal(failed.column(ERROR_COLUMN), ""))
        for row in failed.to_pylist():
            self._count_error(str(row["row_id"]), row[ERROR_COLUMN])

    def _count_error(self, row_id: str, error: str) -> None:
        name = error_class(error)
        known = self._errors.get(name) or ErrorCount(error_class=name, rows=0, message=error)
        ids = known.row_ids
        if len(ids) < MAX_ROW_IDS_PER_ERROR:
            ids = (*ids, row_id)
        self._errors[name] = dataclasses.replace(known, rows=known.rows + 1, row_ids=ids)

    def rows_distinct(self) -> int:
        """Return the number of different row ids seen."""
        return int(pc.count_distinct(pa.chunked_array(self._row_ids, pa.string())).as_py())

    def statuses(self) -> dict[str, int]:
        """Return status to number of rows, the most frequent first."""
        return dict(sorted(self._statuses.items(), key=lambda item: (-item[1], item[0])))

    def errors(self) -> tuple[ErrorCount, ...]:
        """Return the error classes, the most frequent first."""
        return tuple(sorted(self._errors.values(), key=lambda e: (-e.rows, e.error_class)))


class TokenTally:
    """Sums of tokens over output tables.

    `num_asked` counts the rows that were to reach an engine, `num_copies` those of them that took
    the result of an identical row: an engine computes one token of each prompt at least.

    Args:
        output: the columns of the run.
    """

    def __init__(self, output: OutputSchema) -> None:
        self._is_list = output.num_samples > 1
        self.prompt = self.cached = self.generated = self.num_asked = self.num_copies = 0

    def add(self, table: pa.Table) -> None:
        """Count the tokens of `table`."""
        asked = table.filter(pc.greater(table.column("attempts"), 0))
        generated = table.column("num_generated_tokens")
        self.prompt += _sum(asked.column("num_input_tokens"))
        self.cached += _sum(asked.column("num_cached_tokens"))
        self.num_asked += asked.num_rows
        copied = pc.equal(asked.column("num_cached_tokens"), asked.column("num_input_tokens"))
        self.num_copies += _sum(copied)
        self.generated += _sum(pc.list_flatten(generated) if self._is_list else generated)


def read_outputs(path: str, output: OutputSchema) -> pa.Table:
    """Return the counted columns of one part under their plain names, one reason per row."""
    names = (
        "row_id",
        "finish_reason",
        ERROR_COLUMN,
        "num_input_tokens",
        "num_cached_tokens",
        "num_generated_tokens",
        "attempts",
    )
    with fsspec.open(path, "rb") as file:
        table = pq.read_table(file, columns=[output.prefix + name for name in names])
    table = table.select([output.prefix + name for name in names]).rename_columns(list(names))
    if output.num_samples > 1:
        reasons = pc.list_element(table.column("finish_reason"), 0)
        table = table.set_column(1, "finish_reason", reasons)
    return table


def _sum(column: pa.ChunkedArray) -> int:
    return int(pc.sum(column).as_py() or 0)
