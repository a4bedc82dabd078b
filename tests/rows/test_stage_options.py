import subprocess
import sys

import pytest

from raybatch.errors import ConfigError
from raybatch.stages.feeder import LLMStage


def test_unknown_option_fails_at_once_with_a_suggestion():
    with pytest.raises(ConfigError, match=r"LLMStage: unknown option 'promt' \(did you mean"):
        LLMStage("m", promt="{text}")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("max_tokens", "sampling.max_tokens"),
        ("temprature", "sampling.temperature"),
        ("replicas", "pool.replicas"),
        ("max_model_length", "engine.max_model_len"),
        ("id_colum", "id_column"),
        ("MAX_TOKENS", "sampling.max_tokens"),
    ],
)
def test_unknown_option_is_told_where_the_one_that_is_meant_lies(name, meant):
    with pytest.raises(ConfigError, match=rf"unknown option '{name}' \(did you mean '{meant}'\?\)"):
        LLMStage("m", **{name: 1})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"concurrency": 2}, "in raybatch it is 'pool.replicas'"),
        ({"batch_size": 2}, "in raybatch it is 'engine.max_num_seqs'"),
        (
            {"tensor_parallel_size": 2},
            "set 'backend.options.engine_kwargs.tensor_parallel_size' and backend.kind 'vllm'",
        ),
        ({"engine": {"tensor_parallel_size": 2}}, "engine_kwargs.tensor_parallel_size' and"),
        ({"engine": {"kv_cache_memory_bytes": 2}}, "of vLLM, set 'engine.kv_cache_bytes'$"),
        ({"tokenizer": "t"}, "'tokenizer'; take a folder with model and tokenizer as the model"),
        (
            {"engine": {"revision": "r"}},
            "'revision'; write it behind the model of the stage: org/name@revision",
        ),
        ({"data_parallel_size": 2}, "set 'backend.options.engine_kwargs.data_parallel_size'"),
        ({"num_gpus": 2}, "in raybatch it is 'pool.num_gpus_per_replica'"),
        ({"pool": {"num_gpus": 2}}, "in raybatch it is 'pool.num_gpus_per_replica'"),
        (
            {"backend": {"kind": "vllm", "options": {"tensor_parallel_size": 2}}},
            "backend.options: .*set 'backend.options.engine_kwargs.tensor_parallel_size' and",
        ),
        (
            {"backend": {"options": {"tensor_parallel_size": 2}}},
            "backend.options: .*set 'backend.options.engine_kwargs.tensor_parallel_size' and",
        ),
    ],
    ids=str,
)
def test_an_option_that_has_another_name_elsewhere_is_told_what_it_is_here(options, message):
    with pytest.raises(ConfigError, match=message):
        LLMStage("m", **options)


@pytest.mark.parametrize(
    "options",
    [
        {"prompt": "{a", "chat": False},
        {"prompt": "{a.b}"},
        {"prompt": ""},
        {"prompt": "a", "messages": "m"},
        {"sampling": {"temprature": 1}},
        {"sampling": {"temperature": -1}},
        {"overrides": 5},
        {"overrides": ["a"]},
        {"chat_template_kwargs": 5},
        {"messages": []},
        {"messages": ["user"]},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "<user>", "content": "{a}"}]},
        {"messages": [{"role": "user", "content": 5}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "{a}"}]}]},
        {"overrides": {"n": "column"}},
        {"overrides": {"temprature": "column"}},
        {"engine": {"max_num_seq": 1}},
        {"pool": {"replicas": 0}},
        {"backend": "vlm"},
        {"backend": {"kind": "fake", "options": {"delay": 1}}},
        {"backend": {"kind": "native", "options": {"delay": 1}}},
        {"chat_template": "{% for m in messages %}{{ m.content }}"},
        {"chat_template": 3},
        {"on_error": "skip"},
        {"on_too_long": "cut"},
        {"chat": "yes"},
        {"messages": 3},
        {"tokenized_prompt": "ids", "system": "s"},
    ],
)
def test_wrong_option_fails_at_construction(options):
    with pytest.raises(ConfigError):
        LLMStage("m", **options)


def test_construction_loads_neither_torch_nor_transformers():
    code = (
        "import sys; from raybatch.stages.feeder import LLMStage; LLMStage('m', prompt='{a}');"
        "print(sorted({'torch', 'transformers', 'vllm'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_options_of_a_backend_need_its_name():
    options = {"engine_kwargs": {"gpu_memory_utilization": 0.9}}
    with pytest.raises(
        ConfigError, match="backend 'auto' takes no options, got engine_kwargs; choose"
    ):
        LLMStage("demo", prompt="{text}", backend={"options": options})
