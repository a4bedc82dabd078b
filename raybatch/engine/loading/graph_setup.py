"""Which graphs an engine captures, what they need of the memory, and whether they are right."""

import logging
from dataclasses import dataclass

import torch

from raybatch.config import EngineConfig
from raybatch.engine.forward.decode_graphs import (
    CudaGraphs,
    DecodeGraphs,
    DecodeShape,
    step_sizes,
    working_bytes,
)
from raybatch.engine.forward.decoder import Decoder
from raybatch.engine.memory.kv_cache import KVCache, max_sequence_len
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
