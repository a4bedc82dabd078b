"""Interface of the scheduler to copies of KV blocks to host memory and back; torch-free."""

from typing import Protocol

from raybatch.records.arrays import Ints

# errors of a copy when memory or the device runs out of resources
COPY_ERRORS = (RuntimeError, MemoryError, OSError)


class BlockCopies(Protocol):
    """Copies blocks between a device pool and a host pool; item i of the arrays is one copy."""

    num_host_blocks: int
    block_bytes: int

    def save_blocks(self, block_ids: Ints, host_ids: Ints) -> None: ...

    def load_blocks(self, host_ids: Ints, block_ids: Ints) -> None: ...
