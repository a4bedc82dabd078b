"""Takes a schedule apart into schedules that can run one after the other in every layer."""

import numpy as np
import numpy.typing as npt

from raybatch.engine.sequences.schedule import Schedule
from raybatch.engine.sequences.table import SequenceTable

Int64s = npt.NDArray[np.int64]


def split_schedule(schedule: Schedule, table: SequenceTable, max_tokens: int) -> list[Schedule]:
    """Return schedules of at most `max_tokens` tokens each, in the order of their sequences.

    Chunks of which one reads blocks that another fills in this very step stay together, so that no
    part ever waits for another one; such a part, or a single chunk, may be larger.
    """
    assert not len(schedule.draft_tokens), "coroutines take no drafts"
    num_decode = len(schedule.decode_slots)
    parts: list[tuple[list[int], list[int]]] = []
    num_tokens = max_tokens
    units: list[tuple[list[int], list[int], int]] = [([i], [], 1) for i in range(num_decode)]
    for chunks in _connected(schedule, table):
        units.append(([], chunks, int(schedule.chunk_lens[chunks].sum())))
    for decodes, chunks, size in units:
        if num_tokens + size > max_tokens:
            parts.append(([], []))
            num_tokens = 0
        parts[-1][0].extend(decodes)
        parts[-1][1].extend(chunks)
        num_tokens += size
    return [_select(schedule, decodes, sorted(chunks)) for decodes, chunks in parts]


def row_slots(schedule: Schedule) -> Int64s:
    """Return the sequence of each row of the forward batch of `schedule`."""
    return np.concatenate(
        (schedule.decode_slots, np.repeat(schedule.chunk_slots, schedule.chunk_lens))
    )


def slots_with_logits(schedule: Schedule, table: SequenceTable) -> Int64s:
    """Return the sequences of the logits of `schedule`, in the order of their rows."""
    stops = schedule.chunk_starts + schedule.chunk_lens
    is_last = stops == table.num_tokens[schedule.chunk_slots]
    return np.concatenate((schedule.decode_slots, schedule.chunk_slots[is_last]))


def logits_order(schedule: Schedule, parts: list[Schedule], table: SequenceTable) -> Int64s:
    """Return the order of the rows of the parts' logits in which they are those of `schedule`."""
    slots = np.concatenate([slots_with_logits(part, table) for part in parts])
    sorter = np.argsort(slots)
    wanted = slots_with_logits(schedule, table)
    return sorter[np.searchsorted(slots, wanted, sorter=sorter)]


def _connected(schedule: Schedule, table: SequenceTable) -> list[list[int]]:
    """Return the chunks as groups that read what the others fill, by their first chunk."""
    block_size = table.block_size
    writer: dict[int, int] = {}
    stops = schedule.chunk_starts + schedule.chunk_lens
    places = list(zip(schedule.chunk_slots.tolist(), schedule.chunk_starts.tolist(), strict=True))
    for chunk, (slot, start) in enumerate(places):
        last = -(-int(stops[chunk]) // block_size)
        for block in table.block_table[slot, start // block_size : last].tolist():
            writer[block] = chunk
    group = list(range(len(places)))
    for chunk, (slot, start) in enumerate(places):
        for block in table.block_table[slot, : -(-start // block_size)].tolist():
            other = writer.get(block, chunk)
            if group[other] != group[chunk]:
                low, high = sorted((group[other], group[chunk]))
                group = [low if number == high else number for number in group]
    members: dict[int, list[int]] = {}
    for chunk, number in enumerate(group):
        members.setdefault(number, []).append(chunk)
    return list(members.values())


def _select(schedule: Schedule, decodes: list[int], chunks: list[int]) -> Schedule:
    return Schedule(
        decode_slots=schedule.decode_slots[decodes],
        chunk_slots=schedule.chunk_slots[chunks],
        chunk_starts=schedule.chunk_starts[chunks],
        chunk_lens=schedule.chunk_lens[chunks],
    )
