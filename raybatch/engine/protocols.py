"""What the step loop needs from a model, a sampler and a stop checker; small enough for fakes."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from raybatch.engine.batch.forward_batch import ForwardBatch
from raybatch.engine.forward.decode_graphs import GraphCounts
from raybatch.engine.forward.runtime import PartBatch, StepResult
from raybatch.engine.memory.kv_checkpoints import BlockCopier
from raybatch.engine.sequences.schedule import LayerMoves
from raybatch.engine.weights.layer_store import WeightCounters
from raybatch.records.types import Sampling, TokenIds

Int64s = npt.NDArray[np.int64]
TokenLogprobs = tuple[TokenIds, npt.NDArray[np.float32]]


class ModelLimits(Protocol):
    """What the step loop must know about the model."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a sequence."""

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus output, in tokens."""


class Runner(BlockCopier, Protocol):
    """A model with its KV pool. KV of all rows is written before any row attends, layer by layer.

    So a row may attend to blocks that another row of the same forward batch fills.
    """

    @property
    def spec(self) -> ModelLimits:
        """Limits of the model."""

    @property
    def num_blocks(self) -> int:
        """Blocks of the KV pool."""

    @property
    def num_window_blocks(self) -> int:
        """Blocks of the pool in steps whose KV goes to host memory; 0 where there are none."""

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

    def copy_bytes_per_s(self) -> float:
        """Measure copies between both pools while no sequence is there."""

    def clear_blocks(self, block_ids: Int64s) -> None:
        """Zero these blocks: masked positions are multiplied, so stale NaN would spread."""


class SampleResultLike(Protocol):
    """Tokens picked in one step."""

    @property
    def token_ids(self) -> Int64s:
        """One token per row, int64 [S]."""

    @property
    def is_finite(self) -> npt.NDArray[np.bool_]:
        """False for a row whose logits allow no choice, bool [S]."""

    @property
    def logprobs(self) -> Sequence[TokenLogprobs | None] | None:
        """Per row None or a pair (token ids, log probabilities); None where no row asked."""


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

    def sample(
        self, logits: torch.Tensor, slots: Int64s, num_generated: Int64s
    ) -> SampleResultLike:
        """Pick one token per row of `logits` [S, V]; only stateless slots occur twice."""


class StopCheckerLike(Protocol):
    """Finds stop strings in the text of sequences that have some."""

    def add(self, slot: int, sampling: Sampling) -> None:
        """Take a sequence into an empty slot."""

    def remove(self, slot: int) -> None:
        """Empty a slot."""

    def check(self, slot: int, token_id: int) -> str | None:
        """Append a token and return the stop string that it completed, if any."""
