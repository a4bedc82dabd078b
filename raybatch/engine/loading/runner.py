"""Loads a model with its KV pool onto a device and runs steps."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from raybatch.config import EngineConfig
from raybatch.engine.batch.forward_batch import ForwardBatch, on_device
from raybatch.engine.forward.coroutine import CombineAtExperts, CoroutineRuntime, StepPart
from raybatch.engine.forward.decoder import Decoder
from raybatch.engine.forward.ops_choice import pick_ops
from raybatch.engine.forward.step_graphs import GraphCounts, StepGraphs
from raybatch.engine.loading.graph_setup import plan_graphs
from raybatch.engine.loading.loaded_model import (
    LoadedModel,
    chosen_kv_offload,
    give_back_freed_memory,
    load_model,
    place_layers,
    planned_attn_batch,
)
from raybatch.engine.loading.peak_memory import step_peak_bytes
from raybatch.engine.memory.host_layers import HostLayers
from raybatch.engine.memory.kv_cache import (
    KVCache,
    allocate_kv_cache,
    copy_blocks,
    free_memory_bytes,
    host_memory_bytes,
    num_blocks_for,
    num_host_blocks_for,
    num_rounded_blocks_for,
    pick_kv_dtype,
    read_blocks,
    write_blocks,
)
from raybatch.engine.memory.kv_tiers import KVTiers
from raybatch.engine.memory.kv_window import KVWindow, WindowCounters
from raybatch.engine.memory.pinned import IndexUploads, current_device
from raybatch.engine.profile.shared_read_times import timed_reads
from raybatch.engine.weights.layer_store import WeightCounters
from raybatch.kernels.dispatch import Ops
from raybatch.models.checkpoint import model_fingerprint
from raybatch.models.config import ModelSpec
from raybatch.policy.shared_reads import UNTIMED, SharedReads
from raybatch.records.arrays import Ints
from raybatch.records.sequence_kv import KVKey

_logger = logging.getLogger(__name__)


class ModelRunner:
    """A loaded model: `forward` runs one step. Owned by one thread.

    KV of all rows is written before any row attends, layer by layer, so a row may attend to blocks
    that another row of the same forward batch fills. Scrap blocks, the last ones of the pool, are
    no sequence's.
    """

    def __init__(
        self,
        *,
        spec: ModelSpec,
        config: EngineConfig,
        decoder: Decoder,
        cache: KVCache,
        graphs: StepGraphs | None = None,
        num_scrap_blocks: int = 0,
        path: Path | None = None,
        dtype: torch.dtype | None = None,
        shared_reads: SharedReads = UNTIMED,
    ) -> None:
        self.spec, self.config, self.cache = spec, config, cache
        self._path, self._dtype = path, dtype
        self.decoder, self.shared_reads = decoder, shared_reads
        self._graphs = graphs
        self.device = cache.k.device
        self._uploads = IndexUploads(self.device)
        self.num_blocks = int(cache.k.shape[1]) - num_scrap_blocks
        # tokens that attend at once where steps run as coroutines: `load` decides, and without it
        # nothing was measured that would speak for parts
        tokens = config.attn_batch_tokens
        self.attn_batch_tokens = None if tokens == "auto" else tokens
        policy = CombineAtExperts(config.moe_batch_tokens, is_layerwise=decoder.layers.is_streamed)
        kv_dtype = cache.k.dtype
        num_host_blocks = num_host_blocks_for(config, spec, dtype=kv_dtype)
        self.window: KVWindow | None = None
        # of a buffer, where sequences have blocks of the host; 0 where they have those of the pool
        self.num_window_blocks = 0
        if config.kv_offload is True:
            self.window = KVWindow(cache, HostLayers(cache, num_host_blocks))
            self.num_window_blocks = self.window.num_blocks
            self.num_blocks, num_host_blocks = num_host_blocks, 0
        # for what yields its blocks of the pool: exact, and in 8 bits
        self.tiers = KVTiers(cache, num_host_blocks)
        self.rounded_tiers = KVTiers(
            cache,
            num_rounded_blocks_for(config, spec, dtype=kv_dtype),
            dtype=pick_kv_dtype(config.host_kv_dtype, kv_dtype),
        )
        self.runtime = CoroutineRuntime(decoder, cache, policy, self.window)

    @classmethod
    def load(cls, source: str, config: EngineConfig, *, num_engines_on_host: int = 1) -> Self:
        """Load the model that `source` names, see `load_model`.

        Where the options leave it open, a plan from measured layers decides how steps run. Raises
        ConfigError: the model or an option cannot be run, as weights that do not fit. Raises
        CapacityError: the memory does not hold a block of KV.
        """
        model = load_model(source, config)
        with current_device(model.device):
            return cls._of(model, config, num_engines_on_host)

    @classmethod
    def _of(cls, model: LoadedModel, config: EngineConfig, num_engines_on_host: int) -> Self:
        # all before the pool, which takes most of what is free
        layers = place_layers(model)
        kv_dtype = model.resolved.kv_dtype
        ops = pick_ops(
            model.spec,
            model.weights,
            block_size=config.block_size_tokens,
            may_compile=config.compiles_kernels,
            kv_dtype=kv_dtype,
        )
        count_blocks = partial(
            num_blocks_for,
            spec=model.spec,
            dtype=kv_dtype,
            device=model.device,
            num_engines_on_host=num_engines_on_host,
            host_bytes=host_memory_bytes(),
        )
        device_blocks = count_blocks(config, free_bytes=free_memory_bytes(model.device))
        is_offloaded = chosen_kv_offload(model, config, ops, device_blocks=device_blocks)
        config = replace(config, kv_offload=is_offloaded)
        config = replace(config, attn_batch_tokens=planned_attn_batch(model, config, ops))
        setup = plan_graphs(
            config, model.spec, model.device, ops=ops, is_streamed=layers.is_streamed
        )
        num_scrap_blocks = int(setup is not None)
        upload = IndexUploads(model.device).upload
        decoder = Decoder(model.spec, model.weights, layers=layers, ops=ops, upload=upload)
        reserved_bytes = 0 if setup is None else setup.needed_bytes(model.spec, model.dtype)
        if model.device.type == "cuda" and config.kv_cache_bytes is None:
            reserved_bytes += step_peak_bytes(
                decoder, config, model.spec, kv_dtype=kv_dtype, device=model.device
            )
            give_back_freed_memory(model.device)
        num_blocks = count_blocks(
            config,
            free_bytes=free_memory_bytes(model.device),
            num_scrap_blocks=num_scrap_blocks,
            reserved_bytes=reserved_bytes,
        )
        cache = allocate_kv_cache(
            model.spec,
            num_blocks=num_blocks + num_scrap_blocks,
            block_size=config.block_size_tokens,
            dtype=kv_dtype,
            device=model.device,
        )
        graphs = None
        if setup is not None:
            graphs = setup.capture(model.spec, model.weights, cache, decoder)
        runner = cls(
            spec=model.spec,
            config=config,
            decoder=decoder,
            cache=cache,
            graphs=graphs,
            num_scrap_blocks=num_scrap_blocks,
            shared_reads=_reads_of(model, config, ops),
            path=model.path,
            dtype=model.dtype,
        )
        runner.log_loaded(model)
        return runner

    def log_loaded(self, model: LoadedModel) -> None:
        """Tell what was loaded, and where its KV lives."""
        host_memory = ""
        if self.tiers.num_host_blocks:
            host_memory = f", and {self.tiers.num_host_blocks} in host memory for what yields"
            if num_rounded := self.rounded_tiers.num_host_blocks:
                host_memory += f", {num_rounded} more in {self.config.host_kv_dtype}"
        elif self.window is not None:
            host_memory = (
                " in host memory (kv_offload), of which attention has "
                f"{self.num_window_blocks} of one layer at a time on the device"
            )
        _logger.info(
            "%s loaded as %s on %s, with %d KV blocks of %d tokens%s%s",
            model.name,
            str(model.dtype).removeprefix("torch."),
            model.device,
            self.num_blocks,
            self.config.block_size_tokens,
            "" if self.config.kv_cache_dtype == "auto" else f" in {self.config.kv_cache_dtype}",
            host_memory,
        )

    @cached_property
    def kv_key(self) -> KVKey | None:
        """What other engines must have in common with this one to take its KV.

        None for a model that came from no folder. The weights are read for it, or samples of them.
        """
        if self._path is None:
            return None
        return KVKey(
            model=model_fingerprint(self._path),
            dtype=str(self._dtype).removeprefix("torch."),
            kv_dtype=str(self.cache.k.dtype).removeprefix("torch."),
            block_size=self.config.block_size_tokens,
        )

    @property
    def weight_counters(self) -> WeightCounters:
        return self.decoder.layers.counters

    @property
    def window_counters(self) -> WindowCounters:
        return WindowCounters() if self.window is None else self.window.counters

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Run one step and return float32 logits [S, V]; writes the KV of the batch's tokens.

        The logits are valid until the next step.
        """
        logits = None if self._graphs is None else self._graphs.run(batch)
        return self.decoder.forward(self._place(batch), self.cache) if logits is None else logits

    def _place(self, batch: ForwardBatch) -> ForwardBatch:
        return on_device(batch, self._uploads, self.device)

    @property
    def graph_counts(self) -> GraphCounts:
        return GraphCounts() if self._graphs is None else self._graphs.counts

    def forward_parts(self, parts: Sequence[StepPart]) -> torch.Tensor:
        """Return the logits [S, V] of parts of a step; a writer comes before its readers."""
        return self.runtime.forward([StepPart(self._place(b), moves) for b, moves in parts])

    @property
    def _pool(self) -> KVCache:
        """Where the blocks of sequences are."""
        return self.cache if self.window is None else self.window.host.kv

    def copy_blocks(self, source_ids: Ints, target_ids: Ints) -> None:
        copy_blocks(self._pool, source_ids, target_ids)

    def read_blocks(self, block_ids: Ints) -> npt.NDArray[Any]:
        return read_blocks(self._pool, block_ids)

    def write_blocks(self, rows: npt.NDArray[Any], block_ids: Ints) -> None:
        write_blocks(self._pool, rows, block_ids)

    def clear_blocks(self, block_ids: npt.NDArray[np.int64]) -> None:
        """Zero these blocks: masked positions are multiplied, so stale NaN would spread."""
        if self.window is not None:
            self.window.host.clear(block_ids)
            return
        for pool in (self.cache.k, self.cache.v):
            pool[:, block_ids] = 0


def _reads_of(model: LoadedModel, config: EngineConfig, ops: Ops) -> SharedReads:
    """Return from when on rows read a shared run together; timed on a CPU alone."""
    if model.device.type != "cpu":
        return UNTIMED
    return timed_reads(
        ops,
        model.spec,
        block_size=config.block_size_tokens,
        dtype=model.dtype,
        kv_dtype=model.resolved.kv_dtype,
    )
