"""What all launches share: tile sizes, and how the interpreter differs from a GPU."""

from typing import NamedTuple

import torch

# fused multiply-adds are asked for by name, because the default differs by version of Triton
OPTIONS = {"enable_fp_fusion": True}

# programs that fill a GPU of about 130 multiprocessors, four on each
TARGET_PROGRAMS = 512

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


class AttentionTiles(NamedTuple):
    """Tiles of an attention kernel; keys, values and queries fit shared memory and registers."""

    num_keys: int
    dim: int
    most_lanes: int

    @staticmethod
    def of(pool: torch.Tensor) -> "AttentionTiles":
        """Return the tiles for a pool [N, G, B, D]."""
        dim = dot_tile(pool.shape[3])
        row_bytes = dim * pool.element_size()
        is_half = pool.element_size() <= 2
        return AttentionTiles(
            num_keys=64 if is_half and row_bytes <= 512 else 32,
            dim=dim,
            most_lanes=max(16, min(128, 128 * 256 // row_bytes)),
        )
