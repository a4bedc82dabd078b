"""Builds the steps to measure: decodes, alone or in groups, and prompts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from raybatch.engine.batch.forward_batch import ForwardBatch
from raybatch.kernels.attention_plan import AttentionPlan, DecodePart, PrefillPart, PrefixSegment


def decode_step(lens: Sequence[int], block_size: int) -> ForwardBatch:
    """Return a step, on the host, in which each row decodes; `lens` include the new token.

    Blocks are in random order, as in a pool that has been used.
    """
    counts = torch.tensor([-(-length // block_size) for length in lens])
    total = int(counts.sum())
    blocks = torch.randperm(total, generator=torch.Generator().manual_seed(0))
    owners = torch.repeat_interleave(torch.arange(len(lens)), counts)
    starts = torch.cumsum(counts, 0) - counts
    first = (torch.arange(total) - starts[owners]) * block_size
    lengths = torch.tensor(lens)
    part = DecodePart(
        block_ids=blocks,
        owners=owners,
        num_valid=(lengths[owners] - first).clamp(max=block_size),
        is_contiguous=False,
        first_positions=first,
    )
    positions = lengths - 1
    last = blocks[starts + counts - 1]
    return ForwardBatch(
        token_ids=torch.arange(len(lens)) % 97,
        positions=positions,
        slot_mapping=last * block_size + positions % block_size,
        logits_idx=torch.arange(len(lens)),
        attention=AttentionPlan(num_decode=len(lens), decode=part, prefill=None, segments=()),
    )


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Rows that decode in groups; a group shares a prefix of whole blocks."""

    num_rows: int
    rows_per_group: int
    shared_tokens: int
    own_tokens: int

    @property
    def lens(self) -> list[int]:
        """Tokens that each row reads."""
        return [self.shared_tokens + self.own_tokens] * self.num_rows

    @property
    def num_read(self) -> int:
        """Fewest tokens that are read: shared tokens once per group."""
        num_groups = self.num_rows // self.rows_per_group
        return num_groups * self.shared_tokens + self.num_rows * self.own_tokens


def grouped_step(groups: Groups, block_size: int) -> ForwardBatch:
    """Return a step, on the host, in which the rows of `groups` decode."""
    batch = decode_step([groups.own_tokens] * groups.num_rows, block_size)
    plan, shared = batch.attention, groups.shared_tokens
    assert plan.decode is not None, "rows decode"
    assert shared % block_size == 0, "whole blocks are shared"
    first_block, per_group = _blocks_of(batch), shared // block_size
    runs = tuple(
        PrefixSegment(
            query_idx=torch.arange(start, start + groups.rows_per_group),
            block_ids=first_block + group * per_group + torch.arange(per_group),
            num_tokens=shared,
        )
        for group, start in enumerate(range(0, groups.num_rows, groups.rows_per_group))
    )
    own = plan.decode
    assert own.first_positions is not None, "decodes have positions"
    decode = replace(own, first_positions=own.first_positions + shared)
    return replace(
        batch,
        positions=batch.positions + shared,
        attention=replace(plan, decode=decode, segments=runs),
    )


def mixed_step(
    decodes: Sequence[int] | Groups, prompts: Sequence[int], block_size: int
) -> ForwardBatch:
    """Return a step of decodes and prompts; decodes and the last rows of prompts have logits."""
    decode: ForwardBatch | None = None
    if isinstance(decodes, Groups):
        decode = grouped_step(decodes, block_size)
    elif decodes:
        decode = decode_step(decodes, block_size)
    num_decode = 0 if decode is None else len(decode.token_ids)
    used = 0 if decode is None else _blocks_of(decode)
    positions = [torch.arange(length) for length in prompts]
    slots = []
    for length in prompts:
        slots.append(used * block_size + torch.arange(length))
        used += -(-length // block_size)
    ends = num_decode + torch.cumsum(torch.tensor(prompts), 0)
    tensors = {
        "token_ids": torch.arange(sum(prompts)) % 97,
        "positions": torch.cat(positions),
        "slot_mapping": torch.cat(slots),
        "logits_idx": ends - 1,
    }
    if decode is not None:
        tensors = {name: torch.cat((getattr(decode, name), x)) for name, x in tensors.items()}
    return ForwardBatch(
        **tensors,
        attention=AttentionPlan(
            num_decode=num_decode,
            decode=None if decode is None else decode.attention.decode,
            prefill=PrefillPart(
                starts=tuple((ends - torch.tensor(prompts)).tolist()), lens=tuple(prompts)
            ),
            segments=() if decode is None else decode.attention.segments,
        ),
    )


def num_blocks(batch: ForwardBatch, block_size: int) -> int:
    """Return how many blocks a pool needs for a step."""
    return max(int(batch.slot_mapping.max()) // block_size + 1, _blocks_of(batch))


def _blocks_of(batch: ForwardBatch) -> int:
    plan = batch.attention
    tables = [part.block_ids for part in plan.segments]
    if plan.decode is not None:
        tables.append(plan.decode.block_ids)
    return max((int(table.max()) + 1 for table in tables), default=0)
