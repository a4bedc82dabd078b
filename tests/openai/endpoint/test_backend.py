"""The endpoint backend against a real server that refuses, waits, breaks and lies."""

import logging
import pickle
import time
from dataclasses import replace
from email.utils import formatdate

import numpy as np
import pytest

from raybatch.backends.registry import create_backend
from raybatch.config import BackendConfig, EngineConfig
from raybatch.errors import ConfigError, EndpointError
from raybatch.records.types import Request, Sampling
from raybatch_openai.endpoint.backend import OpenAIBackend, create
from raybatch_openai.endpoint.http import proxy_of
from raybatch_openai.endpoint.options import openai_options
from tests.openai.endpoint.endpoint_server import EndpointServer, expected_text

SECRET = "Zx9-abc-secret"
BUSY = {"error": {"message": "too many requests"}}


class Clock:
    """A clock that a test advances; each reading adds a microsecond."""

    def __init__(self):
        self.now_s = 1000.0

    def __call__(self):
        self.now_s += 1e-6
        return self.now_s


@pytest.fixture
def server():
    with EndpointServer() as made:
        yield made


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def make(server, clock):
    made = []

    def make(**options):
        found = openai_options({"base_url": server.url, "max_concurrency": 4, **options})
        headers = {"Authorization": f"Bearer {SECRET}"}
        made.append(OpenAIBackend(found, "served", headers, clock=clock))
        return made[-1]

    yield make
    for backend in made:
        backend.close()


def request(request_id, text=None, **sampling):
    text = f"row {request_id}" if text is None else text
    return Request(
        request_id=request_id,
        row_id=str(request_id),
        prompt_token_ids=np.array([1, 2, 3], np.int32),
        sampling=Sampling(**({"max_tokens": 3} | sampling)),
        payload={"prompt": text},
    )


def run(backend, clock=None, *, skip_s=0.0, polls=2000):
    """Return all remaining completions; time advances by `skip_s` if nothing is in flight."""
    done = []
    for _ in range(polls):
        if not backend.num_unfinished():
            return done
        done += backend.poll()
        if clock is not None and not backend.stats().num_running:
            clock.now_s += skip_s
    raise AssertionError("the backend makes no progress")


def poll_until(backend, is_enough, polls=2000):
    done = []
    for _ in range(polls):
        done += backend.poll()
        if is_enough():
            return done
    raise AssertionError("the condition did not become true")


def once(reaction):
    """React to the first request alone."""
    return lambda number, body: reaction if number == 0 else None


def requested(server):
    return [body["prompt"] for body in server.requested]


@pytest.mark.parametrize(
    "reaction",
    [(408, {}, BUSY), (409, {}, BUSY), (429, {}, BUSY), (500, {}, "oops"), (503, {}, ""), "drop"],
    ids=["408", "409", "429", "500", "503", "dropped"],
)
def test_a_temporary_error_is_retried(server, clock, make, reaction):
    server.react = once(reaction)
    backend = make()
    backend.submit([request(1)])
    (completion,) = run(backend, clock, skip_s=1.0)
    assert completion.text == expected_text(server.requested[1])
    assert (len(server.requested), backend.stats().num_retries) == (2, 1)


def test_a_slow_answer_is_cancelled_and_retried(server, clock, make):
    server.react = once("hang")
    backend = make(timeout_s=0.2)
    backend.submit([request(1)])
    (completion,) = run(backend, clock, skip_s=1.0)
    assert (completion.error, len(server.requested)) == ("", 2)


@pytest.mark.parametrize(
    "headers", [{"Retry-After": "30"}, {"Retry-After": "date"}], ids=["seconds", "date"]
)
def test_nothing_is_sent_before_the_time_that_the_endpoint_names(server, clock, make, headers):
    if headers["Retry-After"] == "date":
        headers = {"Retry-After": formatdate(time.time() + 32, usegmt=True)}
    server.react = lambda number, body: (429, headers, BUSY) if number < 4 else None
    backend = make()
    backend.submit([request(i) for i in range(8)])
    poll_until(backend, lambda: backend.stats().num_running == 0)
    clock.now_s += 25
    for _ in range(20):
        assert backend.poll() == []
    assert len(server.requested) == 4
    clock.now_s += 8
    assert len(run(backend)) == 8


def test_a_limit_that_is_used_up_is_waited_for(server, clock, make):
    used_up = {"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "20s"}
    answer = {"choices": [{"text": "a", "finish_reason": "stop"}]}
    server.react = once((200, used_up, answer))
    backend = make(max_concurrency=1)
    backend.submit([request(1), request(2)])
    assert len(poll_until(backend, lambda: backend.num_unfinished() == 1)) == 1
    clock.now_s += 19
    assert [] == [c for _ in range(20) for c in backend.poll()]
    assert len(server.requested) == 1
    clock.now_s += 2
    assert len(run(backend)) == 1


def test_concurrency_is_halved_under_pressure_and_grows_with_answers(server, clock, make):
    server.react = lambda number, body: (503, {}, BUSY) if number < 8 else None
    backend = make(max_concurrency=8, first_concurrency=8)
    backend.submit([request(i) for i in range(60)])
    poll_until(backend, lambda: backend.stats().num_running == 0)
    assert backend.stats().concurrency == 4
    run(backend, clock, skip_s=1.0)
    assert 4 < backend.stats().concurrency <= 8
    assert server.most_at_once <= 8


def test_retried_rows_go_before_new_ones_and_new_ones_in_order(server, clock, make):
    server.react = once((500, {}, ""))
    backend = make(max_concurrency=1)
    backend.submit([request(i) for i in range(5)])
    poll_until(backend, lambda: backend.stats().num_steps == 2)
    clock.now_s += 1
    run(backend)
    assert requested(server) == ["row 0", "row 1", "row 0", "row 2", "row 3", "row 4"]


def test_after_the_last_try_the_row_is_an_error_and_others_continue(server, clock, make):
    server.react = lambda n, body: (500, {}, "broken") if body["prompt"] == "row 2" else None
    backend = make(max_retries=2)
    backend.submit([request(i, n=2) for i in range(5)])
    done = run(backend, clock, skip_s=2.0)
    errors = {(c.request_id, c.sample_idx): c.error for c in done if c.error}
    output = "EndpointFailed: 500 broken (3 tries)"
    assert errors == {(2, 0): output, (2, 1): output}
    assert requested(server).count("row 2") == 3


@pytest.mark.parametrize(
    ("reaction", "error"),
    [
        ((400, {}, {"error": {"message": "bad thing"}}), "BadRequest: 400 bad thing"),
        ((422, {}, {"detail": "bad thing"}), "BadRequest: 422 bad thing"),
        ((400, {}, {"message": "bad thing", "code": 400}), "BadRequest: 400 bad thing"),
        ((413, {}, "too\nlarge"), "BadRequest: 413 too large"),
        (
            (400, {}, {"error": {"message": "long", "code": "context_length_exceeded"}}),
            "PromptTooLong: 400 long",
        ),
        ((400, {}, {"error": {"message": f"key {SECRET}"}}), "BadRequest: 400 key ***"),
    ],
    ids=["openai", "detail", "flat", "text", "too-long", "secret"],
)
def test_a_refused_row_has_the_words_of_the_endpoint(server, make, reaction, error):
    server.react = once(reaction)
    backend = make(max_concurrency=1)
    backend.submit([request(1), request(2)])
    first, second = run(backend)
    assert (first.error, first.finish_reason, second.error) == (error, "error", "")


def test_a_long_message_is_cut(server, make):
    server.react = once((400, {}, "x" * 100_000))
    backend = make()
    backend.submit([request(1)])
    (completion,) = run(backend)
    assert len(completion.error) < 600


@pytest.mark.parametrize(
    "output",
    ["<html>", "", "null", "[]", '{"choices": []}', '{"choices": [{"message": 3}]}', "\x00\xff"],
)
def test_an_answer_that_is_none_is_an_error_of_its_row(server, make, output):
    server.react = once((200, {}, output))
    backend = make(max_concurrency=1)
    backend.submit([request(1), request(2)])
    first, second = run(backend)
    assert first.error.startswith("BadAnswer: ")
    assert second.error == ""


@pytest.mark.parametrize(
    ("reaction", "output"),
    [
        ((401, {}, {"error": {"message": f"Incorrect key {SECRET}"}}), r"401 Incorrect key \*\*\*"),
        ((403, {}, "forbidden"), "403 forbidden"),
        ((404, {}, {"error": {"message": "no model served"}}), "404 no model served"),
        ((302, {"Location": "http://elsewhere"}, ""), "302 the endpoint answers with a redirect"),
        (
            (429, {}, {"error": {"message": "no credit", "code": "insufficient_quota"}}),
            "429 no credit",
        ),
    ],
    ids=["key", "right", "model", "redirect", "money"],
)
def test_an_error_of_every_row_ends_the_backend(server, make, reaction, output):
    server.react = lambda number, body: reaction
    backend = make()
    backend.submit([request(i) for i in range(10)])
    with pytest.raises(EndpointError, match=f"refuses all requests: {output}") as caught:
        run(backend)
    assert SECRET not in str(caught.value)
    assert len(server.requested) <= 4


def test_answers_that_arrive_before_the_end_are_returned(server, make):
    server.react = lambda n, body: (401, {}, "") if body["prompt"] == "row 1" else None
    backend = make(max_concurrency=2)
    backend.submit([request(0), request(1), request(2)])
    done = backend.poll()
    while backend._http._answers.qsize() < 2:
        time.sleep(0.001)
    done += backend.poll()
    with pytest.raises(EndpointError):
        backend.poll()
    assert [0] == [completion.request_id for completion in done]


def test_an_endpoint_that_answers_nothing_any_more_ends_the_backend(server, clock, make):
    server.react = lambda number, body: (500, {}, "down")
    backend = make(max_retries=1)
    backend.submit([request(i) for i in range(40)])
    with pytest.raises(EndpointError, match=r"does not answer any more: 1[0-3] requests"):
        run(backend, clock, skip_s=2.0)


def test_many_consecutive_rows_that_break_an_endpoint_are_error_rows(server, clock, make):
    poison = {f"row {i}" for i in range(3, 30)}
    server.react = lambda number, body: (500, {}, "oops") if body["prompt"] in poison else None
    backend = make(max_retries=1)
    backend.submit([request(i) for i in range(34)])
    done = run(backend, clock, skip_s=2.0)
    assert {f"row {c.request_id}" for c in done if c.error} == poison
    assert len(done) == 34
    # each ten of them cost at most one probe request
    assert 1 <= sum(body["max_tokens"] == 1 for body in server.requested) <= 2


def test_an_endpoint_that_goes_down_ends_the_backend_and_costs_few_rows(server, clock, make):
    server.react = lambda number, body: (500, {}, "down") if number > 7 else None
    backend = make(max_retries=1)
    backend.submit([request(i) for i in range(60)])
    done = []

    def poll_all():
        while backend.num_unfinished():
            done.extend(backend.poll())
            clock.now_s += 0.01

    with pytest.raises(EndpointError, match="does not answer any more"):
        poll_all()
    assert sum(not c.error for c in done) == 8
    assert sum(bool(c.error) for c in done) == 9


def test_a_row_whose_error_is_in_doubt_can_be_moved(server, clock, make):
    server.react = lambda number, body: (500, {}, "down") if number else None
    backend = make(max_retries=0, max_concurrency=1)
    backend.submit([request(i) for i in range(20)])
    done = poll_until(backend, lambda: backend.stats().num_steps == 12)
    (state,) = backend.export([10])
    assert state.request.request_id == 10
    # the repeated row is a probe, which belongs to no request
    assert backend.export([0]) == []
    assert 10 not in {c.request_id for c in done}


def test_a_budget_of_requests_is_kept(server, clock, make):
    backend = make(requests_per_minute=6)
    backend.submit([request(i) for i in range(3)])
    poll_until(backend, lambda: backend.num_unfinished() == 2)
    clock.now_s += 9
    assert [] == [c for _ in range(20) for c in backend.poll()]
    clock.now_s += 2
    poll_until(backend, lambda: backend.num_unfinished() == 1)


def test_a_budget_of_tokens_counts_what_was_used(server, clock, make):
    backend = make(tokens_per_minute=60, max_concurrency=1)
    backend.submit([request(i, max_tokens=100, text="x" * 20) for i in range(2)])
    server.react = once(
        (
            200,
            {},
            {
                "choices": [{"text": "a", "finish_reason": "stop"}],
                "usage": {"prompt_tokens": 20, "completion_tokens": 1},
            },
        )
    )
    poll_until(backend, lambda: backend.num_unfinished() == 1)
    clock.now_s += 19
    assert [] == [c for _ in range(20) for c in backend.poll()]
    clock.now_s += 3
    assert len(run(backend)) == 1


def test_replicas_share_a_budget(server, clock):
    found = openai_options({"base_url": server.url, "requests_per_minute": 60})
    backend = OpenAIBackend(found, "served", {}, num_replicas=4, clock=clock)
    backend.submit([request(i) for i in range(2)])
    poll_until(backend, lambda: backend.num_unfinished() == 1)
    clock.now_s += 3.5
    assert [] == [c for _ in range(20) for c in backend.poll()]
    clock.now_s += 1
    assert len(run(backend)) == 1
    backend.close()


def test_an_abort_breaks_the_request_off(server, make):
    server.react = once("hang")
    backend = make(max_concurrency=1)
    backend.submit([request(1), request(2)])
    poll_until(backend, lambda: len(server.requested) == 1)
    backend.abort([1])
    assert [2] == [completion.request_id for completion in run(backend)]


def test_usage_is_summed_in_the_counters(server, make):
    backend = make()
    backend.submit([request(i, text="y" * 40) for i in range(3)])
    done = run(backend)
    stats = backend.stats()
    assert stats.prompt_tokens == sum(c.num_input_tokens for c in done) == 120
    assert stats.cached_tokens == sum(c.num_cached_tokens for c in done) == 64
    assert stats.generated_tokens == 9


def test_the_chat_endpoint_takes_no_text_and_the_other_no_messages(server, make):
    messages = {"messages": [{"role": "user", "content": "a"}]}
    for endpoint, payload in (("chat", {"prompt": "a"}), ("completions", messages)):
        backend = make(endpoint=endpoint)
        backend.submit([replace(request(1), payload=payload)])
        (completion,) = run(backend)
        assert completion.error.startswith(f"InvalidPrompt: the {endpoint} endpoint needs")
    assert server.requested == []


def test_a_lone_surrogate_in_an_option_is_no_end_of_the_backend(clock, make):
    backend = make(max_retries=0)
    backend.submit([request(1, stop=("\ud800",)), request(2)])
    bad, good = sorted(run(backend, clock, skip_s=1.0), key=lambda c: c.request_id)
    assert (bool(bad.error), good.error) == (True, "")


def test_a_start_without_a_server_says_so():
    with pytest.raises(EndpointError, match=r"http://127\.0\.0\.1:9/v1 cannot be reached"):
        create(openai_options({"base_url": "http://127.0.0.1:9/v1"}), "m")


def test_a_start_without_its_variable_says_so(monkeypatch):
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    options = {"base_url": "http://127.0.0.1:9/v1", "api_key_env": "NO_SUCH_KEY"}
    with pytest.raises(ConfigError, match="NO_SUCH_KEY is not set where the replica runs"):
        create_backend("m", BackendConfig(kind="openai", options=options), EngineConfig())


def test_a_proxy_of_the_environment_is_used_except_where_it_says_not(server, monkeypatch):
    monkeypatch.setenv("http_proxy", server.url.removesuffix("/v1"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    options = {"base_url": "http://endpoint.invalid/v1"}
    backend = create_backend("m", BackendConfig(kind="openai", options=options), EngineConfig())
    backend.submit([request(1)])
    assert [""] == [completion.error for completion in run(backend)]
    backend.close()
    assert len(server.requested) == 1
    assert proxy_of(server.url) is None


def test_what_netrc_has_for_a_host_is_not_sent(server, monkeypatch, tmp_path):
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password hidden")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    options = {"base_url": server.url}
    backend = create_backend("m", BackendConfig(kind="openai", options=options), EngineConfig())
    backend.submit([request(1)])
    run(backend)
    backend.close()
    assert "Authorization" not in server.headers[0]


def test_a_key_appears_in_no_log_and_in_no_pickle(server, monkeypatch, caplog):
    monkeypatch.setenv("KEY_OF_TEST", SECRET)
    options = {"base_url": server.url, "api_key_env": "KEY_OF_TEST"}
    config = BackendConfig(kind="openai", options=options)
    with caplog.at_level(logging.DEBUG):
        backend = create_backend("m", config, EngineConfig())
        backend.submit([request(1)])
        run(backend)
        backend.close()
    assert server.headers[0]["Authorization"] == f"Bearer {SECRET}"
    assert SECRET not in caplog.text
    assert SECRET.encode() not in pickle.dumps(config)


def refusal(message, **fields):
    return (400, {}, {"error": {"message": message, **fields}})


def extra_field(number, body):
    """Return the answer of FastAPI to an unknown field, with its value."""
    one = {
        "type": "extra_forbidden",
        "loc": ["body", "seed"],
        "msg": "Extra inputs are not allowed",
    }
    return (422, {}, {"detail": [{**one, "input": body["seed"]}]})


def missing_field(number, body):
    one = {"type": "missing", "loc": ["body", "top_k_of_ours"], "msg": "Field required"}
    return (422, {}, {"detail": [{**one, "input": body}]})


SAME = {
    "parameter": (
        lambda number, body: refusal(
            "Unsupported value: only 1 is supported.", param="temperature"
        ),
        {},
        r"'temperature': extra_body: \{temperature: null\} removes it",
    ),
    "text": (
        lambda number, body: refusal("'temperature' does not support 0.5 with this model"),
        {},
        r"extra_body: \{temperature: null\}",
    ),
    "other name": (
        lambda number, body: refusal("Unsupported parameter: 'max_tokens' is not supported"),
        {},
        "max_tokens_field: max_completion_tokens",
    ),
    "seed": (extra_field, {}, "send_seed: false"),
    "seed in text": (
        lambda number, body: refusal(f"the seed {body['seed']} is no seed", param="seed"),
        {},
        "send_seed: false",
    ),
    "body": (missing_field, {}, "remove them from the input.*top_k_of_ours: Field required"),
    "extra body": (
        lambda number, body: refusal("reasoning_effort: unknown"),
        {"extra_body": {"reasoning_effort": "minimal"}},
        "'reasoning_effort': extra_body sets it",
    ),
    "request id": (
        lambda number, body: refusal(f"no such thing (request req_{number:024x})"),
        {},
        "remove them from the input",
    ),
    "no api": (lambda number, body: (200, {}, "<html>Welcome</html>"), {}, "no JSON of the API"),
}


@pytest.mark.parametrize("name", SAME)
def test_refusals_that_are_all_the_same_end_the_run_and_say_the_way(server, make, name):
    server.react, options, message = SAME[name]
    backend = make(**options)
    backend.submit([request(i, temperature=0.5) for i in range(100)])
    with pytest.raises(EndpointError, match=f"answered no row yet and refused 20 .*{message}"):
        run(backend)
    assert 20 <= len(server.requested) < 30


def test_refusals_while_answers_are_on_their_way_end_nothing(server, make):
    server.delay_s = 0.3
    server.react = lambda number, body: refusal("no such value") if number % 4 else None
    backend = make(first_concurrency=16, max_concurrency=16)
    backend.submit([request(i) for i in range(120)])
    done = run(backend, polls=100_000)
    assert len(done) == 120
    assert sum(bool(completion.error) for completion in done) == 90


OTHER = {
    "of the rows": lambda number, body: refusal(f"the prompt {body['prompt']} is bad"),
    "lengths": lambda number, body: refusal(f"your messages have {5000 + number} tokens"),
    "too long": lambda number, body: refusal("too long", code="context_length_exceeded"),
    "filter": lambda number, body: refusal("no", code="content_policy_violation"),
    "after an answer": lambda number, body: refusal("no such value") if number else None,
    "twenty but one": lambda number, body: refusal("no such value") if number < 19 else None,
}


@pytest.mark.parametrize("name", OTHER)
def test_refusals_that_are_about_rows_stay_errors_of_these(server, make, name):
    server.react = OTHER[name]
    backend = make(max_concurrency=1)
    backend.submit([request(i) for i in range(40)])
    assert len(run(backend, polls=20000)) == 40
