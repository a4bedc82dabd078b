import logging
from pathlib import Path

import pyarrow as pa
import pytest
import ray

from raybatch.compat.options import ProcessorConfig, vLLMEngineProcessorConfig
from raybatch.compat.processor import Postprocess, Preprocess, build_processor
from raybatch.config import BackendConfig, EngineConfig
from raybatch.errors import ConfigError
from raybatch.records.types import UNBOUNDED_TOKENS, Sampling
from raybatch.rows.schema import ERROR_COLUMN
from tests.clusters import local_ray, own_ray
from tests.stages.support import answer, local, make_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("model") / "chat")


def stage_of(**options):
    config = ProcessorConfig(model_source="m", **options)
    return build_processor(config).get_stage_by_name("LLMStage")


def test_engine_options_with_an_equivalent_are_taken_over():
    stage = stage_of(
        engine_kwargs={
            "max_model_len": 4096,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 512,
            "dtype": "half",
            "enable_prefix_caching": False,
            "kv_cache_memory_bytes": 1 << 20,
            "block_size": 16,
            "tensor_parallel_size": 1,
        }
    )
    assert stage.config.engine == EngineConfig(
        max_model_len=4096,
        max_num_seqs=8,
        max_batched_tokens=512,
        dtype="float16",
        enable_prefix_caching=False,
        kv_cache_bytes=1 << 20,
        block_size_tokens=16,
    )


@pytest.mark.parametrize(
    ("given", "own"),
    [
        ("auto", "auto"),
        ("fp8", "fp8"),
        ("fp8_e4m3", "fp8"),
        ("fp8_per_token_head", "fp8"),
        ("int8_per_token_head", "int8"),
    ],
)
def test_types_of_kv_are_taken_over_from_vllm(given, own):
    stage = stage_of(engine_kwargs={"kv_cache_dtype": given})
    assert stage.config.engine.kv_cache_dtype == own
    vllm = stage_of(backend="vllm", engine_kwargs={"kv_cache_dtype": given})
    assert vllm.config.engine.kv_cache_dtype == "auto"
    assert vllm.config.backend.options["engine_kwargs"] == {"kv_cache_dtype": given}


def test_a_type_of_kv_that_only_vllm_has_is_refused():
    with pytest.raises(ConfigError, match=r"kv_cache_dtype must be one of .* got 'nvfp4'"):
        stage_of(engine_kwargs={"kv_cache_dtype": "nvfp4"})


@pytest.mark.parametrize(("concurrency", "replicas"), [(3, 3), ((1, 4), 4), (None, None)])
def test_concurrency_becomes_replicas(concurrency, replicas):
    assert stage_of(concurrency=concurrency).config.pool.replicas == replicas


@pytest.mark.parametrize("toggle", [True, False, None, {"enabled": True}], ids=str)
def test_vllm_reads_images_of_rows_with_and_without_a_stage_for_them(toggle):
    stage = stage_of(backend="vllm", prepare_multimodal_stage=toggle)
    assert stage.config.conventional_images == "multimodal_data"
    assert stage_of().config.conventional_images is None


def test_the_native_engine_has_two_forms_of_quantization():
    for form in ("int8", "fp8"):
        assert stage_of(engine_kwargs={"quantization": form}).config.engine.quantization == form
    for value in ("awq", "INT8"):
        with pytest.raises(ConfigError, match=r"engine.quantization must be one of int8, fp8"):
            stage_of(engine_kwargs={"quantization": value})


@pytest.mark.parametrize("name", ["kv_cache_dtype", "dtype"])
def test_types_that_are_no_names_are_refused_by_option(name):
    with pytest.raises(ConfigError, match=rf"engine.{name} must be one of .*, got \['fp8'\]"):
        stage_of(engine_kwargs={name: ["fp8"]})


def test_vllm_gets_all_options_of_the_engine():
    stage = stage_of(
        backend="vllm",
        engine_kwargs={
            "dtype": "half",
            "max_model_len": 4096,
            "max_num_seqs": 8,
            "tensor_parallel_size": 2,
            "quantization": "fp8",
        },
    )
    assert stage.config.engine == EngineConfig(dtype="float16", max_model_len=4096, max_num_seqs=8)
    assert stage.config.backend == BackendConfig(
        kind="vllm",
        options={
            "engine_kwargs": {"max_num_seqs": 8, "tensor_parallel_size": 2, "quantization": "fp8"}
        },
    )


def test_the_native_engine_runs_unless_vllm_is_asked_for():
    assert stage_of().config.backend == BackendConfig(kind="native")


def test_sampling_defaults_are_those_of_vllm():
    assert stage_of().config.sampling == Sampling(temperature=1.0, max_tokens=16)


@pytest.mark.parametrize(("flag", "on_error"), [(None, "row"), (True, "row"), (False, "raise")])
def test_should_continue_on_error_decides_what_a_failed_row_does(flag, on_error):
    assert stage_of(should_continue_on_error=flag).config.on_error == on_error


def test_options_without_effect_are_named_in_one_line(caplog):
    with caplog.at_level(logging.INFO):
        stage_of(batch_size=64, max_concurrent_batches=8, engine_kwargs={"swap_space": 4})
    (line,) = [r.getMessage() for r in caplog.records if "ignoring options" in r.getMessage()]
    assert ": batch_size, max_concurrent_batches, engine_kwargs.swap_space;" in line


@pytest.mark.parametrize(("given", "expected"), [(True, False), (False, "auto"), (None, "auto")])
def test_an_eager_engine_has_no_graphs(given, expected):
    config = stage_of(engine_kwargs={"enforce_eager": given}).config
    assert config.engine.cuda_graphs == expected


def test_a_pool_and_an_option_may_say_the_same():
    assert stage_of(pool={"replicas": 2}, concurrency=2).config.pool.replicas == 2


def test_stages_without_effect_are_named(caplog):
    caplog.set_level(logging.INFO, logger="raybatch")
    options = {"enabled": True, "model_config_kwargs": {"a": 1}}
    stage_of(backend="vllm", detokenize_stage=False, prepare_multimodal_stage=options)
    (line,) = [r.getMessage() for r in caplog.records if "ignoring options" in r.getMessage()]
    names = (
        "prepare_multimodal_stage.model_config_kwargs, detokenize_stage, prepare_multimodal_stage"
    )
    assert f": {names};" in line


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batchsize": 1}, r"unknown option 'batchsize' \(did you mean 'batch_size'\?\)"),
        ({"engine_kwargs": {"max_num_seq": 1}}, r"did you mean 'max_num_seqs'"),
        (
            {"engine_kwargs": {"kv_offload": True}},
            r"LLMStage\(model, engine=\{'kv_offload': ...\}\)",
        ),
        ({"engine_kwargs": {"tensor_parallel_size": 2}}, "tensor_parallel_size=2 is not supported"),
        ({"backend": "vlm"}, "did you mean 'vllm'"),
        (
            {"backend": "vllm", "engine_kwargs": {"quantisation": "x"}},
            "did you mean 'quantization'",
        ),
        ({"task_type": "embed"}, "native backend generates text; .* needs backend='vllm'"),
        ({"task_type": "embedd", "backend": "vllm"}, "did you mean 'embed'"),
        ({"concurrency": 0}, "concurrency must be"),
        ({"concurrency": (3, 2)}, "concurrency must be"),
        ({"chat_template_stage": {"chat_templat": "x"}}, "did you mean 'chat_template'"),
        ({"prepare_multimodal_stage": True}, "prepare_multimodal_stage needs backend='vllm'"),
        ({"prepare_multimodal_stage": {"enabled": True}}, "needs backend='vllm'"),
        ({"dynamic_lora_loading_path": "x"}, "needs backend='vllm' and enable_lora"),
        ({"should_continue_on_error": "no"}, "must be true or false, got 'no'"),
        ({"batch_size": "a"}, "batch_size must be a whole number, got 'a'"),
        (
            {"pool": {"replicas": 8}, "concurrency": 2},
            "pool.replicas is 8, but concurrency.* sets it to 2",
        ),
    ],
)
def test_wrong_option_fails_at_construction(options, message):
    with pytest.raises(ConfigError, match=message):
        ProcessorConfig(model_source="m", **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preprocess": "x"}, "preprocess must be a function of the row, got 'x'"),
        ({"postprocess_map_kwargs": "x"}, "postprocess_map_kwargs must be a mapping, got 'x'"),
        ({"builder_kwargs": {"chat_template_kwargs": 5}}, "must be a mapping, got 5"),
    ],
    ids=["function", "map", "template"],
)
def test_what_a_processor_cannot_be_built_with_is_told(options, message):
    with pytest.raises(ConfigError, match=message):
        build_processor(ProcessorConfig(model_source="m"), **options)


def test_rows_that_are_no_dataset_are_told():
    with pytest.raises(ConfigError, match=r"got list; .* ray\.data\.from_items"):
        build_processor(ProcessorConfig(model_source="m"))([{"prompt": "a"}])


def test_no_bound_of_the_output_may_be_said_for_all_rows():
    assert stage_of(sampling={"max_tokens": None}).config.sampling.max_tokens == UNBOUNDED_TOKENS


def test_an_option_of_vllms_server_has_no_effect(caplog):
    caplog.set_level(logging.INFO, logger="raybatch")
    stage = stage_of(backend="vllm", engine_kwargs={"enable_log_requests": False})
    assert stage.config.backend.options["engine_kwargs"] == {}
    assert "engine_kwargs.enable_log_requests" in caplog.text


def test_builder_knows_only_the_chat_template_options():
    config = ProcessorConfig(model_source="m")
    built = build_processor(config, builder_kwargs={"chat_template_kwargs": {"a": 1}})
    assert built.get_stage_by_name("LLMStage").config.chat_template_kwargs == {"a": 1}
    with pytest.raises(ConfigError, match="unknown option 'chat_kwargs'"):
        build_processor(config, builder_kwargs={"chat_kwargs": {}})


def test_prompt_column_is_complete_and_may_hold_control_tokens(model):
    config = ProcessorConfig(model_source=str(model), backend="fake")
    stage = local(build_processor(config).get_stage_by_name("LLMStage"))
    columns = {"prompt": ["<|user|>a"], "sampling_params": [None], "__rb_input_error__": [""]}
    answer(stage, pa.table(columns))
    assert [r.prompt_token_ids.tolist() for r in stage.pool.requests] == [[257, ord("a")]]


@pytest.mark.parametrize("toggle", [False, {"enabled": False}])
def test_messages_are_not_read_without_the_chat_template_stage(model, toggle):
    config = ProcessorConfig(model_source=str(model), backend="fake", chat_template_stage=toggle)
    stage = local(build_processor(config).get_stage_by_name("LLMStage"))
    columns = {
        "messages": [[{"role": "user", "content": "old"}]],
        "prompt": ["a"],
        "sampling_params": [None],
        "__rb_input_error__": [""],
    }
    answer(stage, pa.table(columns))
    assert [r.prompt_token_ids.tolist() for r in stage.pool.requests] == [[ord("a")]]


def test_second_processor_answers_the_rows_of_a_first(model):
    config = ProcessorConfig(model_source=str(model), backend="fake")
    stage = local(build_processor(config).get_stage_by_name("LLMStage"))
    first = Preprocess(lambda row: {"prompt": row["text"]})
    between = Postprocess(lambda row: {"first": row["row_id"], **row})
    second = Preprocess(lambda row: {"prompt": f"{row['first']}?"})
    table = between(answer(stage, first(pa.table({"text": ["a", None]}))))
    rows = answer(stage, second(table)).to_pylist()
    prompt = bytes(stage.pool.requests[-1].prompt_token_ids.tolist()).decode()
    assert prompt == f"{rows[0]['first']}?"
    assert [row[ERROR_COLUMN] for row in rows] == ["", "InvalidPrompt: column 'prompt' is null"]


def test_rows_that_all_fail_in_preprocess_need_no_prompt(model):
    config = ProcessorConfig(model_source=str(model), backend="fake")
    stage = local(build_processor(config).get_stage_by_name("LLMStage"))
    table = Preprocess(lambda row: {"prompt": row["nothing"]})(pa.table({"text": ["a"]}))
    assert answer(stage, table).column(ERROR_COLUMN).to_pylist() == [
        "PreprocessError: KeyError: 'nothing'; the row has text"
    ]


@pytest.mark.ray
@pytest.mark.slow
def test_engines_that_keep_all_cpus_but_one_leave_that_to_the_next_execution(model):
    # warm engines of other tests may hold some of the shared cluster's
    with own_ray():
        bundle = {"CPU": int(ray.cluster_resources()["CPU"]) - 1}
        config = ProcessorConfig(
            model_source=str(model),
            backend="fake",
            concurrency=1,
            placement_group_config={"bundles": [bundle]},
        )
        processor = build_processor(config, lambda row: {"prompt": "a"})
        found = [processor(ray.data.from_items([{"id": 0}])).count() for _ in range(2)]
    assert found == [1, 1]


@pytest.fixture(scope="module")
def processed(model) -> list[dict]:
    def preprocess(row):
        if row["id"] == 1:
            raise KeyError("no text")
        return {
            "messages": [{"role": "user", "content": f"t{row['id']}"}],
            "sampling_params": {"max_tokens": 2} if row["id"] == 0 else {"temperature": 0.0},
        }

    def postprocess(row):
        if row["id"] == 2:
            raise ValueError("no answer")
        return {"id": row["id"], "num": row["num_generated_tokens"]}

    config = vLLMEngineProcessorConfig(model_source=str(model), backend="fake", concurrency=1)
    processor = build_processor(config, preprocess, postprocess)
    with local_ray():
        rows = processor(ray.data.from_items([{"id": i} for i in range(4)])).take_all()
    return sorted(rows, key=lambda row: row["id"])


@pytest.mark.ray
def test_rows_go_through_both_functions_and_their_own_options(processed):
    assert [processed[i] for i in (0, 3)] == [
        {"id": 0, "num": 2, ERROR_COLUMN: ""},
        {"id": 3, "num": 16, ERROR_COLUMN: ""},
    ]


@pytest.mark.ray
def test_failures_of_both_functions_are_rows(processed):
    no_text = "PreprocessError: KeyError: 'no text'"
    assert [processed[i] for i in (1, 2)] == [
        {"id": 1, "num": None, ERROR_COLUMN: f"{no_text}; the row has id"},
        {"id": 2, "num": None, ERROR_COLUMN: "PostprocessError: ValueError: no answer"},
    ]


@pytest.mark.ray
def test_blocks_with_messages_and_values_of_all_kinds_are_one_dataset(model):
    values = [5, "five", {"a": 1}, [1]]
    part = {"type": "text", "text": "p"}

    def preprocess(row):
        # the first blocks have texts alone, the last ones parts alone
        content = [part] if row["id"] > 5 or row["id"] == 3 else "t"
        return {"messages": [{"role": "user", "content": content}]}

    def postprocess(row):
        prompt_text = row["messages"][0]["content"]
        return {**row, "x": values[row["id"] % 4], "is_text": isinstance(prompt_text, str)}

    config = ProcessorConfig(model_source=str(model), backend="fake", concurrency=1)
    processor = build_processor(config, preprocess, postprocess)
    ending = build_processor(
        config.model_copy(update={"should_continue_on_error": False}),
        preprocess,
        lambda row: {"x": 1 // (row["id"] - 5)},
    )
    with local_ray():
        dataset = ray.data.range(9, override_num_blocks=3)
        rows = sorted(processor(dataset).take_all(), key=lambda row: row["id"])
        with pytest.raises(ray.exceptions.RayTaskError, match="PostprocessError: ZeroDivision"):
            ending(dataset).materialize()
    assert [row["x"] for row in rows] == [values[i % 4] for i in range(9)]
    assert [row["is_text"] for row in rows] == [True] * 3 + [False, True, True] + [False] * 3
    assert {row[ERROR_COLUMN] for row in rows} == {""}


def test_adapters_are_named_by_the_column_model():
    options = {"backend": "vllm", "engine_kwargs": {"enable_lora": True}}
    config = stage_of(**options, dynamic_lora_loading_path="s3://b/adapters").config
    assert (config.lora_column, config.lora_path) == ("model", "s3://b/adapters")


@pytest.mark.parametrize("task", ["embed", "classify", "score"])
def test_pooling_tasks_have_options_per_row_and_no_sampling(task):
    config = stage_of(backend="vllm", task_type=task).config
    assert (config.task, config.pooling_column) == (task, "pooling_params")
    assert (config.sampling_column, config.query is None) == (None, task != "score")
