"""What options of an engine come to on this host and with this model; the same for every engine."""

import torch

from raybatch.config import EngineConfig
from raybatch.errors import ConfigError
from raybatch.kernels.byte_weights import BYTE_DTYPES
from raybatch.models.config import ModelSpec


def pick_device(config: EngineConfig) -> torch.device:
    """Return the device that the options name; "auto" takes a GPU where there is one.

    Raises:
        ConfigError: there is no such device.
    """
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.device(config.device)
    except RuntimeError as error:
        raise ConfigError(f"engine.device {config.device!r} is not a device: {error}") from error


def pick_dtype(config: EngineConfig, spec: ModelSpec, device: torch.device) -> torch.dtype:
    """Return the type in which a model computes on a device."""
    name = config.dtype
    if name == "auto":
        # CPUs without bfloat16 units compute it four times slower than float32
        name = "float32" if device.type == "cpu" else spec.dtype
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def pick_byte_dtype(config: EngineConfig) -> torch.dtype | None:
    """Return the type of weights that are kept as bytes; None where none are."""
    return None if config.quantization is None else BYTE_DTYPES[config.quantization]


def check_max_model_len(config: EngineConfig, own: int, model: str) -> None:
    """Raise ConfigError where the options ask for more than a model was made for.

    Args:
        config: of the engine.
        own: tokens that the model was made for.
        model: its name.
    """
    if config.max_model_len is not None and config.max_model_len > own:
        raise ConfigError(
            f"engine.max_model_len is {config.max_model_len}, but {model} was made for {own} "
            "tokens; lower it or leave it out"
        )
