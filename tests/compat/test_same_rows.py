"""Rows of ray.data.llm and of raybatch.llm, from the same vLLM with the same checkpoint."""

import asyncio
import json

import pytest
import ray

from raybatch import llm
from raybatch.actors.pool import release_pools
from raybatch.text.tokenizer import Tokenizer
from tests.compat.both import ENGINE, ENVIRONMENT, HERE, PLACED, THERE, compared, plain
from tests.compat.documented import blocks_of, run_example
from tests.stages.support import SYSTEM, make_tokenizer

pytest.importorskip("vllm", reason="vLLM is not installed here")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("wide_cluster"),
]

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if enable_thinking %}<|system|>{% endif %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# what both have under one name and in one form
COMPARED = (
    "generated_text",
    "generated_tokens",
    "num_generated_tokens",
    "num_input_tokens",
    "prompt_token_ids",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A small random model with a chat template, whose tokens are bytes."""
    from tests.engine.tiny_models import build

    folder = make_tokenizer(tmp_path_factory.mktemp("moved") / "model")
    options = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**options, "chat_template": TEMPLATE})
    )
    build("qwen3", vocab_size=260).save_pretrained(folder)
    return str(folder)


def rows_of(block, model, module):
    """Return the rows of an example with one of the modules."""
    dataset = ray.data.from_items([{"id": i, "prompt": f"item {i}?"} for i in range(4)])
    names = {"MODEL": model, "ENGINE": dict(ENGINE), "ENVIRONMENT": ENVIRONMENT, "DATASET": dataset}
    return run_example(block, module=module, names=names)


@pytest.mark.parametrize(
    ("number", "names"),
    [
        (0, ("id", "resp", *COMPARED)),
        pytest.param(1, ("resp",), marks=pytest.mark.exhaustive),
        pytest.param(2, COMPARED, marks=pytest.mark.exhaustive),
    ],
    ids=["columns of both", "map options", "template options"],
)
def test_documented_example_of_build_processor_gives_the_same_rows(model, kept, number, names):
    from ray.data.llm import build_processor

    block = blocks_of(build_processor)[number]
    there = kept.get(f"example {number}", lambda: compared(rows_of(block, model, THERE), names))
    here = rows_of(block, model, HERE)
    release_pools()
    assert compared(here, names) == there
    assert here


@pytest.fixture(scope="module")
def results(model, kept):
    """Rows with options, through both, without a template; and the stop string."""
    config = {"model_source": model, **PLACED}
    options = {"temperature": 0.0}
    first = llm.build_processor(
        llm.vLLMEngineProcessorConfig(**config, engine_kwargs=dict(ENGINE), concurrency=1),
        lambda row: {"sampling_params": {**options, "ignore_eos": True, "max_tokens": 12}},
    )
    (row,) = first(ray.data.from_items([{"prompt": "abc"}])).take_all()
    text = row["generated_text"]
    stop = next(c for c in text[4:] if c.isascii())
    free = {"ignore_eos": True}
    rows = [
        {"id": 0, "prompt": "abc", "own": {**free, "max_tokens": 12, "logprobs": 2}},
        {"id": 1, "prompt": "abc", "own": {**free, "max_tokens": 12, "stop": [stop]}},
        {"id": 2, "prompt": "abd", "own": free},
        {"id": 3, "prompt": "a" * 600, "own": {"max_tokens": 2}},
        {"id": 4, "prompt": "yes?", "own": {"structured_outputs": {"choice": ["yes", "no"]}}},
    ]

    def answered(module):
        own = {**config, "engine_kwargs": dict(ENGINE)}
        names = {"rows": rows, "config": own, "options": options, "ray": ray}
        exec(SCRIPT.format(module=module), names)
        return sorted(names["answered"], key=lambda row: row["id"])

    here = answered(HERE)
    return kept.get("results", lambda: [answers_there(row) for row in answered(THERE)]), here, stop


def answers_there(row):
    """Return what is compared of a row of ray.data.llm."""
    chosen = []
    if row["id"] == 0:
        places = zip(row["logprobs"], row["generated_tokens"], strict=True)
        chosen = [place[token]["logprob"] for place, token in places]
    names = (*COMPARED, "prompt", "__inference_error__")
    found = {name: plain(row[name]) for name in names if name in row}
    return {**found, "columns": sorted(row), "chosen": chosen}


SCRIPT = """
import json
from {module} import build_processor, vLLMEngineProcessorConfig

processor = build_processor(
    vLLMEngineProcessorConfig(
        **config,
        concurrency=1,
        batch_size=1,
        chat_template_stage=False,
        should_continue_on_error=True,
    ),
    lambda row: {{"sampling_params": {{**options, **json.loads(row["own"])}}}},
    lambda row: {{**row, "said": row["generated_text"]}},
)
items = [{{**row, "own": json.dumps(row["own"])}} for row in rows]
# one row per block, for ray.data.llm
answered = processor(ray.data.from_items(items, override_num_blocks=len(items))).take_all()
"""


def test_plain_prompts_give_the_same_rows(results):
    there, here, _ = results
    assert compared([here[0]], COMPARED) == compared([there[0]], COMPARED)


def test_constraints_of_a_row_give_the_same_answer(results):
    there, here, _ = results
    assert here[4]["generated_text"] == there[4]["generated_text"]
    assert here[4]["generated_text"] in ("yes", "no")


def test_chosen_tokens_have_the_same_log_probabilities(results):
    there, here, _ = results
    found = [place["logprobs"][0] for place in here[0]["logprobs"]]
    assert found == pytest.approx(there[0]["chosen"], abs=1e-4)
    assert found


def test_a_stop_string_is_in_the_text_there_and_cut_off_here(results):
    there, here, stop = results
    assert there[1]["generated_text"].endswith(stop)
    assert here[1]["generated_text"] + stop == there[1]["generated_text"]


CHAIN = """
from {module} import build_processor, vLLMEngineProcessorConfig

config = vLLMEngineProcessorConfig(**config, concurrency=1)
sampling = {{"temperature": 0.0, "max_tokens": 4}}
first = build_processor(
    config,
    lambda row: {{"messages": asking(f"item {{row['id']}}?"), "sampling_params": sampling}},
    lambda row: {{**row, "first": row["generated_text"]}},
)
second = build_processor(
    config,
    lambda row: {{**row, "messages": asking(row["first"]), "sampling_params": sampling}},
    lambda row: {{**row, "second": row["generated_text"]}},
)
answered = second(first(ray.data.range(3))).take_all()
"""


def test_two_processors_in_a_row_give_the_same_rows(model, kept):
    def asking(text):
        return [{"role": "user", "content": text}]

    def answered(module):
        config = {"model_source": model, "engine_kwargs": dict(ENGINE), **PLACED}
        names = {"config": config, "asking": asking, "ray": ray}
        exec(CHAIN.format(module=module), names)
        return compared(names["answered"], ("id", "first", "second", *COMPARED))

    assert answered(HERE) == kept.get("chain", lambda: answered(THERE))


def test_numbers_beside_absent_ones_become_fractions_there_on_which_vllm_stops():
    """Here: test_rows_with_other_options_beside_them_keep_their_own."""
    import msgspec
    from ray.llm._internal.batch.stages.base import wrap_preprocess
    from vllm import SamplingParams

    def seen_by_a_stage(batch):
        return {"seen": [json.dumps(row["sampling_params"]) for row in batch["__data"]]}

    preprocess = wrap_preprocess(lambda row: {"sampling_params": json.loads(row["own"])}, "__data")
    rows = [{"own": '{"max_tokens": 5}'}, {"own": '{"temperature": 0.5}'}]
    dataset = ray.data.from_items(rows, override_num_blocks=1).map(preprocess)
    seen = [json.loads(row["seen"]) for row in dataset.map_batches(seen_by_a_stage).take_all()]
    assert seen == [
        {"max_tokens": 5.0, "temperature": None},
        {"max_tokens": None, "temperature": 0.5},
    ]
    assert isinstance(seen[0]["max_tokens"], float)
    sent = msgspec.msgpack.encode(SamplingParams(max_tokens=seen[0]["max_tokens"]))
    with pytest.raises(msgspec.ValidationError, match="got `float`"):
        msgspec.msgpack.decode(sent, type=SamplingParams)  # as the engine reads requests


def test_a_prompt_that_is_too_long_is_an_error_row_in_both_and_whole_here(results):
    there, here, _ = results
    assert there[3]["__inference_error__"]
    assert here[3]["__inference_error__"].startswith("PromptTooLong")
    assert len(there[3]["prompt"]) < 600
    assert here[3]["prompt"] == "a" * 600


def test_rows_with_and_without_an_error_have_other_columns_there_and_the_same_here(results):
    there, here, _ = results
    assert set(there[0]["columns"]) - set(there[3]["columns"]) == {"said"}
    assert set(here[3]) == set(here[0])


def test_the_begin_token_is_doubled_there_and_not_here(tmp_path):
    from ray.llm._internal.batch.stages.tokenize_stage import TokenizeUDF

    folder = make_tokenizer(tmp_path / "bos", has_bos=True)
    rendered = "<|system|>a"

    async def tokens():
        udf = TokenizeUDF("__data", ["prompt"], model=str(folder))
        return [row async for row in udf.udf([{"prompt": rendered, "__idx_in_batch": 0}])]

    (row,) = asyncio.run(tokens())
    here = (
        Tokenizer.load(folder)
        .read_chat(
            [{"role": "user", "content": "a"}], chat_template="<|system|>{{ messages[0].content }}"
        )
        .token_ids
    )
    assert row["tokenized_prompt"][:2] == [SYSTEM, SYSTEM]
    assert here.tolist() == [SYSTEM, ord("a")]
