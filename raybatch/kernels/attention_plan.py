"""What attention has to do in one step, as index tensors of the host; built once, for all layers.

Wherever the model is, these tensors are on the CPU: each form of the ops makes of them what its
layers read on the device.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillPart:
    """Chunks of prompts in this step: causal attention of each chunk over its own tokens.

    Args:
        starts: first token (row of the forward batch) of each chunk, ascending.
        lens: tokens of each chunk, all at least 1.
    """

    starts: tuple[int, ...]
    lens: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextPart:
    """Tokens that all attend to the same run of cached positions, in full (no causal mask).

    It is how a chunk sees the part of its own prompt computed before this step, how the members
    of a prefix group see their shared prefix, and how decode tokens see shared blocks.

    Args:
        query_idx: int64 [Q], rows of the forward batch.
        block_ids: int64 [P], cache blocks in order of position.
        num_tokens: valid positions, (P - 1) * B < num_tokens <= P * B.
        first_position: position in the sequence of the first cached token; read only by layers
            with a sliding window.
        chunk: place in the `PrefillPart` of the one chunk whose rows these are; None where others
            read the run as well.
    """

    query_idx: torch.Tensor
    block_ids: torch.Tensor
    num_tokens: int
    first_position: int = 0
    chunk: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodePart:
    """Decode tokens over cache blocks that no context covers ("page-centric").

    Every (block, owner) pair occurs once; the blocks hold the token of this step as well. A row
    without entries gets an empty result: where contexts cover all that it sees, its own token
    included. So there may be no entries at all.

    Args:
        block_ids: int64 [P], ascending, so that memory is walked in order.
        owners: int64 [P], row of the forward batch (below num_decode) that attends to the block.
        num_valid: int64 [P], valid positions of the block, 1..B.
        is_contiguous: block_ids is exactly a range, so the pool can be sliced without a gather.
        first_positions: int64 [P], position in the sequence of the block's first slot; needed
            only by models with a sliding window.
        runs: contexts of decode rows alone, where the form reads them itself (`DecodeForm`).
    """

    block_ids: torch.Tensor
    owners: torch.Tensor
    num_valid: torch.Tensor
    is_contiguous: bool
    first_positions: torch.Tensor | None = None
    runs: tuple[ContextPart, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionPlan:
    """The parts of one step; a token's output merges all parts it occurs in by log-sum-exp.

    Rows 0..num_decode-1 of the forward batch are decode tokens, one per sequence and draft; the
    rest are prompt chunks, one after another. Each row occurs in `decode` or in `prefill`, and in
    any number of `contexts` (which never overlap in positions).
    """

    num_decode: int
    decode: DecodePart | None
    prefill: PrefillPart | None
    contexts: tuple[ContextPart, ...]

    def to(self, device: torch.device) -> "AttentionPlan":
        """Return the plan with its tensors on a device, for references that run there."""
        if device.type == "cpu":
            return self
        decode = self.decode
        if decode is not None:
            first = decode.first_positions
            decode = replace(
                decode,
                block_ids=decode.block_ids.to(device),
                owners=decode.owners.to(device),
                num_valid=decode.num_valid.to(device),
                first_positions=None if first is None else first.to(device),
            )
        contexts = (
            replace(part, query_idx=part.query_idx.to(device), block_ids=part.block_ids.to(device))
            for part in self.contexts
        )
        return replace(self, decode=decode, contexts=tuple(contexts))


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeForm:
    """Two functions that belong together, as `plan_walk` and `attend_decode` do.

    `reads_runs`: contexts that decode rows alone read are handed to `plan` as `DecodePart.runs`.
    """

    plan: Callable[..., Any]
    attend: Callable[..., Any]
    reads_runs: bool = False
