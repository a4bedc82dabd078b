"""What an engine chooses within, and what it says where nothing is chosen."""

import pytest

from raybatch.config import EngineConfig
from raybatch.policy.memory_budget import MemoryBudget


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"speculative_tokens": 3}, "engine.speculative_tokens needs"),
        ({"host_kv_dtype": "int8"}, "engine.host_kv_dtype needs"),
        (
            {"speculative_tokens": 3, "cuda_graphs": True},
            "engine.speculative_tokens and engine.cuda_graphs need",
        ),
    ],
)
def test_options_that_want_kv_on_the_device_are_named(options, named):
    config = EngineConfig(host_kv_bytes=1 << 20, **options)
    scope = MemoryBudget(config=config, is_gpu=False, device_kv_bytes=1, host_kv_bytes=1 << 20)
    assert not scope.may_choose
    assert f"KV on the device, as {named} it there;" in scope.plain_reason()


def test_without_such_options_an_engine_with_host_memory_chooses():
    scope = MemoryBudget(
        config=EngineConfig(host_kv_bytes=1 << 20),
        is_gpu=False,
        device_kv_bytes=1,
        host_kv_bytes=1 << 20,
    )
    assert scope.may_choose
