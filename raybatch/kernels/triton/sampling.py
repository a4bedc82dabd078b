"""A token per row of logits, the form for GPUs of `raybatch.kernels.sampling`.

Logits are read twice, once where a row takes its likeliest token; nothing of their size is written.
"""

import torch
import triton

from raybatch.kernels.sampling import BLOCK, Draws
from raybatch.kernels.triton.jit.sampling import (
    block_sums_kernel,
    invert_kernel,
    join_maxima_kernel,
    tile_maxima_kernel,
)
from raybatch.kernels.triton.launch import OPTIONS, power_of_two

# blocks of one program in a pass over the vocabulary
_TILE_BLOCKS = 16


def draw_tokens(
    logits: torch.Tensor,  # float32 [S, V]
    temperature: torch.Tensor,  # float64 [S]; 0 takes the most likely token, the first of equals
    min_p: torch.Tensor,  # float64 [S]; tokens below this share of the likeliest are left out
    uniform: torch.Tensor,  # float64 [S], in [0, 1)
) -> Draws:
    """Return one token for each row; a NaN counts as the largest logit, so that it is seen.

    Sums of a row are taken in an order of its own, whatever the batch.
    """
    num_rows, vocab_size = logits.shape
    tile = _TILE_BLOCKS * BLOCK
    num_tiles, num_blocks = triton.cdiv(vocab_size, tile), triton.cdiv(vocab_size, BLOCK)
    device = logits.device
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    maxima = torch.empty(num_rows, num_tiles, dtype=torch.float32, device=device)
    tile_sums, tile_tokens = torch.empty_like(maxima), torch.empty_like(maxima, dtype=torch.int32)
    sums = torch.empty(num_rows, num_blocks, dtype=torch.float32, device=device)
    max_logits = torch.empty(num_rows, dtype=torch.float32, device=device)
    normalizers, logprobs = torch.empty_like(max_logits), torch.empty_like(max_logits)
    best = torch.empty(num_rows, dtype=torch.int64, device=device)
    token_ids = torch.empty_like(best)
    if not num_rows:
        return Draws(token_ids, max_logits, logprobs)
    stride, shape = logits.stride(0), {"num_warps": 4, **OPTIONS}
    tile_maxima_kernel[(num_rows, num_tiles)](
        logits, maxima, tile_tokens, tile_sums, stride, VOCAB_SIZE=vocab_size, TILE=tile, **shape
    )
    join_maxima_kernel[(num_rows,)](
        maxima,
        tile_tokens,
        tile_sums,
        best,
        max_logits,
        normalizers,
        NUM_TILES=num_tiles,
        TILE_TILES=power_of_two(num_tiles),
        **shape,
    )
    options = (temperature, min_p)
    sizes = {"VOCAB_SIZE": vocab_size, "BLOCK": BLOCK, **shape}
    block_sums_kernel[(num_rows, num_tiles)](
        logits, max_logits, *options, sums, stride, num_blocks, TILE_BLOCKS=_TILE_BLOCKS, **sizes
    )
    invert_kernel[(num_rows,)](
        logits,
        best,
        max_logits,
        normalizers,
        *options,
        uniform,
        sums,
        token_ids,
        logprobs,
        stride,
        NUM_BLOCKS=num_blocks,
        TILE_BLOCKS=power_of_two(num_blocks),
        **sizes,
    )
    return Draws(token_ids, max_logits, logprobs)
