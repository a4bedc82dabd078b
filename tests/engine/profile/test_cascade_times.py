from types import SimpleNamespace

import pytest
import torch

from raybatch.engine.profile.host_times import timed_reads
from raybatch.kernels.byte_numbers import INT8
from raybatch.kernels.dispatch import REFERENCE, compiled_ops

SPEC = SimpleNamespace(num_heads=4, num_kv_heads=2, head_dim=16, num_layers=3)
# seconds for eight numbers of rows: by row and together, for a short and a long prefix
TIMES = (1.0, 2.0, 8.0, 9.5) * 4 + (1.0, 2.0, 8.0, 1.0) * 4


def rule_of(ops, folder, *, kv_dtype=torch.float32, **options):
    return timed_reads(
        ops, SPEC, block_size=16, dtype=torch.float32, kv_dtype=kv_dtype, folder=folder, **options
    )


@pytest.fixture
def compiled():
    ops = compiled_ops(head_dim=16, num_grouped=2, block_size=16)
    if ops.prepare_attention is REFERENCE.prepare_attention:
        pytest.skip("no C compiler here")
    return ops


def test_a_shape_is_timed_once_for_each_form(compiled, tmp_path):
    measured = []

    def measure(shape, ops):
        measured.append(ops)
        return TIMES

    rules = [rule_of(ops, tmp_path, measure=measure) for ops in (REFERENCE, compiled, REFERENCE)]
    assert measured == [REFERENCE, compiled]
    assert rules[0] == rules[1] == rules[2]


def test_pools_of_bytes_have_separate_times(tmp_path):
    measured = []

    def measure(shape, ops):
        measured.append(shape.kv_dtype)
        return TIMES

    for dtype in (torch.float32, INT8, INT8):
        rule_of(REFERENCE, tmp_path, kv_dtype=dtype, measure=measure)
    assert measured == [torch.float32, INT8]


def test_the_rule_is_that_of_the_times(tmp_path):
    rule = rule_of(REFERENCE, tmp_path, measure=lambda *_: TIMES)
    assert (False, True) == (rule.pays(6, 10_000), rule.pays(32, 512))


@pytest.mark.parametrize("kv_dtype", [torch.float32, INT8], ids=str)
def test_the_timed_plans_read_the_same_keys(tmp_path, kv_dtype, monkeypatch):
    pairs, counts = [], []
    real = REFERENCE.attend

    def attend(q, k, v, k_pool, v_pool, prepared, window):
        output = real(q, k, v, k_pool, v_pool, prepared, window)
        pairs.append(output)
        counts.append(prepared.segments is not None)
        return output

    ops = SimpleNamespace(prepare_attention=REFERENCE.prepare_attention, attend=attend)
    rule_of(ops, tmp_path, kv_dtype=kv_dtype)
    assert counts == [False, True] * (len(counts) // 2)
    for separate, together in zip(pairs[::2], pairs[1::2], strict=True):
        torch.testing.assert_close(separate, together, rtol=1e-4, atol=1e-5)
