"""What ray.data.llm gets wrong, each shown right; listed in how-to/move-from-ray-data-llm.md."""

import copy
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from raybatch.errors import ConfigError
from raybatch.llm import ProcessorConfig, build_processor, vLLMEngineProcessorConfig
from raybatch.rows.schema import ERROR_COLUMN
from tests.compat.support import LocalRun, user
from tests.stages.support import SYSTEM, USER, make_tokenizer

ROOT = Path(__file__).parents[2]
# the template of `make_tokenizer`, with a begin token, and a text that it refuses
TEMPLATE = (
    "<|system|>{% for m in messages %}{{ m.content }}"
    "{% if m.content == 'template' %}{{ raise_exception('no such text') }}{% endif %}"
    "{% endfor %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("model") / "chat", has_bos=True)


def config_of(model, *, fake=None, **options):
    backend = {"kind": "fake", "options": fake or {}}
    return ProcessorConfig(model_source=str(model), backend=backend, **options)


def asking(text, **sampling):
    return {"messages": user(text), "sampling_params": sampling}


def test_a_begin_token_of_the_template_is_not_doubled(model):
    config = config_of(model, chat_template_stage={"chat_template": TEMPLATE})
    run = LocalRun(config, [asking("a")])
    assert run.rows[0]["prompt_token_ids"] == [SYSTEM, ord("a")]


def test_rows_with_other_options_beside_them_keep_their_own(model):
    options = [{"temperature": 0.0, "max_tokens": 5}, {"stop": ["a"], "logprobs": 1}]
    run = LocalRun(
        config_of(model), [{"i": 0}, {"i": 1}], lambda row: asking("a", **options[row["i"]])
    )
    found = [(s.max_tokens, s.temperature, s.stop, s.logprobs) for s in samplings(run)]
    assert found == [(5, 0.0, (), None), (16, 1.0, ("a",), 1)]


def samplings(run):
    return [request.sampling for request in run.requests]


def test_a_struct_that_invents_none_invents_no_unlimited_output(model):
    rows = [asking("a", max_tokens=5), asking("b", temperature=0.5)]
    run = LocalRun(config_of(model), pa.Table.from_pylist(rows))
    assert [s.max_tokens for s in samplings(run)] == [5, 16]


def test_a_function_that_says_none_asks_for_what_the_context_holds(model):
    config = config_of(model, fake={"max_model_len": 64})
    run = LocalRun(config, [{"x": 1}], lambda row: {"prompt": "abc", **asking_none()})
    prompt_length = len(run.rows[0]["prompt_token_ids"])
    assert run.rows[0]["num_generated_tokens"] == 64 - prompt_length


def asking_none():
    return {"sampling_params": {"max_tokens": None}}


STEPS = {
    "fine": "",
    "preprocess": "PreprocessError",
    "template": "RenderError",
    "messages": "InvalidPrompt",
    "sampling": "InvalidSampling",
    "Engine": "ValueError",
    "postprocess": "PostprocessError",
}


@pytest.fixture(scope="module")
def failing(model):
    """One row that fails at each step, and one that does not."""

    def preprocess(row):
        if row["step"] == "preprocess":
            raise KeyError("text")
        options = {"max_tokens": -1} if row["step"] == "sampling" else {}
        return asking(None if row["step"] == "messages" else row["step"], **options)

    def postprocess(row):
        if row["step"] == "postprocess":
            raise ValueError("no answer")
        return {"step": row["step"], "text": row["generated_text"], "prompt": row["prompt"]}

    config = config_of(
        model, fake={"error_on": ord("E")}, chat_template_stage={"chat_template": TEMPLATE}
    )
    return LocalRun(config, [{"step": step} for step in STEPS], preprocess, postprocess)


def test_every_step_that_fails_makes_an_error_row(failing):
    classes = {row["step"]: row[ERROR_COLUMN].partition(":")[0] for row in failing.rows}
    assert classes == STEPS


def test_error_rows_have_the_columns_of_good_ones(failing):
    assert {frozenset(row) for row in failing.rows} == {
        frozenset(["step", "text", "prompt", ERROR_COLUMN])
    }
    assert failing.table.schema.field("text").type == pa.string()


@pytest.mark.parametrize("column", ["prompt", "messages"])
def test_the_prompt_of_an_error_row_is_whole(model, column):
    text = "E" * 600
    row = {"prompt": text} if column == "prompt" else {"messages": user(text)}
    run = LocalRun(config_of(model, fake={"error_on": ord("E")}), [row])
    assert run.rows[0][ERROR_COLUMN].startswith("ValueError")
    assert text in run.rows[0]["prompt"]


def test_all_samples_come_back(model):
    run = LocalRun(config_of(model, sampling={"n": 2, "max_tokens": 3}), [{"prompt": "a"}])
    assert [len(tokens) for tokens in run.rows[0]["generated_tokens"]] == [3, 3]


def test_options_of_a_mapping_leave_the_other_defaults_of_vllm(model):
    run = LocalRun(config_of(model, sampling={"top_k": 2}), [{"prompt": "a"}])
    sampling = run.requests[0].sampling
    assert (sampling.top_k, sampling.temperature, sampling.max_tokens) == (2, 1.0, 16)


def test_a_row_that_asks_for_samples_of_its_own_is_told_where_to_say_it(model):
    run = LocalRun(config_of(model), [{"prompt": "a"}], lambda row: {"sampling_params": {"n": 2}})
    assert "set it in the sampling of the stage" in run.rows[0][ERROR_COLUMN]


def test_reasons_and_cached_tokens_are_columns(model):
    sampling = {"temperature": 0.0, "max_tokens": 2}
    rows = [{"prompt": "abc"}, {"prompt": "abc"}]
    run = LocalRun(config_of(model), rows, lambda row: {"sampling_params": sampling})
    prompt_length = len(run.rows[0]["prompt_token_ids"])
    assert [(r["finish_reason"], r["num_cached_tokens"]) for r in run.rows] == [
        ("length", 0),
        ("length", prompt_length),
    ]


@pytest.mark.parametrize("kind", [ProcessorConfig, vLLMEngineProcessorConfig])
def test_the_users_options_are_not_changed(kind):
    options = {
        "model_source": "m",
        "engine_kwargs": {"max_model_len": 64, "enforce_eager": True},
        "placement_group_config": {"bundle_per_worker": {"CPU": 1}},
        "chat_template_stage": {"enabled": True, "chat_template_kwargs": {"a": 1}},
    }
    before = copy.deepcopy(options)
    build_processor(kind(**options))
    assert options == before


@pytest.mark.parametrize(("concurrency", "replicas"), [(3, 3), ((1, 4), 4)])
def test_concurrency_is_a_number_of_engines(model, concurrency, replicas):
    processor = build_processor(config_of(model, concurrency=concurrency))
    assert processor.get_stage_by_name("LLMStage").config.pool.replicas == replicas


def test_a_wrong_engine_option_is_found_on_the_driver():
    with pytest.raises(ConfigError, match="did you mean 'tensor_parallel_size'"):
        vLLMEngineProcessorConfig(model_source="m", engine_kwargs={"tensor_paralel_size": 2})


def test_building_a_processor_starts_nothing():
    code = (
        "import ray, raybatch.llm as llm\n"
        "llm.build_processor(llm.vLLMEngineProcessorConfig(model_source='nobody/has-this'))\n"
        "print(ray.is_initialized())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("number", [-1, 0, 1])
def test_any_bound_of_pending_requests_is_taken(model, number):
    run = LocalRun(config_of(model, max_pending_requests=number), [{"prompt": "a"}])
    assert run.rows[0][ERROR_COLUMN] == ""


def test_a_column_prompt_of_the_user_is_kept(model):
    run = LocalRun(
        config_of(model), [{"prompt": "a?"}], lambda row: {"messages": user(row["prompt"])}
    )
    (row,) = run.rows
    assert (row["prompt"], row["prompt_token_ids"][0]) == ("a?", USER)
