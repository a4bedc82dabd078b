"""Embeddings of an endpoint: what it is asked, what its answers say, and whole rows over HTTP."""

import base64

import numpy as np
import pytest

from raybatch.errors import ConfigError
from raybatch.stages.feeder import LLMStage
from raybatch_openai.endpoint.backend import OpenAIBackend
from raybatch_openai.endpoint.body import BadAnswer, embedding_body, embedding_of
from raybatch_openai.endpoint.options import OpenAIOptions
from tests.backends.pooled_requests import pooled_request
from tests.openai.endpoint.endpoint_server import EndpointServer, expected_embedding

URL = "http://localhost:8000/v1"
VECTOR = np.array([0.6, -0.8, 1e-9], np.float32)


def options(url=URL, **changes):
    return OpenAIOptions(base_url=url, **changes)


def request(request_id=0, *, tokens=(7, 8), **payload):
    return pooled_request(request_id, tokens, **payload)


def answer(embedding, **usage):
    return {"data": [{"index": 0, "embedding": embedding}], "usage": usage}


@pytest.mark.parametrize(
    ("payload", "sent"), [({"prompt": "say"}, "say"), ({}, [7, 8])], ids=["text", "token-ids"]
)
def test_texts_and_token_ids_are_the_input_of_an_embedding(payload, sent):
    path, body = embedding_body(request(**payload), options(), "m")
    expected = {"model": "m", "input": sent, "encoding_format": "base64"}
    assert (path, body) == ("/embeddings", expected)


def test_options_of_a_row_are_sent_beside_its_text():
    _, body = embedding_body(request(prompt="a", pooling={"dimensions": 4}), options(), "m")
    assert body["dimensions"] == 4


def test_extra_fields_win_and_can_take_out_the_form_of_the_answer():
    extra = options(extra_body={"encoding_format": None, "truncate": True})
    _, body = embedding_body(request(prompt="a"), extra, "m")
    assert body == {"model": "m", "input": "a", "truncate": True}


@pytest.mark.parametrize(
    "output", [VECTOR.tolist(), base64.b64encode(VECTOR.tobytes()).decode()], ids=["list", "base64"]
)
def test_an_embedding_is_read_in_both_forms(output):
    (found,) = embedding_of(request(), answer(output, prompt_tokens=5), options())
    assert (found.vector.tolist(), found.num_input_tokens) == (VECTOR.tolist(), 5)


def test_an_embedding_has_the_price_of_its_input():
    priced = options(price_per_million_input_tokens=3)
    (found,) = embedding_of(request(), answer([1.0], prompt_tokens=1000), priced)
    assert found.cost == pytest.approx(0.003)


@pytest.mark.parametrize(
    "output",
    [
        {},
        {"data": []},
        {"data": [{"embedding": [1.0]}] * 2},
        answer(None),
        answer([]),
        answer("not base64"),
        answer("AAA="),
        answer([[1.0]]),
        answer([float("nan")]),
        answer(["a"]),
    ],
)
def test_answers_without_an_embedding_are_bad(output):
    with pytest.raises(BadAnswer):
        embedding_of(request(), output, options())


@pytest.fixture(scope="module")
def server():
    with EndpointServer(error_on=3) as made:
        yield made


def run(server, requests, **changes):
    backend = OpenAIBackend(options(server.url, **changes), "served", {}, task="embed")
    backend.submit(requests)
    done = {}
    while backend.num_unfinished():
        done |= {c.request_id: c for c in backend.poll()}
    backend.close()
    return done


def test_rows_come_back_with_their_vectors(server):
    done = run(
        server, [request(0, prompt="one"), request(1, tokens=(5, 6)), request(2, prompt="x")]
    )
    expected = [expected_embedding({"input": sent}) for sent in ("one", [5, 6], "x")]
    assert [done[i].vector.tolist() for i in range(3)] == [v.tolist() for v in expected]
    assert [done[i].num_input_tokens for i in range(3)] == [3, 2, 1]


def test_a_row_that_the_endpoint_refuses_is_an_error_row(server):
    done = run(server, [request(0, tokens=(3,)), request(1, tokens=(4,))])
    assert done[0].error.startswith("BadRequest")
    assert (done[0].vector, done[1].error) == (None, "")


def test_rows_of_messages_are_refused_before_they_are_sent(server):
    server.reset()
    done = run(server, [request(0, messages=[{"role": "user", "content": "a"}])])
    assert done[0].error.startswith("InvalidPrompt: embeddings need texts")
    assert server.requested == []


def test_a_prompt_may_fill_the_context(server):
    done = run(server, [request(0, tokens=(5,) * 4), request(1, tokens=(5,) * 5)], max_model_len=4)
    assert (done[0].error, done[1].error.partition(":")[0]) == ("", "PromptTooLong")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "score"}, "openai backend makes text and embeddings.*backend='vllm'"),
        ({"task": "embed", "system": "s"}, "needs texts"),
        ({"task": "embed", "endpoint": "chat"}, "endpoint='chat' has no effect with task 'embed'"),
        ({"task": "embed", "on_too_long": "truncate_left"}, "cuts token ids"),
    ],
)
def test_what_an_endpoint_cannot_embed_is_refused_at_once(changes, message):
    endpoint = {"endpoint": changes.pop("endpoint")} if "endpoint" in changes else {}
    backend = {"kind": "openai", "options": {"base_url": URL, **endpoint}}
    with pytest.raises(ConfigError, match=message):
        LLMStage("m", prompt="{text}", backend=backend, **changes)
