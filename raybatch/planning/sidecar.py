"""What planning needs to know of the rows of a source, and nothing of the users' columns."""

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raybatch.actors.submitting import row_keys
from raybatch.errors import ConfigError
from raybatch.prefix.block_keys import BlockKeys
from raybatch.records.arrays import Bools, Floats, Ints, Uint64s
from raybatch.records.types import Sampling
from raybatch.rows.prepare import Prepared, is_deterministic, row_seed
from raybatch.rows.prompt import POOLED
from raybatch.rows.schema import error_class

# stands among classes of errors, which begin with a capital, for rows left out on purpose
FILTERED = "filtered"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sidecar:
    """Rows of a source as planning sees them, in input order; arrays are read only."""

    # of the rows that engines see; the digest also tells options apart that decide a result, and
    # rows whose results differ by chance
    keys: BlockKeys
    asked: Ints  # [A], positions of these rows among all rows described
    max_tokens: Ints  # [A], longest output over all samples
    expected_tokens: Floats
    num_rows: int
    adapters: Uint64s  # [A], what the adapter of each of these rows is known by; 0 for none
    # rows that no engine sees: class of their error, or "filtered", to their number
    unasked: Counter[str]

    @classmethod
    def concat(cls, parts: Sequence["Sidecar"]) -> "Sidecar":
        """Return the rows of all parts, in order; at least one part."""
        firsts = np.cumsum([0, *(part.num_rows for part in parts)])
        return cls(
            keys=BlockKeys.concat([part.keys for part in parts]),
            asked=np.concatenate([part.asked + firsts[i] for i, part in enumerate(parts)]),
            max_tokens=np.concatenate([part.max_tokens for part in parts]),
            expected_tokens=np.concatenate([part.expected_tokens for part in parts]),
            num_rows=int(firsts[-1]),
            adapters=np.concatenate([part.adapters for part in parts]),
            unasked=sum((part.unasked for part in parts), Counter()),
        )

    @property
    def is_asked(self) -> Bools:
        is_asked = np.zeros(self.num_rows, np.bool_)
        is_asked[self.asked] = True
        return is_asked


def describe_rows(
    table: pa.Table, prepared: Prepared, *, block_size: int, expected_column: str | None
) -> Sidecar:
    """Describe the rows of one batch; every asked row is among the prepared requests (no copies).

    Without a column of output lengths the longest allowed are expected.

    Raises:
        ConfigError: the column is no column of numbers, or holds a length below 0.
    """
    keys, adapters = row_keys(prepared.requests, block_size)
    asked = np.asarray(prepared.rows, np.int64)
    samplings = prepared.request_samplings
    max_tokens = np.array([s.max_tokens * s.n for s in samplings], np.int64)
    generates = np.array([s is not POOLED for s in samplings], np.int64)
    num_samples = np.array([s.n for s in samplings], np.int64)
    row_ids = [prepared.row_ids[row] for row in prepared.rows]
    reasons = (p.error or FILTERED for p in prepared.prompts if not p.is_asked)
    return Sidecar(
        keys=replace(keys, digest=_result_keys(keys.digest, samplings, row_ids)),
        asked=asked,
        max_tokens=max_tokens * generates,
        # one where nothing is generated, so that short prompts come first
        expected_tokens=_expected(table, expected_column, prepared, max_tokens, num_samples),
        num_rows=table.num_rows,
        adapters=adapters,
        unasked=Counter(error_class(reason) for reason in reasons),
    )


def check_expected(schema: pa.Schema, column: str | None) -> None:
    """Raise ConfigError where a column of expected lengths is missing or holds no numbers."""
    if column is None:
        return
    if column not in schema.names:
        raise ConfigError(
            f"plan.expected_tokens_column {column!r} is not in the source: {schema.names}"
        )
    kind = schema.field(column).type
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)
    if not is_number and not pa.types.is_null(kind):
        raise ConfigError(
            f"plan.expected_tokens_column {column!r} is a column of {kind}; give numbers of "
            "tokens, and null where it is not known"
        )


def _result_keys(digest: Uint64s, samplings: Sequence[Sampling], row_ids: Sequence[str]) -> Uint64s:
    """Mix into the digest of each prompt what else decides its result."""
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
    """Return the output length to expect of each row, at least 1 and at most its `max_tokens`."""
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
            f"plan.expected_tokens_column {column!r} is {value} in row {row_id!r}; give a "
            "number of tokens, or null where it is not known"
        )
    return np.clip(np.where(np.isnan(values), limit, values * num_samples), 1, limit)
