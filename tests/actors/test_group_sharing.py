"""What engines compute of prompts that share prefixes: the closed form, whatever the replicas."""

import asyncio

import numpy as np
import pytest
import torch

from raybatch.actors.pool import PoolHandle
from raybatch.actors.wire.columns import decode_completions, request_table
from raybatch.actors.wire.records import PoolSpec
from raybatch.config import BackendConfig, EngineConfig, PoolConfig
from raybatch.engine.memory.kv_cache import kv_bytes_per_token
from raybatch.models.config import read_model_spec
from raybatch.records.types import Sampling
from tests.actors.pools import wait_until
from tests.engine.tiny_models import build

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]

PREFIX, DISTINCT, OUTPUT, BLOCK = 256, 32, 16, 16
NUM_ROWS = 1024
ROWS_PER_CALL = 256
SAMPLINGS = (Sampling(max_tokens=OUTPUT, ignore_eos=True),)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    build("llama", num_attention_heads=2, num_key_value_heads=1, **small).save_pretrained(path)
    return path


@pytest.fixture
def pool_of(model):
    """Makes a pool of native engines, each with KV for a quarter of all prefixes."""
    handles = []

    def make(num_replicas, degree):
        num_tokens = NUM_ROWS // degree * PREFIX // 4
        token_bytes = kv_bytes_per_token(read_model_spec(model), torch.float32)
        handle = PoolHandle(
            PoolSpec(
                model=str(model),
                backend=BackendConfig(kind="native"),
                engine=EngineConfig(
                    dtype="float32",
                    device="cpu",
                    block_size_tokens=BLOCK,
                    max_batched_tokens=512,
                    kv_cache_bytes=num_tokens * token_bytes,
                ),
                pool=PoolConfig(replicas=num_replicas, num_cpus_per_replica=0.1),
            )
        )
        handles.append(handle)
        return handle

    yield make
    for handle in handles:
        handle.shutdown()


def prompts_of(degree):
    """Rows group after group, with tokens that no other group has."""
    rng = np.random.default_rng(degree)
    prefixes = np.repeat(rng.integers(0, 211, (NUM_ROWS // degree, PREFIX)), degree, axis=0)
    return np.hstack([prefixes, rng.integers(0, 211, (NUM_ROWS, DISTINCT))]).astype(np.int32)


def tables_of(degree, rows, *, is_planned):
    prompts = prompts_of(degree)
    for start in range(0, NUM_ROWS, ROWS_PER_CALL):
        here = rows[start : start + ROWS_PER_CALL]
        groups = {}
        if is_planned:
            groups = {
                "group_ids": (here // degree).tolist(),
                "prefix_lens": [PREFIX] * len(here),
                "expected_lens": [OUTPUT] * len(here),
            }
        yield request_table([str(row) for row in here], list(prompts[here]), **groups)


def computed_tokens(handle, tables):
    """Run all tables at once, and return the prompt tokens that were not cached."""
    handle.start()
    wait_until(lambda: len(handle.state().pids) == handle.spec.pool.replicas)

    async def run():
        return await asyncio.gather(*(handle.generate(table, SAMPLINGS) for table in tables))

    completions = [c for results in asyncio.run(run()) for c in decode_completions(results)]
    assert [""] * NUM_ROWS == [c.error for c in completions]
    return sum(PREFIX + DISTINCT - c.num_cached_tokens for c in completions)


def closed_form(degree):
    return NUM_ROWS // degree * PREFIX + NUM_ROWS * DISTINCT


@pytest.mark.parametrize(
    ("degree", "num_replicas"),
    [
        (2, 4),
        (16, 1),
        pytest.param(16, 4, marks=pytest.mark.exhaustive),
        pytest.param(64, 4, marks=pytest.mark.exhaustive),
    ],
)
def test_planned_rows_compute_each_prefix_once(pool_of, degree, num_replicas):
    tables = tables_of(degree, np.arange(NUM_ROWS), is_planned=True)
    computed = computed_tokens(pool_of(num_replicas, degree), tables)
    # in the end a group may be cut for a replica that would idle
    extra = max(0.01 * closed_form(degree), (num_replicas - 1) * PREFIX)
    assert closed_form(degree) <= computed <= closed_form(degree) + extra


@pytest.mark.parametrize(
    ("degree", "num_replicas"),
    [
        pytest.param(4, 1, marks=pytest.mark.exhaustive),
        pytest.param(16, 1, marks=pytest.mark.exhaustive),
        (16, 4),
    ],
)
def test_shuffled_rows_without_a_plan_compute_hardly_a_prefix_twice(pool_of, degree, num_replicas):
    rows = np.random.default_rng(0).permutation(NUM_ROWS)
    tables = tables_of(degree, rows, is_planned=False)
    computed = computed_tokens(pool_of(num_replicas, degree), tables)
    # with the cache of a quarter of the prefixes alone, nearly every row computes its own
    assert computed == pytest.approx(closed_form(degree), rel=0.05)
