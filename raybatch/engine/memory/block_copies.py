"""What a scheduler knows of copies of KV blocks to host memory and back; no torch."""

from typing import Protocol

from raybatch.records.arrays import Ints

# what a copy may raise where memory or the device is short of something
COPY_ERRORS = (RuntimeError, MemoryError, OSError)


class BlockCopies(Protocol):
    """Copies blocks between a device and a pool of host memory; both arrays have one length."""

    num_host_blocks: int
    block_bytes: int

    def save_blocks(self, block_ids: Ints, host_ids: Ints) -> None: ...

    def load_blocks(self, host_ids: Ints, block_ids: Ints) -> None: ...
