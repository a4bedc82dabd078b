"""Rows of 8-bit numbers with a scale: what is lost, what is not, and that C and torch agree."""

import math

import pytest
import torch

from raybatch.kernels.byte_numbers import FP8, INT8, dequantise, quantise, read_rows, row_width
from raybatch.kernels.native.small_ops import compiled_small_ops

BOTH = pytest.mark.parametrize("dtype", [INT8, FP8], ids=["int8", "fp8"])


def rows_of(head_dim, count=300):
    """Rows of very different sizes."""
    generator = torch.Generator().manual_seed(head_dim)
    sizes = 10.0 ** torch.linspace(-12, 12, count).unsqueeze(1)
    return torch.randn(count, head_dim, generator=generator) * sizes


@pytest.mark.parametrize("head_dim", [1, 10, 64, 130])
def test_int8_is_off_by_half_a_step_of_its_row_at_most(head_dim):
    rows = rows_of(head_dim)
    step = rows.abs().amax(dim=1, keepdim=True) / 127
    found = dequantise(quantise(rows, INT8), head_dim, torch.float32)
    assert bool(((found - rows).abs() <= 0.5001 * step).all())


@pytest.mark.parametrize("head_dim", [1, 10, 64, 130])
def test_fp8_is_off_by_a_sixteenth_of_each_number_at_most(head_dim):
    rows = rows_of(head_dim)
    # below 2^-6 of 448 steps are even
    least = rows.abs().amax(dim=1, keepdim=True) / 448 * 2**-9
    found = dequantise(quantise(rows, FP8), head_dim, torch.float32)
    error = (found - rows).abs()
    assert bool((error <= torch.maximum(rows.abs() / 16, 0.5 * least) * 1.0001).all())


def test_every_pattern_of_fp8_reads_as_torch_reads_it():
    bits = torch.arange(256).to(torch.uint8)
    expected = bits.view(torch.float8_e4m3fn).float()
    # those of NaN are not written
    bits, expected = bits[expected.isfinite()], expected[expected.isfinite()]
    scale = torch.ones(len(bits), 1).view(torch.uint8)
    padding = torch.zeros(len(bits), 3, dtype=torch.uint8)
    rows = torch.cat((bits.unsqueeze(1), padding, scale), dim=1)
    assert torch.equal(expected, dequantise(rows, 1, torch.float32).squeeze(1))


@BOTH
def test_the_largest_number_of_a_row_is_kept_and_zeros_are_zeros(dtype):
    rows = torch.tensor([[0.0, -3.25, 1.0], [0.0, 0.0, 0.0], [1e-38, 0.0, 0.0]])
    found = dequantise(quantise(rows, dtype), 3, torch.float32)
    torch.testing.assert_close(found[:, 1], torch.tensor([-3.25, 0.0, 0.0]), rtol=1e-6, atol=0)
    assert not found[1].any()
    assert 0.0 <= float(found[2, 0]) <= 1e-37
    cleared = torch.zeros_like(quantise(rows, dtype))
    assert not dequantise(cleared, 3, torch.float32).any()


@BOTH
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_a_number_spoils_its_own_row_alone(dtype, bad):
    rows = torch.ones(3, 8)
    rows[1, 5] = bad
    found = dequantise(quantise(rows, dtype), 8, torch.float32)
    assert not found[1].isfinite().any()
    torch.testing.assert_close(found[[0, 2]], rows[[0, 2]])


@BOTH
def test_a_row_holds_its_scale_and_is_a_multiple_of_four_bytes(dtype):
    assert [8, 8, 12, 68, 132] == [row_width(dim, dtype) for dim in (1, 4, 5, 64, 128)]
    assert row_width(10, torch.float32) == 10
    assert quantise(torch.ones(2, 3, 10), dtype).shape == (2, 3, 16)


def test_rows_of_other_pools_are_read_as_they_are():
    rows = torch.randn(3, 8).bfloat16()
    assert read_rows(rows, 8, torch.float32) is rows


@BOTH
@pytest.mark.parametrize("head_dim", [10, 16, 64, 130])
def test_the_compiled_store_writes_the_bytes_of_torch(dtype, head_dim):
    ops = compiled_small_ops()
    if ops is None:
        pytest.skip("no C compiler here")
    rows = rows_of(head_dim, count=400).view(200, 2, head_dim)
    rows[7, 1] = 0.0
    rows[9, 0, 3] = math.nan
    stored = rows.clone()
    places = torch.randperm(200, generator=torch.Generator().manual_seed(1))
    pool = torch.zeros(50, 2, 4, row_width(head_dim, dtype), dtype=dtype)
    ops.store_rows(stored, pool, places // 4, places % 4)
    found = pool.transpose(1, 2).flatten(0, 1)[places]
    expected = quantise(rows, dtype)
    is_good = rows.isfinite().all(dim=2)
    assert torch.equal(found[is_good], expected[is_good])
    assert torch.equal(stored[is_good], dequantise(expected, head_dim, torch.float32)[is_good])
    assert not stored[9, 0].isfinite().any()
    assert not dequantise(found, head_dim, torch.float32)[9, 0].isfinite().any()
