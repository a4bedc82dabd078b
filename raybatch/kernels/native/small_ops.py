"""Normalisation, rotation and the KV store in C, which go over their rows once.

Tensors in another form than the decoder hands over (rows of float32 side by side) go to torch.
"""

import ctypes
import functools
import logging
from dataclasses import dataclass

import torch

from raybatch.kernels import attention, norm, rotary
from raybatch.kernels.attention import PreparedAttention
from raybatch.kernels.kv_rows import FP8, INT8, quantise, read_rows, row_width
from raybatch.kernels.native.compiler import FLOATS, CompiledOnce, address, compile_library, whole

# results differ from torch's by a hundredth of this
_TOLERANCE = 1e-4

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SmallOps:
    """The compiled forms of `rms_norm`, `rotate_` and `store_kv`."""

    library: ctypes.CDLL

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See `raybatch.kernels.norm`."""
        heads = x if x.dim() == 3 else x.unsqueeze(-2)
        is_per_head = weight.dim() == 2
        is_known = (
            heads.dim() == 3
            and heads.dtype == weight.dtype == torch.float32
            and heads.stride(2) == 1
            and weight.is_contiguous()
            and weight.shape[-1] == x.shape[-1]
            and (weight.dim() == 1 or weight.shape[0] == heads.shape[1])
        )
        if not is_known:
            return norm.rms_norm(x, weight, eps)
        output = x.new_empty(x.shape)  # whatever the process takes by default
        self.library.rms_norm(
            address(x),
            *whole(heads.stride(0), heads.stride(1)),
            address(weight),
            *whole(x.shape[-1] if is_per_head else 0),
            ctypes.c_float(eps),
            address(output),
            *whole(*heads.shape),
        )
        return output

    def rotate_(self, x: torch.Tensor, table: torch.Tensor) -> None:
        """See `raybatch.kernels.rotary`."""
        if x.dtype != torch.float32 or not _has_rows_side_by_side(x):
            rotary.rotate_(x, table)
            return
        table = table.contiguous()
        self.library.rotate(address(x), *whole(x.stride(0)), address(table), *whole(*x.shape))

    def store_kv(
        self,
        k: torch.Tensor,  # [T, G, D], modified in place where the pool is quantised
        v: torch.Tensor,  # [T, G, D], modified in place where the pool is quantised
        k_pool: torch.Tensor,  # [N, G, B, R], modified in place
        v_pool: torch.Tensor,  # [N, G, B, R], modified in place
        prepared: PreparedAttention,
    ) -> None:
        """See `raybatch.kernels.attention`."""
        both = ((k, k_pool), (v, v_pool))
        if not all(_has_rows_side_by_side(rows) and pool.is_contiguous() for rows, pool in both):
            attention.store_kv(k, v, k_pool, v_pool, prepared)
            return
        for rows, pool in both:
            self.store_rows(rows, pool, prepared.block_ids, prepared.block_offsets)

    def store_rows(
        self,
        rows: torch.Tensor,  # [T, G, D], modified in place where the pool is quantised
        pool: torch.Tensor,  # [N, G, B, R], modified in place
        block_ids: torch.Tensor,  # int64 [T]
        block_offsets: torch.Tensor,  # int64 [T]
    ) -> None:
        """Write keys or values, side by side, to their slots."""
        library = self.library
        stores = {INT8: library.store_int8, FP8: library.store_fp8}
        num_tokens, num_kv_heads, dim = rows.shape
        stores.get(pool.dtype, library.store_rows)(
            address(rows),
            *whole(rows.stride(0)),
            address(pool),
            address(block_ids),
            address(block_offsets),
            *whole(num_tokens, num_kv_heads, pool.shape[2], dim),
        )


@CompiledOnce
def small_ops() -> SmallOps | None:
    """Return the compiled ops, once per process; None where there is no compiler."""
    library = compile_library("small_ops.c", {})
    if library is None:
        return None
    ops = SmallOps(library)
    if not _agree_with_torch(ops):
        _logger.warning("the compiled small ops are wrong on this host, so torch computes them")
        return None
    return ops


def _agree_with_torch(ops: SmallOps) -> bool:
    generator = torch.Generator().manual_seed(0)
    made = functools.partial(torch.randn, generator=generator, **FLOATS)
    x, weight, frequencies = made(5, 3, 34), made(3, 34), made(17)
    table = rotary.rotation_table(torch.arange(5, device="cpu"), frequencies, 1.0)
    normed, expected = ops.rms_norm(x, weight, 1e-6), norm.rms_norm(x, weight, 1e-6)
    is_normed = torch.allclose(normed, expected, atol=_TOLERANCE, rtol=_TOLERANCE)
    ops.rotate_(normed, table)
    rotary.rotate_(expected, table)
    is_rotated = torch.allclose(normed, expected, atol=_TOLERANCE, rtol=_TOLERANCE)
    return is_normed and is_rotated and all(_stores(ops, made(5, 3, 34), d) for d in (INT8, FP8))


def _stores(ops: SmallOps, rows: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether rows [T, G, D] get into a quantised pool, and become what is there."""
    expected = read_rows(quantise(rows, dtype), rows.shape[2], rows.dtype)
    width = row_width(rows.shape[2], dtype)
    pools = torch.zeros(2, 2, rows.shape[1], 4, width, dtype=dtype, device="cpu")
    places = torch.arange(1, 1 + len(rows), device="cpu")
    ops.store_rows(rows, pools[0], places // 4, places % 4)
    stored = read_rows(pools[0].transpose(1, 2).flatten(0, 1)[1:-2], rows.shape[2], rows.dtype)
    return all(
        torch.allclose(actual, expected, atol=_TOLERANCE, rtol=_TOLERANCE)
        for actual in (stored, rows)
    )


def _has_rows_side_by_side(x: torch.Tensor) -> bool:
    return x.stride(2) == 1 and x.stride(1) == x.shape[2]
