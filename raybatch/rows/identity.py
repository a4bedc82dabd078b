"""Who a row is: its `row_id` and the seed that follows from it."""

import hashlib
from collections.abc import Sequence

import pyarrow as pa

from raybatch.records.types import TokenIds
from raybatch.rows.batches import python_values
from raybatch.rows.schema import describe_error


def row_seed(seed: int, row_id: str) -> int:
    """Return the 64-bit seed of a row; nothing about its placement takes part.

    Complexity: one hash of the id.
    """
    digest = hashlib.blake2b(f"{seed}\x00{row_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def column_row_ids(column: pa.ChunkedArray) -> tuple[list[str | None], list[str]]:
    """Return the ids of a user's column as strings, and an error text per row ("" = fine)."""
    ids: list[str | None] = []
    errors: list[str] = []
    for value in python_values(column):
        if value is None or isinstance(value, Exception):
            ids.append(None)
            cause = "the id is null" if value is None else value
            errors.append(describe_error("InvalidRowId", cause))
        else:
            ids.append(value.hex() if isinstance(value, bytes) else str(value))
            errors.append("")
    return ids, errors


def content_row_ids(prompts: Sequence[TokenIds | None], errors: Sequence[str]) -> list[str]:
    """Return ids made of what is asked: a hash of the prompt, and a count of its repetitions.

    They do not depend on order, layout or cluster size, except that the count starts again in
    every row batch: equal prompts in two batches have one id. `id_column` gives unique ids.
    """
    seen: dict[str, int] = {}
    ids: list[str] = []
    for prompt, error in zip(prompts, errors, strict=True):
        content = error.encode() if prompt is None else prompt.tobytes()
        digest = hashlib.blake2b(content, digest_size=8).hexdigest()
        occurrence = seen.get(digest, 0)
        seen[digest] = occurrence + 1
        ids.append(f"{digest}-{occurrence}")
    return ids
