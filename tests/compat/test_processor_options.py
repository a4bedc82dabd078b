"""Options of ray.data.llm's configs: taken over, refused with a way out, or named in a log line."""

import inspect
import logging
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from raybatch import llm
from raybatch.config import PoolConfig
from raybatch.errors import ConfigError
from raybatch.llm import (
    ChatTemplateStageConfig,
    DetokenizeStageConfig,
    PrepareMultimodalStageConfig,
    ProcessorConfig,
    TokenizerStageConfig,
    build_processor,
    vLLMEngineProcessorConfig,
)

SET_APART = {
    # without it, raybatch continues after errors, and documents that
    "should_continue_on_error": True,
    # Ray's config writes its task into it
    "engine_kwargs": {},
}


@pytest.mark.filterwarnings("ignore")  # Ray's own imports warn
@pytest.mark.parametrize(
    "name", ["vLLMEngineProcessorConfig", *(n for n in llm.__all__ if n.endswith("erStageConfig"))]
)
def test_options_that_are_left_out_read_as_those_of_ray(name):
    pytest.importorskip("pydantic", reason="ray.data.llm needs pydantic")
    theirs = getattr(pytest.importorskip("ray.data.llm"), name)
    given = {"model_source": "m"} if name == "vLLMEngineProcessorConfig" else {}
    ours, read = getattr(llm, name)(**given), theirs(**given)
    expected = {n: getattr(read, n) for n in theirs.model_fields}
    if given:
        expected |= SET_APART
    assert {n: getattr(ours, n) for n in theirs.model_fields} == expected


def test_numbers_that_are_left_out_decide_nothing_and_are_no_options_without_effect(caplog):
    config = vLLMEngineProcessorConfig(model_source="m")
    assert (config.batch_size, config.max_concurrent_batches, config.concurrency) == (32, 8, 1)
    copies = [config.model_copy(), config.model_copy(deep=True), pickle.loads(pickle.dumps(config))]
    for left in (config, *copies, vLLMEngineProcessorConfig(**config.model_dump())):
        assert stage_of(left).pool == PoolConfig()
    assert "without effect" not in caplog.text
    assert stage_of(config.model_copy(update={"concurrency": 1})).pool.replicas == 1


def test_a_copy_has_other_options_that_are_checked_again():
    config = vLLMEngineProcessorConfig(model_source="m", tokenize_stage=TokenizerStageConfig())
    changed = config.model_copy(update={"concurrency": (1, 3)})
    assert (config.concurrency, changed.concurrency, changed.model_source) == (1, (1, 3), "m")
    with pytest.raises(ConfigError, match="concurrency must be"):
        config.model_copy(update={"concurrency": 0})
    with pytest.raises(ConfigError, match="unknown option 'batch_sise'"):
        config.model_copy(update={"batch_sise": 1})


def test_a_dump_makes_the_same_config_again():
    stage = ChatTemplateStageConfig(chat_template="a", chat_template_kwargs={"b": 1})
    config = vLLMEngineProcessorConfig(
        model_source="m", chat_template_stage=stage, engine_kwargs={"max_model_len": 64}
    )
    dumped = config.model_dump()
    assert dumped["chat_template_stage"] == stage.model_dump()
    assert stage_of(vLLMEngineProcessorConfig(**dumped)) == stage_of(config)
    dumped["engine_kwargs"]["max_model_len"] = 1
    assert config.engine_kwargs == {"max_model_len": 64}
    assert config.model_dump(exclude_defaults=True, exclude={"chat_template_stage"}) == {
        "model_source": "m",
        "engine_kwargs": {"max_model_len": 64},
    }
    assert stage.model_dump(include={"chat_template", "memory"}, exclude_none=True) == {
        "chat_template": "a"
    }


def test_a_file_of_yaml_is_a_config(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("model_source: m\nconcurrency: 2\ntokenize_stage: {enabled: false}\n")
    config = vLLMEngineProcessorConfig.from_file(str(path))
    assert (config.model_source, config.concurrency) == ("m", 2)
    path.write_text("- m")
    with pytest.raises(ConfigError, match=r"config\.yaml must hold the options of a vLLMEngine"):
        vLLMEngineProcessorConfig.from_file(str(path))


def test_another_task_in_the_options_of_an_engine_warns_and_does_not_count(caplog):
    config = vLLMEngineProcessorConfig(
        model_source="m", task_type="embed", engine_kwargs={"task_type": "generate"}
    )
    (line,) = [r.getMessage() for r in caplog.records]
    assert line.startswith("engine_kwargs.task_type is 'generate', but")
    stage = stage_of(config)
    assert (stage.task, stage.backend.options) == ("embed", {"engine_kwargs": {}})


def test_importing_the_names_loads_no_tokenizers():
    code = "import sys, raybatch.llm; print('tokenizers' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.stdout.strip() == "False"


def stage_of(config):
    return build_processor(config).get_stage_by_name("LLMStage").config


def pool_of(**options):
    return stage_of(vLLMEngineProcessorConfig(model_source="m", **options)).pool


@pytest.mark.parametrize(
    ("kind", "backend", "runs"),
    [
        (vLLMEngineProcessorConfig, None, "vllm"),
        (vLLMEngineProcessorConfig, "native", "native"),
        (ProcessorConfig, None, "native"),
        (ProcessorConfig, {"kind": "vllm"}, "vllm"),
    ],
)
def test_the_name_of_the_config_says_what_runs(kind, backend, runs):
    assert stage_of(kind(model_source="m", backend=backend)).backend.kind == runs


def test_what_ray_data_llm_writes_into_the_options_of_an_engine_is_no_option_of_vllm():
    kwargs = {"task_type": "generate", "model": "m", "distributed_executor_backend": "uni"}
    config = vLLMEngineProcessorConfig(model_source="m", engine_kwargs=kwargs)
    assert stage_of(config).backend.options == {
        "engine_kwargs": {"distributed_executor_backend": "uni"}
    }


@pytest.mark.parametrize(
    ("group", "tensor_parallel_size", "expected"),
    [
        ({"bundles": [{"CPU": 1}]}, 1, (1, 0, {})),
        ({"bundle_per_worker": {"CPU": 2, "GPU": 1}, "strategy": "PACK"}, 4, (8, 4, {})),
        ({"bundles": [{"GPU": 1, "fast": 0.5}, {"GPU": 1, "fast": 0.5}]}, 2, (0, 2, {"fast": 1})),
    ],
)
def test_bundles_become_what_one_engine_reserves(group, tensor_parallel_size, expected):
    pool = pool_of(
        placement_group_config=group, engine_kwargs={"tensor_parallel_size": tensor_parallel_size}
    )
    assert (pool.num_cpus_per_replica, pool.num_gpus_per_replica, pool.resources) == expected


def test_bundles_of_ranks_that_are_actors_stay_a_group():
    bundles = [{"CPU": 1, "GPU": 1}, {"CPU": 0, "GPU": 1}]
    kwargs = {"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}
    group = {"bundles": bundles, "strategy": "SPREAD"}
    pool = pool_of(engine_kwargs=kwargs, placement_group_config=group)

    assert (pool.bundles, pool.strategy) == ([{"CPU": 1, "GPU": 1}, {"GPU": 1}], "SPREAD")
    assert pool.num_gpus_per_replica is None


def test_accelerator_and_environment_reach_the_engines():
    environment = {"env_vars": {"A": "1"}}
    pool = pool_of(accelerator_type="A10G", runtime_env=environment, pool={"replicas": 2})
    assert (pool.replicas, pool.accelerator_type, pool.runtime_env) == (2, "A10G", environment)


def test_options_of_stages_that_shape_actors_are_named_in_one_line(caplog):
    with caplog.at_level(logging.INFO):
        stage_of(
            ProcessorConfig(
                model_source="m",
                log_engine_metrics=False,
                chat_template_stage={"batch_size": 128, "num_cpus": 0.5},
                detokenize_stage=DetokenizeStageConfig(concurrency=(1, 2)),
            )
        )
    (line,) = [r.getMessage() for r in caplog.records if "ignoring options" in r.getMessage()]
    assert (
        ": log_engine_metrics, chat_template_stage.batch_size, chat_template_stage.num_cpus, "
        "detokenize_stage.concurrency;"
    ) in line


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokenize_stage": {"model_source": "other"}}, "tokenize_stage.model_source is 'other'"),
        ({"tokenize_stage": {"batch_sise": 1}}, r"tokenize_stage: .*did you mean 'batch_size'"),
        ({"tokenize_stage": ChatTemplateStageConfig()}, r"a raybatch.llm.TokenizerStageConfig"),
        ({"detokenize_stage": "no"}, "detokenize_stage must be a bool, a mapping or a"),
        ({"chat_template_stage": {"enabled": 1}}, "enabled must be true or false"),
        ({"placement_group_config": {}}, "either bundles or bundle_per_worker"),
        ({"placement_group_config": {"bundel": []}}, "did you mean 'bundles'"),
        ({"placement_group_config": {"bundles": [{"CPU": -1}]}}, "number of at least 0, got -1"),
        ({"placement_group_config": {"bundles": 5}}, "bundles must be a list of bundles"),
        ({"placement_group_config": {"bundles": []}}, "bundles must be a list of bundles"),
        ({"placement_group_config": {"bundle_per_worker": 5}}, "must be a mapping .*, got 5"),
        (
            {"placement_group_config": {"bundles": [{}, {}], "strategy": "SPREAD"}},
            "are processes of one host",
        ),
        ({"placement_group_config": {"bundles": [{}], "strategy": "X"}}, "must be one of PACK"),
        ({"engine_kwargs": [1]}, "engine_kwargs must be a mapping"),
        ({"accelerator_type": 1}, "accelerator_type must be a name"),
        ({"runtime_env": "x"}, "runtime_env must be a mapping"),
    ],
)
def test_what_cannot_be_done_is_refused_when_the_config_is_made(options, message):
    with pytest.raises(ConfigError, match=message):
        vLLMEngineProcessorConfig(model_source="m", **options)


@pytest.mark.parametrize(
    "stage", [PrepareMultimodalStageConfig(), {"model_config_kwargs": {}}, True], ids=repr
)
def test_a_stage_of_images_needs_vllm(stage):
    assert vLLMEngineProcessorConfig(model_source="m", prepare_multimodal_stage=stage)
    with pytest.raises(ConfigError, match="prepare_multimodal_stage needs backend='vllm'"):
        ProcessorConfig(model_source="m", prepare_multimodal_stage=stage)


def test_a_stage_of_images_that_is_not_enabled_is_fine():
    stage = PrepareMultimodalStageConfig(enabled=False)
    assert stage_of(ProcessorConfig(model_source="m", prepare_multimodal_stage=stage))


def test_a_stage_may_name_the_processors_model():
    stage = TokenizerStageConfig(model_source="m")
    assert stage_of(ProcessorConfig(model_source="m", tokenize_stage=stage))


def test_template_options_that_are_given_twice_and_differ_are_refused():
    config = ProcessorConfig(
        model_source="m", chat_template_stage={"chat_template_kwargs": {"a": 1}}
    )
    for kwargs, is_fine in (({"a": 1}, True), ({"a": 2}, False)):
        options = {"builder_kwargs": {"chat_template_kwargs": kwargs}}
        if is_fine:
            build_processor(config, **options)
        else:
            with pytest.raises(ConfigError, match="differ between"):
                build_processor(config, **options)


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("HttpRequestProcessorConfig", '"kind": "openai"'),
        ("HttpRequestStageConfig", '"kind": "openai"'),
        ("ServeDeploymentProcessorConfig", "share their engines"),
        ("SGLangEngineProcessorConfig", "vLLMEngineProcessorConfig"),
    ],
)
def test_configs_of_other_processors_name_the_way(name, way):
    with pytest.raises(ConfigError, match=f"{name} is not supported; use ") as caught:
        getattr(llm, name)(url="http://localhost", concurrency=1)
    assert way in str(caught.value)


def test_arguments_of_build_processor_may_stand_in_order():
    names = list(inspect.signature(build_processor).parameters)
    built = build_processor(ProcessorConfig(model_source="m"), None, None, {}, {}, {})
    assert (names[0], built.list_stage_names()) == ("config", ["LLMStage"])


@pytest.mark.parametrize("name", llm.__all__)
def test_every_public_name_has_a_docstring(name):
    assert getattr(llm, name).__doc__.strip()
