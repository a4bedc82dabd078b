"""Steps that are measured: decodes of given lengths, and prompts, over a pool in random order."""

from collections.abc import Sequence

import torch

from raybatch.engine.batch.forward_batch import ForwardBatch
from raybatch.kernels.attention_plan import AttentionPlan, DecodePart, PrefillPart


def decode_step(lens: Sequence[int], block_size: int) -> ForwardBatch:
    """Return a step, on the host, in which each row decodes; the lengths are with its own token.

    Blocks lie in random order, as in a pool that has been used.
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
        attention=AttentionPlan(num_decode=len(lens), decode=part, prefill=None, contexts=()),
    )


def mixed_step(lens: Sequence[int], prompts: Sequence[int], block_size: int) -> ForwardBatch:
    """Return decodes of such lengths, and whole prompts whose last rows have logits."""
    num_decode = len(lens)
    decode = decode_step(lens, block_size) if num_decode else None
    used = 0 if decode is None or decode.attention.decode is None else _blocks_of(decode)
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
            contexts=(),
        ),
    )


def num_blocks(batch: ForwardBatch, block_size: int) -> int:
    """Return how many blocks a pool needs for a step."""
    return max(int(batch.slot_mapping.max()) // block_size + 1, _blocks_of(batch))


def _blocks_of(batch: ForwardBatch) -> int:
    decode = batch.attention.decode
    return 0 if decode is None else int(decode.block_ids.max()) + 1
