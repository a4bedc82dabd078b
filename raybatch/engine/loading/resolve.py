"""The options of an engine resolved for one model on one device, and the check of its budgets.

`resolve` is the one place where "auto" of a dtype is decided. How steps run (`attn_batch_tokens`,
`cuda_graphs`) is decided later, from layers measured on the device.
"""

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from raybatch.config import EngineConfig
from raybatch.engine.forward.pick_ops import dense_panel_width
from raybatch.engine.memory.kv_cache import (
    max_sequence_len,
    num_blocks_for,
    num_host_blocks_for,
    pick_kv_dtype,
)
from raybatch.engine.weights.layout import WeightForm
from raybatch.engine.weights.loading import weight_sizes
from raybatch.errors import CapacityError, ConfigError
from raybatch.kernels.byte_numbers import BYTE_DTYPES
from raybatch.models.config import ModelSpec, read_model_spec
from raybatch.policy.residence import plan_residence

_logger = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedEngine:
    """Options without "auto" and None, as all of the engine uses them.

    Args:
        dtype: in which the model computes.
        byte_dtype: of weights that are kept as bytes; None where none are.
    """

    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    byte_dtype: torch.dtype | None
    max_model_len: int

    def weight_form(self, *, may_compile: bool) -> WeightForm:
        """Return how the weights are kept; ops that are compiled want panels."""
        width = dense_panel_width(
            self.dtype, self.device, may_compile=may_compile, byte_dtype=self.byte_dtype
        )
        return WeightForm(self.dtype, panel_width=width, byte_dtype=self.byte_dtype)

    def log_changes(self, config: EngineConfig) -> None:
        """Log each option that was left open, with its resolved value."""
        for name, option, value in (
            ("device", config.device, self.device),
            ("dtype", config.dtype, self.dtype),
            ("kv_cache_dtype", config.kv_cache_dtype, self.kv_dtype),
            ("max_model_len", config.max_model_len, self.max_model_len),
        ):
            if option in ("auto", None):
                _logger.info("engine.%s: %s", name, str(value).removeprefix("torch."))


def resolve(
    config: EngineConfig, spec: ModelSpec, device: torch.device | None = None
) -> ResolvedEngine:
    """Return the resolved options for a model on a device; None takes that of `pick_device`.

    Raises:
        ConfigError: there is no such device.
    """
    device = device or pick_device(config)
    name = config.dtype
    if name == "auto":
        # CPUs without bfloat16 units compute it four times slower than float32
        name = "float32" if device.type == "cpu" else spec.dtype
    return ResolvedEngine(
        device=device,
        dtype=_DTYPES[name],
        kv_dtype=pick_kv_dtype(config.kv_cache_dtype, _DTYPES[name]),
        byte_dtype=None if config.quantization is None else BYTE_DTYPES[config.quantization],
        max_model_len=max_sequence_len(config, spec.max_model_len),
    )


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


def check_max_model_len(config: EngineConfig, model_tokens: int, model: str) -> None:
    """Raise ConfigError where the options ask for more than the `model_tokens` of a model."""
    if config.max_model_len is not None and config.max_model_len > model_tokens:
        raise ConfigError(
            f"engine.max_model_len is {config.max_model_len}, but {model} was made for "
            f"{model_tokens} tokens; lower it or leave it out"
        )


def check_budgets(model_path: Path, config: EngineConfig) -> None:
    """Refuse `kv_cache_bytes`, `host_kv_bytes` and `device_weight_bytes` that are too small.

    Reads the files of the model and loads no weights. Engines may run elsewhere, on another device
    and so in another dtype: a budget is refused where it is too small for every device that the
    options allow; the numbers are those of this host.

    Raises:
        ConfigError: weights or KV in host memory do not fit, or the model cannot be run.
        CapacityError: the KV cache does not hold a block.
    """
    spec = read_model_spec(model_path)
    devices = [pick_device(config)]
    if config.device == "auto":
        devices.append(torch.device("cpu" if devices[0].type == "cuda" else "cuda"))
    refusals: list[ConfigError | CapacityError] = []
    for device in devices:
        try:
            _check_budgets_on(resolve(config, spec, device), model_path, spec, config)
        except (ConfigError, CapacityError) as error:
            refusals.append(error)
        else:
            return
    raise refusals[0]


def _check_budgets_on(
    resolved: ResolvedEngine, model_path: Path, spec: ModelSpec, config: EngineConfig
) -> None:
    device = resolved.device
    if config.device_weight_bytes is not None:
        # compiled ops may fill panels up, which takes no less
        form = resolved.weight_form(may_compile=False)
        plan_residence(
            weight_sizes(model_path, spec, form, device=device),
            device_weight_bytes=config.device_weight_bytes,
            weight_buffers=config.weight_buffers,
        )
    if config.kv_cache_bytes is not None:
        num_blocks_for(config, spec, dtype=resolved.kv_dtype, device=device, free_bytes=0)
    num_host_blocks_for(config, spec, dtype=resolved.kv_dtype)
