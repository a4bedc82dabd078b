"""Counts of finished rows: statuses, errors and tokens, made once when they are written."""

from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raybatch.durable.units import ErrorTally, UnitCounts
from raybatch.prefix.histogram import Histogram
from raybatch.rows.batches import is_any_type
from raybatch.rows.schema import ERROR_COLUMN, OutputSchema, Status, error_class, row_status


def unit_counts(finished: pa.Table, output: OutputSchema) -> UnitCounts:
    table = counted_columns(finished, output)
    requested = table.filter(pc.greater(table.column("attempts"), 0))
    copied = pc.equal(requested.column("num_cached_tokens"), requested.column("num_input_tokens"))
    return UnitCounts(
        num_rows=table.num_rows,
        statuses=_statuses(table),
        errors=_errors(table),
        prompt_tokens=_sum(requested.column("num_input_tokens")),
        cached_tokens=_sum(requested.column("num_cached_tokens")),
        generated_tokens=_sum(_per_sample(table, output)),
        num_asked=requested.num_rows,
        num_copies=_sum(copied),
        prompt_lengths=_bins(requested.column("num_input_tokens")),
        output_lengths=() if output.task != "generate" else _bins(_per_sample(requested, output)),
    )


def _per_sample(table: pa.Table, output: OutputSchema) -> pa.ChunkedArray:
    generated = table.column("num_generated_tokens")
    return pc.list_flatten(generated) if output.num_samples > 1 else generated


def _bins(lengths: pa.ChunkedArray) -> tuple[int, ...]:
    return Histogram.of(lengths.drop_null().to_numpy().astype(np.int64)).counts


def row_statuses(finished: pa.Table, output: OutputSchema) -> list[Status]:
    table = counted_columns(finished, output)
    reasons, errors = (table.column(n).to_pylist() for n in ("finish_reason", ERROR_COLUMN))
    return [row_status(r or "", e or "") for r, e in zip(reasons, errors, strict=True)]


def _statuses(table: pa.Table) -> dict[str, int]:
    statuses = Counter[str]()
    keys = table.select(["finish_reason", ERROR_COLUMN])
    for group in keys.group_by(keys.column_names).aggregate([([], "count_all")]).to_pylist():
        status = row_status(group["finish_reason"] or "", group[ERROR_COLUMN] or "")
        statuses[status] += group["count_all"]
    return dict(statuses)


def pipeline_statuses(table: pa.Table) -> dict[str, int]:
    """Count rows of a user's pipeline by status; all are "ok" without the columns of a stage."""
    texts = {field.name for field in table.schema if is_any_type(field.type, "string large_string")}
    return _statuses(table) if {"finish_reason", ERROR_COLUMN} <= texts else {"ok": len(table)}


def _errors(table: pa.Table) -> dict[str, ErrorTally]:
    errors: dict[str, ErrorTally] = {}
    failed = table.filter(pc.not_equal(table.column(ERROR_COLUMN), ""))
    for row in failed.select(["row_id", ERROR_COLUMN]).to_pylist():
        name = error_class(row[ERROR_COLUMN])
        one = ErrorTally(num_rows=1, row_ids=(str(row["row_id"]),), message=row[ERROR_COLUMN])
        errors[name] = errors[name] + one if name in errors else one
    return errors


def counted_columns(table: pa.Table, output: OutputSchema) -> pa.Table:
    """Return the columns of finished rows that reports count, without the output prefix.

    Of several samples only the finish reason of the first is kept.
    """
    names = ["row_id", "finish_reason", ERROR_COLUMN, "num_input_tokens", "num_cached_tokens"]
    names += ["attempts", *(["num_generated_tokens"] if output.task == "generate" else [])]
    table = table.select([output.prefix + name for name in names]).rename_columns(names)
    if output.task != "generate":
        nothing = pa.array(np.zeros(table.num_rows, np.int32))
        table = table.append_column("num_generated_tokens", nothing)
    if output.num_samples > 1:
        reasons = pc.list_element(table.column("finish_reason"), 0)
        table = table.set_column(1, "finish_reason", reasons)
    return table


def _sum(column: pa.ChunkedArray) -> int:
    return int(pc.sum(column).as_py() or 0)
