"""What all launches share: tile sizes, how the interpreter differs from a GPU, and the pools."""

from dataclasses import dataclass
from typing import Any

import torch

from raybatch.kernels.byte_numbers import is_quantised

# fused multiply-adds are asked for by name, because the default differs by version of Triton
OPTIONS = {"enable_fp_fusion": True}

# tensor cores multiply at least so many rows and columns
_MIN_DOT_TILE = 16


def power_of_two(size: int) -> int:
    """Return the smallest power of two that is not below `size`."""
    return 1 << max(0, size - 1).bit_length()


def dot_tile(size: int) -> int:
    """Return the smallest tile of a matrix product that holds `size` rows or columns."""
    return max(_MIN_DOT_TILE, power_of_two(size))


def rows_per_program(row_tile: int, num_elements: int = 4096) -> int:
    """Return how many rows of a tile's width one program of an element-wise kernel takes."""
    return max(1, num_elements // row_tile)


def attention_tiles(q: torch.Tensor, pool: torch.Tensor) -> tuple[int, int, int]:
    """Return the tiles of keys and dims for q [T, H, D], and the most lanes of queries.

    Keys, values and queries fit shared memory and registers.
    """
    dim = dot_tile(q.shape[2])
    row_bytes = dim * q.element_size()
    num_keys = 64 if q.element_size() <= 2 and row_bytes <= 256 else 32
    if is_quantised(pool.dtype):
        # bytes take registers on their way to numbers
        num_keys //= 2
    return num_keys, dim, max(16, min(128, 128 * 256 // row_bytes))


@dataclass(frozen=True, slots=True)
class Pools:
    """The KV pools of one layer, [N, G, B, R], which are laid out alike."""

    k: torch.Tensor
    v: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Both pools, then their scales; these are the ends of rows of bytes, read as float32."""
        assert self.k.stride() == self.v.stride(), "both pools are laid out alike"
        # so that a kernel knows how many bytes of a row it may read at once
        assert self.k.stride()[2:] == (self.k.shape[3], 1), "rows of a block follow each other"
        if not is_quantised(self.k.dtype):
            return self.k, self.v, self.k, self.v
        return self.k, self.v, self.k.view(torch.float32), self.v.view(torch.float32)

    @property
    def options(self) -> dict[str, Any]:
        _, _, block_size, width = self.k.shape
        is_bytes = is_quantised(self.k.dtype)
        return {"BLOCK_SIZE": block_size, "ROW_WIDTH": width, "IS_BYTES": is_bytes}
