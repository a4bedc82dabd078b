"""KV of a sequence as data, for migration to another engine without recomputing it."""

import zlib
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.int32]
Checksums = npt.NDArray[np.uint32]


class KVKey(NamedTuple):
    """Properties that two engines must share to exchange KV."""

    # digest of config.json and the weights
    model: str
    # types of computation and of KV
    dtype: str
    kv_dtype: str
    block_size: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SequenceKV:
    """KV blocks of one sequence, for its tokens up to `num_tokens`.

    The receiver has cached the KV of blocks before `first_block`, or recomputes it.
    """

    key: KVKey
    first_block: int
    num_tokens: int
    # [blocks, 2, L, G, B, R], keys and values as whole numbers with the bits of their type
    blocks: npt.NDArray[Any]
    # one per block, of its bytes and of all tokens up to its end
    checksums: Checksums

    def num_sound(self, token_ids: TokenIds) -> int:
        """Return the number of leading blocks with valid checksums for these tokens.

        It is 0 if the number of blocks does not match the tokens.
        """
        size = self.key.block_size
        num_blocks = -(-self.num_tokens // size) - self.first_block
        if len(self.blocks) != num_blocks or self.num_tokens > len(token_ids):
            return 0
        tokens = token_ids[: self.num_tokens]
        now = block_checksums(self.blocks, tokens, first_block=self.first_block, block_size=size)
        is_sound = np.append(now == self.checksums[:num_blocks], False)
        return int(is_sound.argmin())


def block_checksums(
    blocks: npt.NDArray[Any], token_ids: TokenIds, *, first_block: int, block_size: int
) -> Checksums:
    """Return a CRC-32 per block, uint32 [n], of its bytes and of all tokens up to its end."""
    tokens = np.ascontiguousarray(token_ids, np.int32)
    crc = zlib.crc32(tokens[: first_block * block_size].tobytes())
    checksums = np.zeros(len(blocks), np.uint32)
    for i, block in enumerate(blocks):
        start = (first_block + i) * block_size
        crc = zlib.crc32(tokens[start : start + block_size].tobytes(), crc)
        checksums[i] = zlib.crc32(np.ascontiguousarray(block).data.cast("B"), crc)
    return checksums
