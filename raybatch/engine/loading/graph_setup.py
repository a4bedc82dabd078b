"""Plans, captures and verifies the CUDA graphs of an engine."""

import logging
from dataclasses import dataclass

import torch

from raybatch.config import EngineConfig
from raybatch.engine.forward.decoder import Decoder
from raybatch.engine.forward.graph_sizes import GraphShape
from raybatch.engine.forward.step_graphs import CudaGraphs, StepBuffers, StepGraphs, working_bytes
from raybatch.engine.memory.kv_cache import KVCache, max_sequence_len
from raybatch.engine.weights.records import ModelWeights
from raybatch.errors import ConfigError, error_text
from raybatch.installation import install_command
from raybatch.kernels.dispatch import Ops
from raybatch.models.config import ModelSpec

_logger = logging.getLogger(__name__)

# 12 MiB of indices; steps that need more run eagerly
_MAX_ENTRIES = 1 << 20
# memory of one graph's launches; a guess, not measured
_GRAPH_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphSetup:
    """The graphs that an engine captures once its KV pool exists."""

    shape: GraphShape
    ops: Ops
    # the options require graphs, so a failed capture is an error
    is_required: bool = False

    def needed_bytes(self, spec: ModelSpec, dtype: torch.dtype) -> int:
        """Return the device bytes that buffers and graphs need, without the scrap block."""
        sizes = self.shape.sizes().all()
        return (
            StepBuffers.bytes_of(sizes, spec, dtype)
            + max(working_bytes(spec, size, dtype) for size in sizes)
            + len(sizes) * _GRAPH_BYTES
        )

    def capture(
        self,
        spec: ModelSpec,
        weights: ModelWeights,
        cache: KVCache,
        plain: Decoder,
        *,
        graphs: CudaGraphs | None = None,
    ) -> StepGraphs | None:
        """Capture a graph of every size and compare it with an eager pass; None if that fails.

        The last block of `cache` must belong to no sequence. `plain` is the decoder of eager
        passes. Raises ConfigError: it fails, and the options require graphs.
        """
        try:
            made = StepGraphs(
                Decoder(spec, weights, ops=self.ops),
                cache,
                shape=self.shape,
                graphs=graphs or CudaGraphs(cache.k.device),
            )
            made.check(plain)
        # compilers and drivers raise any exception, and the engine works without graphs
        except Exception as error:
            if self.is_required:
                raise ConfigError(
                    f"engine.cuda_graphs=true, but capturing failed: {error_text(error)}; set it "
                    'to "auto" to run without graphs'
                ) from error
            _logger.warning("running without CUDA graphs: %s", error_text(error))
            return None
        _logger.info(
            "captured %d CUDA graphs: up to %d rows for decodes, up to %d with prompts",
            made.counts.num_captured,
            self.shape.decode[-1],
            self.shape.mixed[-1] if self.shape.mixed else 0,
        )
        return made


def plan_graphs(
    config: EngineConfig,
    spec: ModelSpec,
    device: torch.device,
    *,
    ops: Ops,
    is_streamed: bool = False,
) -> GraphSetup | None:
    """Return the graphs that an engine captures; None if it captures none.

    `kv_offload` must be resolved. Raises ConfigError: the options require graphs, and they are not
    possible.
    """
    if config.cuda_graphs is False:
        return None
    obstacles = (
        (device.type != "cuda", f"the engine runs on {device}, and they need CUDA"),
        (is_streamed, "weights are streamed (device_weight_bytes, or weights='shared')"),
        (config.kv_offload is True, "KV is in host memory (kv_offload)"),
    )
    reason = next((text for holds, text in obstacles if holds), "")
    if not reason and not ops.is_fixed:
        reason = f"they need Triton's kernels: {install_command('gpu')}"
    if reason:
        if config.cuda_graphs is True:
            raise ConfigError(
                f'engine.cuda_graphs is true, but {reason}; set it to "auto" to run without graphs'
            )
        if device.type == "cuda":
            _logger.info("running without CUDA graphs: %s", reason)
        return None
    return GraphSetup(
        shape=graph_shape(config, spec), ops=ops, is_required=config.cuda_graphs is True
    )


def max_decode_rows(config: EngineConfig) -> int:
    """Return the most decode rows of a step, including drafts."""
    return min(config.max_num_seqs * (1 + config.num_drafts), config.token_budget)


def graph_shape(config: EngineConfig, spec: ModelSpec) -> GraphShape:
    max_len = max_sequence_len(config, spec.max_model_len)
    return GraphShape.within(
        max_rows=max_decode_rows(config),
        max_tokens=config.token_budget,
        max_row_blocks=-(-max_len // config.block_size_tokens),
        max_entries=_MAX_ENTRIES,
        block_size=config.block_size_tokens,
        num_kv_heads=spec.num_kv_heads,
    )
