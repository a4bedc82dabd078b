import engine
import pytest
from machine_limits import MachineLimits

from raybatch.models.config import read_model_spec
from raybatch.policy.cost.layers import Workload
from tests.engine.tiny_models import build

LIMITS = MachineLimits(operations_per_s=100.0, read_bytes_per_s=10.0, copied_bytes_per_s=8.0)


@pytest.fixture
def spec(tmp_path):
    build("qwen3").save_pretrained(tmp_path)
    return read_model_spec(tmp_path)


def test_work_is_bound_by_arithmetic_or_by_the_better_rate_of_memory():
    assert LIMITS.least_s(300.0, 20.0) == 3.0
    assert LIMITS.least_s(100.0, 20.0) == 2.0


def test_a_row_tells_how_far_from_the_limits_a_phase_was():
    phase = engine.Phase(
        name="decode",
        num_sequences=4,
        tokens=40,
        operations=300.0,
        moved_bytes=20.0,
        cpu_s=(9.0, 5.0, 6.0),
        least_s=3.0,
    )
    row = phase.row(LIMITS)
    assert (row["median_s"], row["times_the_least"]) == (6.0, 2.0)
    assert (row["share_of_gemm_rate"], row["tokens_per_cpu_s"]) == (0.5, 6.7)


def test_operations_are_those_of_all_products_and_scores(spec):
    width = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    per_token = spec.model_dim * (width + spec.num_heads * spec.head_dim + 3 * spec.ffn_dim)
    logits = spec.model_dim * spec.vocab_size
    seen = 9
    scores = 2 * seen * spec.num_heads * spec.head_dim
    expected = 2 * 5 * (spec.num_layers * (per_token + scores) + logits)
    operations, _ = engine.work_of(spec, Workload(cached_tokens=seen - 1), 5)
    assert operations == expected


def test_a_decode_step_reads_every_weight_and_all_kv(spec):
    few, _ = (engine.work_of(spec, Workload(cached_tokens=n), 5)[1] for n in (8, 16))
    more = engine.work_of(spec, Workload(cached_tokens=16), 5)[1]
    kv_bytes = 2 * spec.num_kv_heads * spec.head_dim * 4
    assert more - few == 5 * 8 * spec.num_layers * kv_bytes


def test_prompts_have_nothing_in_common():
    prompts = [r.prompt_token_ids.tolist() for r in engine.requests_of(3, 20, 4, seed=1)]
    assert len({tuple(prompt[:4]) for prompt in prompts}) == 3
