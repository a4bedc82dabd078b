"""Budgets that are too small are refused from the files of a model, as its engine would."""

import re

import pytest
import torch

from raybatch.config import EngineConfig
from raybatch.engine.loading.loaded_model import check_budgets
from raybatch.engine.loading.runner import ModelRunner
from raybatch.engine.memory.kv_cache import kv_bytes_per_token
from raybatch.errors import CapacityError, ConfigError
from raybatch.models.config import read_model_spec
from tests.engine.tiny_models import build


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Folder of a checkpoint in bfloat16, with a cache folder next to it."""
    path = tmp_path_factory.mktemp("model") / "qwen3"
    build("qwen3").to(torch.bfloat16).save_pretrained(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAYBATCH_CACHE_DIR", str(path.parent / "cache"))
        yield path


def on_cpu(**options):
    return EngineConfig(device="cpu", tune_malloc=False, **{"max_num_seqs": 4, **options})


def refusal(check, path, config):
    with pytest.raises((ConfigError, CapacityError)) as caught:
        check(path, config)
    return type(caught.value), str(caught.value)


def load(path, config):
    ModelRunner.load(str(path), config)


@pytest.mark.parametrize(
    "options",
    [
        {"kv_cache_bytes": 1},
        {"kv_cache_bytes": 1000, "kv_cache_dtype": "int8"},
        {"host_kv_bytes": 1},
        {"host_kv_bytes": 1, "dtype": "bfloat16"},
        {"device_weight_bytes": 10},
        {"device_weight_bytes": 0, "weight_buffers": 1, "quantization": "int8"},
    ],
    ids=str,
)
def test_a_budget_that_is_too_small_is_refused_with_the_message_of_the_engine(path, options):
    # without compiled ops, whose panels may be padded
    config = on_cpu(compile_kernels=False, **options)
    expected = refusal(check_budgets, path, config)
    assert expected == refusal(load, path, config)
    assert next(iter(options)) in expected[1]


@pytest.mark.parametrize("name", ["kv_cache_bytes", "host_kv_bytes", "device_weight_bytes"])
def test_the_least_budget_that_the_refusal_names_is_accepted(path, name):
    _, message = refusal(check_budgets, path, on_cpu(**{name: 1}))
    found = re.search(r"needs (\d+)|at least (\d+)", message)
    least = int(found[1] or found[2])
    refusal(check_budgets, path, on_cpu(**{name: least - 1}))
    config = on_cpu(compile_kernels=False, **{name: least})
    check_budgets(path, config)
    load(path, config)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a host without GPUs")
def test_a_missing_gpu_is_refused_only_by_the_engine(path):
    config = EngineConfig(device="cuda", kv_cache_bytes=1 << 30)

    check_budgets(path, config)  # the hosts of engines may have a GPU

    with pytest.raises(ConfigError, match=r"engine\.device is 'cuda', .* sees no GPU here"):
        ModelRunner.load(str(path), config)


def test_a_budget_that_another_device_may_take_is_left_to_the_engines(path):
    # float32 on a CPU, the checkpoint's bfloat16 on a GPU
    half = 64 * kv_bytes_per_token(read_model_spec(path), torch.bfloat16)
    check_budgets(path, EngineConfig(kv_cache_bytes=half))
    with pytest.raises(CapacityError, match=f"has {half} bytes, .* needs {2 * half};"):
        check_budgets(path, EngineConfig(device="cpu", kv_cache_bytes=half))
    with pytest.raises(CapacityError):
        check_budgets(path, EngineConfig(kv_cache_bytes=half - 1))


def test_without_budgets_nothing_is_refused(path):
    check_budgets(path, EngineConfig())
    check_budgets(path, EngineConfig(host_kv_bytes=0))
