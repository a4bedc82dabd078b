"""Loads a model with its KV pool onto a device and runs steps."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from raybatch.config import EngineConfig
from raybatch.engine.batch.forward_batch import ForwardBatch
from raybatch.engine.forward.coroutine import CombineAtExperts, CoroutineRuntime
from raybatch.engine.forward.decode_graphs import (
    CudaGraphs,
    DecodeGraphs,
    DecodeShape,
    GraphCounts,
    step_sizes,
    working_bytes,
)
from raybatch.engine.forward.decoder import Decoder
from raybatch.engine.forward.ops_choice import pick_ops
from raybatch.engine.loading.loaded_model import load_model, place_layers, planned_attn_batch
from raybatch.engine.memory.kv_cache import (
    KVCache,
    allocate_kv_cache,
    free_memory_bytes,
    host_memory_bytes,
    max_sequence_len,
    num_blocks_for,
    num_host_blocks_for,
)
from raybatch.engine.memory.kv_tiers import KVTiers, LayerWindow
from raybatch.engine.sequences.schedule import LayerMoves
from raybatch.engine.weights.layer_store import WeightCounters
from raybatch.engine.weights.loading import ModelWeights
from raybatch.errors import ConfigError, error_text
from raybatch.kernels.dispatch import Ops, ops_for
from raybatch.models.config import ModelSpec

_logger = logging.getLogger(__name__)

# a step of more rows takes a GPU so long that its launches are made meanwhile
_MAX_ROWS = 512
# 24 MiB of indices; rows that would need more at once run without a graph
_MAX_ENTRIES = 1 << 20
# of the launches of one graph, a guess: it was not measured
_GRAPH_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphSetup:
    """Graphs that an engine is going to capture once it has its pool."""

    shape: DecodeShape
    ops: Ops
    # the options ask for graphs, so that it is an error to have none
    is_required: bool = False

    def needed_bytes(self, spec: ModelSpec, dtype: torch.dtype) -> int:
        """Return the memory that buffers and graphs take; the scrap block is not counted."""
        return (
            self.shape.buffer_bytes(spec.vocab_size)
            + working_bytes(spec, self.shape.max_rows, dtype)
            + len(self.shape.sizes) * _GRAPH_BYTES
        )

    def capture(
        self,
        spec: ModelSpec,
        weights: ModelWeights,
        cache: KVCache,
        plain: Decoder,
        *,
        graphs: CudaGraphs | None = None,
    ) -> DecodeGraphs | None:
        """Capture every size and compare it with the plain forward pass; None where that fails.

        The last block of `cache`, which is unused, is no sequence's; `plain` runs all other steps.
        Raises ConfigError: it fails, and the options ask for graphs.
        """
        try:
            made = DecodeGraphs(
                Decoder(spec, weights, ops=self.ops),
                cache,
                shape=self.shape,
                graphs=graphs or CudaGraphs(cache.k.device),
            )
            made.check(plain)
        # compilers and drivers have exceptions of their own, and the engine can do without graphs
        except Exception as error:
            if self.is_required:
                raise ConfigError(
                    f"engine.cuda_graphs: decode steps cannot be captured: {error_text(error)}"
                ) from error
            _logger.warning("decode steps run without CUDA graphs: %s", error_text(error))
            return None
        sizes = self.shape.sizes
        _logger.info("%d CUDA graphs captured for steps of up to %d rows", len(sizes), sizes[-1])
        return made


def plan_graphs(
    config: EngineConfig,
    spec: ModelSpec,
    device: torch.device,
    *,
    is_streamed: bool = False,
    ops: Ops | None = None,
) -> GraphSetup | None:
    """Return what an engine captures; None where it captures nothing.

    Takes options with `attn_batch_tokens` decided; `ops` of None are those of the device. Raises
    ConfigError: the options ask for graphs, and there can be none.
    """
    if config.cuda_graphs is False:
        return None
    obstacles = (
        (device.type != "cuda", f"the engine runs on {device}, and only CUDA has them"),
        (
            config.attn_batch_tokens not in (None, "auto"),
            "steps run as coroutines (attn_batch_tokens)",
        ),
        (is_streamed, "layers pass through a ring of buffers (device_weight_bytes)"),
        (config.kv_offload, "the pool has two shapes (kv_offload)"),
        (config.kv_cache_dtype != "auto", "Triton's kernels read no KV of 8 bits (kv_cache_dtype)"),
        (
            config.quantization is not None,
            "quantized weights become floats before each product, which a graph would keep",
        ),
    )
    reason = next((text for holds, text in obstacles if holds), "")
    if not reason:
        ops = ops or ops_for(device)  # which loads Triton
        reason = "" if ops.is_fixed else "they need Triton's kernels: pip install raybatch[gpu]"
    if reason or ops is None:
        if config.cuda_graphs:
            raise ConfigError(f"engine.cuda_graphs is true, but {reason}")
        if device.type == "cuda":
            _logger.info("decode steps run without CUDA graphs: %s", reason)
        return None
    return GraphSetup(
        shape=decode_shape(config, spec), ops=ops, is_required=config.cuda_graphs is True
    )


def decode_shape(config: EngineConfig, spec: ModelSpec) -> DecodeShape:
    max_len = max_sequence_len(config, spec.max_model_len)
    max_rows = min(config.max_num_seqs, config.max_batched_tokens, _MAX_ROWS)
    return DecodeShape(
        sizes=step_sizes(max_rows),
        max_row_blocks=-(-max_len // config.block_size_tokens),
        max_entries=_MAX_ENTRIES,
    )


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
        graphs: DecodeGraphs | None = None,
        num_scrap_blocks: int = 0,
    ) -> None:
        self.spec, self.config, self.cache = spec, config, cache
        self.tiers = KVTiers(cache, num_host_blocks_for(config, spec, dtype=cache.k.dtype))
        self.decoder = decoder
        self._graphs = graphs
        self.device = cache.k.device
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
    def load(
        cls, source: str, config: EngineConfig, *, num_engines_on_host: int = 1
    ) -> "ModelRunner":
        """Load the model that `source` names, see `load_model`.

        Where the options leave it open, a plan from measured layers decides how steps run. Raises
        ConfigError: the model or an option cannot be run, as weights that do not fit. Raises
        CapacityError: the memory does not hold a block of KV.
        """
        model = load_model(source, config)
        # both before the pool, which takes most of what is free
        layers = place_layers(model)
        config = replace(config, attn_batch_tokens=planned_attn_batch(model, config))
        setup = plan_graphs(config, model.spec, model.device, is_streamed=layers.is_streamed)
        num_scrap_blocks, kv_dtype = int(setup is not None), model.resolved.kv_dtype
        num_blocks = num_blocks_for(
            config,
            model.spec,
            dtype=kv_dtype,
            device=model.device,
            free_bytes=free_memory_bytes(model.device),
            num_engines_on_host=num_engines_on_host,
            num_scrap_blocks=num_scrap_blocks,
            graph_bytes=0 if setup is None else setup.needed_bytes(model.spec, model.dtype),
            host_bytes=host_memory_bytes(),
        )
        cache = allocate_kv_cache(
            model.spec,
            num_blocks=num_blocks + num_scrap_blocks,
            block_size=config.block_size_tokens,
            dtype=kv_dtype,
            device=model.device,
        )
        ops = pick_ops(
            model.spec,
            model.weights,
            block_size=config.block_size_tokens,
            may_compile=config.compiles_kernels,
            kv_dtype=kv_dtype,
        )
        decoder = Decoder(model.spec, model.weights, layers=layers, ops=ops)
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
        return self.decoder.forward(batch, self.cache) if logits is None else logits

    @property
    def graph_counts(self) -> GraphCounts:
        return GraphCounts() if self._graphs is None else self._graphs.counts

    def forward_parts(self, parts: Sequence[ForwardBatch]) -> torch.Tensor:
        """Return the logits [S, V] of parts of a step that do not read what another one writes."""
        return self.runtime.forward(parts)

    @torch.inference_mode()
    def forward_offloaded(self, batch: ForwardBatch, moves: LayerMoves) -> torch.Tensor:
        """Run one step of prompts whose KV goes to host memory, layer by layer.

        Blocks of the batch are those of the window; the pool's content is lost. Returns float32
        logits [S, V], once host memory has all of the KV.
        """
        window, decoder = self._window, self.decoder
        assert window is not None, "a pool that no prompts pass through"
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
