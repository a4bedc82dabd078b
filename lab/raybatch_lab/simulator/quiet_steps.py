"""Many steps at once in which nothing is decided: the same sequences decode, and take blocks.

It leaves what as many calls of `Scheduler.schedule` and `advance` leave, block ids included. A
simulator lives on it: with long outputs almost all steps are like that.
"""

import numpy as np

from raybatch.engine.scheduling.scheduler import Scheduler
from raybatch.engine.sequences.table import DECODE, EMPTY
from raybatch.records.arrays import Ints


def count_quiet_steps(scheduler: Scheduler, most: int) -> int:
    """Return the number of quiet steps that come next, at most `most`, if no sequence ends.

    In a quiet step all sequences decode, no waiting row can start, and there are enough KV blocks.
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
    """Do `num_steps` quiet steps at once; return the slots that decoded, ascending.

    Each slot gets KV for `num_steps` more tokens; the caller appends the tokens. The number must
    be at most the result of `count_quiet_steps`.
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
    """Return the blocks that each slot takes in `num_steps` steps."""
    table = scheduler.table
    wanted = -(-(table.num_computed[slots] + num_steps) // table.block_size)
    missing: Ints = np.maximum(0, wanted - table.num_blocks[slots])
    return missing
