"""What all launches share: tile sizes, and how the interpreter differs from a GPU."""

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


def attention_tiles(pool: torch.Tensor) -> tuple[int, int, int]:
    """Return the tiles of keys and dims for a pool [N, G, B, D], and the most lanes of queries.

    Keys, values and queries fit shared memory and registers.
    """
    dim = dot_tile(pool.shape[3])
    row_bytes = dim * pool.element_size()
    num_keys = 64 if pool.element_size() <= 2 and row_bytes <= 512 else 32
    return num_keys, dim, max(16, min(128, 128 * 256 // row_bytes))
