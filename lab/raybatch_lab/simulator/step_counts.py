"""What a scheduled step computes, in the counts that a cost model prices."""

import numpy as np

from raybatch.actors.queue.row_states import ALONE
from raybatch.engine.sequences.schedule import Schedule
from raybatch.engine.sequences.table import SequenceTable
from raybatch.policy.cost.cost_model import MeasuredStep, prompt_pairs
from raybatch.records.arrays import Ints


def count_step(table: SequenceTable, schedule: Schedule, group_of: Ints) -> MeasuredStep:
    """Return the counts of a scheduled step, as a cost model takes them, with 0 seconds.

    Args:
        group_of: prefix group of each slot, int64 [slots], `ALONE` for none.
    """
    chunk_slots, lens = schedule.chunk_slots, schedule.chunk_lens
    num_first = np.count_nonzero(schedule.chunk_starts + lens == table.num_tokens[chunk_slots])
    return MeasuredStep(
        seconds=0.0,
        tokens=schedule.num_tokens,
        rows=len(schedule.decode_slots) + int(num_first),
        **prompt_pairs(lens, schedule.chunk_starts),
        **decode_reads(table, schedule.decode_slots, group_of),
    )


def decode_reads(table: SequenceTable, slots: Ints, group_of: Ints) -> dict[str, float]:
    """Return the KV reads of sequences that decode in a step, as fields of `MeasuredStep`.

    If several sequences of a prefix group decode, their shared prefix is read once for all.
    """
    reads = float(table.num_tokens[slots].sum())
    groups = group_of[slots]
    if (groups == ALONE).all():
        return {"context_reads": reads}
    in_group = groups != ALONE
    _, members = np.unique(groups[in_group], return_inverse=True)
    counts = np.bincount(members)
    shared = table.num_shared[slots][in_group] * table.block_size
    shared_pairs = float(shared[counts[members] > 1].sum())
    # members may share unlike lengths; the mean of each group is read once
    of_group = np.bincount(members, weights=shared) / counts
    return {
        "context_reads": reads - shared_pairs,
        "shared_pairs": shared_pairs,
        "cascade_reads": float(of_group[counts > 1].sum()),
    }
