"""What engines compute of prompts that share prefixes: the closed form, whatever the replicas."""

import numpy as np
import pytest
import torch

from raybatch.actors.pool import PoolHandle, PoolSpec
from raybatch.actors.wire import decode_completions, request_table
from raybatch.config import BackendConfig, EngineConfig, PoolConfig
from raybatch.engine.kv_cache import kv_bytes_per_token
from raybatch.engine.model_config import read_model_spec
from raybatch.types import Sampling
from tests.actors.pools import wait_until
from tests.engine.tiny_models import build

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]

PREFIX, DISTINCT, OUTPUT, BLOCK = 256, 32, 16, 16
NUM_ROWS = 1024
ROWS_PER_CALL = 256


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
                backend=BackendConfig(),
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


def computed_tokens(handle, tables):
    """Return the prompt tokens that were not cached, and the share of each replica's load."""
    handle.start()
    num_replicas = handle.spec.pool.replicas
    wait_until(lambda: len(handle.state().pids) == num_replicas)
    calls = [Call(handle, table) for table in tables]
    completions = [c for call in calls for c in decode_completions(call.join())]
    assert {""} == {c.error for c in completions}
    assert NUM_ROWS == len(completions)
    return sum(PREFIX + DISTINCT - c.num_cached_tokens for c in completions)


def closed_form(degree):
    return NUM_ROWS // degree * PREFIX + NUM_ROWS * DISTINCT
