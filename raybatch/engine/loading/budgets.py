"""Refuses budgets of memory in which a model cannot run, from its files alone; loads no weights."""

from pathlib import Path

import torch

from raybatch.config import EngineConfig
from raybatch.engine.loading.limits import pick_byte_dtype, pick_device, pick_dtype
from raybatch.engine.memory.kv_cache import num_blocks_for, num_host_blocks_for, pick_kv_dtype
from raybatch.engine.weights.layout import WeightForm
from raybatch.engine.weights.loading import weight_sizes
from raybatch.errors import CapacityError, ConfigError
from raybatch.models.config import ModelSpec, read_model_spec
from raybatch.policy.residence import plan_residence


def check_budgets(model_path: Path, config: EngineConfig) -> None:
    """Refuse `kv_cache_bytes`, `host_kv_bytes` and `device_weight_bytes` that are too small.

    Engines may run elsewhere, on another device and so in another dtype. A budget is refused where
    it is too small for every device that the options allow; the numbers are those of this host.

    Args:
        model_path: folder of the checkpoint.
        config: of the engine.

    Raises:
        ConfigError: weights or KV in host memory do not fit, or the model cannot be run.
        CapacityError: the KV cache does not hold a block.
    """
    spec = read_model_spec(model_path)
    found: ConfigError | CapacityError | None = None
    for device in _devices(config):
        try:
            _check_on(device, model_path, spec, config)
        except (ConfigError, CapacityError) as error:
            found = found or error
        else:
            return
    assert found is not None, "an engine without a device"
    raise found


def _devices(config: EngineConfig) -> list[torch.device]:
    """Return what engines may run on, the device of this process first."""
    here = pick_device(config)
    if config.device != "auto":
        return [here]
    return [here, torch.device("cpu" if here.type == "cuda" else "cuda")]


def _check_on(
    device: torch.device, model_path: Path, spec: ModelSpec, config: EngineConfig
) -> None:
    dtype = pick_dtype(config, spec, device)
    if config.device_weight_bytes is not None:
        # compiled ops may fill panels up, which takes no less
        form = WeightForm(dtype, byte_dtype=pick_byte_dtype(config))
        plan_residence(
            weight_sizes(model_path, spec, form, device=device),
            device_weight_bytes=config.device_weight_bytes,
            weight_buffers=config.weight_buffers,
        )
    kv_dtype = pick_kv_dtype(config.kv_cache_dtype, dtype)
    if config.kv_cache_bytes is not None:
        num_blocks_for(config, spec, dtype=kv_dtype, device=device, free_bytes=0)
    num_host_blocks_for(config, spec, dtype=kv_dtype)
