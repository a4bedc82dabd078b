"""Resolves the options of an engine and loads its model onto a device; makes no KV pool.

`resolve` decides the "auto" dtypes of the native engine. `kv_offload` is decided after loading,
from layer times measured on the device.
"""

import ctypes
import logging
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from raybatch.config import EngineConfig
from raybatch.engine.forward.decoder import dense_panel_width
from raybatch.engine.loading.peak_memory import pick_weight_placement
from raybatch.engine.memory.kv_cache import kv_bytes_per_token, max_sequence_len, pick_kv_dtype
from raybatch.engine.profile.host_times import shapes_for_torch
from raybatch.engine.weights.layer_store import (
    LayerStore,
    PlaceWeights,
    ResidentLayers,
    StreamedLayers,
)
from raybatch.engine.weights.layout import ModelWeights, WeightForm
from raybatch.engine.weights.loading import dense_shapes, load_weights, weight_sizes
from raybatch.errors import CapacityError, ConfigError
from raybatch.kernels.byte_numbers import BYTE_DTYPES
from raybatch.kernels.native.linears import compiled_linears
from raybatch.models.checkpoint import check_tensors
from raybatch.models.config import ModelSpec, read_model_spec
from raybatch.models.source import resolve_model
from raybatch.policy.memory_budget import (
    WeightPlacement,
    WeightSizes,
    num_blocks_for,
    num_host_blocks_for,
    weight_placement_for,
)

# parameters of glibc's mallopt
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedEngine:
    """Engine options with "auto" and None resolved."""

    device: torch.device
    # compute dtype
    dtype: torch.dtype
    kv_dtype: torch.dtype
    # dtype of quantized weights; None if there are none
    byte_dtype: torch.dtype | None
    max_model_len: int
    # KV bytes over all layers: in the pool, and of 8-bit swap
    kv_token_bytes: int
    rounded_token_bytes: int

    @property
    def count_blocks(self) -> partial[int]:
        """Return `num_blocks_for` for this model, to call with the options and the free bytes."""
        return partial(
            num_blocks_for,
            token_bytes=self.kv_token_bytes,
            max_model_len=self.max_model_len,
            is_cpu=self.device.type == "cpu",
        )

    def weight_form(self, *, may_compile: bool) -> WeightForm:
        """Return the memory form of the weights; compiled ops need panels."""
        width = dense_panel_width(
            self.dtype, self.device, may_compile=may_compile, byte_dtype=self.byte_dtype
        )
        return WeightForm(self.dtype, panel_width=width, byte_dtype=self.byte_dtype)

    def log_changes(self, config: EngineConfig) -> None:
        for name, option, value in (
            ("device", config.device, self.device),
            ("dtype", config.dtype, self.dtype),
            ("kv_cache_dtype", config.kv_cache_dtype, self.kv_dtype),
            ("max_model_len", config.max_model_len, self.max_model_len),
        ):
            if option in ("auto", None):
                _logger.info("engine.%s: %s", name, str(value).removeprefix("torch."))


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedModel:
    """A model whose weights are on a device, or partly in host memory."""

    path: Path
    spec: ModelSpec
    resolved: ResolvedEngine
    # layers that are not resident are in host memory
    weights: ModelWeights
    sizes: WeightSizes
    placement: WeightPlacement
    # layers placed by an extension; None if `placement` decides
    placed: LayerStore | None = None

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def device(self) -> torch.device:
        return self.weights.embed.device

    @property
    def dtype(self) -> torch.dtype:
        return self.resolved.dtype


def load_model(
    source: str,
    config: EngineConfig,
    *,
    num_engines_on_host: int = 1,
    place: PlaceWeights | None = None,
) -> LoadedModel:
    """Load the model that `source` names (see `resolve_model`).

    `place` of an extension may load the feed-forward blocks instead, and raises its own errors.

    Sets torch's threads and, unless switched off, malloc options for the whole process. Raises
    ConfigError: the model or an option is not supported.
    """
    path = resolve_model(source)
    spec = read_model_spec(path)
    check_tensors(path, spec)
    check_max_model_len(config, spec.max_model_len, path.name)
    resolved = resolve(config, spec)
    resolved.log_changes(config)
    if resolved.device.type == "cpu":
        torch.set_num_threads(config.num_threads)
        mallopt = _libc("mallopt") if config.tune_malloc else None
        if mallopt is not None:
            # serve large blocks from the heap and keep it: otherwise every large temporary is
            # mapped, cleared page by page and unmapped again
            mallopt(_MMAP_MAX, 0)
            mallopt(_TRIM_THRESHOLD, 2**31 - 1)
    form = resolved.weight_form(may_compile=config.compiles_kernels)
    if form.panel_width and (ops := compiled_linears(form.byte_dtype)):
        form = replace(form, for_torch=shapes_for_torch(dense_shapes(path, spec), ops))
    sizes = weight_sizes(path, spec, form, device=resolved.device)
    if place is None:
        placement = pick_weight_placement(
            path,
            spec,
            form,
            sizes,
            config,
            kv_dtype=resolved.kv_dtype,
            device=resolved.device,
            num_engines_on_host=num_engines_on_host,
        )
    else:
        # an extension streams the missing blocks
        placement = weight_placement_for(config, sizes)
    weights = load_weights(
        path,
        spec,
        form,
        device=resolved.device,
        streamed=placement.streamed,
        has_shards=place is None,
    )
    placed = None
    if place is not None:
        weights, placed = place(path, spec, form, weights, resolved.device)
    return LoadedModel(
        path=path,
        spec=spec,
        resolved=resolved,
        weights=weights,
        sizes=sizes,
        placement=placement,
        placed=placed,
    )


def place_layers(model: LoadedModel) -> LayerStore:
    """Return the layer store for the decoder; logs what is streamed."""
    placement, sizes = model.placement, model.sizes
    if model.placed is not None:
        return model.placed
    if not placement.streamed:
        return ResidentLayers(model.weights.layers)
    layers = StreamedLayers(model.weights.layers, placement, model.device)
    bytes_per_s = layers.bytes_per_s()
    _logger.info(
        "%s keeps %d of %d layers on the device, %.1f of %.1f MB of weights; the others are "
        "streamed through %d buffers: every step copies %.1f MB at %.1f GB/s and takes %s%.2f ms "
        "longer",
        model.name,
        sum(placement.is_resident),
        len(placement.is_resident),
        placement.device_bytes / 1e6,
        sizes.total_bytes / 1e6,
        placement.num_buffers,
        placement.pass_bytes / 1e6,
        bytes_per_s / 1e9,
        "up to " if model.device.type == "cuda" else "",
        # on a GPU copies overlap with computation
        1e3 * placement.pass_bytes / bytes_per_s,
    )
    return layers


def give_back_freed_memory(device: torch.device) -> None:
    """Return freed memory to the system or the device after a one-time peak."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    trim = _libc("malloc_trim")
    if trim is not None:
        trim(0)


def _libc(name: str) -> "ctypes._NamedFuncPointer | None":
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None


_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve(
    config: EngineConfig, spec: ModelSpec, device: torch.device | None = None
) -> ResolvedEngine:
    """Return the resolved options; a device of None takes that of `pick_device`.

    Raises ConfigError: there is no such device.
    """
    device = device or pick_device(config)
    name = config.dtype
    if name == "auto":
        # without bfloat16 units a CPU is four times slower than in float32
        name = "float32" if device.type == "cpu" else spec.dtype
    kv_dtype = pick_kv_dtype(config.kv_cache_dtype, _DTYPES[name])
    return ResolvedEngine(
        device=device,
        dtype=_DTYPES[name],
        kv_dtype=kv_dtype,
        byte_dtype=None if config.quantization is None else BYTE_DTYPES[config.quantization],
        max_model_len=max_sequence_len(config, spec.max_model_len),
        kv_token_bytes=kv_bytes_per_token(spec, kv_dtype),
        rounded_token_bytes=kv_bytes_per_token(spec, pick_kv_dtype(config.host_kv_dtype, kv_dtype)),
    )


def pick_device(config: EngineConfig) -> torch.device:
    """Return the device of an engine on this host; raises ConfigError if it does not exist."""
    device = _named_device(config)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"engine.device is {config.device!r}, but torch {torch.__version__} sees no GPU here; "
            "leave it out, or install torch with CUDA where the engines run"
        )
    if device.type != "cuda":
        return device
    # always with an index: the current GPU may differ where a tensor is made
    number = torch.cuda.current_device() if device.index is None else device.index
    if number >= torch.cuda.device_count():
        raise ConfigError(
            f"engine.device is {config.device!r}, but this process sees {torch.cuda.device_count()}"
            " GPUs, numbered from 0; Ray assigns GPUs to each engine: set 'cuda'"
        )
    return torch.device("cuda", number)


def _named_device(config: EngineConfig) -> torch.device:
    """Return the device that the options name; "auto" takes a GPU if there is one."""
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(config.device)


def check_max_model_len(config: EngineConfig, model_tokens: int, model: str) -> None:
    """Raise ConfigError if `max_model_len` exceeds the `model_tokens` of a model."""
    if config.max_model_len is not None and config.max_model_len > model_tokens:
        raise ConfigError(
            f"engine.max_model_len is {config.max_model_len}, but {model} supports {model_tokens} "
            "tokens; lower it or leave it out"
        )


def check_budgets(model_path: Path, config: EngineConfig, *, has_weights: bool = True) -> None:
    """Check that `kv_cache_bytes`, `host_kv_bytes` and `device_weight_bytes` are large enough.

    Reads the model's files without loading weights; without them (not `has_weights`) engines check
    `device_weight_bytes` when they load. Engines may run on another device and thus in another
    dtype: a budget is refused if it is too small for every device that the options allow. The
    numbers are those of this host. Raises ConfigError: weights or KV in host memory do not fit, or
    the model is not supported. Raises CapacityError: the KV cache does not hold a block.
    """
    spec = read_model_spec(model_path)
    devices = [_named_device(config)]
    if config.device == "auto":
        devices.append(torch.device("cpu" if devices[0].type == "cuda" else "cuda"))
    refusals: list[ConfigError | CapacityError] = []
    for device in devices:
        try:
            resolved = resolve(config, spec, device)
            if has_weights and isinstance(config.device_weight_bytes, int):
                # panels of compiled ops may be padded, so this is a lower bound
                form = resolved.weight_form(may_compile=False)
                weight_placement_for(config, weight_sizes(model_path, spec, form, device=device))
            if config.kv_cache_bytes is not None:
                resolved.count_blocks(config, free_bytes=0)
            num_host_blocks_for(
                config,
                token_bytes=resolved.kv_token_bytes,
                rounded_bytes=resolved.rounded_token_bytes,
            )
        except (ConfigError, CapacityError) as error:
            refusals.append(error)
        else:
            return
    raise refusals[0]
