"""Arrow tables of requests and completions, for transport between processes.

Requests: one row per prompt. Results: one row per sample, where `row` is the index in the request
table; a failed row has exactly one result row, with `error` set.
"""

import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raybatch.actors.wire.records import RowGroups
from raybatch.errors import ConfigError
from raybatch.prefix.block_keys import start_offsets
from raybatch.records.arrays import Bools, Int32s, Ints
from raybatch.records.parsed_text import ParsedText
from raybatch.records.types import (
    Completion,
    Request,
    Sampling,
    SequenceState,
    TokenIds,
    TokenLengths,
    TokenLogprobs,
    Vector,
)

_Logprobs = tuple[TokenLogprobs, ...]
_ToArray = Callable[[Sequence[Any]], pa.Array]
_ToValues = Callable[[pa.Array], Sequence[Any]]

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
_PLANNED = {b"raybatch.is_planned": b"true"}

LOGPROBS_TYPE = pa.list_(
    pa.struct([("token_ids", pa.list_(pa.int32())), ("logprobs", pa.list_(pa.float32()))])
)
CHECKPOINTED_SCHEMA = pa.schema(
    [
        pa.field("row", pa.int32(), nullable=False),
        pa.field("sample_idx", pa.int32(), nullable=False),
        pa.field("token_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("num_cached_tokens", pa.int32(), nullable=False),
        pa.field("logprobs", LOGPROBS_TYPE),
    ]
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


def token_lists(arrays: Sequence[TokenIds]) -> pa.ListArray:
    return _list_array(arrays, np.int32, "a row batch holds {} tokens")


def split_lists(lists: pa.ListArray, dtype: npt.DTypeLike = np.int32) -> list[npt.NDArray[Any]]:
    """Return the lists as views of one flat array."""
    flat = to_numpy(lists.flatten(), dtype)
    lengths = lists.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    return [flat[a:b] for a, b in itertools.pairwise(start_offsets(lengths).tolist())]


def vector_lists(vectors: Sequence[Vector | None]) -> pa.ListArray:
    """Return vectors as one Arrow list array; None becomes null."""
    return _list_array(vectors, np.float32, "the vectors of a row batch hold {} numbers")


def _list_array(
    arrays: Sequence[npt.NDArray[Any] | None], dtype: npt.DTypeLike, holds: str
) -> pa.ListArray:
    """Return arrays as one list array; ConfigError, with `holds`, if they have too many values."""
    known = [array for array in arrays if array is not None]
    if not known:
        return pa.nulls(len(arrays), pa.list_(pa.from_numpy_dtype(dtype)))
    lengths = np.fromiter((0 if a is None else len(a) for a in arrays), np.int32, len(arrays))
    offsets = start_offsets(lengths)
    if offsets[-1] > np.iinfo(np.int32).max:
        raise ConfigError(
            f"{holds.format(offsets[-1])}, more than an Arrow list column can; use smaller batches"
        )
    mask = pa.array([array is None for array in arrays], pa.bool_())
    flat = np.concatenate(known).astype(dtype, copy=False)
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), pa.array(flat), mask=mask)


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


def prompt_lengths(table: pa.Table) -> npt.NDArray[np.int32]:
    """Return the prompt tokens of each row, int32 [rows]."""
    lengths = whole_array(table["prompt_token_ids"]).value_lengths().fill_null(0)
    return cast(npt.NDArray[np.int32], lengths.to_numpy(zero_copy_only=False).astype(np.int32))


def is_planned(table: pa.Table) -> bool:
    """Return whether the rows are in the order of a plan, with its groups."""
    return _PLANNED.items() <= (table.schema.metadata or {}).items()


class RequestReader:
    """Turns rows of one request table into requests, without copying the prompts."""

    def __init__(self, table: pa.Table, samplings: Sequence[Sampling]) -> None:
        prompts = whole_array(table["prompt_token_ids"])
        self._samplings = samplings
        self._tokens = to_numpy(prompts.flatten(), np.int32)
        self._offsets = start_offsets(prompt_lengths(table))
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
    to_array: _ToArray | None = None
    to_values: _ToValues | None = None


def _as_text(
    to_text: Callable[[Any], str], of_text: Callable[[str], Any]
) -> tuple[_ToArray, _ToValues]:
    """Return functions that make a column of the texts of values, and values of the column."""

    def to_array(values: Sequence[Any]) -> pa.Array:
        return pa.array(
            [None if value is None else to_text(value) for value in values], pa.string()
        )

    def to_values(array: pa.Array) -> list[Any]:
        return [None if text is None else of_text(text) for text in array.to_pylist()]

    return to_array, to_values


_RESULT_COLUMNS = (
    _Column("row", pa.int32()),
    _Column("sample_idx", pa.int32()),
    _Column("token_ids", pa.list_(pa.int32()), False, token_lists, split_lists),
    _Column("finish_reason", pa.string()),
    _Column("stop_reason", pa.string(), True, *_as_text(json.dumps, json.loads)),
    _Column("num_cached_tokens", pa.int32()),
    _Column("error", pa.string()),
    _Column("text", pa.string(), True),
    _Column("vector", pa.list_(pa.float32()), True, vector_lists, split_vectors),
    _Column("logprobs", LOGPROBS_TYPE, True, logprobs_array, logprobs_values),
    _Column("attempts", pa.int32()),
    _Column("num_input_tokens", pa.int32(), True),
    _Column("num_generated_tokens", pa.int32(), True),
    _Column("cost", pa.float64(), True),
    _Column("parsed", pa.string(), True, *_as_text(ParsedText.to_json, ParsedText.from_json)),
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


class _Sample(NamedTuple):
    """The tokens of one sample, as a record batch of one row."""

    num_tokens: int
    tokens: pa.RecordBatch


class CheckpointedTokens:
    """Collects the longest known tokens of each unfinished sample: `add` tokens, `drop` rows."""

    def __init__(self, known: pa.RecordBatch | None = None) -> None:
        # by row, then by index of the sample
        self._rows: defaultdict[int, dict[int, _Sample]] = defaultdict(dict)
        self._new: set[tuple[int, int]] = set()
        if known is not None:
            self.add(known)
            self._new.clear()

    def add(self, tokens: pa.RecordBatch) -> None:
        """Add tokens of samples; a sample of which more tokens are known keeps these."""
        lengths = tokens.column("token_ids").value_lengths().to_pylist()
        for i, ((row, sample_idx), length) in enumerate(zip(_pairs(tokens), lengths, strict=True)):
            known = self._rows[row].get(sample_idx)
            if known is None or known.num_tokens < length:
                self._rows[row][sample_idx] = _Sample(length, tokens.slice(i, 1))
                self._new.add((row, sample_idx))

    def drop(self, rows: Collection[int]) -> None:
        self._new.difference_update(self._keys(rows))
        for row in rows:
            self._rows.pop(row, None)

    def of(self, rows: Collection[int]) -> pa.RecordBatch | None:
        """Return the known tokens of some rows; None if there are none."""
        return self._joined(self._keys(rows))

    def num_tokens(self, rows: Iterable[int]) -> Ints:
        """Return the token count of the shortest sample of each row; 0 for unknown rows."""
        known = (self._rows.get(row, {}).values() for row in rows)
        fewest = [min((sample.num_tokens for sample in of_row), default=0) for of_row in known]
        return np.array(fewest, np.int64)

    def take_new(self) -> pa.RecordBatch | None:
        """Return the tokens added since the last call; None if none were."""
        new, self._new = sorted(self._new), set()
        return self._joined(new)

    def _keys(self, rows: Collection[int]) -> list[tuple[int, int]]:
        known = sorted(self._rows.keys() & rows)
        return [(row, sample_idx) for row in known for sample_idx in sorted(self._rows[row])]

    def _joined(self, keys: Sequence[tuple[int, int]]) -> pa.RecordBatch | None:
        if not keys:
            return None
        table = pa.Table.from_batches([self._rows[row][i].tokens for row, i in keys])
        # a copy, because a slice would be pickled with its whole parent
        return table.take(np.arange(len(keys))).combine_chunks().to_batches()[0]


def encode_checkpointed(rows: Sequence[int], states: Sequence[SequenceState]) -> pa.RecordBatch:
    columns = [
        pa.array(rows, pa.int32()),
        pa.array([state.sample_idx for state in states], pa.int32()),
        token_lists([state.token_ids for state in states]),
        pa.array([state.num_cached_tokens for state in states], pa.int32()),
        logprobs_array([state.logprobs for state in states]),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=CHECKPOINTED_SCHEMA)


def sequence_states(
    requests: Mapping[int, Request], checkpointed: pa.RecordBatch
) -> dict[int, list[SequenceState]]:
    """Return the states of all samples of each request that has checkpointed tokens.

    The result is by request id. A sample without checkpointed tokens starts from the prompt.

    Args:
        requests: requests by their row.
        checkpointed: tokens, see `CheckpointedTokens`.
    """
    tokens = split_lists(checkpointed.column("token_ids"))
    cached = checkpointed.column("num_cached_tokens").to_pylist()
    logprobs = logprobs_values(checkpointed.column("logprobs"))
    place = {key: i for i, key in enumerate(_pairs(checkpointed))}
    states = {}
    for row in sorted({row for row, _ in place}):
        request = requests[row]
        places = [place.get((row, sample_idx)) for sample_idx in range(request.sampling.n)]
        states[request.request_id] = [
            SequenceState(
                request=request,
                sample_idx=sample_idx,
                token_ids=np.empty(0, np.int32) if i is None else tokens[i],
                num_cached_tokens=0 if i is None else cached[i],
                logprobs=None if i is None else logprobs[i],
            )
            for sample_idx, i in enumerate(places)
        ]
    return states


def _pairs(tokens: pa.RecordBatch) -> list[tuple[int, int]]:
    rows, samples = (tokens.column(name).to_pylist() for name in ("row", "sample_idx"))
    return list(zip(rows, samples, strict=True))
