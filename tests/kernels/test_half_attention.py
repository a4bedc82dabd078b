"""Windowed attention in half precision at the ends of what float16 can hold."""

import math

import pytest
import torch

from raybatch.kernels.dense_attention import attend_windowed
from tests import tolerances

HALF = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def attend(q, k, v, first_position, window):
    places = torch.arange(k.shape[1])
    return attend_windowed(
        q,
        k,
        v,
        query_positions=places[: q.shape[2]] + first_position,
        key_positions=places,
        window=window,
    )


@pytest.fixture(params=HALF.values(), ids=HALF.keys())
def dtype(request):
    return request.param


def test_a_query_that_sees_no_key_gets_zeros_without_weight(dtype):
    q, kv = torch.ones(2, 3, 4, 8, dtype=dtype), torch.ones(2, 5, 8, dtype=dtype)
    output, lse = attend(q, kv, kv, first_position=5, window=3)
    # the first query sees keys 3 and 4, the second key 4
    assert output[:, :, :2].eq(1).all()
    assert output[:, :, 2:].eq(0).all()
    assert lse.isneginf()[:, :, 2:].all()
    assert lse.isfinite()[:, :, :2].all()


def test_scores_that_are_large_before_they_are_scaled_do_not_overflow(dtype):
    q, k = torch.full((1, 1, 1, 256), 20.0), torch.zeros(1, 3, 256)
    k[0, 1] = 20.0
    v = torch.arange(3.0).view(1, 3, 1).expand(1, 3, 256)
    output, lse = attend(q.to(dtype), k.to(dtype), v.to(dtype), first_position=2, window=9)
    assert output.eq(1).all()
    assert lse.item() == pytest.approx(20 * 20 * 256 / math.sqrt(256), rel=0.01)


def test_sums_over_many_large_values_do_not_overflow(dtype):
    q, k = torch.zeros(1, 1, 1, 8), torch.zeros(1, 3000, 8)
    v = torch.full((1, 3000, 8), 100.0)
    output, _ = attend(q.to(dtype), k.to(dtype), v.to(dtype), first_position=2999, window=9999)
    tolerance = tolerances.of_sums(dtype, 2)
    torch.testing.assert_close(output, v[:, :1].unsqueeze(1).to(dtype), rtol=tolerance, atol=0)
