"""Loads a model with its KV pool onto a device and runs steps."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

from raybatch.config import EngineConfig
from raybatch.engine.batch.forward_batch import ForwardBatch, on_device
from raybatch.engine.forward.coroutine import CombineAtExperts, CoroutineRuntime
from raybatch.engine.forward.decoder import Decoder
from raybatch.engine.forward.ops_choice import pick_ops
from raybatch.engine.forward.step_graphs import GraphCounts, StepGraphs
from raybatch.engine.loading.graph_setup import plan_graphs
from raybatch.engine.loading.loaded_model import (
    LoadedModel,
    give_back_freed_memory,
    load_model,
    place_layers,
    planned_attn_batch,
)
from raybatch.engine.loading.peak_memory import step_peak_bytes
from raybatch.engine.memory.kv_cache import (
    KVCache,
    allocate_kv_cache,
    free_memory_bytes,
    host_memory_bytes,
    num_blocks_for,
    num_host_blocks_for,
)
from raybatch.engine.memory.kv_tiers import KVTiers, LayerWindow
from raybatch.engine.memory.pinned import IndexUploads, current_device
from raybatch.engine.profile.shared_read_times import timed_reads
from raybatch.engine.sequences.schedule import LayerMoves
from raybatch.engine.weights.layer_store import WeightCounters
from raybatch.models.config import ModelSpec
from raybatch.policy.shared_reads import UNTIMED, SharedReads

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
        shared_reads: SharedReads = UNTIMED,
    ) -> None:
        self.spec, self.config, self.cache = spec, config, cache
        self.tiers = KVTiers(cache, num_host_blocks_for(config, spec, dtype=cache.k.dtype))
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
        self.runtime = CoroutineRuntime(decoder, cache, policy)
        self._window = LayerWindow(cache, self.tiers) if config.kv_offload else None
        # blocks of the pool in steps whose KV goes to host memory
        self.num_window_blocks = self._window.num_blocks if self._window else 0

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
        # both before the pool, which takes most of what is free
        layers = place_layers(model)
        config = replace(config, attn_batch_tokens=planned_attn_batch(model, config))
        kv_dtype = model.resolved.kv_dtype
        ops = pick_ops(
            model.spec,
            model.weights,
            block_size=config.block_size_tokens,
            may_compile=config.compiles_kernels,
            kv_dtype=kv_dtype,
        )
        setup = plan_graphs(
            config, model.spec, model.device, ops=ops, is_streamed=layers.is_streamed
        )
        num_scrap_blocks = int(setup is not None)
        reads = UNTIMED
        if model.device.type == "cpu":
            reads = timed_reads(
                ops,
                model.spec,
                block_size=config.block_size_tokens,
                dtype=model.dtype,
                kv_dtype=kv_dtype,
            )
        upload = IndexUploads(model.device).upload
        decoder = Decoder(model.spec, model.weights, layers=layers, ops=ops, upload=upload)
        reserved_bytes = 0 if setup is None else setup.needed_bytes(model.spec, model.dtype)
        if model.device.type == "cuda" and config.kv_cache_bytes is None:
            reserved_bytes += step_peak_bytes(
                decoder, config, model.spec, kv_dtype=kv_dtype, device=model.device
            )
            give_back_freed_memory(model.device)
        num_blocks = num_blocks_for(
            config,
            model.spec,
            dtype=kv_dtype,
            device=model.device,
            free_bytes=free_memory_bytes(model.device),
            num_engines_on_host=num_engines_on_host,
            num_scrap_blocks=num_scrap_blocks,
            reserved_bytes=reserved_bytes,
            host_bytes=host_memory_bytes(),
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
            shared_reads=reads,
        )
        host_memory = ""
        if runner.tiers.num_host_blocks:
            role = "where all KV lives (kv_offload)" if config.kv_offload else "for what yields"
            host_memory = f", and {runner.tiers.num_host_blocks} in host memory, {role}"
        _logger.info(
            "%s loaded as %s on %s, with %d KV blocks of %d tokens%s%s",
            model.name,
            str(model.dtype).removeprefix("torch."),
            model.device,
            runner.num_blocks,
            config.block_size_tokens,
            "" if config.kv_cache_dtype == "auto" else f" in {config.kv_cache_dtype}",
            host_memory,
        )
        return runner

    @property
    def weight_counters(self) -> WeightCounters:
        return self.decoder.layers.counters

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

    def forward_parts(self, parts: Sequence[ForwardBatch]) -> torch.Tensor:
        """Return the logits [S, V] of parts of a step that do not read what another one writes."""
        return self.runtime.forward([self._place(part) for part in parts])

    @torch.inference_mode()
    def forward_offloaded(self, batch: ForwardBatch, moves: LayerMoves) -> torch.Tensor:
        """Run one step of prompts whose KV goes to host memory, layer by layer.

        Blocks of the batch are those of the window; the pool's content is lost. Returns float32
        logits [S, V], once host memory has all of the KV.
        """
        window, decoder = self._window, self.decoder
        assert window is not None, "a pool that no prompts pass through"
        batch = self._place(batch)
        prepared = decoder.prepare(batch, window.cache(0))
        x = decoder.embed(batch)
        for layer_idx in range(decoder.num_layers):
            window.load(layer_idx, moves)
            x = decoder.attention(layer_idx, x, prepared, window.cache(layer_idx))
            window.save(layer_idx, moves)
            decoder.ffn_(layer_idx, x)
        logits = decoder.logits(x)
        window.finish()
        return logits

    def clear_blocks(self, block_ids: npt.NDArray[np.int64]) -> None:
        """Zero these blocks: masked positions are multiplied, so stale NaN would spread."""
        for pool in (self.cache.k, self.cache.v):
            pool[:, block_ids] = 0
