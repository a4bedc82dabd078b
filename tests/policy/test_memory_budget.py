"""What KV may take of a device and its host, and what an engine says where nothing is chosen."""

import pytest

from raybatch.config import EngineConfig
from raybatch.policy.memory_budget import MemoryBudget, WeightMemory, WeightSizes


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
    assert f"KV on device: {named} it there;" in scope.plain_reason()


def test_without_such_options_an_engine_with_host_memory_chooses():
    scope = MemoryBudget(
        config=EngineConfig(host_kv_bytes=1 << 20),
        is_gpu=False,
        device_kv_bytes=1,
        host_kv_bytes=1 << 20,
    )
    assert scope.may_choose


@pytest.mark.parametrize(
    ("options", "on_cpu", "on_gpu"),
    [
        ({}, 0, 25),
        ({"kv_offload": True}, 25, 25),
        ({"kv_offload": False}, 0, 0),
        ({"host_kv_bytes": 7}, 7, 7),
        ({"host_kv_bytes": None}, 0, 0),
    ],
)
def test_auto_takes_a_share_of_the_free_host_memory_where_kv_may_go_there(options, on_cpu, on_gpu):
    config = EngineConfig(**options)
    memory = {"free_host_bytes": 100, "num_engines_on_host": 2}
    for is_gpu, expected in ((False, on_cpu), (True, on_gpu)):
        budget = MemoryBudget.resolve(config, is_gpu=is_gpu, **memory)
        assert expected == budget.host_kv_bytes
        least = MemoryBudget.resolve(config, is_gpu=is_gpu, most_kv_bytes=10, **memory)
        assert min(expected, 10) == least.host_kv_bytes


@pytest.mark.parametrize(
    ("options", "place"),
    [({}, None), ({"kv_offload": True}, True), ({"speculative_tokens": 3}, False)],
)
def test_before_weights_are_there_kv_takes_half_of_the_host_or_what_layers_leave(options, place):
    sizes = WeightSizes(other_bytes=10, ffn_bytes=(30, 30))
    for host_bytes, expected in ((200, 100), (100, 30), (50, 0)):
        memory = WeightMemory(
            sizes=sizes,
            weight_buffers=1,
            device_bytes=50,
            host_bytes=host_bytes,
            step_bytes=1,
            kv_share=0.9,
        )
        budget = MemoryBudget.before_weights(EngineConfig(**options), memory)
        found = (budget.kv_offload, budget.host_kv_bytes)
        assert found == (place, 0 if place is False else expected)


def test_without_a_choice_options_stay_and_kv_is_on_the_device():
    budget = MemoryBudget.resolve(EngineConfig(), is_gpu=True, free_host_bytes=100)
    plain = budget.chosen(None)
    assert (False, None, "auto") == (
        plain.kv_offload,
        plain.host_kv_bytes,
        plain.max_batched_tokens,
    )
    moved = budget.chosen((True, 4096))
    assert (True, 50, 4096) == (moved.kv_offload, moved.host_kv_bytes, moved.max_batched_tokens)
