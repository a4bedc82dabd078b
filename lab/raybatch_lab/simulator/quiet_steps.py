"""Many steps at once in which nothing is decided: the same sequences decode, and take blocks.

It leaves what as many calls of `Scheduler.schedule` and `advance` leave, block ids included. A
simulator lives on it: with long outputs almost all steps are like that.
"""

import numpy as np

from raybatch.engine.scheduling.scheduler import Scheduler
from raybatch.engine.sequences.table import DECODE, EMPTY
from raybatch.records.arrays import Ints


def count_quiet_steps(scheduler: Scheduler, most: int) -> int:
    """Return how many steps from here on, up to `most`, are quiet if no sequence ends.

    Quiet is a step without prompts, where nobody who waits could start and there are blocks for all
    that decode.
    """
    table, blocks = scheduler.table, scheduler.blocks
    slots = np.flatnonzero(table.phase != EMPTY)
    can_start = scheduler.num_waiting > 0 and table.has_free_slot
    is_decoding = (table.phase[slots] == DECODE).all() and not table.shares_last[slots].any()
    if can_start or not len(slots) or not is_decoding:
        return 0
    low, high = 0, most
    while low < high:
        middle = -(-(low + high) // 2)
        if int(_num_missing(scheduler, slots, middle).sum()) <= blocks.num_available:
            low = middle
        else:
            high = middle - 1
    return low


def run_quiet_steps(scheduler: Scheduler, num_steps: int) -> Ints:
    """Compute as many steps as `count_quiet_steps` allows; return the slots, ascending.

    Each has KV of `num_steps` tokens more; the tokens themselves are the caller's to append.
    """
    table = scheduler.table
    slots = np.flatnonzero(table.phase != EMPTY)
    missing = _num_missing(scheduler, slots, num_steps)
    if missing.any():
        owners = np.repeat(slots, missing)
        places = np.arange(len(owners)) - np.repeat(np.cumsum(missing) - missing, missing)
        # a sequence takes a block in the step that fills it, older ones first
        begins = (table.num_blocks[owners] + places) * table.block_size
        order = np.lexsort((table.arrival[owners], begins - table.num_computed[owners]))
        taken = np.empty(len(owners), np.int64)
        taken[order] = scheduler.blocks.allocate(len(owners))
        ends = np.cumsum(missing)
        for slot, start, stop in zip(
            slots.tolist(), (ends - missing).tolist(), ends.tolist(), strict=True
        ):
            if start < stop:
                table.add_blocks(slot, taken[start:stop].tolist())
    table.num_computed[slots] += num_steps
    return slots


def _num_missing(scheduler: Scheduler, slots: Ints, num_steps: int) -> Ints:
    """Return the blocks that each slot takes in so many steps."""
    table = scheduler.table
    wanted = -(-(table.num_computed[slots] + num_steps) // table.block_size)
    missing: Ints = np.maximum(0, wanted - table.num_blocks[slots])
    return missing
