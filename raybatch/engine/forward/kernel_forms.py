"""Warm-up: runs steps of every size and kind for which kernels are specialised.

Compiling a kernel specialisation takes seconds, for which no step of a job should wait.
"""

import logging
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from raybatch.engine.batch.forward_batch import ForwardBatch, on_device
from raybatch.engine.forward.decoder import Decoder
from raybatch.engine.forward.ops_choice import layers_of_kinds
from raybatch.engine.memory.kv_cache import allocate_kv_cache
from raybatch.engine.memory.pinned import IndexUploads
from raybatch.engine.sampling.draw import DrawOptions, draw_ranked
from raybatch.engine.weights.records import ModelWeights
from raybatch.kernels.attention_plan import AttentionPlan, DecodePart, PrefillPart, PrefixSegment
from raybatch.kernels.dispatch import Ops
from raybatch.kernels.moe import MAX_ROW_TILE
from raybatch.models.config import ModelSpec

_logger = logging.getLogger(__name__)

# sampled rows; their number does not matter
_DRAWN_ROWS = 3
# positions read by each decode row: enough to split one row over several programs
_ROW_TOKENS = 2048


def run_forms(
    ops: Ops,
    spec: ModelSpec,
    weights: ModelWeights,
    *,
    block_size: int,
    kv_dtype: torch.dtype,
    max_tokens: int,
    max_rows: int,
) -> None:
    """Compile the kernels: run steps of 1, 2, 4, .. up to `max_tokens` tokens, and sample once.

    Each runs two layers of each kind. Up to `max_rows` of the tokens decode. Steps that do not fit
    into memory are skipped.
    """
    few, some = _twice(*layers_of_kinds(spec, weights))
    device = weights.embed.device
    decoder, uploads = Decoder(few, some, ops=ops), IndexUploads(device)
    cache = allocate_kv_cache(
        few, num_blocks=1, block_size=block_size, dtype=kv_dtype, device=device
    )
    rows, ones = np.arange(_DRAWN_ROWS), np.ones(_DRAWN_ROWS)
    logits = torch.zeros(_DRAWN_ROWS, spec.vocab_size, device=device)
    draw_ranked(logits, rows, DrawOptions(ones, rows + 1, 0.9 * ones, 0 * ones, 0.5 * ones))
    for batch in steps_of_forms(
        spec, block_size=block_size, max_tokens=max_tokens, max_rows=max_rows
    ):
        try:
            decoder.forward(on_device(batch, uploads, device), cache)
        except torch.OutOfMemoryError:
            _logger.warning(
                "a warm-up step of %d tokens does not fit into memory next to the weights: the "
                "first such step will compile its kernels; lower engine.max_batched_tokens",
                len(batch.token_ids),
            )
            return


def steps_of_forms(
    spec: ModelSpec, *, block_size: int, max_tokens: int, max_rows: int
) -> Iterator[ForwardBatch]:
    """Yield host batches of one decode token, then of 1, 2, 4, .. up to `max_tokens` tokens.

    Half of the tokens decode, at most `max_rows`.
    """
    if spec.moe is not None:
        # from this size on experts use the largest row tile
        max_tokens = max(max_tokens, MAX_ROW_TILE * spec.moe.num_experts // spec.moe.top_k)
    yield step_of(1, 0, block_size)
    for i in range(max_tokens.bit_length()):
        num_decode = min((1 << i) // 2, max_rows)
        yield step_of(num_decode, (1 << i) - num_decode, block_size)


def _twice(spec: ModelSpec, weights: ModelWeights) -> tuple[ModelSpec, ModelWeights]:
    """Return a model with its layers doubled: only the last layer uses its special launches."""
    twice = replace(spec, num_layers=2 * spec.num_layers, windows=2 * spec.windows)
    return twice, replace(weights, layers=2 * weights.layers)


def step_of(num_decode: int, num_chunk: int, block_size: int) -> ForwardBatch:
    """Return a host batch of decode rows with a shared prefix, and one prompt chunk.

    All rows read and write the only block of their pool.
    """
    num_rows, rows = num_decode + num_chunk, torch.arange(num_decode)
    logits_idx = torch.arange(num_decode + (num_chunk > 0))
    if num_chunk:
        logits_idx[-1] = num_rows - 1
    return ForwardBatch(
        token_ids=torch.zeros(num_rows, dtype=torch.int64),
        positions=torch.arange(num_rows),
        slot_mapping=torch.arange(num_rows) % block_size,
        logits_idx=logits_idx,
        attention=AttentionPlan(
            num_decode=num_decode,
            decode=_decodes(num_decode, block_size) if num_decode else None,
            prefill=PrefillPart(starts=(num_decode,), lens=(num_chunk,)) if num_chunk else None,
            segments=_runs(rows, block_size),
        ),
        logits_attention=None
        if len(logits_idx) == num_rows
        else AttentionPlan(
            num_decode=len(logits_idx),
            decode=_decodes(len(logits_idx), block_size),
            prefill=None,
            segments=_runs(rows, block_size),
        ),
    )


def _decodes(num_rows: int, block_size: int) -> DecodePart:
    row_blocks = max(2, _ROW_TOKENS // block_size)
    owners = torch.arange(num_rows).repeat_interleave(row_blocks)
    return DecodePart(
        block_ids=torch.zeros_like(owners),
        owners=owners,
        num_valid=torch.full_like(owners, block_size),
        is_contiguous=False,
        first_positions=torch.arange(row_blocks).repeat(num_rows) * block_size,
    )


def _runs(rows: torch.Tensor, block_size: int) -> tuple[PrefixSegment, ...]:
    if not len(rows):
        return ()
    block = torch.zeros(1, dtype=torch.int64)
    return (PrefixSegment(query_idx=rows, block_ids=block, num_tokens=block_size),)
