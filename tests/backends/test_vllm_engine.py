"""The vLLM backend with vLLM: exact tokens after moves, ends, caches and lists of options."""

from contextlib import closing
from dataclasses import fields

import numpy as np
import pytest
import torch
import transformers

from raybatch.backends.registry import create_backend
from raybatch.backends.vllm.args import ENGINE_ARGS
from raybatch.backends.vllm.model import model_length
from raybatch.config import BackendConfig, EngineConfig
from raybatch.errors import ConfigError
from raybatch.records.types import Request, Sampling
from tests.backends.vllm_engines import (
    BLOCK_TOKENS,
    EOS_PLACE,
    PROMPT,
    VllmShelf,
    save_text_model,
    start_tiny,
)
from tests.engine.tiny_models import build
from tests.stages.support import make_tokenizer

pytest.importorskip("vllm", reason="vLLM is not installed here")
pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_text_model(tmp_path_factory.mktemp("vllm") / "model")


@pytest.fixture(scope="module")
def shelf(folder):
    return VllmShelf(lambda: start_tiny(folder, num_blocks=64))


@pytest.fixture
def backend(shelf):
    with closing(shelf.make()) as made:
        yield made


@pytest.fixture
def other(shelf):
    with closing(shelf.make()) as made:
        yield made


def request(request_id=1, prompt=None, **sampling):
    return Request(
        request_id=request_id,
        row_id=str(request_id),
        prompt_token_ids=np.array(PROMPT if prompt is None else prompt, np.int32),
        sampling=Sampling(**({"max_tokens": 24, "ignore_eos": True} | sampling)),
        seed=request_id,
    )


def run(backend):
    done = {}
    while backend.num_unfinished():
        done |= {(c.request_id, c.sample_idx): c for c in backend.poll()}
    return done


def answer(backend, **sampling):
    backend.submit([request(**sampling)])
    return run(backend)[1, 0]


def outcome(completion):
    """Return the public fields of a completion without the values of logprobs."""
    ids = [ids.tolist() for ids, _ in completion.logprobs or ()]
    ends = completion.finish_reason, completion.stop_reason, completion.error
    return completion.token_ids.tolist(), ends, ids


def check_same(expected, actual):
    """Check that both are equal, with close logprobs."""
    assert {k: outcome(c) for k, c in expected.items()} == {
        k: outcome(c) for k, c in actual.items()
    }
    for key, completion in expected.items():
        pairs = zip(completion.logprobs or (), actual[key].logprobs or (), strict=True)
        for (_, values), (_, others) in pairs:
            np.testing.assert_allclose(others, values, atol=1e-4)


@pytest.mark.parametrize("num_steps", [1, 8])
@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"logprobs": 2},
        {"n": 2},
        {"min_tokens": 12, "ignore_eos": False},
        {"repetition_penalty": 1.5},
        {"presence_penalty": 1.5},
        {"frequency_penalty": 1.5},
        {"temperature": 0.8, "top_p": 0.9, "n": 2},
        {"structured_outputs": {"regex": "[a-d]{12}"}, "ignore_eos": False},
    ],
    ids=lambda options: "-".join(options) or "greedy",
)
def test_a_row_that_moves_ends_as_one_that_stays(shelf, backend, other, sampling, num_steps):
    row = request(**sampling)
    with closing(shelf.make()) as stays:
        stays.submit([row])
        expected = run(stays)
    backend.submit([row])
    reported = []
    # grammars are compiled during the first steps
    while len(reported) < row.sampling.n:
        backend.poll()
        reported += backend.checkpoint(num_steps)
    other.restore(backend.export([1]))
    check_same(expected, run(other))


def test_tokens_of_a_request_that_was_taken_out_before_they_came_are_not_counted(backend):
    engine = backend._engine
    for key in "ab":
        engine.add(key, PROMPT, {"max_tokens": 24, "temperature": 0.0})
    outputs = engine._client.get_output()
    while len(outputs.outputs) < 2:
        outputs = engine._client.get_output()
    num_counted = engine.generated_tokens()
    engine.take(["a"])
    engine._frontend.count_tokens(outputs)
    assert engine.generated_tokens() == num_counted + 1


def test_a_stop_string_across_the_move_is_found(backend, other):
    tokens = answer(backend).token_ids.tolist()
    place = next(i for i in range(3, 20) if tokens[i] < 128 and tokens[i + 1] < 128)
    stop = bytes(tokens[place : place + 2]).decode()
    expected = outcome(answer(backend, stop=(stop,)))
    assert expected[1] == ("stop", stop, "")
    backend.submit([request(stop=(stop,))])
    for _ in range(place + 1):
        backend.poll()
    other.restore(backend.export([1]))
    assert expected == outcome(run(other)[1, 0])


def test_the_end_token_of_the_model_ends_a_row_without_a_reason(backend):
    completion = answer(backend, ignore_eos=False)
    assert len(completion.token_ids) <= EOS_PLACE + 1
    assert outcome(completion)[1] == ("stop", None, "")


def test_an_answer_keeps_to_its_constraint(backend):
    constraint = {"choice": ["to be", "not to be"]}
    completion = answer(backend, structured_outputs=constraint, ignore_eos=False)
    assert bytes(completion.token_ids[:-1].tolist()).decode() in constraint["choice"]
    assert completion.finish_reason == "stop"


def test_a_constraint_that_is_none_is_an_error_row(backend):
    completion = answer(backend, structured_outputs={"regex": "(("}, ignore_eos=False)
    assert completion.error.startswith("RequestRefused: ")


def test_an_option_that_vllm_refuses_makes_an_error_row(backend):
    backend.submit([request(1, logprobs=21), request(2)])
    done = run(backend)
    assert "max allowed: 20" in done[1, 0].error
    assert done[2, 0].error == ""


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"ignore_eos": False},
        {"stop_token_ids": tuple(range(0, 250, 9))},
        {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.5},
        {"logprobs": 3},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_greedy_rows_are_those_of_the_native_engine(folder, backend, sampling):
    rows = [request(i, [*PROMPT, i, 2 * i], **sampling) for i in range(6)]
    engine = EngineConfig(dtype="float32", device="cpu", kv_cache_bytes=1 << 20)
    with closing(create_backend(str(folder), BackendConfig(kind="native"), engine)) as native:
        native.submit(rows)
        expected = run(native)
    backend.submit(rows)
    check_same(expected, run(backend))


def test_a_model_that_the_native_engine_lacks_gives_the_tokens_of_transformers(tmp_path):
    make_tokenizer(tmp_path / "gpt2", has_chat_template=False)
    torch.manual_seed(3)
    config = transformers.GPT2Config(
        vocab_size=260,
        n_positions=128,
        n_embd=64,
        n_layer=2,
        n_head=2,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    model.save_pretrained(tmp_path / "gpt2")
    message_there = model.generate(torch.tensor([PROMPT]), max_new_tokens=24, do_sample=False)
    with closing(VllmShelf(lambda: start_tiny(tmp_path / "gpt2", num_blocks=16)).make()) as gpt2:
        assert message_there[0, len(PROMPT) :].tolist() == answer(gpt2).token_ids.tolist()


def test_rows_of_a_group_share_what_is_scheduled_in_one_step(backend):
    groups = [[100 + g] * 2 * BLOCK_TOKENS for g in range(4)]
    backend.submit([request(4 * g + i, [*groups[g], i]) for g in range(4) for i in range(4)])
    cached = [c.num_cached_tokens for _, c in sorted(run(backend).items())]
    assert cached == [0, *[2 * BLOCK_TOKENS] * 3] * 4


def test_rows_that_lose_their_memory_end_with_the_same_tokens(folder, shelf):
    rows = [request(i, [*PROMPT, i], max_tokens=90, temperature=0.7) for i in range(6)]
    with closing(shelf.make()) as roomy:
        roomy.submit(rows)
        expected = run(roomy)
    tight = VllmShelf(lambda: start_tiny(folder, num_blocks=9, max_model_len=128)).make()
    tight.submit(rows)
    check_same(expected, run(tight))
    assert tight.stats().num_preemptions > 0


def test_every_option_of_vllm_is_listed():
    from vllm.engine.arg_utils import EngineArgs

    names = {f.name for f in fields(EngineArgs)}
    assert {name for name in names if not name.startswith("_")} <= ENGINE_ARGS


@pytest.mark.parametrize("variant", ["llama-rope-linear", "qwen3-rope-yarn"])
def test_the_driver_knows_the_length_that_vllm_takes(tmp_path, variant):
    from vllm.config import ModelConfig

    config = build(variant).config
    config.save_pretrained(tmp_path)
    model = ModelConfig(model=str(tmp_path), skip_tokenizer_init=True, dtype="float32")
    assert model_length(tmp_path) == model.max_model_len


@pytest.mark.parametrize(
    "kwargs",
    [{"structured_outputs_config": {"nonsense": 1}}, {"seed": "a text"}],
    ids=["inside a config", "top level"],
)
def test_a_value_that_vllm_refuses_is_an_error_of_the_options(folder, kwargs):
    backend = BackendConfig(kind="vllm", options={"engine_kwargs": kwargs})
    with pytest.raises(ConfigError, match="vLLM refuses the options of its engine: "):
        create_backend(str(folder), backend, EngineConfig())


def test_requests_start_only_where_those_that_run_can_grow(backend):
    # eight prompts would fill all blocks but one, and each needs one more for its first token
    prompts = np.random.default_rng(5).integers(10, 250, (12, 7 * BLOCK_TOKENS))
    before = backend.stats().num_preemptions
    backend.submit([request(i, prompt=prompt, max_tokens=8) for i, prompt in enumerate(prompts)])
    ended = run(backend)

    assert {completion.finish_reason for completion in ended.values()} == {"length"}
    assert backend.stats().num_preemptions == before
