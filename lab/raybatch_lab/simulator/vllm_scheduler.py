"""vLLM's scheduler, where it differs from ours."""

from dataclasses import replace

from raybatch.engine.scheduling.scheduler import Scheduler
from raybatch.engine.sequences.table import Sequence


class VllmScheduler(Scheduler):
    """Schedules as vLLM does: first come, first served, and KV blocks of outputs are cached too.

    So a preempted sequence recomputes only blocks that were overwritten meanwhile. Admission,
    preemption and the chunks of prompts are those of `Scheduler` without a memory forecast. Unlike
    vLLM it allocates all blocks of a prompt with the first chunk.
    """

    def add(self, record: Sequence) -> None:
        block_size, request = self.table.block_size, record.request
        num_shared = request.prefix_len // block_size if request.group_id is not None else 0
        owners = [-1 - (request.group_id or 0)] * num_shared
        owners += [request.request_id] * (record.max_len // block_size - num_shared)
        if self._has_cache:
            record.block_hashes = [f"{owner} {i}".encode() for i, owner in enumerate(owners)]
        # it knows no groups
        record.request = replace(request, group_id=None)
        super().add(record)

    def _vacate(self, slot: int) -> Sequence:
        num_full = int(self.table.num_computed[slot]) // self.table.block_size
        blocks = self.table.blocks(slot)[:num_full].tolist()
        # no other row has requested blocks of its output yet; without a cache there are none
        hashes = self.table.record(slot).block_hashes or []
        for block, block_hash in zip(blocks, hashes, strict=False):
            self.blocks.register(block, block_hash)
        return super()._vacate(slot)
