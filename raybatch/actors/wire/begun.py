"""Tokens so far of sequences that are not finished, as they travel and while they are kept.

Another engine goes on from them with the tokens of an undisturbed run, so only the longest state of
a sample is kept.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
import pyarrow as pa

from raybatch.actors.wire.columns import (
    LOGPROBS_TYPE,
    logprobs_array,
    logprobs_values,
    split_lists,
    token_lists,
)
from raybatch.records.arrays import Ints
from raybatch.records.types import Request, SequenceState

BEGUN_SCHEMA = pa.schema(
    [
        pa.field("row", pa.int32(), nullable=False),
        pa.field("sample_idx", pa.int32(), nullable=False),
        pa.field("token_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("num_cached_tokens", pa.int32(), nullable=False),
        pa.field("logprobs", LOGPROBS_TYPE),
    ]
)


class Begun:
    """The longest known state of each sample of some rows; one record batch row each."""

    def __init__(self, known: pa.RecordBatch | None = None) -> None:
        self._samples: dict[tuple[int, int], pa.RecordBatch] = {}
        self._new: set[tuple[int, int]] = set()
        if known is not None:
            self.add(known)
            self._new.clear()

    def add(self, tokens: pa.RecordBatch) -> None:
        """Keep these tokens, unless more are known of their samples."""
        keys = _pairs(tokens)
        lengths = tokens.column("token_ids").value_lengths().to_pylist()
        for i, (key, length) in enumerate(zip(keys, lengths, strict=True)):
            known = self._samples.get(key)
            if known is None or len(known.column("token_ids")[0]) < length:
                self._samples[key] = tokens.slice(i, 1)
                self._new.add(key)

    def drop(self, rows: Collection[int]) -> None:
        gone = {key for key in self._samples if key[0] in rows}
        self._new -= gone
        for key in gone:
            del self._samples[key]

    def of(self, rows: Collection[int]) -> pa.RecordBatch | None:
        """Return the tokens of some rows; None where there are none."""
        return self._joined([key for key in sorted(self._samples) if key[0] in rows])

    def num_tokens(self, rows: Iterable[int]) -> Ints:
        """Return the tokens of each row, of the sample with the fewest; 0 of others."""
        fewest: dict[int, int] = {}
        for (row, _), known in self._samples.items():
            length = len(known.column("token_ids")[0])
            fewest[row] = min(length, fewest.get(row, length))
        return np.array([fewest.get(row, 0) for row in rows], np.int64)

    def take_new(self) -> pa.RecordBatch | None:
        """Return what was added since the last call; None for nothing."""
        new, self._new = sorted(self._new), set()
        return self._joined(new)

    def _joined(self, keys: Sequence[tuple[int, int]]) -> pa.RecordBatch | None:
        if not keys:
            return None
        table = pa.Table.from_batches([self._samples[key] for key in keys])
        # taken, because a slice would travel with everything that it was cut from
        return table.take(np.arange(len(keys))).combine_chunks().to_batches()[0]


def encode_begun(rows: Sequence[int], states: Sequence[SequenceState]) -> pa.RecordBatch:
    columns = [
        pa.array(rows, pa.int32()),
        pa.array([state.sample_idx for state in states], pa.int32()),
        token_lists([state.token_ids for state in states]),
        pa.array([state.num_cached_tokens for state in states], pa.int32()),
        logprobs_array([state.logprobs for state in states]),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=BEGUN_SCHEMA)


def sequence_states(
    requests: Mapping[int, Request], begun: pa.RecordBatch
) -> dict[int, list[SequenceState]]:
    """Return all samples of the requests that have tokens; unknown ones begin at their first."""
    tokens = split_lists(begun.column("token_ids"))
    cached = begun.column("num_cached_tokens").to_pylist()
    logprobs = logprobs_values(begun.column("logprobs"))
    place = {key: i for i, key in enumerate(_pairs(begun))}
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
