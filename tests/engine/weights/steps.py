"""One step of a decoder with prompts; all or some rows have logits."""

import torch

from raybatch.engine.batch.forward_batch import ForwardBatch
from raybatch.engine.memory.kv_cache import allocate_kv_cache
from raybatch.kernels.attention_plan import AttentionPlan, PrefillPart

BLOCK = 4


def prompt_batch(spec, *, lens=(9, 5), seed=0, logits_of=None, token_ids=None):
    """Return prompts of these lengths, each in separate blocks from the second block on.

    `logits_of` are the rows that have logits, None for all; without `token_ids` these are random.
    """
    random = torch.Generator().manual_seed(seed)
    starts, num_rows = [0], sum(lens)
    for length in lens[:-1]:
        starts.append(starts[-1] + length)
    slots = [BLOCK * (1 + start) + torch.arange(n) for start, n in zip(starts, lens, strict=True)]
    drawn = torch.randint(0, spec.vocab_size, (num_rows,), generator=random)
    return ForwardBatch(
        token_ids=drawn if token_ids is None else torch.tensor(token_ids),
        positions=torch.cat([torch.arange(length) for length in lens]),
        slot_mapping=torch.cat(slots),
        logits_idx=torch.arange(num_rows) if logits_of is None else torch.tensor(logits_of).long(),
        attention=AttentionPlan(
            num_decode=0,
            decode=None,
            prefill=PrefillPart(starts=tuple(starts), lens=tuple(lens)),
            segments=(),
        ),
    )


def prompt_logits(decoder, spec, *, lens=(9, 5), **options):
    """Return the logits [S, V] of `prompt_batch`, in a new pool."""
    cache = allocate_kv_cache(
        spec,
        num_blocks=1 + sum(lens),
        block_size=BLOCK,
        dtype=decoder.layers.ffn(0).norm.dtype,
        device=torch.device("cpu"),
    )
    batch = prompt_batch(spec, lens=lens, **options)
    return decoder.forward(batch, cache).clone()
