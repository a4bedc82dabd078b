"""Turns a schedule into an AttentionPlan: which rows read which blocks, and together with whom.

The blocks that a step reads fall into three kinds, by their readers (`BlockUsers`):

    one decoding sequence        DecodePart, in memory order
    at least one prompt chunk    ContextPart of all its readers
    several decoding sequences   ContextPart where that saves enough reads, else DecodePart with
                                 one (block, owner) pair per reader

Blocks with the same set of readers form one ContextPart, so every shared run of a prefix tree is
read once, whatever the tree looks like.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from raybatch.engine.index_tensors import to_device
from raybatch.engine.scheduler import Schedule
from raybatch.engine.sequences import SequenceTable
from raybatch.kernels.attention_plan import AttentionPlan, ContextPart, DecodePart, PrefillPart

__all__ = ["PlanBuilder"]

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Readers:
    """Blocks with more than one reader or read by a chunk, as runs with one set of readers.

    `blocks` are sorted by run and position, `block_ends` and `member_ends` cut the runs apart;
    members index the sequences of the step: decode rows, then chunks.
    """

    blocks: Int64s
    block_ends: Int64s
    members: Int64s
    member_ends: Int64s


class PlanBuilder:
    """Builds one plan per step from the table and the schedule.

    Args:
        table: running sequences.
        num_blocks: blocks of the pool.
        min_saved_tokens: decode rows read a shared run together if that saves at least so many
            reads of cached positions, two readers not counted: the second finds the block in the
            processor's cache. Below it, a part of its own costs more than it saves (measured on a
            CPU with heads of 32 to 128).
    """

    def __init__(
        self, table: SequenceTable, num_blocks: int, *, min_saved_tokens: int = 768
    ) -> None:
        self._table = table
        self._min_saved_blocks = max(1, -(-min_saved_tokens // table.block_size))
        self._group_of_block: Int64s = np.full(num_blocks, -1, np.int64)
        self._member_of_slot: Int64s = np.full(len(table.records), -1, np.int64)

    def build(self, schedule: Schedule, device: torch.device) -> AttentionPlan:
        """Return the plan of `schedule`; its readers are noted in the table."""
        table, num_decode = self._table, len(schedule.decode_slots)
        slots = np.concatenate((schedule.decode_slots, schedule.chunk_slots))
        decode_lens = table.num_computed[schedule.decode_slots] + 1
        targets = np.concatenate(
            (-(-decode_lens // table.block_size), schedule.chunk_starts // table.block_size)
        )
        table.users.extend(slots, targets, table.block_table)
        self._member_of_slot[slots] = np.arange(len(slots))
        own_blocks, own_members, context_blocks = self._split(num_decode)
        contexts, pairs = self._contexts(schedule, slots, context_blocks)
        self._member_of_slot[slots] = -1
        chunk_rows = num_decode + np.cumsum(schedule.chunk_lens) - schedule.chunk_lens
        prefill = None
        if len(chunk_rows):
            prefill = PrefillPart(
                starts=tuple(chunk_rows.tolist()), lens=tuple(schedule.chunk_lens.tolist())
            )
        decode = None
        if num_decode:
            blocks = np.concatenate((own_blocks, *(p[0] for p in pairs)))
            owners = np.concatenate((own_members, *(p[1] for p in pairs)))
            decode = self._decode_part(blocks, owners, decode_lens, device)
        return AttentionPlan(
            num_decode=num_decode,
            decode=decode,
            prefill=prefill,
            contexts=self._context_parts(contexts, device),
        )

    def _context_parts(
        self, contexts: list[tuple[Int64s, Int64s, int]], device: torch.device
    ) -> tuple[ContextPart, ...]:
        arrays = [array for rows, blocks, _ in contexts for array in (rows, blocks)]
        tensors = to_device(arrays, device)
        positions = self._table.users.position
        return tuple(
            ContextPart(
                query_idx=query_idx,
                block_ids=block_ids,
                num_tokens=num_tokens,
                first_position=int(positions[blocks[0]]) * self._table.block_size,
            )
            for query_idx, block_ids, (_, blocks, num_tokens) in zip(
                tensors[::2], tensors[1::2], contexts, strict=True
            )
        )

    def _split(self, num_decode: int) -> tuple[Int64s, Int64s, Int64s]:
        users = self._table.users
        count = users.count[: users.high_water]
        single = np.flatnonzero(count == 1)
        members = self._member_of_slot[users.slot_sum[single]]
        is_decode = (members >= 0) & (members < num_decode)
        shared = np.flatnonzero(count > 1)
        own_of_chunks = single[members >= num_decode]
        return single[is_decode], members[is_decode], np.concatenate((shared, own_of_chunks))

    def _group(self, slots: Int64s, blocks: Int64s) -> _Readers:
        users, table = self._table.users, self._table
        _, group = np.unique(users.key_sum[blocks], return_inverse=True)
        order = np.lexsort((users.position[blocks], group))
        blocks, group = blocks[order], group[order]
        position = users.position[blocks]
        # a run ends with its set of readers, or where the positions leave a gap
        is_end = (np.diff(group) != 0) | (np.diff(position) != 1)
        ends = np.append(np.flatnonzero(is_end) + 1, len(blocks))
        first_blocks = blocks[np.concatenate(([0], ends[:-1]))]
        # the first block of a run stands for all of them: whoever reads it is a member
        self._group_of_block[first_blocks] = np.arange(len(ends))
        found_groups, found_members = [], []
        attended = users.num_attended[slots]
        for first in np.unique(users.position[first_blocks]).tolist():
            members = np.flatnonzero(attended > first)
            groups = self._group_of_block[table.block_table[slots[members], first]]
            found_groups.append(groups[groups >= 0])
            found_members.append(members[groups >= 0])
        self._group_of_block[first_blocks] = -1
        groups, members = np.concatenate(found_groups), np.concatenate(found_members)
        order = np.argsort(groups, kind="stable")
        return _Readers(
            blocks=blocks,
            block_ends=ends,
            members=members[order],
            member_ends=np.cumsum(np.bincount(groups, minlength=len(ends))),
        )

    def _contexts(
        self, schedule: Schedule, slots: Int64s, blocks: Int64s
    ) -> tuple[list[tuple[Int64s, Int64s, int]], list[tuple[Int64s, Int64s]]]:
        """Return the context parts as (rows, blocks, tokens), and pairs for the decode part."""
        block_size, num_decode = self._table.block_size, len(schedule.decode_slots)
        contexts: list[tuple[Int64s, Int64s, int]] = []
        pairs: list[tuple[Int64s, Int64s]] = []
        tails = self._partial_blocks(schedule)
        if len(blocks):
            readers = self._group(slots, blocks)
            block_start = member_start = 0
            ends = zip(readers.block_ends.tolist(), readers.member_ends.tolist(), strict=True)
            for block_end, member_end in ends:
                run = readers.blocks[block_start:block_end]
                members = readers.members[member_start:member_end]
                block_start, member_start = block_end, member_end
                if not len(members):
                    continue
                if members[-1] < num_decode:
                    if (len(members) - 2) * len(run) >= self._min_saved_blocks:
                        contexts.append((members, run, len(run) * block_size))
                    else:
                        pairs.append((np.repeat(run, len(members)), np.tile(members, len(run))))
                    continue
                num_tokens = len(run) * block_size
                if len(members) == 1 and (tail := tails.pop(int(members[0]), None)):
                    run, num_tokens = np.append(run, tail[0]), num_tokens + tail[1]
                contexts.append((self._rows(schedule, members), run, num_tokens))
        for member, (block, num_tokens) in tails.items():
            rows = self._rows(schedule, np.array([member]))
            contexts.append((rows, np.array([block]), num_tokens))
        return contexts, pairs

    def _partial_blocks(self, schedule: Schedule) -> dict[int, tuple[int, int]]:
        """Return, by member, the block that a chunk starts inside of and its tokens before."""
        table = self._table
        offsets = schedule.chunk_starts % table.block_size
        tails = {}
        for i in np.flatnonzero(offsets).tolist():
            slot, start = schedule.chunk_slots[i], schedule.chunk_starts[i]
            block = int(table.block_table[slot, start // table.block_size])
            tails[len(schedule.decode_slots) + i] = (block, int(offsets[i]))
        return tails

    def _rows(self, schedule: Schedule, members: Int64s) -> Int64s:
        """Return the rows of the forward batch of decode rows and chunks, ascending."""
        num_decode = len(schedule.decode_slots)
        chunks = members[members >= num_decode] - num_decode
        stops = num_decode + np.cumsum(schedule.chunk_lens)
        starts = stops - schedule.chunk_lens
        return np.concatenate(
            (
                members[members < num_decode],
                *(np.arange(starts[c], stops[c]) for c in chunks.tolist()),
            )
        )

    def _decode_part(
        self, blocks: Int64s, owners: Int64s, decode_lens: Int64s, device: torch.device
    ) -> DecodePart:
        steps = np.diff(blocks)
        if len(steps) and steps.min() < 0:
            order = np.argsort(blocks, kind="stable")
            blocks, owners = blocks[order], owners[order]
            steps = np.diff(blocks)
        block_size = self._table.block_size
        first_positions = self._table.users.position[blocks] * block_size
        num_valid = np.minimum(block_size, decode_lens[owners] - first_positions)
        block_ids, owner_rows, valid, first = to_device(
            (blocks, owners, num_valid, first_positions), device
        )
        return DecodePart(
            block_ids=block_ids,
            owners=owner_rows,
            num_valid=valid,
            is_contiguous=bool((steps == 1).all()),
            first_positions=first,
        )
