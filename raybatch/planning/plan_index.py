"""The plan index: what planning needs of the rows of a source, without the user's columns."""

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raybatch.actors.pool import row_keys
from raybatch.errors import ConfigError
from raybatch.prefix.block_keys import BlockKeys
from raybatch.records.arrays import Bools, Floats, Ints, Uint64s
from raybatch.records.types import Sampling
from raybatch.rows.prepare import Prepared, is_deterministic, row_seed
from raybatch.rows.prompt import POOLED
from raybatch.rows.schema import error_class

# counted like an error class (which begins with a capital) for rows dropped on purpose
FILTERED = "filtered"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlanIndex:
    """Data of rows for planning: prefix keys, output lengths and adapters.

    Rows are in input order; arrays are read only.
    """

    # of requested rows; the digest also depends on options that decide a result, and on the row
    # if its result is random
    keys: BlockKeys
    requested: Ints  # [A], positions of these rows among all rows described
    max_tokens: Ints  # [A], longest output over all samples
    expected_tokens: Floats
    num_rows: int
    adapters: Uint64s  # [A], id of the adapter of each of these rows; 0 for none
    # number of rows without a request, by class of error, or "filtered"
    skipped: Counter[str]

    @classmethod
    def concat(cls, parts: Sequence["PlanIndex"]) -> "PlanIndex":
        """Join the indexes of consecutive parts of the input, at least one."""
        firsts = np.cumsum([0, *(part.num_rows for part in parts)])
        return cls(
            keys=BlockKeys.concat([part.keys for part in parts]),
            requested=np.concatenate([part.requested + firsts[i] for i, part in enumerate(parts)]),
            max_tokens=np.concatenate([part.max_tokens for part in parts]),
            expected_tokens=np.concatenate([part.expected_tokens for part in parts]),
            num_rows=int(firsts[-1]),
            adapters=np.concatenate([part.adapters for part in parts]),
            skipped=sum((part.skipped for part in parts), Counter()),
        )

    @property
    def is_requested(self) -> Bools:
        is_requested = np.zeros(self.num_rows, np.bool_)
        is_requested[self.requested] = True
        return is_requested


def describe_rows(
    table: pa.Table, prepared: Prepared, *, block_size: int, expected_column: str | None
) -> PlanIndex:
    """Return the plan index of one row batch and its prepared requests.

    `prepared` has a request for every requested row, also for duplicates. The expected output
    length of a row is in `expected_column`; without one it is the row's `max_tokens`.

    Raises:
        ConfigError: the column is not numeric, or has a length below 0.
    """
    keys, adapters = row_keys(prepared.requests, block_size)
    requested = np.asarray(prepared.rows, np.int64)
    samplings = prepared.request_samplings
    max_tokens = np.array([s.max_tokens * s.n for s in samplings], np.int64)
    generates = np.array([s is not POOLED for s in samplings], np.int64)
    num_samples = np.array([s.n for s in samplings], np.int64)
    row_ids = [prepared.row_ids[row] for row in prepared.rows]
    reasons = (p.error or FILTERED for p in prepared.prompts if not p.is_requested)
    return PlanIndex(
        keys=replace(keys, digest=_result_keys(keys.digest, samplings, row_ids)),
        requested=requested,
        max_tokens=max_tokens * generates,
        # 1 without generation, so that short prompts come first
        expected_tokens=_expected(table, expected_column, prepared, max_tokens, num_samples),
        num_rows=table.num_rows,
        adapters=adapters,
        skipped=Counter(error_class(reason) for reason in reasons),
    )


def check_expected(schema: pa.Schema, column: str | None) -> None:
    """Raise ConfigError if a column of expected lengths is missing or not numeric."""
    if column is None:
        return
    if column not in schema.names:
        raise ConfigError(
            f"plan.expected_tokens_column {column!r} is not in the source, whose columns are "
            f"{schema.names}"
        )
    kind = schema.field(column).type
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)
    if not is_number and not pa.types.is_null(kind):
        raise ConfigError(
            f"plan.expected_tokens_column {column!r} has type {kind}; it must have numbers of "
            "tokens, and null if unknown"
        )


def _result_keys(digest: Uint64s, samplings: Sequence[Sampling], row_ids: Sequence[str]) -> Uint64s:
    """Mix the other inputs of a result into the digest of each prompt."""
    texts = {sampling: repr(dataclasses.astuple(sampling)) for sampling in set(samplings)}
    known = {
        sampling: int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
        for sampling, text in texts.items()
    }
    salts = [
        known[one] ^ (0 if is_deterministic(one) else row_seed(one.seed, row_id))
        for one, row_id in zip(samplings, row_ids, strict=True)
    ]
    return digest ^ np.array(salts, np.uint64)


def _expected(
    table: pa.Table, column: str | None, prepared: Prepared, max_tokens: Ints, num_samples: Ints
) -> Floats:
    """Return the expected output length of each row, at least 1 and at most its `max_tokens`."""
    limit = max_tokens.astype(float)
    if column is None:
        return limit
    check_expected(table.schema, column)
    values = pc.cast(table.column(column), pa.float64()).to_numpy()[list(prepared.rows)]
    is_wrong = (values < 0) | np.isinf(values)
    if is_wrong.any():
        row = prepared.rows[int(np.argmax(is_wrong))]
        row_id, value = prepared.row_ids[row], table.column(column)[row].as_py()
        raise ConfigError(
            f"plan.expected_tokens_column {column!r} is {value} in row {row_id!r}; it must be a "
            "number of tokens, or null if unknown"
        )
    return np.clip(np.where(np.isnan(values), limit, values * num_samples), 1, limit)
