"""Which layers of a model stay on the device: as the options say, or by its free memory.

Where weights may not fit, the first layers are loaded before all others: they tell what steps take
beside weights and KV, and what layers cost.
"""

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from raybatch.config import EngineConfig
from raybatch.engine.forward.decoder import Decoder
from raybatch.engine.forward.ops_choice import pick_ops
from raybatch.engine.loading.peak_memory import step_peak_bytes
from raybatch.engine.memory.kv_cache import (
    GPU_FRACTION,
    free_memory_bytes,
    max_sequence_len,
    pick_kv_dtype,
)
from raybatch.engine.memory.pinned import current_device
from raybatch.engine.profile.layer_bench import profile_options
from raybatch.engine.profile.module_profile import measured_profile, model_shape, profile_layer
from raybatch.engine.weights.layout import WeightForm
from raybatch.engine.weights.loading import load_weights
from raybatch.models.config import ModelSpec
from raybatch.policy.batches.step_plan import RowShape
from raybatch.policy.choose_engine import EngineFacts
from raybatch.policy.choose_residence import WeightMemory, choose_residence
from raybatch.policy.residence import Residence, WeightSizes, plan_residence

# of the free memory, which the largest steps are taken to need until they are measured
_STEP_FRACTION = 1 / 3

_logger = logging.getLogger(__name__)


def pick_residence(
    path: Path,
    spec: ModelSpec,
    form: WeightForm,
    sizes: WeightSizes,
    config: EngineConfig,
    *,
    device: torch.device,
    num_engines_on_host: int = 1,
) -> Residence:
    """Return the residence of `device_weight_bytes`; the log says why, where that is "auto".

    Raises ConfigError: weights do not fit, whichever layers are streamed.
    """
    budget, free_bytes = config.device_weight_bytes, free_device_bytes(device)
    plan = partial(plan_residence, sizes, weight_buffers=config.weight_buffers)
    if budget != "auto" or free_bytes is None:
        return plan(device_weight_bytes=None if budget == "auto" else budget)
    kv_dtype = pick_kv_dtype(config.kv_cache_dtype, form.dtype)
    shape = model_shape(spec, dtype=form.dtype, kv_dtype=kv_dtype, byte_dtype=form.byte_dtype)
    row = RowShape.within(max_sequence_len(config, spec.max_model_len))
    memory = WeightMemory(
        sizes=sizes,
        weight_buffers=config.weight_buffers,
        device_bytes=free_bytes,
        host_bytes=free_memory_bytes(torch.device("cpu")) // num_engines_on_host,
        step_bytes=int(_STEP_FRACTION * free_bytes),
        kv_share=GPU_FRACTION,
        kv_bytes=config.kv_cache_bytes,
    )
    if memory.holds_all(shape, row):
        return plan(device_weight_bytes=None)
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
        memory = replace(memory, step_bytes=step_bytes)
        if memory.holds_all(shape, row):
            return plan(device_weight_bytes=None)
        measure = partial(profile_layer, ops=ops)
        profile, _ = measured_profile(spec, weights, profile_options(config), measure=measure)
    keeps_kv = config.kv_offload is False or config.speculative_tokens or config.cuda_graphs
    facts = EngineFacts(
        model=shape,
        costs=profile.costs(),
        device_kv_bytes=0,
        host_kv_bytes=0 if keeps_kv else config.host_kv_bytes or 0,
        max_num_seqs=config.max_num_seqs,
        max_batched_tokens=config.max_batched_tokens,
        row=row,
    )
    choice = choose_residence(facts, memory, needs_offload=config.kv_offload is True)
    _logger.info(
        "engine.device_weight_bytes: %d, as weights of %.2f GB do not fit %.2f GB of free memory "
        "beside steps of %.2f GB and KV of a few rows: %s",
        choice.residence.device_bytes,
        sizes.total_bytes / 1e9,
        free_bytes / 1e9,
        step_bytes / 1e9,
        choice.reason,
    )
    return choice.residence


def free_device_bytes(device: torch.device) -> int | None:
    """Return the free bytes of a GPU; None for a CPU, which keeps all weights in its memory."""
    return free_memory_bytes(device) if device.type == "cuda" else None


def _first_layers(spec: ModelSpec) -> ModelSpec:
    """Return a model of the first two layers, and more up to one with experts if there are any."""
    is_sparse = spec.moe.is_sparse if spec.moe is not None else ()
    count = min(spec.num_layers, 2 + (is_sparse.index(True) if any(is_sparse) else 0))
    moe = None if spec.moe is None else replace(spec.moe, is_sparse=is_sparse[:count])
    return replace(spec, num_layers=count, windows=spec.windows[:count], moe=moe)
