"""Checkpointed tokens of unfinished sequences, and their Arrow form.

Another engine resumes from them and generates the same tokens as an undisturbed run. So only the
longest state of a sample is kept.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

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

CHECKPOINTED_SCHEMA = pa.schema(
    [
        pa.field("row", pa.int32(), nullable=False),
        pa.field("sample_idx", pa.int32(), nullable=False),
        pa.field("token_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("num_cached_tokens", pa.int32(), nullable=False),
        pa.field("logprobs", LOGPROBS_TYPE),
    ]
)


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
