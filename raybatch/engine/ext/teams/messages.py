"""What a leader tells its followers, each message an array of int64: a step, or moves of KV.

A message has a head, then its body. The head holds the epoch, the number of the message, its kind
and the length of its body; a rank that reads another epoch or number stops.
"""

from collections.abc import Iterator
from enum import IntEnum

import numpy as np
import torch

from raybatch.engine.batch.forward_batch import ForwardBatch
from raybatch.engine.ext.teams.group import TeamGroup
from raybatch.errors import TeamError
from raybatch.kernels.attention_plan import AttentionPlan, ContextPart, DecodePart, PrefillPart
from raybatch.records.arrays import Ints

HEAD_LEN = 4
# numbers of the buffer that every message has; longer ones have a second
_FIRST_LEN = 4096


class Kind(IntEnum):
    """What followers are to do."""

    WRITE = 1  # the KV of these blocks, which comes next with all heads
    CHECK = 2  # hand over a checksum of what these blocks hold
    COMMIT = 3  # the team is there, and steps may come
    STEP = 4  # run a forward batch
    COPY = 5  # blocks into as many others
    CLEAR = 6
    READ = 7  # hand over what these blocks hold
    RELEASE = 8


def pack(batch: ForwardBatch) -> Ints:
    """Return a forward batch of the host as one array.

    Each array in it has its length before it.
    """
    parts = [x.numpy() for x in (batch.token_ids, batch.positions, batch.slot_mapping)]
    parts.append(batch.logits_idx.numpy())
    parts += _plan_parts(batch.attention)
    last = batch.logits_attention
    parts.append(_numbers(last is not None))
    if last is not None:
        parts += _plan_parts(last)
    return np.concatenate([x for part in parts for x in (_numbers(len(part)), part)])


def unpack(message: Ints) -> ForwardBatch:
    """Return the forward batch of `pack`, in memory of its own."""
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
        _numbers(plan.num_decode, decode is not None, prefill is not None, len(plan.contexts))
    ]
    if decode is not None:
        first = decode.first_positions
        parts += [x.numpy() for x in (decode.block_ids, decode.owners, decode.num_valid)]
        parts.append(_numbers(decode.is_contiguous, first is not None))
        if first is not None:
            parts.append(first.numpy())
    if prefill is not None:
        parts += [_numbers(*prefill.starts), _numbers(*prefill.lens)]
    for context in plan.contexts:
        has_chunk = context.chunk is not None
        facts = (context.num_tokens, context.first_position, has_chunk, context.chunk or 0)
        parts += [context.query_idx.numpy(), context.block_ids.numpy(), _numbers(*facts)]
    return parts


def _read_plan(arrays: Iterator[Ints]) -> AttentionPlan:
    num_decode, has_decode, has_prefill, num_contexts = next(arrays).tolist()
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
    contexts = tuple(_read_context(arrays) for _ in range(num_contexts))
    return AttentionPlan(num_decode=num_decode, decode=decode, prefill=prefill, contexts=contexts)


def _read_context(arrays: Iterator[Ints]) -> ContextPart:
    rows, blocks = (_tensor(next(arrays)) for _ in range(2))
    num_tokens, first_position, has_chunk, chunk = next(arrays).tolist()
    return ContextPart(
        query_idx=rows,
        block_ids=blocks,
        num_tokens=num_tokens,
        first_position=first_position,
        chunk=chunk if has_chunk else None,
    )


class Wire:
    """Sends on rank 0, and receives on the others; every message is one broadcast, or two."""

    def __init__(self, group: TeamGroup, epoch: int) -> None:
        self._group, self._epoch, self._number = group, epoch, 0
        self._first = torch.zeros(_FIRST_LEN, dtype=torch.int64)

    def send(self, kind: Kind, body: Ints) -> None:
        """Send a message; raises TeamError where a follower is gone."""
        self._number += 1
        head = np.array([self._epoch, self._number, kind, len(body)], np.int64)
        message = torch.from_numpy(np.concatenate((head, body)))
        count = min(len(message), _FIRST_LEN)
        self._first[:count] = message[:count]
        self._group.broadcast_(self._first)
        if len(message) > _FIRST_LEN:
            self._group.broadcast_(message[_FIRST_LEN:].contiguous())

    def receive(self) -> tuple[Kind, Ints]:
        """Return the next message, valid until the one after it.

        Raises TeamError: there is none within the timeout, or it is of another epoch or order.
        """
        self._group.broadcast_(self._first)
        numbers = self._first.numpy()
        epoch, number, kind, length = numbers[:HEAD_LEN].tolist()
        self._number += 1
        if (epoch, number) != (self._epoch, self._number):
            raise TeamError(
                f"message {number} of epoch {epoch} came in place of message {self._number} of "
                f"epoch {self._epoch}"
            )
        body = numbers[HEAD_LEN : HEAD_LEN + length]
        if HEAD_LEN + length > _FIRST_LEN:
            rest = torch.zeros(HEAD_LEN + length - _FIRST_LEN, dtype=torch.int64)
            self._group.broadcast_(rest)
            body = np.concatenate((body, rest.numpy()))
        return Kind(kind), body
