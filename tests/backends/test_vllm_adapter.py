"""The adapter of the vLLM that is installed, against that vLLM."""

import inspect
from contextlib import closing
from dataclasses import replace

import pytest

from raybatch.backends.vllm import versions
from raybatch.backends.vllm.args import VllmOptions
from raybatch.backends.vllm.backend import pooling_params, sampling_params
from raybatch.backends.vllm.model import has_experts
from raybatch.backends.vllm.versions import ADAPTERS
from raybatch.config import BackendConfig, EngineConfig
from raybatch.errors import ConfigError
from raybatch.records.types import Request, Sampling
from tests.backends.vllm_engines import PROMPT, save_text_model, start_tiny
from tests.engine.tiny_models import build

pytest.importorskip("vllm", reason="vLLM is not installed here")
pytestmark = pytest.mark.vllm

ADAPTER = versions.adapter()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_text_model(tmp_path_factory.mktemp("adapter") / "model")


@pytest.fixture(scope="module")
def engine(folder):
    # the only one of this process that is closed
    with closing(start_tiny(folder, num_blocks=64)) as made:
        yield made


def test_the_version_that_packages_tell_is_that_of_the_module():
    import vllm

    assert ADAPTER is ADAPTERS[".".join(vllm.__version__.split(".")[:2])]


@pytest.mark.parametrize("part", ADAPTER.names)
def test_every_name_is_there_and_takes_what_it_is_given(part):
    names = vars(ADAPTER.load(part))
    assert list(names) == list(ADAPTER.names[part])


def test_load_formats_are_those_of_vllm_and_its_plugins(monkeypatch):
    theirs = ADAPTER.load("loading").load_formats
    assert set(theirs) == set(ADAPTER.load_formats.split())
    monkeypatch.setitem(theirs, "mine", object)
    VllmOptions(engine_kwargs={"load_format": "mine"})
    with pytest.raises(ConfigError, match="got 'yours'"):
        VllmOptions(engine_kwargs={"load_format": "yours"})


def test_all_that_is_called_belongs_to_a_name():
    names = {name for names in ADAPTER.names.values() for name in names}
    assert {call.partition(".")[0] for call in ADAPTER.arguments} <= names


def test_options_of_rows_are_those_of_vllm():
    vllm = ADAPTER.load("engine")
    sampling = Sampling(structured_outputs={"regex": "a"}, temperature=1.0)
    request = Request(request_id=1, row_id="1", prompt_token_ids=PROMPT, sampling=sampling)
    assert set(sampling_params(request, 0)) <= set(
        inspect.signature(vllm.SamplingParams).parameters
    )
    assert set(pooling_params(request)) <= set(inspect.signature(vllm.PoolingParams).parameters)


def test_all_that_is_read_of_an_engine_and_of_a_request_is_there(engine):
    inner = engine._engine
    ADAPTER.check(inner, f"{ADAPTER.read} {ADAPTER.read_here}", "its engine")
    engine.add("a", PROMPT, {"max_tokens": 2, "temperature": 0.0})
    inner_id, request = engine._requests["a"]
    ADAPTER.check(request, ADAPTER.read_of_request, "its request")
    state = inner.output_processor.request_states[inner_id]
    ADAPTER.check(state, ADAPTER.read_of_output, "its output")
    engine.take(["a"])


@pytest.mark.parametrize("field", ["read", "read_here", "read_of_request", "read_of_output"])
def test_an_attribute_that_vllm_has_no_more_is_told_when_the_engine_starts(
    folder, monkeypatch, field
):
    broken = replace(ADAPTER, **{field: "engine_core.gone"})
    (minor,) = (name for name, each in ADAPTERS.items() if each is ADAPTER)
    monkeypatch.setitem(versions.ADAPTERS, minor, broken)
    with pytest.raises(ConfigError, match=r"versions\.py\): its .* has no engine_core.gone"):
        start_tiny(folder, num_blocks=64).add("a", PROMPT, {"max_tokens": 2})


@pytest.mark.parametrize("variant", ["qwen3", "mixtral", "qwen3-moe"])
def test_the_driver_takes_the_models_for_mixtures_of_experts_that_vllm_does(tmp_path, variant):
    from vllm.config import ModelConfig

    build(variant).config.save_pretrained(tmp_path)
    model = ModelConfig(model=str(tmp_path), skip_tokenizer_init=True, dtype="float32")
    assert has_experts(tmp_path) == model.is_moe == (variant != "qwen3")


def test_a_load_format_without_weights_needs_none(folder, tmp_path):
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    from raybatch.backends.vllm.start import start_inner

    backend = BackendConfig(kind="vllm", options={"engine_kwargs": {"load_format": "dummy"}})
    engine = EngineConfig(kv_cache_bytes=1 << 20, max_num_seqs=2)
    assert start_inner(str(tmp_path), backend, engine).vocab_size() == 260
