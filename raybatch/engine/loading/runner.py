"""Makes the KV pool of a loaded model and runs its forward passes."""

import logging
import math
from collections.abc import Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt
import torch

from raybatch.config import EngineConfig
from raybatch.engine.batch.forward_batch import ForwardBatch, on_device
from raybatch.engine.forward.coroutine import CoroutineRuntime, StepPart
from raybatch.engine.forward.decoder import Decoder
from raybatch.engine.forward.step_graphs import GraphCounts, StepGraphs, plan_graphs
from raybatch.engine.loading.loaded_model import LoadedModel, give_back_freed_memory
from raybatch.engine.loading.peak_memory import step_peak_bytes
from raybatch.engine.loading.prepared import PreparedModel
from raybatch.engine.memory.kv_cache import (
    KVCache,
    KVTiers,
    allocate_kv_cache,
    copy_blocks,
    kv_bytes_per_token,
    pick_kv_dtype,
    read_blocks,
    write_blocks,
)
from raybatch.engine.memory.kv_window import HostLayers, KVWindow, WindowCounters
from raybatch.engine.memory.pinned import IndexUploads, current_device
from raybatch.engine.weights.weight_buffers import WeightCounters
from raybatch.models.checkpoint import model_fingerprint
from raybatch.models.config import ModelSpec
from raybatch.policy.choose_engine import EngineChoice
from raybatch.policy.cost.cascade import UNTIMED, CascadeThresholds
from raybatch.policy.cost.layers import full_step_tokens
from raybatch.policy.memory_budget import num_host_blocks_for
from raybatch.records.arrays import Ints
from raybatch.records.sequence_kv import KVKey

_logger = logging.getLogger(__name__)
# computed once for all runners of a model
_fingerprint = cache(model_fingerprint)


class Passes(Protocol):
    """Runs forward passes instead of a runner, while it is the runner's `passes`."""

    @property
    def most_step_tokens(self) -> int | None:
        """Upper limit of tokens in the next step; None for no further limit."""

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Run a host batch as `ModelRunner.forward` does."""


class Blocks(Protocol):
    """Stores the KV of sequences by block, instead of a runner's pool."""

    def copy_blocks(self, source_ids: Ints, target_ids: Ints) -> None: ...

    def read_blocks(self, block_ids: Ints) -> npt.NDArray[Any]: ...

    def write_blocks(self, rows: npt.NDArray[Any], block_ids: Ints) -> None: ...

    def clear_blocks(self, block_ids: Ints) -> None: ...


class ModelRunner:
    """Runs forward passes of a model on its KV pool; used by one thread.

    In each layer the KV of all rows is written before any row attends, so a row may attend to
    blocks that another row of the same batch fills. Scrap blocks, the last of the pool, belong to
    no sequence. An extension may set `passes` to run the passes, and `blocks` to replace the pool
    with an equal number of blocks.
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
        cascade: CascadeThresholds = UNTIMED,
        weight_bytes: int | None = None,
    ) -> None:
        self.spec, self.config, self.cache = spec, config, cache
        self._path, self._dtype, self._weight_bytes = path, dtype, weight_bytes
        self.decoder, self.cascade = decoder, cascade
        self._graphs = graphs
        self.passes: Passes | None = None
        self.blocks: Blocks | None = None
        self.device = cache.k.device
        self._uploads = IndexUploads(self.device)
        self.num_blocks = int(cache.k.shape[1]) - num_scrap_blocks
        kv_dtype = cache.k.dtype
        rounded_dtype = pick_kv_dtype(config.host_kv_dtype, kv_dtype)
        num_host_blocks, num_rounded_blocks = num_host_blocks_for(
            config,
            token_bytes=kv_bytes_per_token(spec, kv_dtype),
            rounded_bytes=kv_bytes_per_token(spec, rounded_dtype),
        )
        self.window: KVWindow | None = None
        self.runtime: CoroutineRuntime | None = None
        # blocks of one window buffer if KV is in host memory; 0 if it is on the device
        self.num_window_blocks = 0
        if config.kv_offload is True:
            self.window = KVWindow(cache, HostLayers(cache, num_host_blocks))
            self.runtime = CoroutineRuntime(decoder, self.window)
            self.num_window_blocks = self.window.num_blocks
            self.num_blocks, num_host_blocks = num_host_blocks, 0
        # swap space for preempted KV: exact, and in 8 bits
        self.tiers = KVTiers(cache, num_host_blocks)
        self.rounded_tiers = KVTiers(cache, num_rounded_blocks, dtype=rounded_dtype)

    @classmethod
    def load(cls, source: str, config: EngineConfig, *, num_engines_on_host: int = 1) -> Self:
        """Load a model and make its pools for rows of usual length, see `PreparedModel.load`.

        "auto" options are chosen from measured layer times; the log gives the reason.
        """
        prepared = PreparedModel.load(source, config, num_engines_on_host=num_engines_on_host)
        return cls.of(prepared, prepared.choose(prepared.usual_rows()))

    @classmethod
    def of(cls, prepared: PreparedModel, choice: EngineChoice | None) -> Self:
        """Return a runner of a prepared model for the chosen execution mode; makes its KV pools."""
        with current_device(prepared.model.device):
            runner = cls._of(prepared, prepared.chosen(choice))
        runner.log_loaded(prepared.model)
        return runner

    @classmethod
    def _of(cls, prepared: PreparedModel, config: EngineConfig) -> Self:
        model, decoder = prepared.model, prepared.decoder
        kv_dtype = model.resolved.kv_dtype
        setup = plan_graphs(
            config,
            model.spec,
            model.device,
            ops=prepared.ops,
            is_streamed=decoder.layers.is_streamed,
        )
        num_scrap_blocks = int(setup is not None)
        reserved_bytes = 0 if setup is None else setup.needed_bytes(model.spec, model.dtype)
        if model.device.type == "cuda" and config.kv_cache_bytes is None:
            reserved_bytes += step_peak_bytes(
                decoder, config, model.spec, kv_dtype=kv_dtype, device=model.device
            )
            give_back_freed_memory(model.device)
        num_blocks = prepared.count_blocks(
            config, num_scrap_blocks=num_scrap_blocks, reserved_bytes=reserved_bytes
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
        return cls(
            spec=model.spec,
            config=config,
            decoder=decoder,
            cache=cache,
            graphs=graphs,
            num_scrap_blocks=num_scrap_blocks,
            cascade=prepared.cascade(),
            path=model.path,
            dtype=model.dtype,
            weight_bytes=None if decoder.layers.is_streamed else model.sizes.total_bytes,
        )

    def log_loaded(self, model: LoadedModel) -> None:
        """Log the loaded model and the location of its KV."""
        host_memory = ""
        if self.tiers.num_host_blocks:
            host_memory = f", {self.tiers.num_host_blocks} swap blocks in host memory"
            if num_rounded := self.rounded_tiers.num_host_blocks:
                host_memory += f", {num_rounded} more in {self.config.host_kv_dtype}"
        elif self.window is not None:
            host_memory = (
                " in host memory (kv_offload), and a device window of "
                f"{self.num_window_blocks} blocks of one layer"
            )
        _logger.info(
            "loaded %s as %s on %s, with %d KV blocks of %d tokens%s%s",
            model.name,
            str(model.dtype).removeprefix("torch."),
            model.device,
            self.num_blocks,
            self.config.block_size_tokens,
            "" if self.config.kv_cache_dtype == "auto" else f" in {self.config.kv_cache_dtype}",
            host_memory,
        )

    @property
    def full_step_tokens(self) -> float:
        """Tokens at which a step becomes compute bound; infinite if weight copies dominate."""
        if self._weight_bytes is None or self.window is not None:
            return math.inf
        moe, num_tokens = self.spec.moe, self.num_blocks * self.config.block_size_tokens
        return full_step_tokens(
            weight_bytes=self._weight_bytes,
            kv_bytes=kv_bytes_per_token(self.spec, self.cache.k.dtype) * num_tokens,
            used_fraction=1.0 if moe is None else moe.top_k / moe.num_experts,
        )

    @cached_property
    def kv_key(self) -> KVKey | None:
        """Key of this engine's KV: another engine accepts it only if its own key is equal.

        It includes a fingerprint of the weights; None for a model without a folder.
        """
        if self._path is None:
            return None
        return KVKey(
            model=_fingerprint(self._path),
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

    @property
    def most_step_tokens(self) -> int | None:
        """Return the upper limit of tokens in the next step; None for no further limit."""
        return None if self.passes is None else self.passes.most_step_tokens

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Run one step and return float32 logits [S, V]; writes the KV of the batch's tokens.

        The logits are valid until the next step.
        """
        if self.passes is not None:
            return self.passes.forward(batch)
        logits = None if self._graphs is None else self._graphs.run(batch)
        return self.decoder.forward(self.place(batch), self.cache) if logits is None else logits

    def place(self, batch: ForwardBatch) -> ForwardBatch:
        """Copy a host batch to the device."""
        return on_device(batch, self._uploads, self.device)

    @property
    def graph_counts(self) -> GraphCounts:
        return GraphCounts() if self._graphs is None else self._graphs.counts

    def forward_parts(self, parts: Sequence[StepPart]) -> torch.Tensor:
        """Return the logits [S, V] of the parts of a step; only if KV is in host memory.

        A part that reads another's new KV must come after it.
        """
        assert self.runtime is not None, "KV is on the device: the step has no parts"
        return self.runtime.forward([StepPart(self.place(b), moves) for b, moves in parts])

    @property
    def _pool(self) -> KVCache:
        """Pool that holds the blocks of sequences."""
        return self.cache if self.window is None else self.window.host.kv

    def copy_blocks(self, source_ids: Ints, target_ids: Ints) -> None:
        if self.blocks is not None:
            self.blocks.copy_blocks(source_ids, target_ids)
            return
        copy_blocks(self._pool, source_ids, target_ids)

    def read_blocks(self, block_ids: Ints) -> npt.NDArray[Any]:
        if self.blocks is not None:
            return self.blocks.read_blocks(block_ids)
        return read_blocks(self._pool, block_ids)

    def write_blocks(self, rows: npt.NDArray[Any], block_ids: Ints) -> None:
        if self.blocks is not None:
            self.blocks.write_blocks(rows, block_ids)
            return
        write_blocks(self._pool, rows, block_ids)

    def clear_blocks(self, block_ids: npt.NDArray[np.int64]) -> None:
        """Zero these blocks: masked positions are multiplied, so a stale NaN would spread."""
        if self.blocks is not None:
            self.blocks.clear_blocks(block_ids)
            return
        if self.window is not None:
            self.window.host.clear(block_ids)
            return
        for pool in (self.cache.k, self.cache.v):
            pool[:, block_ids] = 0
