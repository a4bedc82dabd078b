"""Loads a model with its KV pool onto a device and runs steps; sets up the process for torch."""

import ctypes
import logging
import sys
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from raybatch.config import EngineConfig
from raybatch.engine.decoder import Decoder
from raybatch.engine.forward_batch import ForwardBatch
from raybatch.engine.kv_cache import (
    KVCache,
    allocate_kv_cache,
    num_blocks_for,
    num_host_blocks_for,
)
from raybatch.engine.kv_tiers import KVTiers
from raybatch.engine.limits import check_max_model_len, pick_device
from raybatch.engine.memory import free_memory_bytes
from raybatch.engine.model_config import ModelSpec, read_model_spec
from raybatch.engine.model_source import resolve_model
from raybatch.engine.runtime import CombineAtExperts, CoroutineRuntime, PartBatch, StepResult
from raybatch.engine.weights import load_weights

logger = logging.getLogger(__name__)


class ModelRunner:
    """A loaded model: `forward` runs one step. Owned by one thread."""

    def __init__(
        self, *, spec: ModelSpec, config: EngineConfig, decoder: Decoder, cache: KVCache
    ) -> None:
        self.spec = spec
        self.config = config
        self.cache = cache
        self.tiers = KVTiers(cache, num_host_blocks_for(config, spec, dtype=cache.k.dtype))
        self.decoder = decoder
        policy = CombineAtExperts(config.moe_batch_tokens)
        self.runtime = CoroutineRuntime(decoder, cache, policy)

    @classmethod
    def load(
        cls, source: str, config: EngineConfig, *, num_engines_on_host: int = 1
    ) -> "ModelRunner":
        """Load the model that `source` names (see `resolve_model`).

        Sets the threads of torch and, unless switched off, malloc's options: both hold for the
        whole process.

        Args:
            source: folder, hub id, URI or "demo".
            config: options of the engine.
            num_engines_on_host: engines that share the memory of the host.

        Raises:
            ConfigError: the model or an option cannot be run.
            CapacityError: the memory does not hold a block of KV.
        """
        path = resolve_model(source)
        spec = read_model_spec(path)
        check_max_model_len(config, spec.max_model_len, path.name)
        device = pick_device(config)
        _set_up_process(config, device)
        dtype = _pick_dtype(config, spec, device)
        weights = load_weights(path, spec, dtype=dtype, device=device)
        cache = _make_cache(config, spec, dtype, device, num_engines_on_host)
        logger.info(
            "%s loaded as %s on %s, with %d KV blocks of %d tokens",
            path.name,
            str(dtype).removeprefix("torch."),
            device,
            cache.k.shape[1],
            config.block_size_tokens,
        )
        return cls(spec=spec, config=config, decoder=Decoder(spec, weights), cache=cache)

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks in the pool."""
        return int(self.cache.k.shape[1])

    @property
    def num_host_blocks(self) -> int:
        """Return the number of blocks in host memory."""
        return self.tiers.num_host_blocks

    @property
    def block_bytes(self) -> int:
        """Return the bytes of one block, keys and values of all layers."""
        return self.tiers.block_bytes

    @property
    def device(self) -> torch.device:
        """Return where weights, pool and the tensors of a batch live."""
        return self.cache.k.device

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Run one step and return float32 logits [S, V]; writes the KV of the batch's tokens."""
        return self.decoder.forward(batch, self.cache)

    def forward_parts(self, parts: Sequence[PartBatch]) -> StepResult:
        """Run one step as coroutines; parts must not read what another one writes."""
        return self.runtime.forward(parts)

    def save_blocks(
        self, block_ids: npt.NDArray[np.int64], host_ids: npt.NDArray[np.int64]
    ) -> None:
        """Copy blocks of the pool into as many of host memory."""
        self.tiers.save(block_ids, host_ids)

    def load_blocks(
        self, host_ids: npt.NDArray[np.int64], block_ids: npt.NDArray[np.int64]
    ) -> None:
        """Copy blocks of host memory into as many of the pool."""
        self.tiers.load(host_ids, block_ids)

    def copy_bytes_per_s(self) -> float:
        """Measure copies between both pools, which must be idle."""
        return self.tiers.bytes_per_s()

    def clear_blocks(self, block_ids: npt.NDArray[np.int64]) -> None:
        """Zero these blocks of the pool."""
        for pool in (self.cache.k, self.cache.v):
            pool[:, block_ids] = 0


def _pick_dtype(config: EngineConfig, spec: ModelSpec, device: torch.device) -> torch.dtype:
    name = config.dtype
    if name == "auto":
        # CPUs without bfloat16 units compute it four times slower than float32
        name = "float32" if device.type == "cpu" else spec.dtype
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def _make_cache(
    config: EngineConfig,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    num_engines_on_host: int,
) -> KVCache:
    num_blocks = num_blocks_for(
        config,
        spec,
        dtype=dtype,
        device=device,
        free_bytes=free_memory_bytes(device),
        num_engines_on_host=num_engines_on_host,
    )
    return allocate_kv_cache(
        spec,
        num_blocks=num_blocks,
        block_size=config.block_size_tokens,
        dtype=dtype,
        device=device,
    )


def _set_up_process(config: EngineConfig, device: torch.device) -> None:
    if device.type == "cpu":
        torch.set_num_threads(config.num_threads)
        if config.tune_malloc:
            _keep_freed_memory()


def _keep_freed_memory() -> None:
    """Tell glibc to serve large blocks from the heap and never to give the heap back.

    Otherwise every large temporary is mapped, cleared page by page and unmapped again.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    trim_threshold, mmap_max = -1, -4
    mallopt(mmap_max, 0)
    mallopt(trim_threshold, 2**31 - 1)
