"""Attention within prompt chunks by torch's variable-length attention (FlashAttention).

It does not support pages of fewer than 256 tokens, so kernels compute all cached segments, merged
by log-sum-exp. A chunk is cut into the same pieces as the items of the kernels, each a sequence
whose keys start at its chunk. So no shape depends on lengths, and a CUDA graph can replay it.
"""

from typing import NamedTuple

import torch
from torch.nn.attention.varlen import AuxRequest, varlen_attn_out

from raybatch.kernels.step_index import Item, Parts, StepSize


class Pieces(NamedTuple):
    """Prompt chunks, cut into pieces, as sequences for torch's `varlen_attn`; on the device.

    All are int32 except `is_row`; I is the number of pieces.

    Args:
        query_starts: [I + 1], start row of each piece, then the end of the last one; padded pieces
            start at that end and are empty.
        key_starts: [I + 1], start row of the chunk of each piece.
        num_keys: [I], rows from there to the end of the piece, which its last query attends to.
        is_row: bool [T, 1], whether a row belongs to a chunk.
    """

    query_starts: torch.Tensor
    key_starts: torch.Tensor
    num_keys: torch.Tensor
    is_row: torch.Tensor


def pieces_of(size: StepSize, parts: Parts[torch.Tensor]) -> Pieces:
    """Return the items of prompt chunks as pieces, one per item, without host sync.

    Example: chunks of 130 and 2 rows after 3 decode rows have query_starts [3, 131, 133, 135],
    key_starts [3, 3, 133, 135] and num_keys [128, 130, 2].
    """
    items = parts.chunks.view(-1, len(Item._fields))
    first_query, num_queries, *_, chunk_start = items.unbind(1)
    stops = first_query + num_queries
    end = stops.amax(0, keepdim=True)
    # padded items are all zeros
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
    """Write the attention of chunks over their own tokens; segments are merged afterwards."""
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
        # visible positions before the token's own
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=True,
        seqused_k=pieces.num_keys,
    )
    if size.segment_items:
        # [H, T], natural log; rows of no chunk are not written
        torch.where(pieces.is_row, sums.t(), lse, out=lse)
