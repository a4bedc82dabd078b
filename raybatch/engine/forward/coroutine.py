"""Sequence coroutines, which pause between modules of a forward pass, and their runtime.

A `SequenceCoroutine` is a part of a step at one yield point, with the hidden states of its rows.
Those at one yield point are combined for a module that serves them all, and split again. Pausing,
combining and splitting compute nothing, so the firing order does not change tokens (BatchGen,
section 4).

The engine uses the order of its Algorithm 1: attention part by part, each with its KV in a window
buffer, then the feed-forward block of a layer once for all parts, so that experts get large
batches.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import torch

from raybatch.engine.batch.forward_batch import ForwardBatch
from raybatch.engine.forward.decoder import Decoder, PreparedBatch
from raybatch.engine.memory.kv_window import KVWindow, WindowMoves
from raybatch.engine.sequences.schedule import Schedule
from raybatch.engine.sequences.table import SequenceTable
from raybatch.kernels.attention_plan import AttentionPlan, DecodePart
from raybatch.records.arrays import Ints


def split_for_window(
    schedule: Schedule, table: SequenceTable, *, num_blocks: int
) -> list[Schedule]:
    """Split a schedule into parts that each need at most `num_blocks` distinct blocks.

    A row that needs more is a part by itself. Decodes that share blocks are neighbours, so that
    these are loaded once. Chunks keep their order: one that reads blocks follows the one that
    writes them.
    """
    assert not len(schedule.draft_tokens), "coroutines do not support drafts"
    num_decode, order = len(schedule.decode_slots), _by_prefix(schedule.decode_slots, table)
    decode_slots = schedule.decode_slots[order]
    stops = np.concatenate(
        (table.num_computed[decode_slots] + 1, schedule.chunk_starts + schedule.chunk_lens)
    )
    slots = np.concatenate((decode_slots, schedule.chunk_slots)).tolist()
    counts = (-(-stops // table.block_size)).tolist()
    # last part that uses each block
    part_of_block: Ints = np.full(len(table.users.count), -1, np.int64)
    starts, num_held = [0], 0
    for i, (slot, count) in enumerate(zip(slots, counts, strict=True)):
        blocks = table.block_table[slot, :count]
        num_new = int(np.count_nonzero(part_of_block[blocks] != len(starts)))
        if i > starts[-1] and num_held + num_new > num_blocks:
            starts.append(i)
            num_held, num_new = 0, count
        part_of_block[blocks] = len(starts)
        num_held += num_new
    ends = [*starts[1:], len(slots)]
    rows = [np.arange(start, end) for start, end in zip(starts, ends, strict=True)]
    return [
        _part_of(schedule, order[r[r < num_decode]], r[r >= num_decode] - num_decode) for r in rows
    ]


def _by_prefix(slots: Ints, table: SequenceTable) -> Ints:
    """Return an order of decoding slots [S] in which those that share blocks are neighbours.

    Sorts by first block, then by the last block that another row reads too.
    """
    if not len(slots):
        return np.empty(0, np.int64)
    counts = -(-(table.num_computed[slots] + 1) // table.block_size)
    blocks = table.block_table[slots, : counts.max()]
    is_held = np.arange(blocks.shape[1]) < counts[:, None]
    num_shared = ((table.users.count[blocks] > 1) & is_held).sum(axis=1)
    last = blocks[np.arange(len(slots)), np.maximum(num_shared - 1, 0)]
    return np.lexsort((last, blocks[:, 0]))


def _part_of(schedule: Schedule, decodes: Ints, chunks: Ints) -> Schedule:
    """Return the schedule of some decodes and chunks of another one, by index."""
    return Schedule(
        decode_slots=schedule.decode_slots[decodes],
        chunk_slots=schedule.chunk_slots[chunks],
        chunk_starts=schedule.chunk_starts[chunks],
        chunk_lens=schedule.chunk_lens[chunks],
    )


def is_connected(schedule: Schedule, table: SequenceTable) -> bool:
    """Return whether a chunk of this step reads KV that another one writes."""
    block_size = table.block_size
    writer: dict[int, int] = {}
    firsts = schedule.chunk_starts // block_size
    stops = -(-(schedule.chunk_starts + schedule.chunk_lens) // block_size)
    for slot, first, stop in zip(schedule.chunk_slots, firsts, stops, strict=True):
        writer |= dict.fromkeys(table.block_table[slot, first:stop].tolist(), int(slot))
    read = -(-schedule.chunk_starts // block_size)
    return any(
        writer.get(block, slot) != slot
        for slot, stop in zip(schedule.chunk_slots.tolist(), read.tolist(), strict=True)
        for block in table.block_table[slot, :stop].tolist()
    )


class WindowNumbers:
    """Renumbers the host blocks of a part of a step as blocks of a window buffer."""

    def __init__(self, table: SequenceTable) -> None:
        self._table = table
        # valid for the blocks of the current part
        self._number: Ints = np.zeros(len(table.users.count), np.int64)

    def place(
        self, batch: ForwardBatch, part: Schedule, *, follows_writer: bool
    ) -> tuple[ForwardBatch, WindowMoves]:
        """Return (the part's batch with blocks of the buffer, the copies that it needs).

        `batch` has host blocks. `follows_writer`: another part of the step writes some of these
        blocks.
        """
        block_size = self._table.block_size
        slots = batch.slot_mapping.numpy()
        written, offsets = divmod(slots, block_size)
        filled = self._filled(part)
        decode = batch.attention.decode
        decoded = np.empty(0, np.int64) if decode is None else np.unique(decode.block_ids.numpy())
        read = _blocks_of(batch.attention)
        if batch.logits_attention is not None:
            read = np.concatenate((read, _blocks_of(batch.logits_attention)))
        rest = np.setdiff1d(np.concatenate((read, written)), np.concatenate((decoded, filled)))
        loaded = np.concatenate((decoded, rest))
        number = self._number
        number[loaded] = np.arange(len(loaded))
        number[filled] = len(loaded) + np.arange(len(filled))
        last = batch.logits_attention
        batch = replace(
            batch,
            slot_mapping=torch.from_numpy(number[written] * block_size + offsets),
            attention=self._renumbered(batch.attention),
            logits_attention=None if last is None else self._renumbered(last),
        )
        return batch, WindowMoves(load_host=loaded, save_host=slots, follows_writer=follows_writer)

    def _filled(self, part: Schedule) -> Ints:
        """Return the blocks that the chunks of a part write completely."""
        block_size = self._table.block_size
        firsts = -(-part.chunk_starts // block_size)
        stops = (part.chunk_starts + part.chunk_lens) // block_size
        columns = (part.chunk_slots.tolist(), firsts.tolist(), stops.tolist())
        ranges = [
            self._table.block_table[slot, first:stop]
            for slot, first, stop in zip(*columns, strict=True)
        ]
        return np.concatenate((np.empty(0, np.int64), *ranges)).astype(np.int64)

    def _renumbered(self, plan: AttentionPlan) -> AttentionPlan:
        segments = tuple(
            replace(part, block_ids=self._numbers(part.block_ids)) for part in plan.segments
        )
        decode = None if plan.decode is None else self._decode_part(plan.decode)
        return replace(plan, decode=decode, segments=segments)

    def _decode_part(self, part: DecodePart) -> DecodePart:
        block_ids, first = self._number[part.block_ids.numpy()], part.first_positions
        order = torch.from_numpy(np.argsort(block_ids, kind="stable"))
        block_ids.sort()
        return DecodePart(
            block_ids=torch.from_numpy(block_ids),
            owners=part.owners[order],
            num_valid=part.num_valid[order],
            is_contiguous=bool((np.diff(block_ids) == 1).all()),
            first_positions=None if first is None else first[order],
        )

    def _numbers(self, block_ids: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(self._number[block_ids.numpy()])


def _blocks_of(plan: AttentionPlan) -> Ints:
    parts = [part.block_ids.numpy() for part in plan.segments]
    if plan.decode is not None:
        parts.append(plan.decode.block_ids.numpy())
    return np.concatenate((np.empty(0, np.int64), *parts))


class Module(IntEnum):
    """The modules of a layer, in the order of execution."""

    ATTENTION = 0
    FFN = 1


class YieldPoint(NamedTuple):
    layer: int
    module: Module

    def after(self) -> "YieldPoint":
        """Return the next yield point; after the last layer, `layer` is the number of layers."""
        if self.module is Module.ATTENTION:
            return YieldPoint(self.layer, Module.FFN)
        return YieldPoint(self.layer + 1, Module.ATTENTION)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SequenceCoroutine:
    """Sequences of a step that attend together, paused at one yield point."""

    # index of the part in its step
    index: int
    prepared: PreparedBatch
    # its KV copies between host memory and the window
    moves: WindowMoves
    point: YieldPoint
    hidden: torch.Tensor  # [T, M]; after the last layer only of rows with logits


Waiting = Mapping[YieldPoint, Sequence[SequenceCoroutine]]


def combine_at_experts(waiting: Waiting) -> Sequence[SequenceCoroutine]:
    """Return the coroutines that run next, all at one yield point; at least one.

    Attention runs part by part, in order of arrival; a feed-forward block runs once all parts wait
    for it, so that each layer's weights serve all rows of a step.
    """
    attending = [point for point in waiting if point.module is Module.ATTENTION]
    return waiting[min(attending)][:1] if attending else waiting[min(waiting)]


class StepPart(NamedTuple):
    """Rows of a step that attend together, and their KV copies."""

    batch: ForwardBatch
    moves: WindowMoves


@dataclass(frozen=True, slots=True)
class CoroutineRuntime:
    """Runs a decoder by coroutines, with KV in host memory behind a window.

    `choose` gets the waiting coroutines by yield point, in order of arrival, and returns those that
    run next, all at one yield point. A part that follows a writer attends in each layer after the
    parts before it.
    """

    _decoder: Decoder
    _window: KVWindow
    _choose: Callable[[Waiting], Sequence[SequenceCoroutine]] = combine_at_experts

    def forward(self, parts: Sequence[StepPart]) -> torch.Tensor:
        """Run the parts of a step; a part that reads another's new KV must come after it.

        Returns:
            float32 logits [S, V], part after part.
        """
        # no empty lists
        waiting: dict[YieldPoint, list[SequenceCoroutine]] = {}
        logits = dict[int, torch.Tensor]()
        first = YieldPoint(0, Module.ATTENTION)
        waiting[first] = [
            SequenceCoroutine(
                index=index,
                prepared=self._decoder.prepare(batch, self._window.cache),
                moves=moves,
                point=first,
                hidden=self._decoder.embed(batch),
            )
            for index, (batch, moves) in enumerate(parts)
        ]
        while waiting:
            chosen = list(self._choose(waiting))
            point = chosen[0].point
            assert all(each.point == point for each in chosen), "one yield point at a time"
            kept = [coroutine for coroutine in waiting.pop(point) if coroutine not in chosen]
            if kept:
                waiting[point] = kept
            for coroutine in self._resume(point, chosen):
                if coroutine.point.layer == self._decoder.num_layers:
                    logits[coroutine.index] = self._decoder.logits(coroutine.hidden)
                else:
                    waiting.setdefault(coroutine.point, []).append(coroutine)
        self._window.finish()
        return torch.cat([logits[index] for index in range(len(parts))])

    def _resume(
        self, point: YieldPoint, coroutines: Sequence[SequenceCoroutine]
    ) -> list[SequenceCoroutine]:
        """Run one module; return the coroutines at the next yield point."""
        if point.module is Module.FFN:
            parts = [coroutine.hidden for coroutine in coroutines]
            combined = torch.cat(parts) if len(parts) > 1 else parts[0]
            self._decoder.ffn_(point.layer, combined)
            hidden = torch.split(combined, [len(part) for part in parts])
        else:
            hidden = tuple(self._attend(point.layer, coroutine) for coroutine in coroutines)
        return [
            replace(coroutine, point=point.after(), hidden=rows)
            for coroutine, rows in zip(coroutines, hidden, strict=True)
        ]

    def _attend(self, layer: int, part: SequenceCoroutine) -> torch.Tensor:
        cache = self._window.enter(layer, part.moves)
        hidden = self._decoder.attention(layer, part.hidden, part.prepared, cache)
        self._window.leave(layer, part.prepared.batch.slot_mapping, part.moves)
        return hidden
