"""RMS norm, rotary embedding and KV store in C, in one pass over their rows.

Tensors other than contiguous float32 rows use torch.
"""

import ctypes
import logging
from dataclasses import dataclass

import torch

from raybatch.kernels import attention, small_ops
from raybatch.kernels.attention import PreparedAttention
from raybatch.kernels.byte_numbers import FP8, INT8, quantise, read_rows, row_width
from raybatch.kernels.native.compiler import (
    CompiledOnce,
    call,
    compile_library,
    random_tensors,
    resemble,
)

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SmallOps:
    """Compiled `rms_norm`, `rotate_` and `store_kv`."""

    library: ctypes.CDLL

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        heads = x if x.dim() == 3 else x.unsqueeze(-2)
        is_known = (
            heads.dim() == 3
            and heads.dtype == weight.dtype == torch.float32
            and heads.stride(2) == 1
            and weight.is_contiguous()
            and weight.shape[-1] == x.shape[-1]
            and (weight.dim() == 1 or weight.shape[0] == heads.shape[1])
        )
        if not is_known:
            return small_ops.rms_norm(x, weight, eps)
        output = x.new_empty(x.shape)  # independent of torch's default dtype
        weight_stride = x.shape[-1] if weight.dim() == 2 else 0
        strides, sizes = heads.stride()[:2], heads.shape
        call(self.library.rms_norm, x, *strides, weight, weight_stride, float(eps), output, *sizes)
        return output

    def rotate_(self, x: torch.Tensor, table: torch.Tensor) -> None:
        if x.dtype != torch.float32 or not _has_rows_side_by_side(x):
            small_ops.rotate_(x, table)
        else:
            call(self.library.rotate, x, x.stride(0), table.contiguous(), *x.shape)

    def store_kv(
        self,
        k: torch.Tensor,  # [T, G, D], modified in place where the pool is quantised
        v: torch.Tensor,  # [T, G, D], modified in place where the pool is quantised
        k_pool: torch.Tensor,  # [N, G, B, R], modified in place
        v_pool: torch.Tensor,  # [N, G, B, R], modified in place
        prepared: PreparedAttention,
    ) -> None:
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
        """Write the keys or values of tokens to their slots: offsets in blocks of the pool."""
        stores = {INT8: self.library.store_int8, FP8: self.library.store_fp8}
        store = stores.get(pool.dtype, self.library.store_rows)
        num_tokens, num_kv_heads, dim = rows.shape
        sizes = num_tokens, num_kv_heads, pool.shape[2], dim
        call(store, rows, rows.stride(0), pool, block_ids, block_offsets, *sizes)


@CompiledOnce
def compiled_small_ops() -> SmallOps | None:
    """Return the compiled ops, once per process; None without a compiler."""
    library = compile_library("small_ops.c", {})
    if library is None:
        return None
    ops = SmallOps(library)
    if not _agree_with_torch(ops):
        _logger.warning("compiled small ops give wrong results on this host, using torch ops")
        return None
    return ops


def _agree_with_torch(ops: SmallOps) -> bool:
    made = random_tensors()
    x, weight, frequencies = made(5, 3, 34), made(3, 34), made(17)
    table = small_ops.rotation_table(torch.arange(5, device="cpu"), frequencies, 1.0)
    normed, expected = ops.rms_norm(x, weight, 1e-6), small_ops.rms_norm(x, weight, 1e-6)
    is_normed = resemble(normed, expected)
    ops.rotate_(normed, table)
    small_ops.rotate_(expected, table)
    is_right = is_normed and resemble(normed, expected)
    return is_right and all(_stores(ops, made(5, 3, 34), dtype) for dtype in (INT8, FP8))


def _stores(ops: SmallOps, rows: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether rows [T, G, D] are stored correctly in a quantized pool."""
    expected = read_rows(quantise(rows, dtype), rows.shape[2], rows.dtype)
    width = row_width(rows.shape[2], dtype)
    pool = torch.zeros(2, rows.shape[1], 4, width, dtype=dtype, device="cpu")
    places = torch.arange(1, 1 + len(rows), device="cpu")
    ops.store_rows(rows, pool, places // 4, places % 4)
    stored = read_rows(pool.transpose(1, 2).flatten(0, 1)[1:-2], rows.shape[2], rows.dtype)
    return resemble(stored, expected) and resemble(rows, expected)


def _has_rows_side_by_side(x: torch.Tensor) -> bool:
    return x.stride(2) == 1 and x.stride(1) == x.shape[2]
