"""Stop strings that are special tokens, and prompts of ids that the tokenizer does not know."""

import json
import logging

import pyarrow as pa
import pytest

from tests.stages.support import EOS, USER, answer, fake_stage, local


def stops_asked(model, sampling, **columns):
    stage = local(fake_stage(model, prompt="{x}", sampling=sampling, **columns))
    answer(stage, pa.table({"x": ["a"], "mine": [["<|user|>"]]}))
    [request] = stage.pool.requests
    return request.sampling.stop, set(request.sampling.stop_token_ids)


def test_a_stop_string_that_is_a_special_token_stops(model):
    stops = ["<|eos|>", "b"]
    expected = (tuple(stops), {EOS, 7})
    assert stops_asked(model, {"stop": stops, "stop_token_ids": [7]}) == expected


def test_where_special_tokens_are_text_they_are_found_there(model):
    sampling = {"stop": ["<|eos|>"], "skip_special_tokens": False}
    assert stops_asked(model, sampling) == (("<|eos|>",), set())


def test_the_stop_string_of_a_row_may_be_a_special_token(model):
    assert stops_asked(model, {}, overrides={"stop": "mine"}) == (("<|user|>",), {USER})


@pytest.mark.parametrize("skip", [True, False])
def test_a_stop_string_that_cannot_be_found_is_warned_of_once(model, caplog, skip):
    sampling = {"stop": ["<|eos|>\n"], "skip_special_tokens": skip}
    with caplog.at_level(logging.WARNING):
        assert stops_asked(model, sampling) == (("<|eos|>\n",), set())
    messages = [r.getMessage() for r in caplog.records if "never matches" in r.getMessage()]
    assert len(messages) == skip
    assert all("skip_special_tokens: false" in text for text in messages)


@pytest.mark.parametrize("form", [{"vocab_size": 300}, {"text_config": {"vocab_size": 300}}])
def test_ids_between_the_sizes_of_tokenizer_and_model_are_prompts(model, tmp_path, form):
    for file in model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(form))
    stage = local(fake_stage(tmp_path, tokenized_prompt="x"))
    out = answer(stage, pa.table({"x": [[1, 299], [1, 300]]}))
    assert [r.prompt_token_ids.tolist() for r in stage.pool.requests] == [[1, 299]]
    [_, error] = out.column("__inference_error__").to_pylist()
    assert "outside the vocabulary of 300 tokens" in error
