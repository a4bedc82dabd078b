"""The Arrow form of requests and completions; what moves between processes in bulk is this.

Requests: one row per prompt. Results: one row per sample, where `row` is the index in the request
table; a row that failed has exactly one result row, with `error` set.
"""

import itertools
import json
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from raybatch.errors import ConfigError
from raybatch.types import Completion, FinishReason, Request, Sampling, TokenIds

_Offsets = npt.NDArray[np.int64]
_Logprobs = tuple[tuple[TokenIds, npt.NDArray[np.float32]], ...]

REQUEST_SCHEMA = pa.schema(
    [
        pa.field("row_id", pa.string(), nullable=False),
        pa.field("prompt_token_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("seed", pa.uint64(), nullable=False),
        pa.field("sampling", pa.int32(), nullable=False),
        pa.field("group_id", pa.int64()),
        pa.field("prefix_len", pa.int32(), nullable=False),
    ]
)

LOGPROBS_TYPE = pa.list_(
    pa.struct([("token_ids", pa.list_(pa.int32())), ("logprobs", pa.list_(pa.float32()))])
)

RESULT_SCHEMA = pa.schema(
    [
        pa.field("row", pa.int32(), nullable=False),
        pa.field("sample_idx", pa.int32(), nullable=False),
        pa.field("token_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("finish_reason", pa.string(), nullable=False),
        pa.field("stop_reason", pa.string(), nullable=False),
        pa.field("num_cached_tokens", pa.int32(), nullable=False),
        pa.field("error", pa.string(), nullable=False),
        pa.field("text", pa.string()),
        pa.field("logprobs", LOGPROBS_TYPE),
        pa.field("attempts", pa.int32(), nullable=False),
    ]
)


def request_table(
    row_ids: Sequence[str],
    prompts: Sequence[TokenIds],
    *,
    seeds: Sequence[int] | npt.NDArray[np.uint64] | None = None,
    sampling: Sequence[int] | npt.NDArray[np.int32] | None = None,
    group_ids: Sequence[int | None] | None = None,
    prefix_lens: Sequence[int] | npt.NDArray[np.int32] | None = None,
) -> pa.Table:
    """Build a request table from columns; what is left out is zero or null.

    Args:
        row_ids: identity of each row.
        prompts: token ids of each row.
        seeds: 64-bit seed of each row.
        sampling: index of each row into the samplings that travel beside the table.
        group_ids: prefix group of each row.
        prefix_lens: tokens that the row's group shares.
    """
    zeros = np.zeros(len(row_ids), np.int32)
    columns = [
        pa.array(row_ids, pa.string()),
        _token_lists(prompts),
        pa.array(zeros.astype(np.uint64) if seeds is None else seeds, pa.uint64()),
        pa.array(zeros if sampling is None else sampling, pa.int32()),
        pa.nulls(len(row_ids), pa.int64())
        if group_ids is None
        else pa.array(group_ids, pa.int64()),
        pa.array(zeros if prefix_lens is None else prefix_lens, pa.int32()),
    ]
    return pa.Table.from_arrays(columns, schema=REQUEST_SCHEMA)


def check_requests(table: pa.Table, num_samplings: int) -> None:
    """Raise ConfigError unless `table` has the request columns and valid sampling indexes."""
    missing = [name for name in REQUEST_SCHEMA.names if name not in table.column_names]
    if missing:
        raise ConfigError(f"the request table lacks the columns {', '.join(missing)}")
    sampling = _numpy(table["sampling"], np.dtype(np.int32))
    if len(sampling) and not 0 <= int(sampling.min()) <= int(sampling.max()) < num_samplings:
        raise ConfigError(
            f"the column sampling must lie in [0, {num_samplings}), got values from "
            f"{sampling.min()} to {sampling.max()}"
        )


def prompt_lengths(table: pa.Table) -> npt.NDArray[np.int32]:
    """Return the prompt tokens of each row, int32 [rows]."""
    lengths = _array(table["prompt_token_ids"]).value_lengths().fill_null(0)
    return cast(npt.NDArray[np.int32], lengths.to_numpy(zero_copy_only=False).astype(np.int32))


def max_new_tokens(table: pa.Table, samplings: Sequence[Sampling]) -> npt.NDArray[np.int64]:
    """Return the upper bound of generated tokens of each row over its samples, int64 [rows]."""
    bounds = np.array([s.max_tokens * s.n for s in samplings], np.int64)
    indexes = _numpy(table["sampling"], np.dtype(np.int32))
    return cast(npt.NDArray[np.int64], bounds[indexes])


class RequestReader:
    """Turns spans of one request table into requests without copying the prompts."""

    def __init__(self, table: pa.Table, samplings: Sequence[Sampling]) -> None:
        prompts = _array(table["prompt_token_ids"])
        self._samplings = samplings
        self._tokens = _flat(prompts, np.dtype(np.int32))
        self._offsets = _offsets(prompt_lengths(table))
        self._row_ids = _array(table["row_id"])
        self._seeds = _numpy(table["seed"], np.dtype(np.uint64))
        self._sampling = _numpy(table["sampling"], np.dtype(np.int32))
        self._group_ids = _array(table["group_id"])
        self._prefix_lens = _numpy(table["prefix_len"], np.dtype(np.int32))

    def read(self, start: int, stop: int, first_request_id: int) -> list[Request]:
        """Return the requests of rows `start` to `stop`.

        Args:
            start: first row.
            stop: after the last row.
            first_request_id: id of row 0 of the table; the others follow it.
        """
        row_ids = self._row_ids.slice(start, stop - start).to_pylist()
        group_ids = self._group_ids.slice(start, stop - start).to_pylist()
        offsets = self._offsets[start : stop + 1].tolist()
        seeds = self._seeds[start:stop].tolist()
        sampling = self._sampling[start:stop].tolist()
        prefix_lens = self._prefix_lens[start:stop].tolist()
        return [
            Request(
                request_id=first_request_id + start + i,
                row_id=row_ids[i],
                prompt_token_ids=self._tokens[offsets[i] : offsets[i + 1]],
                sampling=self._samplings[sampling[i]],
                seed=seeds[i],
                group_id=group_ids[i],
                prefix_len=prefix_lens[i],
            )
            for i in range(stop - start)
        ]


def encode_completions(
    rows: Sequence[int] | npt.NDArray[np.int32], completions: Sequence[Completion]
) -> pa.RecordBatch:
    """Return completions as a record batch of the result schema.

    Args:
        rows: index of each completion's row in its request table.
        completions: one per sample; `request_id` is not kept.
    """
    num = len(completions)
    columns = [
        pa.array(rows, pa.int32()),
        pa.array([c.sample_idx for c in completions], pa.int32()),
        _token_lists([c.token_ids for c in completions]),
        pa.array([c.finish_reason for c in completions], pa.string()),
        pa.array([json.dumps(c.stop_reason) for c in completions], pa.string()),
        pa.array([c.num_cached_tokens for c in completions], pa.int32()),
        pa.array([c.error for c in completions], pa.string()),
        pa.array([c.text for c in completions], pa.string()),
        _logprobs_array([c.logprobs for c in completions]),
        pa.array(np.ones(num, np.int32), pa.int32()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=RESULT_SCHEMA)


def decode_completions(results: pa.Table | pa.RecordBatch) -> list[Completion]:
    """Return result rows as completions whose `request_id` is the row index."""
    table = results if isinstance(results, pa.Table) else pa.Table.from_batches([results])
    tokens = _split(_array(table["token_ids"]))
    columns = {name: table[name].to_pylist() for name in RESULT_SCHEMA.names if name != "token_ids"}
    return [
        Completion(
            request_id=columns["row"][i],
            sample_idx=columns["sample_idx"][i],
            token_ids=tokens[i],
            finish_reason=cast(FinishReason, columns["finish_reason"][i]),
            stop_reason=json.loads(columns["stop_reason"][i]),
            num_cached_tokens=columns["num_cached_tokens"][i],
            text=columns["text"][i],
            logprobs=_logprobs_value(columns["logprobs"][i]),
            error=columns["error"][i],
        )
        for i in range(table.num_rows)
    ]


def combine_results(results: Sequence[pa.RecordBatch], attempts: npt.NDArray[np.int16]) -> pa.Table:
    """Return one result table in order of row and sample, with the attempts of each row."""
    table = pa.Table.from_batches(results, schema=RESULT_SCHEMA)
    rows = _numpy(table["row"], np.dtype(np.int32))
    order = np.lexsort((_numpy(table["sample_idx"], np.dtype(np.int32)), rows))
    table = table.take(pa.array(order)).combine_chunks()
    column = pa.array(attempts[rows[order]].astype(np.int32), pa.int32())
    return table.set_column(
        RESULT_SCHEMA.get_field_index("attempts"), RESULT_SCHEMA.field("attempts"), column
    )


def row_numbers(results: pa.RecordBatch) -> npt.NDArray[np.int32]:
    """Return the distinct row indexes of a result batch, ascending."""
    return np.unique(_numpy(results.column("row"), np.dtype(np.int32)))


def has_error(results: pa.RecordBatch) -> npt.NDArray[np.bool_]:
    """Return which rows of a result batch carry an error."""
    is_error = pc.not_equal(results.column("error"), "")
    return cast(npt.NDArray[np.bool_], is_error.to_numpy(zero_copy_only=False))


def _array(column: pa.ChunkedArray) -> pa.Array:
    # combine_chunks copies also where there is nothing to combine
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _numpy(column: pa.Array | pa.ChunkedArray, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    array = _array(column) if isinstance(column, pa.ChunkedArray) else column
    if array.null_count:
        array = array.fill_null(0)
    values: npt.NDArray[Any] = array.to_numpy(zero_copy_only=False)
    return values.astype(dtype, copy=False)


def _flat(lists: pa.ListArray, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    return _numpy(lists.flatten(), dtype)


def _offsets(lengths: npt.NDArray[np.int32]) -> _Offsets:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _token_lists(arrays: Sequence[TokenIds]) -> pa.ListArray:
    lengths = np.fromiter((len(a) for a in arrays), np.int32, len(arrays))
    flat = np.concatenate(arrays) if len(arrays) else np.empty(0, np.int32)
    offsets = _offsets(lengths)
    if offsets[-1] > np.iinfo(np.int32).max:
        raise ConfigError(f"a row batch holds {offsets[-1]} tokens; hand over fewer rows at once")
    return pa.ListArray.from_arrays(
        pa.array(offsets.astype(np.int32)), pa.array(flat.astype(np.int32, copy=False))
    )


def _split(lists: pa.ListArray) -> list[TokenIds]:
    flat = _flat(lists, np.dtype(np.int32))
    lengths = lists.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    bounds = _offsets(lengths).tolist()
    return [flat[a:b] for a, b in itertools.pairwise(bounds)]


def _logprobs_array(values: Sequence[_Logprobs | None]) -> pa.Array:
    if all(value is None for value in values):
        return pa.nulls(len(values), LOGPROBS_TYPE)
    rows = [
        None
        if value is None
        else [{"token_ids": ids.tolist(), "logprobs": logs.tolist()} for ids, logs in value]
        for value in values
    ]
    return pa.array(rows, LOGPROBS_TYPE)


def _logprobs_value(value: list[dict[str, list[float]]] | None) -> _Logprobs | None:
    if value is None:
        return None
    return tuple(
        (np.array(pair["token_ids"], np.int32), np.array(pair["logprobs"], np.float32))
        for pair in value
    )
