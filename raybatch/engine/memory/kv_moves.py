"""Exports the KV of migrating sequences, and validates KV from other engines."""

import logging
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from raybatch.engine.memory.kv_tiers import KVTiers
from raybatch.engine.sequences.block_manager import SwappedKV
from raybatch.errors import RankError, error_text
from raybatch.records.arrays import Ints
from raybatch.records.sequence_kv import KVKey, SequenceKV, block_checksums
from raybatch.records.types import SequenceState, TokenIds

logger = logging.getLogger(__name__)


def tokens_with_kv(state: SequenceState) -> TokenIds:
    """Return the tokens of a sequence that can have KV: all but the last, the next step's input."""
    return np.concatenate((state.request.prompt_token_ids, state.token_ids))[:-1]


class KVOwner(Protocol):
    """The part of a runner that exports KV."""

    @property
    def tiers(self) -> KVTiers: ...

    @property
    def kv_key(self) -> KVKey | None: ...

    def read_blocks(self, block_ids: Ints) -> npt.NDArray[Any]: ...


def state_with_kv(state: SequenceState, place: SwappedKV | None, owner: KVOwner) -> SequenceState:
    """Return a sequence's state with copies of the exact KV that is stored at `place`.

    KV that was rounded, or computed from rounded KV, is left out and must be recomputed.
    """
    key = owner.kv_key if place is not None else None
    if place is None or key is None:
        return state
    tokens = tokens_with_kv(state)[: place.num_tokens]
    first, size = place.first_block, key.block_size
    if place.num_exact is not None:
        tokens = tokens[: place.num_exact * size]
    count = -(-len(tokens) // size) - first
    if count <= 0:
        return state
    if place.rows is not None:
        blocks = place.rows[:count]
    else:
        read = owner.read_blocks if place.is_on_device else owner.tiers.read_host_blocks
        try:
            blocks = read(place.host_blocks[:count].astype(np.int64))
        except RankError as error:
            logger.warning("moving a row without its KV, which is lost: %s", error_text(error))
            return state
    checksums = block_checksums(blocks, tokens, first_block=first, block_size=size)
    kv = SequenceKV(
        key=key, first_block=first, num_tokens=len(tokens), blocks=blocks, checksums=checksums
    )
    return replace(state, kv=kv)


def accept_kv(state: SequenceState, key: KVKey | None) -> SwappedKV | None:
    """Return the part of a migrated sequence's KV that an engine with this key can use, or None.

    The rest is recomputed; the log gives the reason.
    """
    kv, row_id = state.kv, state.request.row_id
    if kv is None:
        return None
    if kv.key != key:
        logger.info(
            "recomputing the KV of row %s: it is of another model, dtype or block size (%s, here "
            "%s)",
            row_id,
            tuple(kv.key),
            None if key is None else tuple(key),
        )
        return None
    count = kv.num_sound(tokens_with_kv(state))
    if count < len(kv.blocks) or not count:
        logger.warning(
            "the KV of row %s is damaged, recomputing it from token %d",
            row_id,
            (kv.first_block + count) * kv.key.block_size,
        )
    if not count:
        return None
    return SwappedKV(
        first_block=kv.first_block,
        host_blocks=np.empty(0, np.int32),
        num_tokens=min(kv.num_tokens, (kv.first_block + count) * kv.key.block_size),
        rows=kv.blocks[:count],
    )
