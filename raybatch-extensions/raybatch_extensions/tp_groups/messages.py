"""Messages from the driver rank to the worker ranks, int64 arrays: steps and KV moves.

A message is a head and a body. The head holds generation, message number, kind and body length; a
rank that reads an unexpected generation or number stops.
"""

from collections.abc import Iterator
from enum import IntEnum

import numpy as np
import torch

from raybatch.engine.batch.forward_batch import ForwardBatch
from raybatch.errors import RankError
from raybatch.kernels.attention_plan import AttentionPlan, DecodePart, PrefillPart, PrefixSegment
from raybatch.records.arrays import Ints
from raybatch_extensions.tp_groups.group import RankGroup

HEAD_LEN = 4
# numbers in the first broadcast of a message; longer messages need a second one
_FIRST_LEN = 4096


class Kind(IntEnum):
    """Commands to worker ranks."""

    WRITE = 1  # write the KV of these blocks, which follows with all heads
    CHECK = 2  # return a checksum of these blocks
    COMMIT = 3  # the TP group is formed, steps follow
    STEP = 4  # run a forward batch
    COPY = 5  # copy blocks to other blocks of the pool
    CLEAR = 6
    READ = 7  # return the contents of these blocks
    RELEASE = 8


def pack(batch: ForwardBatch) -> Ints:
    """Pack a host forward batch into one array; each part is preceded by its length."""
    parts = [x.numpy() for x in (batch.token_ids, batch.positions, batch.slot_mapping)]
    parts.append(batch.logits_idx.numpy())
    parts += _plan_parts(batch.attention)
    last = batch.logits_attention
    parts.append(_numbers(last is not None))
    if last is not None:
        parts += _plan_parts(last)
    return np.concatenate([x for part in parts for x in (_numbers(len(part)), part)])


def unpack(message: Ints) -> ForwardBatch:
    """Unpack the result of `pack` into new memory."""
    arrays = _split(message)
    tokens, positions, slots, logits_idx = (_tensor(next(arrays)) for _ in range(4))
    attention = _read_plan(arrays)
    (has_last,) = next(arrays)
    return ForwardBatch(
        token_ids=tokens,
        positions=positions,
        slot_mapping=slots,
        logits_idx=logits_idx,
        attention=attention,
        logits_attention=_read_plan(arrays) if has_last else None,
    )


def _numbers(*values: int) -> Ints:
    return np.array(values, np.int64)


def _tensor(array: Ints) -> torch.Tensor:
    return torch.from_numpy(array.copy())


def _split(message: Ints) -> Iterator[Ints]:
    start = 0
    while start < len(message):
        stop = start + 1 + int(message[start])
        yield message[start + 1 : stop]
        start = stop


def _plan_parts(plan: AttentionPlan) -> list[Ints]:
    decode, prefill = plan.decode, plan.prefill
    parts: list[Ints] = [
        _numbers(plan.num_decode, decode is not None, prefill is not None, len(plan.segments))
    ]
    if decode is not None:
        first = decode.first_positions
        parts += [x.numpy() for x in (decode.block_ids, decode.owners, decode.num_valid)]
        parts.append(_numbers(decode.is_contiguous, first is not None))
        if first is not None:
            parts.append(first.numpy())
    if prefill is not None:
        parts += [_numbers(*prefill.starts), _numbers(*prefill.lens)]
    for segment in plan.segments:
        has_chunk = segment.chunk is not None
        facts = (segment.num_tokens, segment.first_position, has_chunk, segment.chunk or 0)
        parts += [segment.query_idx.numpy(), segment.block_ids.numpy(), _numbers(*facts)]
    return parts


def _read_plan(arrays: Iterator[Ints]) -> AttentionPlan:
    num_decode, has_decode, has_prefill, num_segments = next(arrays).tolist()
    decode = prefill = None
    if has_decode:
        block_ids, owners, num_valid = (_tensor(next(arrays)) for _ in range(3))
        is_contiguous, has_first = next(arrays).tolist()
        decode = DecodePart(
            block_ids=block_ids,
            owners=owners,
            num_valid=num_valid,
            is_contiguous=bool(is_contiguous),
            first_positions=_tensor(next(arrays)) if has_first else None,
        )
    if has_prefill:
        starts, lens = (tuple(next(arrays).tolist()) for _ in range(2))
        prefill = PrefillPart(starts=starts, lens=lens)
    segments = tuple(_read_segment(arrays) for _ in range(num_segments))
    return AttentionPlan(num_decode=num_decode, decode=decode, prefill=prefill, segments=segments)


def _read_segment(arrays: Iterator[Ints]) -> PrefixSegment:
    rows, blocks = (_tensor(next(arrays)) for _ in range(2))
    num_tokens, first_position, has_chunk, chunk = next(arrays).tolist()
    return PrefixSegment(
        query_idx=rows,
        block_ids=blocks,
        num_tokens=num_tokens,
        first_position=first_position,
        chunk=chunk if has_chunk else None,
    )


class Wire:
    """Sends messages on rank 0 and receives them on the others, each by one or two broadcasts."""

    def __init__(self, group: RankGroup, generation: int) -> None:
        self._group, self._generation, self._number = group, generation, 0
        self._first = torch.zeros(_FIRST_LEN, dtype=torch.int64)

    def send(self, kind: Kind, body: Ints) -> None:
        """Send a message; raises RankError if a worker rank failed."""
        self._number += 1
        head = np.array([self._generation, self._number, kind, len(body)], np.int64)
        message = torch.from_numpy(np.concatenate((head, body)))
        count = min(len(message), _FIRST_LEN)
        self._first[:count] = message[:count]
        self._group.broadcast_(self._first)
        if len(message) > _FIRST_LEN:
            self._group.broadcast_(message[_FIRST_LEN:].contiguous())

    def receive(self) -> tuple[Kind, Ints]:
        """Return (kind, body) of the next message; the body is valid until the following call.

        Raises RankError: timeout, or an unexpected generation or message number.
        """
        self._group.broadcast_(self._first)
        numbers = self._first.numpy()
        generation, number, kind, length = numbers[:HEAD_LEN].tolist()
        self._number += 1
        if (generation, number) != (self._generation, self._number):
            raise RankError(
                f"unexpected message in the TP group: expected message {self._number} of "
                f"generation {self._generation}, got message {number} of generation {generation}"
            )
        body = numbers[HEAD_LEN : HEAD_LEN + length]
        if HEAD_LEN + length > _FIRST_LEN:
            rest = torch.zeros(HEAD_LEN + length - _FIRST_LEN, dtype=torch.int64)
            self._group.broadcast_(rest)
            body = np.concatenate((body, rest.numpy()))
        return Kind(kind), body
