"""Host memory that KV may take, and what an engine of this host would choose within."""

from pathlib import Path

import torch

from raybatch.config import EngineConfig
from raybatch.engine.loading.loaded_model import ResolvedEngine, resolve
from raybatch.engine.memory.kv_cache import (
    free_memory_bytes,
    host_memory_bytes,
    kv_bytes_per_token,
    num_blocks_for,
)
from raybatch.engine.profile.layer_bench import profile_options
from raybatch.engine.profile.module_profile import ModuleProfile, load_profile, profile_path
from raybatch.models.config import ModelSpec, read_model_spec
from raybatch.policy.choice_scope import ChoiceScope
from raybatch.policy.residence import USUAL_BUFFERS, WeightSizes, plan_residence

# of what a host has free, for KV that an engine may keep there by its own choice
_HOST_FRACTION = 0.5


def host_kv_bytes(
    config: EngineConfig, spec: ModelSpec, resolved: ResolvedEngine, num_engines_on_host: int
) -> int:
    """Return what the option says, or what an engine may take by itself.

    Memory of a CPU's host is the device's, so there "auto" has none but where `kv_offload` asks for
    it.
    """
    if config.host_kv_bytes != "auto":
        return config.given_host_kv_bytes
    is_cpu = resolved.device.type == "cpu"
    if config.kv_offload is False or (is_cpu and config.kv_offload is not True):
        return 0
    return free_host_kv_bytes(config, spec, resolved, num_engines_on_host)


def free_host_kv_bytes(
    config: EngineConfig, spec: ModelSpec, resolved: ResolvedEngine, num_engines_on_host: int
) -> int:
    """Return a share of what the host has free, or the KV of the most rows where that is less."""
    token_bytes = kv_bytes_per_token(spec, resolved.kv_dtype)
    most = config.max_num_seqs * resolved.max_model_len * token_bytes
    share = _HOST_FRACTION * free_memory_bytes(torch.device("cpu"))
    return int(min(most, share / num_engines_on_host))


def known_scope(
    folder: Path, config: EngineConfig, *, num_engines_on_host: int = 1
) -> tuple[ChoiceScope, ModuleProfile | None]:
    """Return the scope of an engine on this host, about, and its layers where they were measured.

    Reads the config in a model's folder and loads no weights. Raises ConfigError: there is no such
    device, or the model cannot be run. Raises CapacityError: the memory does not hold a block of
    KV.
    """
    spec = read_model_spec(folder)
    resolved = resolve(config, spec)
    device, options = resolved.device, profile_options(config)
    profile = load_profile(profile_path(spec, resolved.dtype, device, options))
    free_bytes, residence = free_memory_bytes(device), None
    if profile is not None:
        model, budget = profile.model, config.device_weight_bytes
        attention_bytes = model.num_layers * model.layer.attention_bytes
        residence = plan_residence(
            WeightSizes(
                other_bytes=model.other_bytes + attention_bytes,
                ffn_bytes=(model.layer.ffn_bytes,) * model.num_layers,
            ),
            device_weight_bytes=None if budget == "auto" else budget,
            weight_buffers=config.given_buffers or USUAL_BUFFERS,
        )
        # weights are not there yet
        free_bytes = max(0, free_bytes - residence.device_bytes)
    num_blocks = num_blocks_for(
        config,
        spec,
        dtype=resolved.kv_dtype,
        device=device,
        free_bytes=free_bytes,
        num_engines_on_host=num_engines_on_host,
        host_bytes=host_memory_bytes(),
    )
    block_bytes = kv_bytes_per_token(spec, resolved.kv_dtype) * config.block_size_tokens
    scope = ChoiceScope(
        config=config,
        is_gpu=device.type == "cuda",
        device_kv_bytes=num_blocks * block_bytes,
        host_kv_bytes=host_kv_bytes(config, spec, resolved, num_engines_on_host),
        residence=residence,
    )
    return scope, profile
