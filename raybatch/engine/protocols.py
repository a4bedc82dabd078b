"""What the step loop needs from a model and a sampler; small enough for fakes."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from raybatch.engine.batch.forward_batch import ForwardBatch
from raybatch.engine.forward.coroutine import PartBatch, StepResult
from raybatch.engine.forward.decode_graphs import GraphCounts
from raybatch.engine.memory.kv_checkpoints import BlockCopier
from raybatch.engine.sampling.sampler import SampleResult
from raybatch.engine.sequences.schedule import LayerMoves
from raybatch.engine.weights.layer_store import WeightCounters
from raybatch.models.config import ModelSpec
from raybatch.records.types import Sampling, TokenIds

Int64s = npt.NDArray[np.int64]


class Runner(Protocol):
    """A model with its KV pool. KV of all rows is written before any row attends, layer by layer.

    So a row may attend to blocks that another row of the same forward batch fills.
    """

    @property
    def spec(self) -> ModelSpec:
        """The model; `vocab_size`, `eos_token_ids` and `max_model_len` are read of it."""

    @property
    def num_blocks(self) -> int:
        """Blocks of the KV pool."""

    @property
    def num_window_blocks(self) -> int:
        """Blocks of the pool in steps whose KV goes to host memory; 0 where there are none."""

    @property
    def tiers(self) -> BlockCopier:
        """Copies between this pool and host memory, which may have no blocks."""

    @property
    def device(self) -> torch.device:
        """Where the index tensors of a forward batch are expected."""

    @property
    def attn_batch_tokens(self) -> int | None:
        """Tokens that attend at once where steps run as coroutines; None for plain steps."""

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Return logits [S, V], one row per `batch.logits_idx`; valid until the next step."""

    @property
    def graph_counts(self) -> GraphCounts:
        """Return what captured steps did; all zero where there are none."""

    def forward_parts(self, parts: Sequence[PartBatch]) -> StepResult:
        """Return the logits of parts of a step that do not read what another one writes."""

    def forward_offloaded(self, batch: ForwardBatch, moves: LayerMoves) -> torch.Tensor:
        """Return the logits of prompts whose KV goes to host memory, layer by layer.

        Blocks of the batch are those of the window; what was in the pool is lost.
        """

    @property
    def weight_counters(self) -> WeightCounters:
        """Weights that were copied to the device."""

    def clear_blocks(self, block_ids: Int64s) -> None:
        """Zero these blocks: masked positions are multiplied, so stale NaN would spread."""


class SamplerLike(Protocol):
    """Picks tokens; keeps per slot what sampling needs to know about a sequence."""

    def refusal(self, sampling: Sampling) -> str:
        """Return why no sequence can run with these options, "" where one can."""

    def add(
        self,
        slot: int,
        sampling: Sampling,
        seed: int,
        sample_idx: int,
        prompt_token_ids: TokenIds,
        generated: TokenIds,
    ) -> None:
        """Take a sequence into an empty slot; `generated` are its tokens so far."""

    def remove(self, slot: int) -> None:
        """Empty a slot."""

    def is_stateless(self, sampling: Sampling) -> bool:
        """Return whether logits, seed and position alone decide each token.

        Rows of such sequences may be sampled several at a time, and again.
        """

    def sample(self, logits: torch.Tensor, slots: Int64s, num_generated: Int64s) -> SampleResult:
        """Pick one token per row of `logits` [S, V]; only stateless slots occur twice."""
