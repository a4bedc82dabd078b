"""Measures the memory next to KV: activations of the largest steps, and weight placement.

If the weights may not fit, the first layers are loaded alone. They give the memory of a step and
the time of a layer, from which follows how many layers stay on the device.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from raybatch.config import EngineConfig
from raybatch.engine.batch.forward_batch import ForwardBatch, on_device
from raybatch.engine.forward.decoder import Decoder
from raybatch.engine.forward.ops_choice import pick_ops
from raybatch.engine.memory.kv_cache import allocate_kv_cache, free_memory_bytes, max_sequence_len
from raybatch.engine.memory.pinned import IndexUploads, current_device
from raybatch.engine.profile.module_profile import (
    measured_profile,
    model_shape,
    profile_layer,
    profile_options,
)
from raybatch.engine.sampling.draw import DrawOptions, draw_dense, draw_ranked
from raybatch.engine.weights.layout import WeightForm
from raybatch.engine.weights.loading import load_weights
from raybatch.errors import ConfigError
from raybatch.kernels.attention_plan import AttentionPlan, DecodePart, PrefillPart, PrefixSegment
from raybatch.kernels.step_index import MAX_RUNS, StepIndex, max_places
from raybatch.models.config import ModelSpec
from raybatch.policy.choose_engine import EngineInputs, choose_weight_placement
from raybatch.policy.cost.layers import RowsAhead, RowShape
from raybatch.policy.memory_budget import (
    GPU_FRACTION,
    USUAL_BUFFERS,
    MemoryBudget,
    WeightMemory,
    WeightPlacement,
    WeightSizes,
    weight_placement_for,
)

_logger = logging.getLogger(__name__)

# assumed share of free memory for the largest steps, until measured
_STEP_FRACTION = 1 / 3

# runs a function and returns its peak memory in bytes
Measure = Callable[[Callable[[], object]], int]


def pick_weight_placement(
    path: Path,
    spec: ModelSpec,
    form: WeightForm,
    sizes: WeightSizes,
    config: EngineConfig,
    *,
    kv_dtype: torch.dtype,
    device: torch.device,
    num_engines_on_host: int = 1,
) -> WeightPlacement:
    """Return the weight placement for `device_weight_bytes`; logs the reason if it is "auto".

    Raises ConfigError: the weights do not fit even if all layers are streamed.
    """
    free_bytes = free_device_bytes(device)
    if config.device_weight_bytes != "auto" or free_bytes is None:
        return weight_placement_for(config, sizes)
    shape = model_shape(spec, dtype=form.dtype, kv_dtype=kv_dtype, byte_dtype=form.byte_dtype)
    row = RowShape.within(max_sequence_len(config, spec.max_model_len))
    row_bytes = shape.num_layers * shape.layer.kv_bytes_per_token
    row_bytes *= row.prompt_tokens + row.output_tokens
    memory = WeightMemory(
        sizes=sizes,
        weight_buffers=config.explicit_buffers or USUAL_BUFFERS,
        device_bytes=free_bytes,
        host_bytes=free_memory_bytes(torch.device("cpu")) // num_engines_on_host,
        step_bytes=int(_STEP_FRACTION * free_bytes),
        kv_share=GPU_FRACTION,
        kv_bytes=config.kv_cache_bytes,
    )
    if memory.holds_all(row_bytes):
        return weight_placement_for(config, sizes)
    with current_device(device):
        first = _first_layers(spec)
        weights = load_weights(path, first, form, device=device)
        ops = pick_ops(
            first,
            weights,
            block_size=config.block_size_tokens,
            may_compile=config.compiles_kernels,
            kv_dtype=kv_dtype,
        )
        decoder = Decoder(first, weights, ops=ops)
        step_bytes = step_peak_bytes(decoder, config, first, kv_dtype=kv_dtype, device=device)
        memory, costs = replace(memory, step_bytes=step_bytes), None
        if not memory.holds_all(row_bytes):
            measure = partial(profile_layer, ops=ops)
            profile, _ = measured_profile(spec, weights, profile_options(config), measure=measure)
            costs = profile.costs()
        del decoder, weights
        torch.cuda.empty_cache()
    if costs is None:
        return weight_placement_for(config, sizes)
    budget = MemoryBudget.before_weights(config, memory)
    inputs = EngineInputs(
        model=shape,
        costs=costs,
        device_kv_bytes=0,
        host_kv_bytes=budget.host_kv_bytes,
        max_num_seqs=config.max_num_seqs,
        token_budgets=(config.token_budget,),
        rows=RowsAhead(shape=row),
        block_size=config.block_size_tokens,
        kv_offload=budget.kv_offload,
    )
    return _chosen(inputs, memory)


def _chosen(inputs: EngineInputs, memory: WeightMemory) -> WeightPlacement:
    """Return the fastest weight placement by forecast; logs the reason."""
    choice = choose_weight_placement(inputs, memory)
    assert choice.placement is not None, "no placement was chosen"
    _logger.info(
        "set engine.device_weight_bytes to %d: %.2f GB of weights and KV of a few rows do not fit "
        "into %.2f GB of free memory: %s",
        choice.placement.device_bytes,
        memory.sizes.total_bytes / 1e9,
        memory.device_bytes / 1e9,
        choice.reason,
    )
    return choice.placement


def free_device_bytes(device: torch.device) -> int | None:
    """Return the free bytes of a GPU; None for a CPU, where all weights are resident."""
    return free_memory_bytes(device) if device.type == "cuda" else None


def _first_layers(spec: ModelSpec) -> ModelSpec:
    """Return a model of the first two layers, extended to the first one with experts."""
    is_sparse = spec.moe.is_sparse if spec.moe is not None else ()
    count = min(spec.num_layers, 2 + (is_sparse.index(True) if any(is_sparse) else 0))
    moe = None if spec.moe is None else replace(spec.moe, is_sparse=is_sparse[:count])
    return replace(spec, num_layers=count, windows=spec.windows[:count], moe=moe)


def step_peak_bytes(
    decoder: Decoder,
    config: EngineConfig,
    spec: ModelSpec,
    *,
    kv_dtype: torch.dtype,
    device: torch.device,
    measure: Measure | None = None,
) -> int:
    """Return the peak bytes of the larger step: of the longest prompt chunk, or the most decodes.

    Runs both steps on a small temporary pool. `measure` of None reads the allocator of a GPU.
    Raises ConfigError: out of memory.
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
                options = DrawOptions(ones, np.ones_like(rows), ones, 0 * ones, 0.5 * ones)
                for draw in (draw_dense, draw_ranked):
                    draw(logits, rows, options)

        measure = measure or _on_gpu(device)
        of_prompt = measure(lambda: run(prompts, draws=False))
        of_prompt += _unmeasured_bytes(prompts, spec, config.block_size_tokens)
        of_decodes = measure(lambda: run(decodes, draws=True))
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"a step of {config.token_budget} tokens (engine.max_batched_tokens), or of "
            f"{len(decodes.token_ids)} rows (engine.max_num_seqs), does not fit next to the "
            f"weights on {device}: {error}; lower either option or engine.max_model_len, or "
            "stream weights by setting engine.device_weight_bytes"
        ) from error
    _logger.info(
        "peak activation memory %.2f GB: %.2f for %d prompt tokens at a context of %d, %.2f for "
        "%d decode rows",
        max(of_prompt, of_decodes) / 1e9,
        of_prompt / 1e9,
        len(prompts.token_ids),
        int(prompts.positions.max()) + 1,
        of_decodes / 1e9,
        len(decodes.token_ids),
    )
    return max(of_prompt, of_decodes)


def largest_prompt(config: EngineConfig, spec: ModelSpec) -> ForwardBatch:
    """Return the largest prefill step; the first chunk is at the end of its prompt.

    The cached tokens before it are split into as many segments as are merged at once, each with a
    partial result, all but one of them minimal. They repeat one block, as the pool is small.
    """
    max_len, block_size = max_sequence_len(config, spec.max_model_len), config.block_size_tokens
    num_tokens = config.token_budget
    num_blocks = max(0, max_len - num_tokens) // block_size
    rows = torch.arange(num_tokens)
    starts = tuple(range(0, num_tokens, max_len))
    lens = tuple(min(max_len, num_tokens - start) for start in starts)
    segments = tuple(
        PrefixSegment(
            query_idx=rows,
            block_ids=torch.zeros(length, dtype=torch.int64),
            num_tokens=length * block_size,
            first_position=run * block_size,
        )
        for run, length in enumerate([*[1] * (MAX_RUNS - 1), max(1, num_blocks - MAX_RUNS + 1)])
    )
    prefill = PrefillPart(starts=starts, lens=lens)
    plan = AttentionPlan(num_decode=0, decode=None, prefill=prefill, segments=segments)
    return ForwardBatch(
        token_ids=torch.zeros_like(rows),
        positions=num_blocks * block_size + rows % max_len,
        slot_mapping=block_size + rows,
        logits_idx=torch.tensor([sum(chunk) - 1 for chunk in zip(starts, lens, strict=True)]),
        attention=plan,
    )


def _unmeasured_bytes(prompts: ForwardBatch, spec: ModelSpec, block_size: int) -> int:
    """Return the bytes of further partial results in the step that has the most of them."""
    num_rows, num_kv_heads = len(prompts.token_ids), spec.num_kv_heads
    index = StepIndex(
        prompts.attention, num_rows=num_rows, num_kv_heads=num_kv_heads, block_size=block_size
    )
    missing = max_places(num_rows, num_kv_heads) - index.size.places
    return max(0, missing) * spec.num_heads * (spec.head_dim + 1) * torch.float32.itemsize


def largest_decodes(config: EngineConfig) -> ForwardBatch:
    """Return the decode step with the most rows; each reads one block."""
    num_drafts = config.num_drafts
    num_rows = min(config.max_num_seqs * (1 + num_drafts), config.token_budget)
    rows = torch.arange(num_rows)
    block_ids, num_valid = torch.zeros_like(rows).unsqueeze(1), torch.ones_like(rows)
    decode = DecodePart.of_rows(block_ids, num_valid, block_size=config.block_size_tokens)
    return ForwardBatch(
        token_ids=torch.zeros_like(rows),
        positions=torch.zeros_like(rows),
        slot_mapping=config.block_size_tokens + rows,
        logits_idx=rows,
        attention=AttentionPlan(num_decode=num_rows, decode=decode, prefill=None, segments=()),
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
