import json

import pyarrow as pa
import pytest
from safetensors.numpy import save_file

from raybatch.backends import registry
from raybatch.backends.choice import gpus_of_engine
from raybatch.backends.registry import answering_options
from raybatch.backends.vllm import VLLM
from raybatch.backends.vllm.args import VllmOptions, engine_args
from raybatch.config import BackendConfig, EngineConfig
from raybatch.errors import ConfigError, MissingDependency
from raybatch.rows.options import build_stage_config
from raybatch.rows.stage_model import check_model, max_model_len


def vllm(**engine_kwargs):
    return BackendConfig(kind="vllm", options={"engine_kwargs": engine_kwargs})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpu_memory_utilisation": 0.5}, r"did you mean 'gpu_memory_utilization'\?"),
        (
            {"max_model_len": 10},
            "engine_kwargs.max_model_len cannot be set here: set engine.max_model_len instead",
        ),
        ({"kv_cache_memory_bytes": 10}, "set engine.kv_cache_bytes instead"),
        ({"model": "other"}, "engine_kwargs.model cannot be set here: take the model of the stage"),
        ({"data_parallel_backend": "ray"}, "must be 'mp' here, got 'ray'; all ranks of an engine"),
        ({"data_parallel_rank": 1}, "data_parallel_rank must be None here, got 1; all ranks of"),
        (
            {"data_parallel_size": 2, "distributed_executor_backend": "ray"},
            "data_parallel_size needs all ranks of an engine on one host",
        ),
        ({"nnodes": 2}, "must be 1 here, got 2; set distributed_executor_backend='ray'"),
        (
            {"distributed_executor_backend": "external_launcher"},
            "must be None or 'mp' or 'uni' or 'ray' here, got 'external",
        ),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be a number of at least 1"),
        (
            {"load_format": "nonsense"},
            "load_format must be one of auto, .* got 'nonsense'; a format",
        ),
        ({"load_format": "Dummy"}, r"got 'Dummy' \(did you mean 'dummy'\?\)"),
        ({"load_format": ["pt"]}, "load_format must be one of auto, dummy"),
        ({"tensor_parallel_size": "2"}, "tensor_parallel_size must be a number of at least 1"),
    ],
)
def test_wrong_options_are_refused_without_vllm(options, message):
    with pytest.raises(ConfigError, match=message):
        VllmOptions(engine_kwargs=options)


def test_a_stage_is_checked_when_it_is_built():
    backend = {"kind": "vllm", "options": {"engine_kwarg": {}}}
    with pytest.raises(ConfigError, match="did you mean 'engine_kwargs'"):
        build_stage_config("m", {"backend": backend}, where="LLMStage")


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"host_kv_bytes": 8}, "are options of the native engine"),
        ({"host_kv_bytes": 8}, "which go into engine_kwargs"),
        ({"host_kv_bytes": 8, "host_kv_dtype": "int8"}, "engine.host_kv_dtype"),
        ({"quantization": "int8"}, "see engine_kwargs.quantization"),
        ({"device_weight_bytes": 8}, r"engine_kwargs \(cpu_offload_gb\)"),
        ({"device_weight_bytes": 8, "weight_buffers": 3}, r"engine_kwargs \(cpu_offload_gb\)"),
        ({"speculative_tokens": 4}, "vLLM has engine_kwargs.speculative_config"),
        ({"cuda_graphs": True}, "vLLM has engine_kwargs.enforce_eager"),
        ({"cuda_graphs": False}, "vLLM has engine_kwargs.enforce_eager"),
        ({"max_num_seqs": 8}, "engine.max_num_seqs=8 and engine_kwargs.max_num_seqs=16"),
        (
            {"kv_cache_dtype": "int8"},
            "'int8_per_token_head', and engine_kwargs.kv_cache_dtype='fp8'",
        ),
    ],
)
def test_options_of_the_engine_that_do_not_fit_are_refused(engine, message):
    with pytest.raises(ConfigError, match=message):
        registry.check_options(vllm(max_num_seqs=16, kv_cache_dtype="fp8"), EngineConfig(**engine))


@pytest.mark.parametrize(
    ("own", "given", "expected"),
    [
        ("auto", None, None),
        ("int8", None, "int8_per_token_head"),
        ("fp8", None, "fp8_per_token_head"),
        ("fp8", "fp8_per_token_head", "fp8_per_token_head"),
        ("auto", "fp8", "fp8"),
    ],
)
def test_kv_of_8_bits_has_the_names_of_vllm(own, given, expected):
    engine, kwargs = EngineConfig(kv_cache_dtype=own), {}
    if given is not None:
        kwargs["kv_cache_dtype"] = given
    registry.check_options(vllm(**kwargs), engine)
    args = engine_args(VllmOptions(engine_kwargs=kwargs), engine)
    assert expected == args.get("kv_cache_dtype")


@pytest.mark.parametrize("kind", ["transformers", "openai"])
def test_backends_that_keep_kv_by_themselves_refuse_its_type(kind):
    with pytest.raises(ConfigError, match=f"engine.kv_cache_dtype .* not of the {kind} backend"):
        registry.check_options(BackendConfig(kind=kind), EngineConfig(kv_cache_dtype="int8"))


def test_options_of_the_engine_get_the_names_of_vllm():
    engine = EngineConfig(
        dtype="float32",
        kv_cache_bytes=1 << 20,
        block_size_tokens=32,
        max_batched_tokens=512,
        max_num_seqs=8,
        max_model_len=100,
        enable_prefix_caching=False,
    )
    args = engine_args(VllmOptions(engine_kwargs={"seed": 3}), engine)
    assert args == {
        "dtype": "float32",
        "kv_cache_memory_bytes": 1 << 20,
        "block_size": 32,
        "max_num_batched_tokens": 512,
        "max_num_seqs": 8,
        "max_model_len": 100,
        "enable_prefix_caching": False,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "seed": 3,
    }


def test_sizes_that_nobody_has_set_are_left_to_vllm():
    assert set(engine_args(VllmOptions(), EngineConfig())) == {
        "dtype",
        "enable_prefix_caching",
        "disable_log_stats",
        "use_tqdm_on_load",
    }


@pytest.mark.parametrize(("task", "found"), [("generate", True), ("embed", None), ("score", None)])
def test_vllm_decides_whether_a_pooling_model_can_share_prefixes(task, found):
    args = engine_args(VllmOptions(), EngineConfig(), task)
    assert args.get("enable_prefix_caching") is found
    off = EngineConfig(enable_prefix_caching=False)
    assert engine_args(VllmOptions(), off, task)["enable_prefix_caching"] is False


def test_what_vllm_is_told_wins_over_our_defaults():
    args = engine_args(VllmOptions(engine_kwargs={"disable_log_stats": False}), EngineConfig())
    assert args["disable_log_stats"] is False


@pytest.mark.parametrize(
    ("task", "kwargs", "name", "expected"),
    [
        ("classify", {"convert": "auto"}, "convert", "classify"),
        ("embed", {"runner": "auto"}, "runner", "pooling"),
        ("classify", {"convert": "none"}, "convert", "none"),
        (
            "generate",
            {"tensor_parallel_size": 2, "distributed_executor_backend": None},
            "distributed_executor_backend",
            "mp",
        ),
        ("generate", {"reasoning_parser": None}, "reasoning_parser", "qwen3"),
    ],
    ids=["convert", "runner", "given", "ranks", "parser"],
)
def test_what_leaves_a_choice_open_replaces_no_choice(task, kwargs, name, expected):
    parser = "qwen3" if task == "generate" else None
    options = VllmOptions(engine_kwargs=kwargs, reasoning_parser=parser)
    assert engine_args(options, EngineConfig(), task)[name] == expected


def test_an_engine_takes_as_many_gpus_as_it_has_ranks():
    ranks = {"tensor_parallel_size": 4, "pipeline_parallel_size": 2}
    assert gpus_of_engine(vllm(**ranks), EngineConfig()) == 8
    assert gpus_of_engine(vllm(**ranks, data_parallel_size=3), EngineConfig()) == 24
    assert gpus_of_engine(vllm(), EngineConfig()) == 1
    assert gpus_of_engine(vllm(**ranks), EngineConfig(device="cpu")) == 0


def test_ranks_of_an_engine_are_processes_that_end_with_it():
    args = engine_args(VllmOptions(engine_kwargs={"tensor_parallel_size": 2}), EngineConfig())
    assert args["distributed_executor_backend"] == "mp"
    # which have a process each, and their parts only where there are some
    args = engine_args(VllmOptions(engine_kwargs={"data_parallel_size": 2}), EngineConfig())
    assert "distributed_executor_backend" not in args


def test_a_job_remembers_the_options_that_decide_answers_alone():
    backend = vllm(
        quantization="fp8",
        gpu_memory_utilization=0.5,
        tensor_parallel_size=2,
        data_parallel_size=2,
        enable_expert_parallel=True,
        hf_token="secret",
    )
    options = {"engine_kwargs": {"quantization": "fp8"}}
    assert answering_options(backend, "m") == {"kind": "vllm", "options": options}


def test_a_host_without_vllm_is_told_what_to_install(monkeypatch):
    monkeypatch.setattr(registry, "find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match=r"pip install .*\[vllm\]'"):
        registry.create_backend("m", vllm(), EngineConfig())


@pytest.fixture
def gpt2(tmp_path):
    """A folder of a model that the native engine does not run."""
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_positions": 300}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({}, tmp_path / "model.safetensors")
    (tmp_path / "vocab.json").touch()
    return tmp_path


PROMPTS = pa.schema([("prompt", pa.string())])


def stage_of(folder, backend):
    return build_stage_config(str(folder), {"backend": backend}, where="LLMStage")


def test_data_parallel_ranks_of_a_dense_model_are_refused_by_its_config(gpt2):
    with pytest.raises(ConfigError, match=r"is for mixtures of experts, .*: set pool\.replicas"):
        VLLM.check_files(gpt2, vllm(data_parallel_size=2))
    config = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8}
    (gpt2 / "config.json").write_text(json.dumps(config))
    VLLM.check_files(gpt2, vllm(data_parallel_size=2))


def test_a_model_that_vllm_alone_runs_passes_the_check_of_jobs(gpt2):
    check_model(stage_of(gpt2, "vllm"), PROMPTS)
    with pytest.raises(ConfigError, match="not supported by the native engine"):
        check_model(stage_of(gpt2, "native"), PROMPTS)


def test_the_length_of_such_a_model_is_known_to_stages(gpt2):
    assert max_model_len(stage_of(gpt2, "vllm"), gpt2) == 300


@pytest.mark.parametrize(
    ("options", "output"),
    [
        ({"reasoning_parser": "qwen"}, "reasoning_parser: .* no 'qwen' .did you mean 'qwen3'"),
        ({"tool_call_parser": "hermess"}, "did you mean 'hermes'"),
        ({"tool_call_parser": "zz"}, "it has apertus, "),
        (
            {"reasoning_parser": "qwen3", "engine_kwargs": {"reasoning_parser": "granite"}},
            "set the same option to different values",
        ),
    ],
    ids=["reasoning", "calls", "nothing-near", "twice"],
)
def test_a_parser_that_vllm_lacks_is_refused(options, output):
    with pytest.raises(ConfigError, match=output):
        VllmOptions(**options)


def test_a_plugin_may_bring_a_parser_of_any_name():
    kwargs = {"reasoning_parser_plugin": "mine.py"}
    assert VllmOptions(reasoning_parser="mine", engine_kwargs=kwargs).reasoning_parser == "mine"


def test_a_constraint_of_vllm_waits_for_the_end_of_the_reasoning():
    args = engine_args(VllmOptions(reasoning_parser="qwen3"), EngineConfig())
    assert args["reasoning_parser"] == "qwen3"
