"""The books of the host's KV pool, and what a sequence has there; no tensors."""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int32s = npt.NDArray[np.int32]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SwappedKV:
    """KV of a sequence in host memory; what lies before its first block stayed on the device.

    ```
    blocks of the sequence   | 0 | 1 | 2 | 3 | 4 | 5 |      first_block = 2, three host blocks,
    found again by hash      | x | x |                      num_tokens ends within block 4;
    in host memory                   | h | h | h |          block 5 is not there yet
    ```

    Args:
        first_block: place of the first host block in the sequence.
        host_blocks: int32 [n], in order of position.
        num_tokens: tokens of the sequence that had KV, from its beginning.
    """

    first_block: int
    host_blocks: Int32s
    num_tokens: int


class HostBlocks:
    """Hands out the blocks of the host's pool, lowest id first; each has one owner."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks))

    @property
    def num_available(self) -> int:
        """Blocks that may be allocated."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that sequences hold."""
        return self.num_blocks - len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Return `count` blocks, ascending.

        Raises:
            RuntimeError: fewer are available; callers ask `num_available` first.
        """
        if count > len(self._free):
            raise RuntimeError(f"{count} host blocks asked for, {len(self._free)} available")
        return [heapq.heappop(self._free) for _ in range(count)]

    def release(self, blocks: Iterable[int] | Int32s) -> None:
        for block in blocks:
            heapq.heappush(self._free, int(block))

    def check(self, tables: Sequence[Int32s]) -> None:
        """Raise RuntimeError unless the books agree with what the sequences hold."""
        held = [block for table in tables for block in table.tolist()]
        if sorted([*held, *self._free]) != list(range(self.num_blocks)):
            raise RuntimeError(
                f"host blocks: {len(held)} held and {len(self._free)} free do not make up the "
                f"pool of {self.num_blocks}, or one is there twice"
            )
