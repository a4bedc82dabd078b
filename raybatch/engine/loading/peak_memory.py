"""The most memory that a step takes beside weights and KV, measured by running the largest ones."""

import logging
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import torch

from raybatch.config import EngineConfig
from raybatch.engine.batch.forward_batch import ForwardBatch, on_device
from raybatch.engine.forward.decoder import Decoder
from raybatch.engine.memory.kv_cache import allocate_kv_cache, max_sequence_len
from raybatch.engine.memory.pinned import IndexUploads
from raybatch.engine.sampling.draw import DrawOptions, draw_dense, draw_ranked
from raybatch.errors import ConfigError
from raybatch.kernels.attention_plan import AttentionPlan, ContextPart, DecodePart, PrefillPart
from raybatch.models.config import ModelSpec

_logger = logging.getLogger(__name__)

# of a row over what lies before its chunk; deeper trees of prefixes are not reserved for
_MAX_RUNS = 8

# runs something and returns the bytes that it held at most
Measure = Callable[[Callable[[], object]], int]


def step_peak_bytes(
    decoder: Decoder,
    config: EngineConfig,
    spec: ModelSpec,
    *,
    kv_dtype: torch.dtype,
    device: torch.device,
    measure: Measure | None = None,
) -> int:
    """Return the most that a step takes, of the longest chunk of a prompt and of decodes.

    A small pool is made for it, and is gone after it. `measure` of None asks the allocator of a
    GPU. Raises ConfigError: it is more than there is.
    """
    prompts, decodes = largest_prompt(config, spec), largest_decodes(config)
    num_tokens = max(len(prompts.token_ids), len(decodes.token_ids))
    try:
        cache = allocate_kv_cache(
            spec,
            num_blocks=2 + num_tokens // config.block_size_tokens,
            block_size=config.block_size_tokens,
            dtype=kv_dtype,
            device=device,
        )
        uploads = IndexUploads(device)

        def run(batch: ForwardBatch, *, draws: bool) -> None:
            logits = decoder.forward(on_device(batch, uploads, device), cache)
            if draws:
                rows = np.arange(len(logits))
                ones = np.ones(len(logits))
                options = DrawOptions(ones, rows, ones, 0 * ones, 0.5 * ones)
                for draw in (draw_dense, draw_ranked):
                    draw(logits, rows, options)

        measure = measure or _on_gpu(device)
        of_prompt = measure(lambda: run(prompts, draws=False))
        of_decodes = measure(lambda: run(decodes, draws=True))
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"a step of {config.max_batched_tokens} tokens (engine.max_batched_tokens), or of "
            f"{len(decodes.token_ids)} rows (engine.max_num_seqs), does not fit beside the weights "
            f"on {device}: {error}; lower them, or engine.max_model_len, or set "
            "engine.device_weight_bytes"
        ) from error
    _logger.info(
        "a step takes up to %.2f GB beside weights and KV: %.2f for %d tokens of a prompt of %d, "
        "%.2f for %d rows that decode",
        max(of_prompt, of_decodes) / 1e9,
        of_prompt / 1e9,
        len(prompts.token_ids),
        int(prompts.positions[-1]) + 1,
        of_decodes / 1e9,
        len(decodes.token_ids),
    )
    return max(of_prompt, of_decodes)


def largest_prompt(config: EngineConfig, spec: ModelSpec) -> ForwardBatch:
    """Return a chunk as long as a step, at the end of the longest prompt.

    It reads what lies before it as so many runs as if that were a path in a tree of prefixes, each
    with a partial result of its own. They are one block again and again, as the pool is small.
    """
    max_len, block_size = max_sequence_len(config, spec.max_model_len), config.block_size_tokens
    num_tokens = min(config.max_batched_tokens, max_len)
    num_blocks = (max_len - num_tokens) // block_size
    rows = torch.arange(num_tokens)
    first_blocks = np.unique(np.linspace(0, num_blocks, _MAX_RUNS + 1).astype(int))
    contexts = tuple(
        ContextPart(
            query_idx=rows,
            block_ids=torch.zeros(stop - start, dtype=torch.int64),
            num_tokens=(stop - start) * block_size,
            first_position=start * block_size,
        )
        for start, stop in pairwise(first_blocks.tolist())
    )
    prefill = PrefillPart(starts=(0,), lens=(num_tokens,))
    plan = AttentionPlan(num_decode=0, decode=None, prefill=prefill, contexts=contexts)
    return ForwardBatch(
        token_ids=torch.zeros_like(rows),
        positions=num_blocks * block_size + rows,
        slot_mapping=block_size + rows,
        logits_idx=rows[-1:],
        attention=plan,
    )


def largest_decodes(config: EngineConfig) -> ForwardBatch:
    """Return a step of as many rows with logits as there can be; each reads one block."""
    num_drafts = config.speculative_tokens or 0
    num_rows = min(config.max_num_seqs * (1 + num_drafts), config.max_batched_tokens)
    rows = torch.arange(num_rows)
    decode = DecodePart(
        block_ids=torch.zeros_like(rows),
        owners=rows,
        num_valid=torch.ones_like(rows),
        is_contiguous=False,
        first_positions=torch.zeros_like(rows),
    )
    return ForwardBatch(
        token_ids=torch.zeros_like(rows),
        positions=torch.zeros_like(rows),
        slot_mapping=config.block_size_tokens + rows,
        logits_idx=rows,
        attention=AttentionPlan(num_decode=num_rows, decode=decode, prefill=None, contexts=()),
    )


def _on_gpu(device: torch.device) -> Measure:
    def measure(run: Callable[[], object]) -> int:
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before

    return measure
