"""The attention work of one step as host index tensors; built once for all layers.

These tensors are always on the CPU; each implementation of the ops converts them for its device.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillPart:
    """Prompt chunks of this step: causal attention of each chunk over its own tokens.

    Args:
        starts: first token (row of the forward batch) of each chunk, ascending.
        lens: tokens of each chunk, all at least 1.
    """

    starts: tuple[int, ...]
    lens: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixSegment:
    """A run of consecutive cached positions, and the tokens that attend to all of them (no mask).

    Used for the earlier part of a chunk's own prompt, for the shared prefix of a group, and for
    blocks shared by decode tokens (cascade attention).

    Args:
        query_idx: int64 [Q], rows of the forward batch.
        block_ids: int64 [P], cache blocks in order of position.
        num_tokens: valid positions, (P - 1) * B < num_tokens <= P * B.
        first_position: position in the sequence of the first cached token; used only by layers
            with a sliding window.
        chunk: index in the `PrefillPart` of the only chunk that reads the segment; None if there
            are other readers.
    """

    query_idx: torch.Tensor
    block_ids: torch.Tensor
    num_tokens: int
    first_position: int = 0
    chunk: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodePart:
    """Attention of decode tokens over the cache blocks that are in no segment.

    Each entry is a pair of a block and an owner, a decode row that attends to it; every pair occurs
    once. The blocks include the token of this step. A row without entries gets an empty result:
    segments cover everything it attends to, including its own token. There may be no entries.

    Args:
        block_ids: int64 [P], ascending, so that memory is read in order.
        owners: int64 [P], row of the forward batch (below num_decode) that attends to the block.
        num_valid: int64 [P], valid positions of the block, 1..B.
        is_contiguous: block_ids is exactly a range, so the pool can be sliced without a gather.
        first_positions: int64 [P], position in the sequence of the block's first slot; needed
            only by models with a sliding window.
        runs: segments that only decode rows read, if the implementation supports them
            (`DecodeForm`).
    """

    block_ids: torch.Tensor
    owners: torch.Tensor
    num_valid: torch.Tensor
    is_contiguous: bool
    first_positions: torch.Tensor | None = None
    runs: tuple[PrefixSegment, ...] = ()

    @classmethod
    def of_rows(
        cls,
        block_ids: torch.Tensor,  # int64 [S, X], ascending
        num_valid: torch.Tensor,  # int64 [S], valid positions of the last block of each row
        *,
        block_size: int,
        first_position: int = 0,
    ) -> "DecodePart":
        """Return the part in which each of S rows reads X consecutive blocks of its sequence.

        `first_position` is that of the first of them, in all sequences.
        """
        blocks, num_blocks = block_ids.flatten(), block_ids.shape[1]
        valid = torch.full_like(block_ids, block_size)
        valid[:, -1] = num_valid
        places = torch.arange(len(blocks))
        return cls(
            block_ids=blocks,
            owners=places // num_blocks,
            num_valid=valid.flatten(),
            is_contiguous=bool((blocks.diff() == 1).all()),
            first_positions=first_position + places % num_blocks * block_size,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionPlan:
    """The parts of attention in one step; the results of a token are merged by log-sum-exp.

    Rows 0..num_decode-1 of the forward batch are decode tokens, one per sequence and draft; the
    rest are consecutive prompt chunks. Each row is in `decode` or in `prefill`, and in any number
    of `segments`, which do not overlap in positions.
    """

    num_decode: int
    decode: DecodePart | None
    prefill: PrefillPart | None
    segments: tuple[PrefixSegment, ...]

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
        segments = (
            replace(part, query_idx=part.query_idx.to(device), block_ids=part.block_ids.to(device))
            for part in self.segments
        )
        return replace(self, decode=decode, segments=tuple(segments))


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeForm:
    """An implementation of decode attention: functions `plan` and `attend`.

    They have the signatures of `plan_walk` and `attend_decode`. `reads_segments`: segments that
    only decode rows read are passed to `plan` as `DecodePart.runs`.
    """

    plan: Callable[..., Any]
    attend: Callable[..., Any]
    reads_segments: bool = False
