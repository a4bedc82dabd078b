"""The input of one forward pass, passed as an argument; there is no global context."""

from dataclasses import dataclass

import torch

from raybatch.kernels.attention_plan import AttentionPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardBatch:
    """Packed tokens of all sequences in one step: decode tokens with their drafts, then chunks.

    Args:
        token_ids: int64 [T].
        positions: int64 [T], position in the sequence, from 0.
        slot_mapping: int64 [T], where the token's KV goes: block_id * B + offset.
        logits_idx: int64 [S], rows whose logits are needed (decode rows, last rows of prompts),
            ascending.
        attention: what each row attends to.
        logits_attention: the same for the rows of `logits_idx` alone, every one a decode row over
            all the KV of its sequence; of the last layer, nothing else is needed. None where all
            rows need logits or the saving is not wanted.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    logits_idx: torch.Tensor
    attention: AttentionPlan
    logits_attention: AttentionPlan | None = None
