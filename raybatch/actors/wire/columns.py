"""The Arrow form of requests and completions; what moves between processes in bulk is this.

Requests: one row per prompt. Results: one row per sample, where `row` is the index in the request
table; a row that failed has exactly one result row, with `error` set.
"""

import json
from collections.abc import Sequence
from typing import cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from raybatch.actors.wire.arrow_arrays import (
    flat_values,
    offsets_of,
    split_lists,
    split_vectors,
    to_numpy,
    token_lists,
    vector_lists,
    whole_array,
)
from raybatch.actors.wire.records import RowGroups
from raybatch.errors import ConfigError
from raybatch.records.parsed_text import ParsedText
from raybatch.records.types import Completion, FinishReason, Request, Sampling, TokenIds

_Logprobs = tuple[tuple[TokenIds, npt.NDArray[np.float32]], ...]

REQUEST_SCHEMA = pa.schema(
    [
        pa.field("row_id", pa.string(), nullable=False),
        pa.field("prompt_token_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("seed", pa.uint64(), nullable=False),
        pa.field("sampling", pa.int32(), nullable=False),
        pa.field("group_id", pa.int64()),
        pa.field("prefix_len", pa.int32(), nullable=False),
        pa.field("expected_output_len", pa.int32()),
        # JSON, null for none
        pa.field("payload", pa.string()),
    ]
)
# metadata of a table whose groups come from a plan, also where all of its rows are alone
_PLANNED = {"raybatch.is_planned": "true"}

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
        pa.field("vector", pa.list_(pa.float32())),
        pa.field("logprobs", LOGPROBS_TYPE),
        pa.field("attempts", pa.int32(), nullable=False),
        pa.field("num_input_tokens", pa.int32()),
        pa.field("num_generated_tokens", pa.int32()),
        pa.field("cost", pa.float64()),
        # JSON, null for none
        pa.field("parsed", pa.string()),
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
    expected_lens: Sequence[int | None] | None = None,
    payloads: Sequence[str | None] | None = None,
) -> pa.Table:
    """Build a request table from columns; what is left out is zero or null.

    Rows with `group_ids`, be they null, come in the order of a plan, which the pool keeps to. Rows
    without are grouped by the pool as they wait.

    Args:
        row_ids: identity of each row.
        prompts: token ids of each row.
        seeds: 64-bit seed of each row.
        sampling: index of each row into the samplings that travel beside the table.
        group_ids: prefix group of each row, from 0; None for a row that is alone.
        prefix_lens: tokens that the row's group shares.
        expected_lens: output tokens to expect of each sample; None expects `max_tokens`.
        payloads: of each row in JSON, see `Request.payload`; None for a row without.
    """
    zeros = np.zeros(len(row_ids), np.int32)
    columns = [
        pa.array(row_ids, pa.string()),
        token_lists(prompts),
        pa.array(zeros.astype(np.uint64) if seeds is None else seeds, pa.uint64()),
        pa.array(zeros if sampling is None else sampling, pa.int32()),
        pa.nulls(len(row_ids), pa.int64())
        if group_ids is None
        else pa.array(group_ids, pa.int64()),
        pa.array(zeros if prefix_lens is None else prefix_lens, pa.int32()),
        pa.nulls(len(row_ids), pa.int32())
        if expected_lens is None
        else pa.array(expected_lens, pa.int32()),
        pa.nulls(len(row_ids), pa.string())
        if payloads is None
        else pa.array(payloads, pa.string()),
    ]
    table = pa.Table.from_arrays(columns, schema=REQUEST_SCHEMA)
    return table if group_ids is None else table.replace_schema_metadata(_PLANNED)


def check_requests(table: pa.Table, num_samplings: int) -> None:
    """Raise ConfigError unless `table` has the request columns and valid sampling indexes."""
    missing = [name for name in REQUEST_SCHEMA.names if name not in table.column_names]
    if missing:
        raise ConfigError(f"the request table lacks the columns {', '.join(missing)}")
    sampling = to_numpy(table["sampling"], np.dtype(np.int32))
    if len(sampling) and not 0 <= int(sampling.min()) <= int(sampling.max()) < num_samplings:
        raise ConfigError(
            f"the column sampling must lie in [0, {num_samplings}), got values from "
            f"{sampling.min()} to {sampling.max()}"
        )


def prompt_lengths(table: pa.Table) -> npt.NDArray[np.int32]:
    """Return the prompt tokens of each row, int32 [rows]."""
    lengths = whole_array(table["prompt_token_ids"]).value_lengths().fill_null(0)
    return cast(npt.NDArray[np.int32], lengths.to_numpy(zero_copy_only=False).astype(np.int32))


def max_new_tokens(table: pa.Table, samplings: Sequence[Sampling]) -> npt.NDArray[np.int64]:
    """Return the upper bound of generated tokens of each row over its samples, int64 [rows]."""
    bounds = np.array([s.max_tokens * s.n for s in samplings], np.int64)
    indexes = to_numpy(table["sampling"], np.dtype(np.int32))
    return cast(npt.NDArray[np.int64], bounds[indexes])


def expected_new_tokens(table: pa.Table, samplings: Sequence[Sampling]) -> npt.NDArray[np.int64]:
    """Return the tokens to expect of each row over its samples, int64 [rows]."""
    bounds = max_new_tokens(table, samplings)
    expected = whole_array(table["expected_output_len"])
    if expected.null_count == len(expected):
        return bounds
    indexes = to_numpy(table["sampling"], np.dtype(np.int32))
    samples = np.array([s.n for s in samplings], np.int64)[indexes]
    is_known = expected.is_valid().to_numpy(zero_copy_only=False)
    lengths = to_numpy(expected, np.dtype(np.int64)) * samples
    return np.where(is_known, np.clip(lengths, 0, bounds), bounds)


def is_planned(table: pa.Table) -> bool:
    """Return whether the rows come in the order of a plan, with its groups."""
    metadata = table.schema.metadata or {}
    return all(metadata.get(k.encode()) == v.encode() for k, v in _PLANNED.items())


class RequestReader:
    """Turns spans of one request table into requests without copying the prompts."""

    def __init__(self, table: pa.Table, samplings: Sequence[Sampling]) -> None:
        prompts = whole_array(table["prompt_token_ids"])
        self._samplings = samplings
        self._tokens = flat_values(prompts, np.dtype(np.int32))
        self._offsets = offsets_of(prompt_lengths(table))
        self._row_ids = whole_array(table["row_id"])
        self._seeds = to_numpy(table["seed"], np.dtype(np.uint64))
        self._sampling = to_numpy(table["sampling"], np.dtype(np.int32))
        self._group_ids = whole_array(table["group_id"])
        self._prefix_lens = to_numpy(table["prefix_len"], np.dtype(np.int32))
        self._expected = whole_array(table["expected_output_len"])
        self._payloads = whole_array(table["payload"])

    def read(
        self, start: int, stop: int, first_request_id: int, groups: RowGroups | None = None
    ) -> list[Request]:
        """Return the requests of rows `start` to `stop`.

        Args:
            start: first row.
            stop: after the last row.
            first_request_id: id of row 0 of the table; the others follow it.
            groups: of these rows, in place of those in the table.
        """
        row_ids = self._row_ids.slice(start, stop - start).to_pylist()
        expected = self._expected.slice(start, stop - start).to_pylist()
        payloads = self._payloads.slice(start, stop - start).to_pylist()
        if groups is None:
            group_ids = self._group_ids.slice(start, stop - start).to_pylist()
            prefix_lens = self._prefix_lens[start:stop].tolist()
        else:
            group_ids = [None if group < 0 else group for group in groups.group_ids.tolist()]
            prefix_lens = groups.prefix_lens.tolist()
        offsets = self._offsets[start : stop + 1].tolist()
        seeds = self._seeds[start:stop].tolist()
        sampling = self._sampling[start:stop].tolist()
        return [
            Request(
                request_id=first_request_id + start + i,
                row_id=row_ids[i],
                prompt_token_ids=self._tokens[offsets[i] : offsets[i + 1]],
                sampling=self._samplings[sampling[i]],
                seed=seeds[i],
                group_id=group_ids[i],
                prefix_len=prefix_lens[i],
                expected_output_len=expected[i],
                payload={} if payloads[i] is None else json.loads(payloads[i]),
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
        token_lists([c.token_ids for c in completions]),
        pa.array([c.finish_reason for c in completions], pa.string()),
        pa.array([json.dumps(c.stop_reason) for c in completions], pa.string()),
        pa.array([c.num_cached_tokens for c in completions], pa.int32()),
        pa.array([c.error for c in completions], pa.string()),
        pa.array([c.text for c in completions], pa.string()),
        vector_lists([c.vector for c in completions]),
        logprobs_array([c.logprobs for c in completions]),
        pa.array(np.ones(num, np.int32), pa.int32()),
        pa.array([c.num_input_tokens for c in completions], pa.int32()),
        pa.array([c.num_generated_tokens for c in completions], pa.int32()),
        pa.array([c.cost for c in completions], pa.float64()),
        pa.array([c.parsed and c.parsed.to_json() for c in completions], pa.string()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=RESULT_SCHEMA)


def decode_completions(results: pa.Table | pa.RecordBatch) -> list[Completion]:
    """Return result rows as completions whose `request_id` is the row index."""
    table = results if isinstance(results, pa.Table) else pa.Table.from_batches([results])
    tokens = split_lists(whole_array(table["token_ids"]))
    vectors = split_vectors(whole_array(table["vector"]))
    lists = ("token_ids", "vector")
    columns = {n: table[n].to_pylist() for n in RESULT_SCHEMA.names if n not in lists}
    return [
        Completion(
            request_id=columns["row"][i],
            sample_idx=columns["sample_idx"][i],
            token_ids=tokens[i],
            finish_reason=cast(FinishReason, columns["finish_reason"][i]),
            stop_reason=json.loads(columns["stop_reason"][i]),
            num_cached_tokens=columns["num_cached_tokens"][i],
            text=columns["text"][i],
            vector=vectors[i],
            logprobs=logprobs_value(columns["logprobs"][i]),
            error=columns["error"][i],
            num_input_tokens=columns["num_input_tokens"][i],
            num_generated_tokens=columns["num_generated_tokens"][i],
            cost=columns["cost"][i],
            parsed=None if (said := columns["parsed"][i]) is None else ParsedText.from_json(said),
        )
        for i in range(table.num_rows)
    ]


def combine_results(results: Sequence[pa.RecordBatch], attempts: npt.NDArray[np.int16]) -> pa.Table:
    """Return one result table in order of row and sample, with the attempts of each row."""
    table = pa.Table.from_batches(results, schema=RESULT_SCHEMA)
    rows = to_numpy(table["row"], np.dtype(np.int32))
    order = np.lexsort((to_numpy(table["sample_idx"], np.dtype(np.int32)), rows))
    table = table.take(pa.array(order)).combine_chunks()
    column = pa.array(attempts[rows[order]].astype(np.int32), pa.int32())
    return table.set_column(
        RESULT_SCHEMA.get_field_index("attempts"), RESULT_SCHEMA.field("attempts"), column
    )


def crash_error(num_crashes: int, cause: str = "") -> str:
    """Return the error of a row that is given up because engines died with it.

    Args:
        num_crashes: deaths with this row.
        cause: what the last engine said of its end, "" where it said nothing.
    """
    told = f"ReplicaCrash: the engine died {num_crashes} times with this row"
    return f"{told}; the last time: {' '.join(cause.split())}" if cause else told


def row_numbers(results: pa.RecordBatch) -> npt.NDArray[np.int32]:
    """Return the distinct row indexes of a result batch, ascending."""
    return np.unique(to_numpy(results.column("row"), np.dtype(np.int32)))


def has_error(results: pa.RecordBatch) -> npt.NDArray[np.bool_]:
    """Return which rows of a result batch carry an error."""
    is_error = pc.not_equal(results.column("error"), "")
    return cast(npt.NDArray[np.bool_], is_error.to_numpy(zero_copy_only=False))


def logprobs_array(values: Sequence[_Logprobs | None]) -> pa.Array:
    """Return the log probabilities of many samples as an array."""
    if all(value is None for value in values):
        return pa.nulls(len(values), LOGPROBS_TYPE)
    rows = [
        None
        if value is None
        else [{"token_ids": ids.tolist(), "logprobs": logs.tolist()} for ids, logs in value]
        for value in values
    ]
    return pa.array(rows, LOGPROBS_TYPE)


def logprobs_value(value: list[dict[str, list[float]]] | None) -> _Logprobs | None:
    """Return the log probabilities of one sample from a value of such an array."""
    if value is None:
        return None
    return tuple(
        (np.array(pair["token_ids"], np.int32), np.array(pair["logprobs"], np.float32))
        for pair in value
    )
