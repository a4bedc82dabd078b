"""The input of one forward pass, and how it is built from a schedule; no global context."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from raybatch.engine.batch.plan_builder import PlanBuilder, to_device
from raybatch.engine.sequences.schedule import Schedule
from raybatch.engine.sequences.table import SequenceTable
from raybatch.kernels.attention_plan import AttentionPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardBatch:
    """Packed tokens of all sequences in one step: decode tokens with their drafts, then chunks.

    Args:
        token_ids: int64 [T].
        positions: int64 [T], position in the sequence, from 0.
        slot_mapping: int64 [T], where the token's KV goes: block_id * B + offset.
        logits_idx: int64 [S], rows whose logits are needed (decode rows, last rows of prompts),
            ascending.
        attention: what each row attends to.
        logits_attention: the same for the rows of `logits_idx` alone, every one a decode row over
            all the KV of its sequence; of the last layer, nothing else is needed. None where all
            rows need logits.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    logits_idx: torch.Tensor
    attention: AttentionPlan
    logits_attention: AttentionPlan | None = None


class BatchBuilder:
    """Packs the tokens of a step: each decoding sequence and its drafts, then the chunks."""

    def __init__(self, table: SequenceTable, num_blocks: int, device: torch.device) -> None:
        self._table = table
        self._plans = PlanBuilder(table, num_blocks)
        self._device = device

    def build(self, schedule: Schedule) -> ForwardBatch:
        """Return the forward batch of `schedule`, which the scheduler made just before."""
        table, block_size = self._table, self._table.block_size
        decode_slots, lens = schedule.decode_slots, schedule.chunk_lens
        first_rows = np.cumsum(lens) - lens
        chunk_positions = np.repeat(schedule.chunk_starts - first_rows, lens) + np.arange(
            lens.sum()
        )
        decode_slots, places = np.repeat(decode_slots, schedule.decode_lens), schedule.draft_places
        decode_tokens = table.last_token[decode_slots]
        decode_tokens[places > 0] = schedule.draft_tokens
        positions = np.concatenate((table.num_computed[decode_slots] + places, chunk_positions))
        row_slots = np.concatenate((decode_slots, np.repeat(schedule.chunk_slots, lens)))
        blocks = table.block_table[row_slots, positions // block_size].astype(np.int64)
        stops = schedule.chunk_starts + lens
        is_last = stops == table.num_tokens[schedule.chunk_slots]
        last_rows = len(decode_slots) + (first_rows + lens - 1)[is_last]
        token_ids, positions_tensor, slot_mapping, logits_idx = to_device(
            (
                np.concatenate((decode_tokens, *self._chunk_tokens(schedule))),
                positions,
                blocks * block_size + positions % block_size,
                np.concatenate((np.arange(len(decode_slots)), last_rows)),
            ),
            self._device,
        )
        attention = self._plans.build(schedule, self._device)
        logits_attention = None
        if len(logits_idx) < len(token_ids):
            logits_attention = self._plans.build_last(schedule, self._device)
        return ForwardBatch(
            token_ids=token_ids,
            positions=positions_tensor,
            slot_mapping=slot_mapping,
            logits_idx=logits_idx,
            attention=attention,
            logits_attention=logits_attention,
        )

    def _chunk_tokens(self, schedule: Schedule) -> list[npt.NDArray[np.int32]]:
        stops = schedule.chunk_starts + schedule.chunk_lens
        columns = (schedule.chunk_slots, schedule.chunk_starts, stops)
        return [
            self._table.tokens(slot, start, stop)
            for slot, start, stop in zip(*(c.tolist() for c in columns), strict=True)
        ]
