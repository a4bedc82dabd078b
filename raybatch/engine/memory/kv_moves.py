"""Takes KV out of an engine together with its sequences, and checks what comes from another one."""

import logging
from dataclasses import replace
from typing import Protocol

import numpy as np

from raybatch.engine.memory.kv_tiers import KVTiers
from raybatch.engine.sequences.block_manager import KVPlace, SwappedKV
from raybatch.engine.sequences.table import Sequence
from raybatch.records.sequence_kv import KVKey, SequenceKV, block_checksums
from raybatch.records.types import SequenceState, TokenIds

logger = logging.getLogger(__name__)


def tokens_with_kv(state: SequenceState) -> TokenIds:
    """Return the tokens of a sequence that can have KV; the last one is fed to the next step."""
    return np.concatenate((state.request.prompt_token_ids, state.token_ids))[:-1]


class KVOwner(Protocol):
    """What of a runner has to do with KV that moves."""

    @property
    def tiers(self) -> KVTiers: ...

    @property
    def kv_key(self) -> KVKey | None: ...


def export_state(
    record: Sequence, place: KVPlace | SwappedKV | None, owner: KVOwner
) -> SequenceState:
    """Return a sequence that does not run any more, with the KV at `place`."""
    state = record.state()
    if place is None or owner.kv_key is None:
        return state
    return replace(state, kv=_read_kv(state, place, owner.tiers, owner.kv_key))


def _read_kv(
    state: SequenceState, place: KVPlace | SwappedKV, tiers: KVTiers, key: KVKey
) -> SequenceKV | None:
    """Copy the KV of a sequence to arrays; None where it has none."""
    tokens = tokens_with_kv(state)[: place.num_tokens]
    count = -(-len(tokens) // key.block_size) - place.first_block
    if count <= 0:
        return None
    if isinstance(place, KVPlace):
        blocks = tiers.read_blocks(place.blocks[:count].astype(np.int64))
    elif place.rows is not None:
        blocks = place.rows[:count]
    else:
        blocks = tiers.read_host_blocks(place.host_blocks[:count].astype(np.int64))
    return SequenceKV(
        key=key,
        first_block=place.first_block,
        num_tokens=len(tokens),
        blocks=blocks,
        checksums=block_checksums(
            blocks, tokens, first_block=place.first_block, block_size=key.block_size
        ),
    )


def accept_kv(state: SequenceState, key: KVKey | None) -> SwappedKV | None:
    """Return what an engine of this key may use of the KV that came with a sequence.

    The log tells what cannot be used, and is computed again.
    """
    kv, row_id = state.kv, state.request.row_id
    if kv is None:
        return None
    if kv.key != key:
        logger.info(
            "the KV of row %s is of another model, dtype or block size (%s, here %s): it is "
            "computed again",
            row_id,
            tuple(kv.key),
            None if key is None else tuple(key),
        )
        return None
    count = kv.num_sound(tokens_with_kv(state))
    if count < len(kv.blocks) or not count:
        logger.warning(
            "the KV of row %s is damaged: from token %d on it is computed again",
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
