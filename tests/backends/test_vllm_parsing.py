"""Reasoning and calls of tools with vLLM's own parsers: on texts, in the engine, in jobs."""

import json
import logging
from contextlib import closing

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoTokenizer

from raybatch import Job, LLMStage
from raybatch.backends.registry import create_backend
from raybatch.backends.vllm.args import REASONING_PARSERS, TOOL_PARSERS
from raybatch.config import BackendConfig, EngineConfig
from raybatch.errors import ConfigError
from raybatch.records.types import Completion, Request, Sampling
from raybatch.text.tokenizer import Tokenizer
from raybatch_openai.batch.run import BatchOptions, BatchRun
from tests.backends.vllm_engines import BLOCK_TOKENS
from tests.engine.tiny_models import build
from tests.openai.batch.support import chat, files_of, read_file, write_batch
from tests.stages.support import make_tokenizer, write_parquet

pytest.importorskip("vllm", reason="vLLM is not installed here")
pytestmark = pytest.mark.vllm

TEMPLATE = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
    "{% for m in messages %}{{ m.content }}{% endfor %}"
)
MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
TEXTS = [
    f"<think>hm</think>so {CALL}",
    f"hm</think>so {CALL}{CALL}",
    "<think>never done",
    f"<think>{CALL}</think>no",
    "<think></think>",
]
PARSERS = {"reasoning_parser": "deepseek_r1", "tool_call_parser": "hermes"}
# the grammar writes the whole answer here, and not what follows the reasoning
IN_REASONING = {"structured_outputs_config": {"enable_in_reasoning": True}}
ENGINE = {"dtype": "float32", "device": "cpu", "kv_cache_bytes": 4 << 20, "max_num_seqs": 4}
# engines that were to end, and that others in this process could not do without
ENDED = []
# a call that is no JSON
BROKEN = "<think>hm</think><tool_call>{add</tool_call>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random model whose tokenizer has the marks of reasoning and of calls."""
    made = make_tokenizer(tmp_path_factory.mktemp("parsing") / "model")
    tokenizer = AutoTokenizer.from_pretrained(made)
    tokenizer.add_tokens(MARKS)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(made)
    model = build("qwen3", vocab_size=264)
    model.config.eos_token_id = model.generation_config.eos_token_id = 256
    with torch.no_grad():
        model.save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def backend(folder):
    options = {**PARSERS, "engine_kwargs": IN_REASONING}
    config = BackendConfig(kind="vllm", options=options)
    engine = EngineConfig(block_size_tokens=BLOCK_TOKENS, **ENGINE)
    with closing(create_backend(str(folder), config, engine)) as made:
        yield made


@pytest.fixture(scope="module")
def parser(backend):
    return backend._parse


def request(payload=None, **sampling):
    return Request(
        request_id=1,
        row_id="r",
        prompt_token_ids=np.array([72, 105], np.int32),
        sampling=Sampling(max_tokens=200, **sampling),
        payload={"chat": {"tools": TOOLS}} if payload is None else payload,
    )


def parsed(folder, parser, text, payload=None, **sampling):
    tokens = Tokenizer.load(folder).encode(text, special_tokens="allow")
    completion = Completion(request_id=1, token_ids=tokens, finish_reason="length")
    return parser(request(payload, **sampling), completion)


def run(backend, *requests):
    backend.submit(requests)
    done = []
    while backend.num_unfinished():
        done += backend.poll()
    return sorted(done, key=lambda completion: completion.sample_idx)


@pytest.mark.parametrize("text", TEXTS)
def test_texts_come_apart_as_the_parsers_of_vllm_take_them_apart(folder, parser, text):
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    tokenizer = AutoTokenizer.from_pretrained(folder)
    requested = ChatCompletionRequest(messages=[{"role": "user", "content": ""}], tools=TOOLS)
    reasoner = ReasoningParserManager.get_reasoning_parser("deepseek_r1")(tokenizer)
    reasoning, content = reasoner.extract_reasoning(text, requested)
    finder = ToolParserManager.get_tool_parser("hermes")(tokenizer)
    calls = finder.extract_tool_calls(content or "", requested)
    found = parsed(folder, parser, text)
    assert (found.text, found.parsed.reasoning) == (calls.content or "", reasoning)
    expected = [(call.function.name, call.function.arguments) for call in calls.tool_calls]
    assert [(call.name, call.arguments) for call in found.parsed.tool_calls] == expected


def test_a_chat_without_tools_keeps_calls_in_its_text(folder, parser):
    found = parsed(folder, parser, TEXTS[0], {"chat": {}})
    assert (found.text, found.parsed.tool_calls) == (f"so {CALL}", ())


def test_calls_are_looked_for_where_nobody_knows_the_tools(folder, parser):
    found = parsed(folder, parser, TEXTS[0], {})
    assert (found.text, len(found.parsed.tool_calls)) == ("so ", 1)


def test_a_call_that_is_no_json_stays_in_the_text_and_the_row_says_so(folder, parser):
    found = parsed(folder, parser, BROKEN)
    assert (found.text, found.error) == ("<tool_call>{add</tool_call>", "")
    assert found.parsed.reasoning == "hm"
    assert found.parsed.error.startswith("JSONDecodeError: ")


def test_the_next_row_after_a_failure_has_no_error(folder, parser):
    assert parsed(folder, parser, BROKEN).parsed.error
    assert parsed(folder, parser, TEXTS[0]).parsed.error == ""


class Undecodable:
    """A tokenizer that knows none of the ids."""

    def decode(self, token_ids, skip_special_tokens=True, *, after=None):
        raise OverflowError("no such token")


def test_tokens_that_are_no_text_are_left_to_who_makes_the_text(parser, monkeypatch):
    monkeypatch.setattr(parser, "_decoder", Undecodable())
    completion = Completion(request_id=1, token_ids=np.array([1], np.int32), finish_reason="length")
    assert parser(request(), completion) is completion


def test_logs_of_vllm_are_left_alone_outside_of_the_parsers(folder, parser):
    assert parsed(folder, parser, BROKEN).parsed.error
    logs = [logging.getLogger(f"vllm.{name}") for name in ("tool_parsers", "reasoning", "parser")]
    assert [(log.handlers, log.propagate) for log in logs] == [([], True)] * 3


def test_tools_that_vllm_refuses_leave_the_text_as_it_is(folder, parser):
    found = parsed(folder, parser, TEXTS[0], {"chat": {"tools": [{"type": "function"}]}})
    assert (found.text, found.error) == (TEXTS[0], "")
    assert found.parsed.error.startswith("ValidationError: ")


def test_ids_of_calls_are_the_same_in_every_run_and_differ_in_a_row(folder, parser):
    first, again = (parsed(folder, parser, TEXTS[1]).parsed.tool_calls for _ in range(2))
    assert first == again
    assert first[0].id != first[1].id


def test_an_answer_of_the_engine_comes_apart(backend):
    constraint = {"choice": [TEXTS[0]]}
    (completion,) = run(backend, request(structured_outputs=constraint))
    assert (completion.text, completion.parsed.reasoning) == ("so ", "hm")
    (call,) = completion.parsed.tool_calls
    assert (call.name, json.loads(call.arguments)) == ("add", {"a": 1})


def test_each_sample_comes_apart_by_itself(backend):
    constraint = {"regex": "<think>[ab]{12}</think>[cd]{3}"}
    samples = run(backend, request(structured_outputs=constraint, n=2, temperature=1.0))
    texts = [f"<think>{c.parsed.reasoning}</think>{c.text}" for c in samples]
    raw = [bytes(i for i in c.token_ids.tolist() if i < 256).decode() for c in samples]
    assert [text.replace("<think>", "").replace("</think>", "") for text in texts] == [
        text.replace("<think>", "").replace("</think>", "") for text in raw
    ]
    assert texts[0] != texts[1]


def test_a_bad_row_stays_an_error_row(backend):
    (completion,) = run(backend, request(structured_outputs={"regex": "(("}))
    assert completion.error.startswith("RequestRefused: ")
    assert completion.parsed is None


def test_a_stop_string_is_cut_off_before_the_parser_sees_the_text(backend):
    constraint = {"choice": ["<think>hm</think>so it is"]}
    sampling = {"structured_outputs": constraint, "stop": (" it",)}
    (completion,) = run(backend, request(**sampling))
    assert (completion.text, completion.stop_reason) == ("so", " it")


def test_a_parser_that_does_not_fit_the_tokenizer_ends_the_start(backend):
    with pytest.raises(ConfigError, match="deepseek_v3 cannot be used"):
        backend._engine.output_parser(tool_call_parser="deepseek_v3")


def test_a_start_that_fails_after_vllm_is_up_ends_it(folder, monkeypatch):
    from vllm.v1.engine.core import EngineCore

    monkeypatch.setattr(EngineCore, "shutdown", lambda core: ENDED.append(core))
    # which this tokenizer has no tokens for
    config = BackendConfig(kind="vllm", options={"tool_call_parser": "deepseek_v3"})
    with pytest.raises(ConfigError, match="deepseek_v3 cannot be used") as raised:
        create_backend(str(folder), config, EngineConfig(**ENGINE))
    # while the error holds what it was raised from
    assert raised.tb is not None
    assert len(ENDED) == 1


def test_every_parser_of_vllm_is_listed():
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    assert set(ReasoningParserManager.list_registered()) <= REASONING_PARSERS
    assert set(ToolParserManager.list_registered()) <= TOOL_PARSERS


def stage_options(folder):
    return {
        "backend": {"kind": "vllm", "options": {**PARSERS, "engine_kwargs": IN_REASONING}},
        "engine": {**ENGINE, "block_size_tokens": BLOCK_TOKENS},
        "pool": {"replicas": 1},
    }


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_a_job_writes_what_was_found_into_columns(folder, tmp_path):
    constraints = [json.dumps({"choice": [text]}) for text in TEXTS[:2]]
    table = pa.table(
        {
            "id": ["a", "b"],
            "messages": [json.dumps([{"role": "user", "content": "1 and 1"}])] * 2,
            "tools": [json.dumps(TOOLS), None],
            "constraint": constraints,
        }
    )
    write_parquet(tmp_path / "in" / "a.parquet", table)
    stage = LLMStage(
        str(folder),
        messages="messages",
        tools="tools",
        id_column="id",
        overrides={"structured_outputs": "constraint"},
        sampling={"max_tokens": 200},
        **stage_options(folder),
    )
    Job(tmp_path / "in", tmp_path / "out", stage).run()
    rows = {row["id"]: row for row in pq.read_table(tmp_path / "out" / "data").to_pylist()}
    assert [rows[name]["__inference_error__"] for name in "ab"] == ["", ""]
    assert [rows[name]["reasoning"] for name in "ab"] == ["hm", "hm"]
    assert [rows[name]["generated_text"] for name in "ab"] == ["so ", f"so {CALL}{CALL}"]
    (call,) = rows["a"]["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert (rows["b"]["tool_calls"], rows["b"]["parse_error"]) == ([], "")


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_a_batch_file_is_answered_with_calls(folder, tmp_path):
    requested = {"tools": TOOLS, "max_tokens": 200, "temperature": 0}
    write_batch(
        tmp_path / "in.jsonl", chat("a", structured_outputs={"choice": [TEXTS[0]]}, **requested)
    )
    stage = {"model": str(folder), **stage_options(folder)}
    options = BatchOptions(job={"stage": stage}, names=("m",))
    BatchRun(files=files_of(tmp_path), options=options).run()
    (answer,) = read_file(tmp_path / "out.jsonl")
    (choice,) = answer["response"]["body"]["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert (choice["message"]["content"], choice["message"]["reasoning"]) == ("so ", "hm")
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}
