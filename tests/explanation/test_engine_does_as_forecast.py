"""What a plan is said to save is what the native engine saves."""

import numpy as np
import pytest
import torch

from raybatch.backends.native import create
from raybatch.config import EngineConfig
from raybatch.engine.memory.kv_cache import kv_bytes_per_token
from raybatch.models.config import read_model_spec
from raybatch.prefix.forecast import CacheSize, forecast_orders
from raybatch.records.types import Request, Sampling
from tests.engine.tiny_models import save
from tests.explanation.inputs import grouped_prompts, plan_prompts, tree_prompts
from tests.tiers import some

BLOCK, MAX_SEQS = 16, 32

pytestmark = pytest.mark.usefixtures("shared_cache")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    save("llama", path)
    return path


@pytest.fixture(params=["groups", "tree"])
def planned(request, rng):
    if request.param == "groups":
        prompts = grouped_prompts(rng, groups=24, size=8, prefix=256, own=32)
    else:
        prompts = tree_prompts(rng, count=240)
    expected = rng.integers(1, 13, len(prompts))
    return plan_prompts(prompts, block_size=BLOCK, expected=expected, limit=12)


def run_engine(checkpoint, planned, order, *, num_blocks, has_groups, has_cache=True):
    token_bytes = kv_bytes_per_token(read_model_spec(checkpoint), torch.float32)
    config = EngineConfig(
        block_size_tokens=BLOCK,
        dtype="float32",
        device="cpu",
        kv_cache_bytes=num_blocks * BLOCK * token_bytes,
        max_batched_tokens=256,
        max_num_seqs=MAX_SEQS,
        enable_prefix_caching=has_cache,
    )
    backend = create(str(checkpoint), config)
    plan = planned.plan
    backend.submit(
        [
            Request(
                request_id=row,
                row_id=str(row),
                prompt_token_ids=planned.prompts[row],
                sampling=Sampling(max_tokens=int(planned.expected_tokens[row]), ignore_eos=True),
                group_id=int(plan.group_id[row])
                if has_groups and plan.group_id[row] >= 0
                else None,
                prefix_len=int(plan.prefix_len[row]) if has_groups else 0,
            )
            for row in order.tolist()
        ]
    )
    while backend.num_unfinished():
        backend.poll()
    return backend.stats()


def forecast(planned, num_blocks, *, has_cache=True):
    forecasts = forecast_orders(
        planned.keys,
        planned.plan,
        planned.arrangement,
        output_tokens=planned.expected_tokens,
        size=CacheSize(num_blocks=num_blocks, concurrency=MAX_SEQS, finds_blocks=has_cache),
    )
    return {forecast.name: forecast for forecast in forecasts}


def blocks_for(planned, share):
    """Blocks for a share of all prefixes, and for the largest row in any case."""
    wanted = share * planned.arrangement.load.prefix_tokens.sum() / BLOCK
    largest = (planned.keys.num_tokens + planned.expected_tokens).max() / BLOCK + 2
    return int(np.ceil(max(wanted, largest)))


@pytest.mark.parametrize("share", some([0.5, 0.25, 1.5]))
def test_the_engine_saves_what_the_plan_is_forecast_to_save(checkpoint, planned, share):
    num_blocks = blocks_for(planned, share)
    representative = planned.arrangement.groups.representative
    order = planned.plan.order[
        (representative == np.arange(len(representative)))[planned.plan.order]
    ]
    stats = run_engine(checkpoint, planned, order, num_blocks=num_blocks, has_groups=True)
    copies = int(planned.keys.num_tokens.sum()) - stats.prompt_tokens
    predicted = forecast(planned, num_blocks)["planned"].saved_tokens
    assert abs(predicted / (stats.cached_tokens + copies) - 1) < 0.01


@pytest.mark.parametrize("has_groups", some([True, False]))
def test_without_a_prefix_cache_the_engine_saves_what_is_forecast(checkpoint, planned, has_groups):
    num_blocks = blocks_for(planned, 1.5)
    representative = planned.arrangement.groups.representative
    generated = representative == np.arange(len(representative))
    order = planned.plan.order[generated[planned.plan.order]]
    stats = run_engine(
        checkpoint, planned, order, num_blocks=num_blocks, has_groups=has_groups, has_cache=False
    )
    copies = int(planned.keys.num_tokens.sum()) - stats.prompt_tokens
    orders = forecast(planned, num_blocks, has_cache=False)
    predicted = (
        orders["planned"].saved_tokens - copies if has_groups else orders["input"].saved_tokens
    )
    assert predicted == pytest.approx(stats.cached_tokens, rel=0.01)


@pytest.mark.parametrize("share", some([0.25, 1.5]))
def test_the_engine_hits_in_input_order_about_what_is_forecast(checkpoint, planned, share):
    num_blocks = blocks_for(planned, share)
    order = np.arange(planned.keys.num_rows)
    stats = run_engine(checkpoint, planned, order, num_blocks=num_blocks, has_groups=False)
    predicted = forecast(planned, num_blocks)["input"].hit_rate
    assert abs(predicted - stats.cached_tokens / stats.prompt_tokens) < 0.04
