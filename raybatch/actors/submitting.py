"""Builds the submission of a request table, so that the coordinator never opens the table."""

import hashlib
import uuid
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raybatch.actors.wire.columns import (
    check_requests,
    expected_new_tokens,
    flat_values,
    is_planned,
    max_new_tokens,
    offsets_of,
    prompt_lengths,
    to_numpy,
    whole_array,
)
from raybatch.actors.wire.records import RowGroups, Submission
from raybatch.config import EngineConfig
from raybatch.prefix.block_keys import BlockKeys, hash_blocks
from raybatch.records.payload import adapter_in
from raybatch.records.types import Sampling


def make_submission(
    table: pa.Table,
    samplings: Sequence[Sampling],
    client: str,
    engine: EngineConfig,
    *,
    name: str = "",
    copies: npt.NDArray[np.int32] | None = None,
    dedup_keys: bytes = b"",
) -> Submission:
    """Return a submission that describes the rows of a request table to the coordinator.

    It has the groups of rows with a plan, and block keys of other rows unless prefix caching is
    off. `name`, `copies` and `dedup_keys` are as in `Submission`.

    Raises:
        ConfigError: the table lacks columns, or has an index outside `samplings`.
    """
    check_requests(table, len(samplings))
    planned = is_planned(table)
    has_keys = engine.enable_prefix_caching and not planned
    return Submission(
        token=uuid.uuid4().hex,
        client=client,
        name=name,
        prompt_tokens=prompt_lengths(table),
        max_new_tokens=max_new_tokens(table, samplings),
        expected_new_tokens=expected_new_tokens(table, samplings),
        num_samples=_sample_counts(table, samplings),
        copies=copies,
        dedup_keys=dedup_keys,
        groups=_row_groups(table, client) if planned else None,
        block_keys=row_keys(table, engine.block_size_tokens).blocks if has_keys else None,
    )


def _sample_counts(table: pa.Table, samplings: Sequence[Sampling]) -> npt.NDArray[np.int32] | None:
    """Return the samples of each row, int32 [rows]; None if each has one."""
    counts = np.array([s.n for s in samplings], np.int32)
    if (counts == 1).all():
        return None
    of_rows: npt.NDArray[np.int32] = counts[to_numpy(table["sampling"], np.int32)]
    return of_rows


def _row_groups(table: pa.Table, client: str) -> RowGroups:
    """Return the planned groups of the rows, with ids that are unique among clients."""
    ids = to_numpy(whole_array(table["group_id"]).fill_null(-1), np.int64)
    salt = np.int64(_digest(client) >> 1)
    return RowGroups(
        group_ids=np.where(ids < 0, -1, ids ^ salt),
        prefix_lens=to_numpy(table["prefix_len"], np.int32),
    )


class RowKeys(NamedTuple):
    """Hashes of the rows of a request table, by which shared prefixes are found.

    Args:
        blocks: hashes of prompts up to each block's end; rows of different adapters share none,
            and rows of different payloads are not identical.
        adapters: hash of the adapter of each row, uint64 [rows]; 0 for none.
    """

    blocks: BlockKeys
    adapters: npt.NDArray[np.uint64]


def row_keys(table: pa.Table, block_size: int) -> RowKeys:
    """Return the hashes of all rows of a request table; linear in tokens and in payloads."""
    prompts = whole_array(table["prompt_token_ids"])
    tokens = flat_values(prompts, np.int32)
    keys = hash_blocks(tokens, offsets_of(prompt_lengths(table)), block_size)
    payloads = table["payload"]
    # salts of each payload: for the KV of a prompt, and for its result
    salts = np.zeros((len(payloads), 2), np.uint64)
    if payloads.null_count < len(payloads):
        texts = payloads.to_pylist()
        known = {text: (_digest(adapter_in(text)), _digest(text)) for text in set(texts)}
        salts = np.array([known[text] for text in texts], np.uint64)
    return RowKeys(keys.salted(salts[:, 0], salts[:, 1]), salts[:, 0])


def _digest(text: str | None) -> int:
    if text is None:
        return 0
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")
