"""Steps in which decode rows have no unshared key, or none within a window."""

from dataclasses import dataclass

import torch

from raybatch.kernels.attention_plan import AttentionPlan, DecodePart, PrefixSegment
from tests.oracles import dense_attention

BLOCK_SIZE = 4


def part_of(entries):
    """Return a part of (block, owner, valid, first position); None if empty."""
    columns = torch.tensor(sorted(entries), dtype=torch.int64).view(-1, 4).unbind(1)
    return DecodePart(
        block_ids=columns[0].contiguous(),
        owners=columns[1].contiguous(),
        num_valid=columns[2].contiguous(),
        is_contiguous=bool((columns[0].diff() == 1).all()),
        first_positions=columns[3].contiguous(),
    )


def context(rows, blocks, first=0):
    return PrefixSegment(
        query_idx=torch.tensor(rows),
        block_ids=torch.tensor(blocks),
        num_tokens=len(blocks) * BLOCK_SIZE,
        first_position=first,
    )


@dataclass(frozen=True)
class KeylessStep:
    """A step of decode rows.

    Args:
        tables: blocks of each row, in order of position.
        contexts: runs of whole blocks as (rows, blocks, first position).
        own: further blocks of rows as (block, row, valid positions, first position).
    """

    tables: list
    segments: list
    own: list

    def positions(self):
        """Return the position of each row: the last valid one of its table."""
        ends = {row: first + valid for _, row, valid, first in self.own if first}
        return [ends.get(i, len(table) * BLOCK_SIZE) - 1 for i, table in enumerate(self.tables)]

    def plan(self):
        return AttentionPlan(
            num_decode=len(self.tables),
            decode=part_of(self.own),
            prefill=None,
            segments=tuple(context(*parts) for parts in self.segments),
        )

    def expected(self, q, k_pool, v_pool, window):
        """Return the attention of each row, [S, H * D], over float pools [N, G, B, D]."""
        outputs = []
        for i, (table, position) in enumerate(zip(self.tables, self.positions(), strict=True)):
            keys, values = (pool[table].transpose(1, 2).flatten(0, 1) for pool in (k_pool, v_pool))
            outputs.append(dense_attention(q[i : i + 1], keys, values, [position], window))
        return torch.cat(outputs).flatten(1)


STEPS = {
    "one row shares all that it sees": KeylessStep(
        [[3, 1], [3, 1, 7]], [([0, 1], [3, 1])], [(7, 1, 2, 8)]
    ),
    "all rows do": KeylessStep([[3, 1], [3, 1]], [([0, 1], [3, 1])], []),
    "unshared keys of a row may be before its window": KeylessStep(
        [[5, 3, 1], [5, 3, 1, 7]],
        [([0, 1], [3, 1], BLOCK_SIZE)],
        [(5, 0, 4, 0), (5, 1, 4, 0), (7, 1, 2, 12)],
    ),
    "rows in the middle and at the end do": KeylessStep(
        [[2, 4, 6], [2, 4], [2, 4, 8], [2]],
        [([0, 1, 2, 3], [2]), ([0, 1, 2], [4], BLOCK_SIZE)],
        [(6, 0, 1, 8), (8, 2, 4, 8)],
    ),
}
