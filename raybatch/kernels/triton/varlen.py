"""Chunks of prompts over themselves, by the variable-length attention of torch (FlashAttention).

It has no pages of fewer than 256 tokens, so cached runs stay with the kernels: what a chunk alone
reads is a run like others, merged by log-sum-exp. A chunk is cut into the pieces that are items of
the kernels, each a sequence whose keys start where its chunk does. So no shape depends on lengths,
and a graph can repeat it.
"""

from typing import NamedTuple

import torch
from torch.nn.attention.varlen import AuxRequest, varlen_attn_out

from raybatch.kernels.step_index import Item, Parts, StepSize


class Pieces(NamedTuple):
    """Chunks as sequences of `varlen_attn`, int32 tensors of the device.

    Args:
        query_starts: [I + 1], the row where each piece starts, and the end of the last one; a
            padded one is empty and stands there.
        key_starts: [I + 1], the row where its chunk starts.
        num_keys: [I], rows from there to the end of the piece: its last query sees all of them.
        is_row: bool [T, 1], rows of chunks.
    """

    query_starts: torch.Tensor
    key_starts: torch.Tensor
    num_keys: torch.Tensor
    is_row: torch.Tensor


def pieces_of(size: StepSize, parts: Parts[torch.Tensor]) -> Pieces:
    """Turn the items of chunks, which follow each other, into pieces; nothing is read back.

    Example: chunks of 130 and 2 rows behind 3 decode rows have query_starts [3, 131, 133, 135],
    key_starts [3, 3, 133, 135] and num_keys [128, 130, 2].
    """
    items = parts.chunks.view(-1, len(Item._fields))
    first_query, num_queries, *_, chunk_start = items.unbind(1)
    stops = first_query + num_queries
    end = stops.amax(0, keepdim=True)
    # padded items are zeros
    is_piece = num_queries > 0
    query_starts, key_starts = (
        torch.cat((torch.where(is_piece, x, end), end)) for x in (first_query, chunk_start)
    )
    rows = torch.arange(size.rows, device=stops.device).unsqueeze(1)
    return Pieces(
        query_starts=query_starts,
        key_starts=key_starts,
        num_keys=stops - chunk_start,
        is_row=(rows >= query_starts[0]) & (rows < end),
    )


def attend_pieces_into(
    output: torch.Tensor,  # [T, H, D], contiguous, overwritten in rows of chunks
    lse: torch.Tensor,  # float32 [T, H], contiguous, overwritten in rows of chunks
    q: torch.Tensor,  # [T, H, D], last dimension contiguous
    k: torch.Tensor,  # [T, G, D], last dimension contiguous
    v: torch.Tensor,  # [T, G, D], last dimension contiguous
    pieces: Pieces,
    size: StepSize,
    window: int | None,
) -> None:
    """Compute chunks over themselves; what else their rows see is merged afterwards."""
    _, sums = varlen_attn_out(
        output,
        q,
        k,
        v,
        pieces.query_starts,
        pieces.key_starts,
        size.chunk_queries,
        size.rows,
        return_aux=AuxRequest(lse=True),
        # how many positions before its own a token sees
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=True,
        seqused_k=pieces.num_keys,
    )
    if size.run_items:
        # [H, T], natural log; rows of no chunk are not written
        torch.where(pieces.is_row, sums.t(), lse, out=lse)
