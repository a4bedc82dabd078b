"""The input of one forward pass, built from a schedule; holds all state of the pass."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from raybatch.engine.batch.plan_builder import PlanBuilder
from raybatch.engine.memory.pinned import IndexUploads
from raybatch.engine.sequences.schedule import Schedule
from raybatch.engine.sequences.table import SequenceTable
from raybatch.kernels.attention_plan import AttentionPlan
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
