"""Queues of equal rows or of prefix groups, and what tests read from the grants."""

import numpy as np

from raybatch.actors.queue.row_queue import RowQueue
from raybatch.actors.wire.records import Credit, RowGroups
from raybatch.prefix.block_keys import hash_blocks

AMPLE = Credit(tokens=10**9, rows=10**9)
BLOCK = 4


def queue_of(*num_rows, prompt=10, new=10, max_row_crashes=3):
    queue = RowQueue(max_row_crashes)
    for batch_id, num in enumerate(num_rows):
        queue.add(batch_id, [prompt] * num, [new] * num)
    return queue


def groups_of(ids, prefix):
    """Return the groups of rows; None is a row that is alone."""
    group_ids = np.array([-1 if i is None else i for i in ids], np.int64)
    prefixes = np.broadcast_to(prefix, len(ids))
    return RowGroups(
        group_ids=group_ids, prefix_lens=np.where(group_ids < 0, 0, prefixes).astype(np.int32)
    )


def add_groups(queue, batch_id, ids, *, prefix=100, distinct=10, new=10):
    """Queue planned rows, given by the group of each."""
    groups = groups_of(ids, prefix)
    queue.add(batch_id, groups.prefix_lens + distinct, [new] * len(ids), groups=groups)


def grouped_queue(ids, **lengths):
    queue = RowQueue(3)
    add_groups(queue, 0, ids, **lengths)
    return queue


def plain_prompts(groups, *, prefix=8, distinct=4):
    """Return prompts given by the group of each row; None shares nothing."""
    prompts = []
    for row, group in enumerate(groups):
        shared = np.full(prefix, -1 - row if group is None else group)
        prompts.append(np.r_[shared, np.full(distinct - 1, 7), 10_000 + row])
    return prompts


def keys_of(prompts):
    flat = np.concatenate([*prompts, np.empty(0, np.int32)]).astype(np.int32)
    offsets = np.cumsum([0, *map(len, prompts)], dtype=np.int64)
    return hash_blocks(flat, offsets, BLOCK)


def add_plain(queue, batch_id, groups, *, new=10, **lengths):
    """Queue rows without a plan, given by the prefix that each has."""
    keys = keys_of(plain_prompts(groups, **lengths))
    queue.add(batch_id, keys.num_tokens, np.broadcast_to(new, len(groups)), keys=keys)


def held_rows(grants):
    return [(s.batch_id, row) for s in grants for row in range(s.start, s.stop)]
