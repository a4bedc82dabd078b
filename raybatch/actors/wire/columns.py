"""Arrow tables of requests and completions, for transport between processes.

Requests: one row per prompt. Results: one row per sample, where `row` is the index in the request
table; a failed row has exactly one result row, with `error` set.
"""

import itertools
import json
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raybatch.actors.wire.records import RowGroups
from raybatch.errors import ConfigError
from raybatch.records.arrays import Bools, Int32s, Ints
from raybatch.records.parsed_text import ParsedText
from raybatch.records.types import (
    Completion,
    Request,
    Sampling,
    TokenIds,
    TokenLengths,
    TokenLogprobs,
    Vector,
)

_JSON_NULL = "null"
_Logprobs = tuple[TokenLogprobs, ...]

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
# metadata of a table with groups of a plan, even if no row has a group
_PLANNED = {"raybatch.is_planned": "true"}

LOGPROBS_TYPE = pa.list_(
    pa.struct([("token_ids", pa.list_(pa.int32())), ("logprobs", pa.list_(pa.float32()))])
)


def whole_array(column: pa.ChunkedArray) -> pa.Array:
    """Return a column as one array, copied only if it has several chunks."""
    # combine_chunks would copy a single chunk
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def to_numpy(column: pa.Array | pa.ChunkedArray, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return a column as a NumPy array of `dtype`, with nulls as 0."""
    array = whole_array(column) if isinstance(column, pa.ChunkedArray) else column
    if array.null_count:
        array = array.fill_null(0)
    values: npt.NDArray[Any] = array.to_numpy(zero_copy_only=False)
    return values.astype(dtype, copy=False)


def flat_values(lists: pa.ListArray, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    return to_numpy(lists.flatten(), dtype)


def offsets_of(lengths: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """Return the sum of the lengths before each one, and at the end their total: int64 [n + 1]."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def token_lists(arrays: Sequence[TokenIds]) -> pa.ListArray:
    lengths = np.fromiter((len(a) for a in arrays), np.int32, len(arrays))
    flat = np.concatenate(arrays) if len(arrays) else np.empty(0, np.int32)
    offsets = offsets_of(lengths)
    if offsets[-1] > np.iinfo(np.int32).max:
        raise ConfigError(
            f"a row batch holds {offsets[-1]} tokens, more than an Arrow list column can; use "
            "smaller batches"
        )
    return _list_array(offsets, flat.astype(np.int32, copy=False))


def split_lists(lists: pa.ListArray, dtype: npt.DTypeLike = np.int32) -> list[npt.NDArray[Any]]:
    """Return the lists as views of one flat array."""
    flat = flat_values(lists, dtype)
    lengths = lists.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    return [flat[a:b] for a, b in itertools.pairwise(offsets_of(lengths).tolist())]


def vector_lists(vectors: Sequence[Vector | None]) -> pa.ListArray:
    """Return vectors as one Arrow list array; None becomes null."""
    known = [vector for vector in vectors if vector is not None]
    if not known:
        return pa.nulls(len(vectors), pa.list_(pa.float32()))
    lengths = np.fromiter((0 if v is None else len(v) for v in vectors), np.int32, len(vectors))
    offsets = offsets_of(lengths)
    if offsets[-1] > np.iinfo(np.int32).max:
        raise ConfigError(
            f"the vectors of a row batch hold {offsets[-1]} numbers, more than an Arrow list "
            "column can; use smaller batches"
        )
    mask = pa.array([vector is None for vector in vectors], pa.bool_())
    return _list_array(offsets, np.concatenate(known).astype(np.float32, copy=False), mask)


def _list_array(
    offsets: npt.NDArray[np.int64], flat: npt.NDArray[Any], mask: pa.Array | None = None
) -> pa.ListArray:
    starts = pa.array(offsets.astype(np.int32))
    return pa.ListArray.from_arrays(starts, pa.array(flat), mask=mask)


def split_vectors(lists: pa.ListArray) -> list[Vector | None]:
    """Return the vectors of a list array as views of one flat array; None for null."""
    vectors, is_valid = split_lists(lists, np.float32), lists.is_valid().to_pylist()
    return [vector if valid else None for vector, valid in zip(vectors, is_valid, strict=True)]


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
    """Build a request table from columns; omitted ones are zero or null.

    If `group_ids` is given, the rows are in the order of a plan, which the pool keeps. Otherwise
    the pool groups rows while they wait.

    Args:
        sampling: index of each row into the samplings sent with the table.
        group_ids: prefix group of each row, from 0; None for a row without a group.
        prefix_lens: prefix tokens of the group of each row.
        expected_lens: expected output tokens of each sample of a row; None expects `max_tokens`.
        payloads: JSON of each row, see `Request.payload`; None for none.
    """
    zeros, nulls = np.zeros(len(row_ids), np.int32), [None] * len(row_ids)
    columns = {
        "row_id": row_ids,
        "prompt_token_ids": token_lists(prompts),
        "seed": zeros.astype(np.uint64) if seeds is None else seeds,
        "sampling": zeros if sampling is None else sampling,
        "group_id": nulls if group_ids is None else group_ids,
        "prefix_len": zeros if prefix_lens is None else prefix_lens,
        "expected_output_len": nulls if expected_lens is None else expected_lens,
        "payload": nulls if payloads is None else payloads,
    }
    table = pa.Table.from_pydict(columns, schema=REQUEST_SCHEMA)
    return table if group_ids is None else table.replace_schema_metadata(_PLANNED)


def check_requests(table: pa.Table, num_samplings: int) -> None:
    """Raise ConfigError unless `table` has the request columns and valid sampling indexes."""
    missing = [name for name in REQUEST_SCHEMA.names if name not in table.column_names]
    if missing:
        raise ConfigError(f"the request table lacks the columns {', '.join(missing)}")
    sampling = to_numpy(table["sampling"], np.int32)
    if len(sampling) and not 0 <= int(sampling.min()) <= int(sampling.max()) < num_samplings:
        raise ConfigError(
            f"the column sampling of the request table must have indices in [0, {num_samplings}), "
            f"got values from {sampling.min()} to {sampling.max()}"
        )


def prompt_lengths(table: pa.Table) -> npt.NDArray[np.int32]:
    """Return the prompt tokens of each row, int32 [rows]."""
    lengths = whole_array(table["prompt_token_ids"]).value_lengths().fill_null(0)
    return cast(npt.NDArray[np.int32], lengths.to_numpy(zero_copy_only=False).astype(np.int32))


def max_new_tokens(table: pa.Table, samplings: Sequence[Sampling]) -> npt.NDArray[np.int64]:
    """Return the most tokens that each row may generate, over all samples, int64 [rows]."""
    bounds = np.array([s.max_tokens * s.n for s in samplings], np.int64)
    return cast(npt.NDArray[np.int64], bounds[to_numpy(table["sampling"], np.int32)])


def expected_new_tokens(table: pa.Table, samplings: Sequence[Sampling]) -> npt.NDArray[np.int64]:
    """Return the tokens that each row should generate, over all samples, int64 [rows].

    That is the upper bound for rows without an expected length.
    """
    bounds = max_new_tokens(table, samplings)
    expected = whole_array(table["expected_output_len"])
    if expected.null_count == len(expected):
        return bounds
    samples = np.array([s.n for s in samplings], np.int64)[to_numpy(table["sampling"], np.int32)]
    is_known = expected.is_valid().to_numpy(zero_copy_only=False)
    lengths = to_numpy(expected, np.int64) * samples
    return np.where(is_known, np.clip(lengths, 0, bounds), bounds)


def is_planned(table: pa.Table) -> bool:
    """Return whether the rows are in the order of a plan, with its groups."""
    metadata = table.schema.metadata or {}
    return all(metadata.get(k.encode()) == v.encode() for k, v in _PLANNED.items())


class RequestReader:
    """Turns rows of one request table into requests, without copying the prompts."""

    def __init__(self, table: pa.Table, samplings: Sequence[Sampling]) -> None:
        prompts = whole_array(table["prompt_token_ids"])
        self._samplings = samplings
        self._tokens = flat_values(prompts, np.int32)
        self._offsets = offsets_of(prompt_lengths(table))
        self._row_ids = whole_array(table["row_id"])
        self._seeds = to_numpy(table["seed"], np.uint64)
        self._sampling = to_numpy(table["sampling"], np.int32)
        self._group_ids = whole_array(table["group_id"])
        self._prefix_lens = to_numpy(table["prefix_len"], np.int32)
        self._expected = whole_array(table["expected_output_len"])
        self._payloads = whole_array(table["payload"])

    def read(
        self,
        start: int,
        stop: int,
        first_request_id: int,
        groups: RowGroups | None = None,
        likely: Sequence[TokenLengths] | None = None,
    ) -> list[Request]:
        """Return the requests of rows `start` to `stop` (exclusive).

        Args:
            first_request_id: request id of row 0 of the table.
            groups: groups of these rows; None uses those in the table.
            likely: likely output lengths of each of these rows, see `Request.likely_output_lens`.
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
                likely_output_lens=() if likely is None else likely[i],
                payload={} if payloads[i] is None else json.loads(payloads[i]),
            )
            for i in range(stop - start)
        ]


def combine_results(results: Sequence[pa.RecordBatch], attempts: npt.NDArray[np.int16]) -> pa.Table:
    """Return one result table, sorted by row and sample, given the attempts of each row."""
    table = pa.Table.from_batches(results, schema=RESULT_SCHEMA)
    rows = to_numpy(table["row"], np.int32)
    order = np.lexsort((to_numpy(table["sample_idx"], np.int32), rows))
    table = table.take(pa.array(order)).combine_chunks()
    column = pa.array(attempts[rows[order]].astype(np.int32), pa.int32())
    return table.set_column(
        RESULT_SCHEMA.get_field_index("attempts"), RESULT_SCHEMA.field("attempts"), column
    )


def crash_error(num_crashes: int, cause: str = "") -> str:
    """Return the error of a row that is given up; `cause` is why the engine died the last time."""
    message = f"ReplicaCrash: the engine died {num_crashes} times with this row"
    return f"{message}; the last time: {' '.join(cause.split())}" if cause else message


def logprobs_array(values: Sequence[_Logprobs | None]) -> pa.Array:
    if all(value is None for value in values):
        return pa.nulls(len(values), LOGPROBS_TYPE)
    rows = [
        None
        if value is None
        else [{"token_ids": ids.tolist(), "logprobs": logs.tolist()} for ids, logs in value]
        for value in values
    ]
    return pa.array(rows, LOGPROBS_TYPE)


def logprobs_values(array: pa.Array) -> list[_Logprobs | None]:
    return [
        None
        if value is None
        else tuple(
            (np.array(p["token_ids"], np.int32), np.array(p["logprobs"], np.float32)) for p in value
        )
        for value in array.to_pylist()
    ]


class _Column(NamedTuple):
    """One column of the results: a field of `Completion`, but for `row` and `attempts`.

    The functions make the column of the fields of many completions, and these of the column; None
    where Arrow can.
    """

    name: str
    kind: pa.DataType
    is_nullable: bool = False
    to_array: Callable[[Sequence[Any]], pa.Array] | None = None
    to_values: Callable[[pa.Array], Sequence[Any]] | None = None


def _stop_reason_array(values: Sequence[str | int | None]) -> pa.Array:
    # most sequences have none
    texts = [_JSON_NULL if value is None else json.dumps(value) for value in values]
    return pa.array(texts, pa.string())


def _stop_reason_values(array: pa.Array) -> list[str | int | None]:
    return [None if text == _JSON_NULL else json.loads(text) for text in array.to_pylist()]


def _parsed_array(values: Sequence[ParsedText | None]) -> pa.Array:
    return pa.array([value and value.to_json() for value in values], pa.string())


def _parsed_values(array: pa.Array) -> list[ParsedText | None]:
    texts = array.to_pylist()
    return [None if text is None else ParsedText.from_json(text) for text in texts]


_RESULT_COLUMNS = (
    _Column("row", pa.int32()),
    _Column("sample_idx", pa.int32()),
    _Column("token_ids", pa.list_(pa.int32()), False, token_lists, split_lists),
    _Column("finish_reason", pa.string()),
    _Column("stop_reason", pa.string(), False, _stop_reason_array, _stop_reason_values),
    _Column("num_cached_tokens", pa.int32()),
    _Column("error", pa.string()),
    _Column("text", pa.string(), True),
    _Column("vector", pa.list_(pa.float32()), True, vector_lists, split_vectors),
    _Column("logprobs", LOGPROBS_TYPE, True, logprobs_array, logprobs_values),
    _Column("attempts", pa.int32()),
    _Column("num_input_tokens", pa.int32(), True),
    _Column("num_generated_tokens", pa.int32(), True),
    _Column("cost", pa.float64(), True),
    # JSON, null for none
    _Column("parsed", pa.string(), True, _parsed_array, _parsed_values),
)
RESULT_SCHEMA = pa.schema(
    [pa.field(column.name, column.kind, column.is_nullable) for column in _RESULT_COLUMNS]
)


def encode_completions(
    rows: Sequence[int] | npt.NDArray[np.int32], completions: Sequence[Completion]
) -> pa.RecordBatch:
    """Return completions as a record batch of the result schema, with 1 for `attempts`.

    `rows` has the row of each completion in the request table, which replaces its `request_id`.
    """
    others: dict[str, Any] = {"row": rows, "attempts": np.ones(len(completions), np.int32)}
    arrays = []
    for column in _RESULT_COLUMNS:
        values = others.get(column.name)
        if values is None:
            values = list(map(attrgetter(column.name), completions))
        to_array = column.to_array
        arrays.append(to_array(values) if to_array else pa.array(values, column.kind))
    return pa.RecordBatch.from_arrays(arrays, schema=RESULT_SCHEMA)


def decode_completions(results: pa.Table | pa.RecordBatch) -> list[Completion]:
    """Return result rows as completions whose `request_id` is the row index."""
    table = results if isinstance(results, pa.Table) else pa.Table.from_batches([results])
    fields: dict[str, Sequence[Any]] = {}
    for column in _RESULT_COLUMNS:
        array = whole_array(table[column.name])
        # a field without any value has its default, which is None
        if column.name != "attempts" and array.null_count < len(array):
            name = "request_id" if column.name == "row" else column.name
            fields[name] = column.to_values(array) if column.to_values else array.to_pylist()
    # all are of one length, and to check that for each row would take 3 % of the time
    rows = zip(*fields.values(), strict=False)
    return [Completion(**dict(zip(fields, row, strict=False))) for row in rows]


def row_numbers(results: pa.RecordBatch) -> Int32s:
    """Return the distinct row indexes of a result batch, ascending."""
    # what np.unique does, of a few hundred numbers
    ordered = np.sort(to_numpy(results.column("row"), np.int32))
    is_new = np.ones(len(ordered), np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=is_new[1:])
    return ordered[is_new]


def has_error(results: pa.RecordBatch) -> Bools:
    """Return a mask of the results with an error, bool [results]."""
    return _lengths(results.column("error")) > 0


def generated_lengths(results: pa.RecordBatch) -> Ints:
    """Return the generated tokens of each result, int64 [results], as the backend counts them.

    Without such a count they are the token ids.
    """
    lengths = _lengths(results.column("token_ids")).astype(np.int64)
    counted = results.column("num_generated_tokens")
    if counted.null_count == len(counted):
        return lengths
    return np.where(to_numpy(counted.is_valid(), np.bool_), to_numpy(counted, np.int64), lengths)


def total(column: pa.Array) -> float:
    """Return the sum of a column, nulls as 0."""
    if column.null_count == len(column):
        return 0.0
    return float(to_numpy(column, np.float64).sum())


def _lengths(column: pa.Array) -> Int32s:
    """Return the lengths of texts, in bytes, or of lists; there are no nulls."""
    if not len(column):
        return np.zeros(0, np.int32)
    # of every finished row of a pool: several times as quick as Arrow on a few hundred
    offsets = np.frombuffer(column.buffers()[1], np.int32, len(column) + 1, 4 * column.offset)
    return np.diff(offsets)
