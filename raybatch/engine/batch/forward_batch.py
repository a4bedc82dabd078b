"""The input of one forward pass, built from a schedule; holds all state of the pass.

Its attention plan says which rows read which blocks, and which reads are shared.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from raybatch.engine.memory.pinned import IndexUploads
from raybatch.engine.sequences.schedule import Schedule
from raybatch.engine.sequences.table import SequenceTable
from raybatch.kernels.attention_plan import AttentionPlan, DecodePart, PrefillPart, PrefixSegment
from raybatch.policy.cost.cascade import UNTIMED, CascadeThresholds
from raybatch.records.arrays import Ints


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardBatch:
    """The packed tokens of a step: token and drafts of each decoding sequence, then prompt chunks.

    Logits are needed for decode rows and for the last row of each prompt that ends.
    `logits_attention` is the attention plan of these rows alone, each a decode row over all KV of
    its sequence: the last layer computes no other rows. It is None if all rows need logits.
    """

    token_ids: torch.Tensor  # int64 [T]
    positions: torch.Tensor  # int64 [T], in the sequence, from 0
    slot_mapping: torch.Tensor  # int64 [T], where the token's KV goes: block_id * B + offset
    logits_idx: torch.Tensor  # int64 [S], rows whose logits are needed, ascending
    attention: AttentionPlan
    logits_attention: AttentionPlan | None = None
    late: "LateTokens | None" = None


class LateTokens(NamedTuple):
    """Tokens that the previous step sampled and the host has not read yet."""

    rows: Ints  # of this step
    places: Ints  # of their tokens in `drawn`
    drawn: torch.Tensor  # int64, on the device

    def put(self, token_ids: torch.Tensor, uploads: IndexUploads) -> None:
        """Write the late tokens into `token_ids` of this step, on the device."""
        both = uploads.upload(np.concatenate((self.rows, self.places)), token_ids.device)
        rows, places = both.chunk(2)
        token_ids.index_copy_(0, rows, self.drawn.index_select(0, places).to(token_ids.dtype))


class BatchBuilder:
    """Packs the tokens of a step: each decoding sequence with its drafts, then prompt chunks."""

    def __init__(
        self, table: SequenceTable, num_blocks: int, *, reads: CascadeThresholds = UNTIMED
    ) -> None:
        self._table = table
        self._plans = PlanBuilder(table, num_blocks, reads=reads)

    def build(self, schedule: Schedule) -> ForwardBatch:
        """Return the forward batch of the table's latest schedule; its tensors are on the host."""
        table, block_size = self._table, self._table.block_size
        decode_slots, lens = schedule.decode_slots, schedule.chunk_lens
        first_rows = np.cumsum(lens) - lens
        firsts = np.repeat(schedule.chunk_starts - first_rows, lens)
        chunk_positions = firsts + np.arange(lens.sum())
        decode_slots, places = np.repeat(decode_slots, schedule.decode_lens), schedule.draft_places
        decode_tokens = table.last_token[decode_slots]
        decode_tokens[places > 0] = schedule.draft_tokens
        positions = np.concatenate((table.num_computed[decode_slots] + places, chunk_positions))
        row_slots = np.concatenate((decode_slots, np.repeat(schedule.chunk_slots, lens)))
        blocks = table.block_table[row_slots, positions // block_size].astype(np.int64)
        stops = schedule.chunk_starts + lens
        is_last = stops == table.num_tokens[schedule.chunk_slots]
        columns = (schedule.chunk_slots.tolist(), schedule.chunk_starts.tolist(), stops.tolist())
        chunk_tokens = [table.tokens(*chunk) for chunk in zip(*columns, strict=True)]
        last_rows = len(decode_slots) + (first_rows + lens - 1)[is_last]
        token_ids = np.concatenate((decode_tokens, *chunk_tokens), dtype=np.int64)
        slots = blocks * block_size + positions % block_size
        logits_idx = np.concatenate((np.arange(len(decode_slots)), last_rows))
        has_more_rows = len(logits_idx) < len(token_ids)
        return ForwardBatch(
            token_ids=torch.from_numpy(token_ids),
            positions=torch.from_numpy(positions),
            slot_mapping=torch.from_numpy(slots),
            logits_idx=torch.from_numpy(logits_idx),
            attention=self._plans.build(schedule),
            logits_attention=self._plans.build_last(schedule) if has_more_rows else None,
        )


def on_device(batch: ForwardBatch, uploads: IndexUploads, device: torch.device) -> ForwardBatch:
    """Return a host batch with its tensors on the device, late tokens included, for the decoder.

    Takes one copy, and another for late tokens; none on a CPU. Attention plans stay on the host.
    """
    if device.type != "cpu":
        tensors = (batch.token_ids, batch.positions, batch.slot_mapping, batch.logits_idx)
        packed = uploads.upload(np.concatenate([x.numpy() for x in tensors]), device)
        token_ids, positions, slots, logits_idx = torch.split(packed, [len(x) for x in tensors])
        batch = replace(
            batch,
            token_ids=token_ids,
            positions=positions,
            slot_mapping=slots,
            logits_idx=logits_idx,
        )
    if batch.late is not None:
        batch.late.put(batch.token_ids, uploads)
    return batch


def slots_with_logits(schedule: Schedule, table: SequenceTable) -> Ints:
    """Return the table slot of each row with logits, int64 [S]; a slot with drafts repeats."""
    stops = schedule.chunk_starts + schedule.chunk_lens
    is_last = stops == table.num_tokens[schedule.chunk_slots]
    decode_slots = np.repeat(schedule.decode_slots, schedule.decode_lens)
    return np.concatenate((decode_slots, schedule.chunk_slots[is_last]))


def logits_order(schedule: Schedule, parts: list[Schedule], table: SequenceTable) -> Ints:
    """Return the indices that bring the logits rows of `parts` into the order of `schedule`.

    int64 [S]: row i of `schedule` is row `order[i]` of the parts, concatenated.
    """
    slots = np.concatenate([slots_with_logits(part, table) for part in parts])
    sorter = np.argsort(slots)
    wanted = slots_with_logits(schedule, table)
    return sorter[np.searchsorted(slots, wanted, sorter=sorter)]


class PlanBuilder:
    """Builds one attention plan per step from the table and the schedule.

    The blocks of a step fall into three kinds, by their readers (`BlockUsers`):

        one decoding sequence        DecodePart, in memory order
        at least one prompt chunk    PrefixSegment of all its readers
        several decoding sequences   PrefixSegment if cascade attention is faster, else DecodePart
                                     with one (block, owner) pair per reader

    Blocks with the same set of readers form one PrefixSegment, so every node of a prefix tree is
    read once. Drafts of a decoding sequence are decode rows as well, each one position after the
    previous row. The number of valid positions per block is the causal mask.

    `reads` decides which shared prefixes decode rows read by cascade attention.
    """

    def __init__(
        self, table: SequenceTable, num_blocks: int, *, reads: CascadeThresholds = UNTIMED
    ) -> None:
        self._table = table
        self._reads = reads
        self._group_of_block: Ints = np.full(num_blocks, -1, np.int64)
        self._member_of_slot: Ints = np.full(len(table.records), -1, np.int64)

    def build(self, schedule: Schedule) -> AttentionPlan:
        """Return the attention plan of `schedule`.

        Records in the table which blocks its sequences read.
        """
        return self._build(schedule, self._table.num_computed[schedule.decode_slots])

    def build_last(self, schedule: Schedule) -> AttentionPlan:
        """Return the attention plan of the rows with logits, all as decode rows.

        These are the decode rows of `schedule` and the last rows of the prompts that end in it.
        """
        table, stops = self._table, schedule.chunk_starts + schedule.chunk_lens
        is_last = stops == table.num_tokens[schedule.chunk_slots]
        rows = Schedule(
            decode_slots=np.concatenate((schedule.decode_slots, schedule.chunk_slots[is_last])),
            draft_lens=np.concatenate(
                (schedule.decode_lens - 1, np.zeros(is_last.sum(), np.int64))
            ),
        )
        starts = np.concatenate((table.num_computed[schedule.decode_slots], stops[is_last] - 1))
        return self._build(rows, starts)

    def _build(self, schedule: Schedule, decode_starts: Ints) -> AttentionPlan:
        """Return the plan; `decode_starts` are the positions of the first rows of decodes."""
        table, num_decode = self._table, len(schedule.decode_slots)
        slots = np.concatenate((schedule.decode_slots, schedule.chunk_slots))
        stops = decode_starts + schedule.decode_lens
        targets = np.concatenate(
            (-(-stops // table.block_size), schedule.chunk_starts // table.block_size)
        )
        table.users.extend(slots, targets, table.block_table)
        self._member_of_slot[slots] = np.arange(len(slots))
        own_blocks, own_members, segment_blocks = self._split(num_decode)
        segments, pairs = self._segments(schedule, slots, segment_blocks)
        self._member_of_slot[slots] = -1
        num_decode_rows = int(schedule.decode_lens.sum())
        chunk_rows = num_decode_rows + np.cumsum(schedule.chunk_lens) - schedule.chunk_lens
        prefill = None
        if len(chunk_rows):
            prefill = PrefillPart(
                starts=tuple(chunk_rows.tolist()), lens=tuple(schedule.chunk_lens.tolist())
            )
        decode = None
        if num_decode:
            blocks = np.concatenate((own_blocks, *(p[0] for p in pairs)))
            members = np.concatenate((own_members, *(p[1] for p in pairs)))
            decode = self._decode_part(blocks, members, schedule, decode_starts)
        return AttentionPlan(
            num_decode=num_decode_rows, decode=decode, prefill=prefill, segments=tuple(segments)
        )

    def _split(self, num_decode: int) -> tuple[Ints, Ints, Ints]:
        users = self._table.users
        count = users.count[: users.high_water]
        single = np.flatnonzero(count == 1)
        members = self._member_of_slot[users.slot_sum[single]]
        is_decode = (members >= 0) & (members < num_decode)
        shared = np.flatnonzero(count > 1)
        own_of_chunks = single[members >= num_decode]
        return single[is_decode], members[is_decode], np.concatenate((shared, own_of_chunks))

    def _runs(self, slots: Ints, blocks: Ints) -> Iterator[tuple[Ints, Ints]]:
        """Yield runs of shared blocks, by position, each with its readers.

        Readers (members) are indices of the step's sequences: decoding ones, then chunks.
        """
        if not len(blocks):
            return
        users, table = self._table.users, self._table
        _, group = np.unique(users.key_sum[blocks], return_inverse=True)
        order = np.lexsort((users.position[blocks], group))
        blocks, group = blocks[order], group[order]
        # a run ends where the set of readers changes, or the positions leave a gap
        is_end = (np.diff(group) != 0) | (np.diff(users.position[blocks]) != 1)
        cuts = np.flatnonzero(is_end) + 1
        first_blocks = blocks[np.concatenate(([0], cuts))]
        # the first block of a run represents all of them: its readers are the members
        self._group_of_block[first_blocks] = np.arange(len(first_blocks))
        group_parts, member_parts = [], []
        attended = users.num_attended[slots]
        for first in np.unique(users.position[first_blocks]).tolist():
            members = np.flatnonzero(attended > first)
            groups = self._group_of_block[table.block_table[slots[members], first]]
            group_parts.append(groups[groups >= 0])
            member_parts.append(members[groups >= 0])
        self._group_of_block[first_blocks] = -1
        groups, members = np.concatenate(group_parts), np.concatenate(member_parts)
        members = members[np.argsort(groups, kind="stable")]
        ends = np.cumsum(np.bincount(groups, minlength=len(first_blocks)))
        block_ends = pairwise([0, *cuts.tolist(), len(blocks)])
        member_ends = pairwise([0, *ends.tolist()])
        for (start, stop), (first, last) in zip(block_ends, member_ends, strict=True):
            yield blocks[start:stop], members[first:last]

    def _segments(
        self, schedule: Schedule, slots: Ints, blocks: Ints
    ) -> tuple[list[PrefixSegment], list[tuple[Ints, Ints]]]:
        """Return the prefix segments, and (blocks, owners) pairs for the decode part."""
        block_size, num_decode = self._table.block_size, len(schedule.decode_slots)
        segments: list[PrefixSegment] = []
        pairs: list[tuple[Ints, Ints]] = []
        tails = self._tails(schedule)
        for run, members in self._runs(slots, blocks):
            if not len(members):
                continue
            start, num_tokens = int(self._table.users.position[run[0]]), len(run) * block_size
            if members[-1] >= num_decode:
                tail = tails.get(int(members[0])) if len(members) == 1 else None
                if tail and tail.first_position == start * block_size + num_tokens:
                    del tails[int(members[0])]
                    run = np.append(run, tail.block_ids.numpy())
                    num_tokens += tail.num_tokens
            elif not self._reads.pays(int(schedule.decode_lens[members].sum()), num_tokens):
                pairs.append((np.repeat(run, len(members)), np.tile(members, len(run))))
                continue
            segments.append(
                PrefixSegment(
                    query_idx=self._rows(schedule, members),
                    block_ids=torch.from_numpy(run),
                    num_tokens=num_tokens,
                    first_position=start * block_size,
                    chunk=int(members[0]) - num_decode if len(members) == 1 else None,
                )
            )
        return segments + list(tails.values()), pairs

    def _tails(self, schedule: Schedule) -> dict[int, PrefixSegment]:
        """Return, by member, the cached part of the block in which a chunk starts."""
        table, block_size = self._table, self._table.block_size
        offsets = schedule.chunk_starts % block_size
        tails = {}
        for i in np.flatnonzero(offsets).tolist():
            slot, offset = int(schedule.chunk_slots[i]), int(offsets[i])
            first_position = int(schedule.chunk_starts[i]) - offset
            block = table.block_table[slot, first_position // block_size]
            member = len(schedule.decode_slots) + i
            tails[member] = PrefixSegment(
                query_idx=self._rows(schedule, np.array([member])),
                block_ids=torch.tensor([block], dtype=torch.int64),
                num_tokens=offset,
                first_position=first_position,
                chunk=i,
            )
        return tails

    def _rows(self, schedule: Schedule, members: Ints) -> torch.Tensor:
        """Return the rows of the forward batch of decoding sequences and chunks, ascending."""
        lens = np.concatenate((schedule.decode_lens, schedule.chunk_lens))
        return torch.from_numpy(_ranges((np.cumsum(lens) - lens)[members], lens[members]))

    def _decode_part(
        self, blocks: Ints, members: Ints, schedule: Schedule, decode_starts: Ints
    ) -> DecodePart:
        """Return the decode part: each of `blocks` is read by the rows of its member."""
        steps = np.diff(blocks)
        if len(steps) and steps.min() < 0:
            order = np.argsort(blocks, kind="stable")
            blocks, members = blocks[order], members[order]
        lens, block_size = schedule.decode_lens, self._table.block_size
        owners = _ranges((np.cumsum(lens) - lens)[members], lens[members])
        blocks = np.repeat(blocks, lens[members])
        row_stops = np.repeat(decode_starts, lens) + schedule.draft_places + 1
        first_positions = self._table.users.position[blocks] * block_size
        num_valid = np.minimum(block_size, row_stops[owners] - first_positions)
        # a block may start after a row: for a later draft, or for a rejected one
        is_seen = num_valid > 0
        if not is_seen.all():
            blocks, owners = blocks[is_seen], owners[is_seen]
            num_valid, first_positions = num_valid[is_seen], first_positions[is_seen]
        is_contiguous = bool((np.diff(blocks) == 1).all())
        return DecodePart(
            block_ids=torch.from_numpy(blocks),
            owners=torch.from_numpy(owners),
            num_valid=torch.from_numpy(num_valid),
            is_contiguous=is_contiguous,
            first_positions=torch.from_numpy(first_positions),
        )


def _ranges(starts: Ints, lens: Ints) -> Ints:
    """Return the concatenated ranges [start, start + len)."""
    return np.repeat(starts - (np.cumsum(lens) - lens), lens) + np.arange(lens.sum())
