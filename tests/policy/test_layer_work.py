"""Work of modules, against counts by hand."""

from dataclasses import replace

import pytest

from raybatch.policy.cost.layers import LayerShape, Workload
from tests.policy.layers import SPARSE

TINY = LayerShape(
    model_dim=8, num_heads=2, num_kv_heads=1, head_dim=4, ffn_dim=6, num_experts=4, top_k=2
)
# q, k and v: 8 x 16; o: 8 x 8
LINEARS = 8 * 16 + 8 * 8


def test_bytes_of_weights_and_kv():
    assert 4 * LINEARS == TINY.attention_bytes
    assert 4 * 4 * 3 * 6 * 8 == TINY.ffn_bytes
    assert 4 * 2 * 4 == TINY.kv_bytes_per_token


def test_weights_that_are_bytes_move_a_quarter_and_compute_the_same():
    as_bytes = replace(TINY, weight_bytes=1)
    assert (LINEARS, 4 * 3 * 6 * 8) == (as_bytes.attention_bytes, as_bytes.ffn_bytes)
    assert TINY.kv_bytes_per_token == as_bytes.kv_bytes_per_token
    floats, found = (of.attention_work(5, Workload(cached_tokens=10)) for of in (TINY, as_bytes))
    assert floats.operations == found.operations
    assert 3 * LINEARS == floats.moved_bytes - found.moved_bytes
    assert TINY.ffn_work(7).operations == as_bytes.ffn_work(7).operations


def test_decoding_counts_the_context_of_every_sequence():
    work = TINY.attention_work(5, Workload(cached_tokens=10))
    # each of five tokens sees ten from before and itself, with two heads of four
    assert 2 * 5 * LINEARS + 4 * 5 * 11 * 2 * 4 == work.operations
    activations = 5 * (2 * 8 + 2 * 16) * 4
    assert 4 * LINEARS + (5 * 10 + 5) * 32 + activations == work.moved_bytes


def test_prefill_sees_half_of_its_own_tokens():
    work = TINY.attention_work(6, Workload(tokens_per_sequence=3))
    # two sequences of 1 + 2 + 3
    assert 2 * 6 * LINEARS + 4 * 12 * 2 * 4 == work.operations


def test_a_dense_layer_reads_all_weights_for_one_token():
    dense = replace(TINY, num_experts=1, top_k=1)
    assert 3 * 6 * 8 * 4 + 4 * (2 * 8 + 2 * 8 + 2 * 6) == dense.ffn_work(1).moved_bytes


def test_experts_that_are_read_are_those_that_random_tokens_visit(rng):
    tokens = 2
    visited = [len({e for _ in range(tokens) for e in rng.permutation(4)[:2]}) for _ in range(2000)]
    activations = ((2 + 2 * 2) * tokens * 8 + 2 * 2 * tokens * 6) * 4
    read = (TINY.ffn_work(tokens).moved_bytes - activations) / (TINY.ffn_bytes / 4)
    assert pytest.approx(sum(visited) / len(visited), rel=0.01) == read


def test_operations_of_experts_grow_with_the_rows_alone():
    assert 100 * SPARSE.ffn_work(1).operations == SPARSE.ffn_work(100).operations
