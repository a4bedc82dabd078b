"""Which graphs an engine captures, what they need of the memory, and whether they are right."""

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

# 12 MiB of indices; rows that would need more at once run without a graph
_MAX_ENTRIES = 1 << 20
# of the launches of one graph, a guess: it was not measured
_GRAPH_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphSetup:
    """Graphs that an engine is going to capture once it has its pool."""

    shape: GraphShape
    ops: Ops
    # the options ask for graphs, so that it is an error to have none
    is_required: bool = False

    def needed_bytes(self, spec: ModelSpec, dtype: torch.dtype) -> int:
        """Return the memory that buffers and graphs take; the scrap block is not counted."""
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
        """Capture every size and compare it with the plain forward pass; None where that fails.

        The last block of `cache`, which is unused, is no sequence's; `plain` runs all other steps.
        Raises ConfigError: it fails, and the options ask for graphs.
        """
        try:
            made = StepGraphs(
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
                    f"engine.cuda_graphs: steps cannot be captured: {error_text(error)}"
                ) from error
            _logger.warning("steps run without CUDA graphs: %s", error_text(error))
            return None
        _logger.info(
            "%d CUDA graphs captured, of decodes for up to %d rows and with prompts for up to %d",
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
    """Return what an engine captures; None where it captures nothing.

    Takes options with `kv_offload` decided, and the ops of the engine. Raises ConfigError: the
    options ask for graphs, and there can be none.
    """
    if config.cuda_graphs is False:
        return None
    obstacles = (
        (device.type != "cuda", f"the engine runs on {device}, and only CUDA has them"),
        (is_streamed, "weights pass through buffers (device_weight_bytes, or weights='shared')"),
        (config.kv_offload is True, "the pool is a window (kv_offload)"),
    )
    reason = next((text for holds, text in obstacles if holds), "")
    if not reason and not ops.is_fixed:
        reason = f"they need Triton's kernels: {install_command('gpu')}"
    if reason:
        if config.cuda_graphs is True:
            raise ConfigError(f"engine.cuda_graphs is true, but {reason}")
        if device.type == "cuda":
            _logger.info("steps run without CUDA graphs: %s", reason)
        return None
    return GraphSetup(
        shape=graph_shape(config, spec), ops=ops, is_required=config.cuda_graphs is True
    )


def max_decode_rows(config: EngineConfig) -> int:
    """Return the most rows of a step that decode, drafts included."""
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
