"""Common launch code: tile sizes, options, and the pools."""

from dataclasses import dataclass
from typing import Any

import torch

from raybatch.kernels.byte_numbers import is_quantised

# request fused multiply-adds, because the default varies by Triton version
OPTIONS = {"enable_fp_fusion": True}

# minimum rows and columns of tensor core products
_MIN_DOT_TILE = 16


def power_of_two(size: int) -> int:
    """Return the smallest power of two that is not below `size`."""
    return 1 << max(0, size - 1).bit_length()


def dot_tile(size: int) -> int:
    """Return the smallest tile size of a matrix product that covers `size` rows or columns."""
    return max(_MIN_DOT_TILE, power_of_two(size))


def rows_per_program(row_tile: int, num_elements: int = 4096) -> int:
    """Return the rows per program of an element-wise kernel whose rows have `row_tile` elements."""
    return max(1, num_elements // row_tile)


def attention_tiles(q: torch.Tensor, pool: torch.Tensor) -> tuple[int, int, int]:
    """Return the tile sizes (keys, dimensions, most query lanes) of attention for q [T, H, D].

    With them keys, values and queries fit into shared memory and registers.
    """
    dim = dot_tile(q.shape[2])
    row_bytes = dim * q.element_size()
    num_keys = 64 if q.element_size() <= 2 and row_bytes <= 256 else 32
    if is_quantised(pool.dtype):
        # converting 8-bit keys needs registers
        num_keys //= 2
    return num_keys, dim, max(16, min(128, 128 * 256 // row_bytes))


@dataclass(frozen=True, slots=True)
class Pools:
    """The KV pools of one layer, [N, G, B, R], with equal layout."""

    k: torch.Tensor
    v: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Both pools, then their scales: the ends of 8-bit rows, viewed as float32."""
        assert self.k.stride() == self.v.stride(), "both pools must have equal layout"
        # allows vectorised loads of rows
        assert self.k.stride()[2:] == (self.k.shape[3], 1), "rows of a block must be contiguous"
        if not is_quantised(self.k.dtype):
            return self.k, self.v, self.k, self.v
        return self.k, self.v, self.k.view(torch.float32), self.v.view(torch.float32)

    @property
    def options(self) -> dict[str, Any]:
        _, _, block_size, width = self.k.shape
        is_bytes = is_quantised(self.k.dtype)
        return {"BLOCK_SIZE": block_size, "ROW_WIDTH": width, "IS_BYTES": is_bytes}
