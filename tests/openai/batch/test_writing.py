"""Lines of answers and errors from rows."""

import json
import math

import pytest

from raybatch_openai.batch.requests import CHAT, COMPLETIONS, Refusal, Reply, unexecuted
from raybatch_openai.batch.writing import AnswerWriter, LogprobTexts


class Letters:
    """Decodes ids as letters; 0 is the end token."""

    special_ids = frozenset({0})

    def decode(self, token_ids, skip_special_tokens=True, *, after=None):
        return "".join(chr(96 + i) if i else "<end>" for i in token_ids)


WRITER = AnswerWriter(name="b", created=17, logprobs=LogprobTexts(Letters()))


def row(line=3, place=0, endpoint=CHAT, num_logprobs=None, **values):
    return {
        "line": line,
        "place": place,
        "num_prompts": 1,
        "custom_id": "c",
        "reply": json.dumps(Reply(endpoint, "m", num_logprobs)),
        "generated_text": "hi",
        "num_input_tokens": 5,
        "num_generated_tokens": 3,
        "num_cached_tokens": 4,
        "finish_reason": "stop",
        "__inference_error__": "",
        **values,
    }


def answered(*rows):
    written = WRITER.answered(rows)
    return json.loads(written.data), written.is_error


def test_chat_answer_has_the_shape_of_openai():
    found, is_error = answered(row())
    body = found["response"]["body"]
    assert not is_error
    assert (found["custom_id"], found["error"], found["response"]["status_code"]) == (
        "c",
        None,
        200,
    )
    assert (body["object"], body["created"], body["model"]) == ("chat.completion", 17, "m")
    message = {"role": "assistant", "content": "hi", "refusal": None}
    assert body["choices"] == [
        {"index": 0, "finish_reason": "stop", "message": message, "logprobs": None}
    ]
    assert body["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 3,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 4},
    }


def test_samples_of_several_prompts_are_choices_in_order():
    samples = {"num_generated_tokens": [1, 1]}
    rows = [
        row(place=p, endpoint=COMPLETIONS, generated_text=texts, finish_reason=["stop", "length"])
        | samples
        for p, texts in enumerate((["a", "b"], ["c", "d"]))
    ]
    body = answered(*rows)[0]["response"]["body"]
    found = [(c["index"], c["text"], c["finish_reason"]) for c in body["choices"]]
    assert found == [(0, "a", "stop"), (1, "b", "length"), (2, "c", "stop"), (3, "d", "length")]
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (10, 4)


def test_ids_differ_by_line_and_are_the_same_every_time():
    assert answered(row(line=1)) == answered(row(line=1))
    assert answered(row(line=1))[0]["id"] != answered(row(line=2))[0]["id"]


@pytest.mark.parametrize(
    ("error", "status", "code", "kind"),
    [
        ("PromptTooLong: x", 400, "context_length_exceeded", "invalid_request_error"),
        ("InvalidPrompt: x", 400, "invalid_request", "invalid_request_error"),
        ("ReplicaCrash: x", 500, "ReplicaCrash", "server_error"),
        ("ValueError: x", 500, "ValueError", "server_error"),
    ],
)
def test_error_of_a_row_is_an_answer_with_its_status(error, status, code, kind):
    found, is_error = answered(row(generated_text=None, __inference_error__=error))
    reported = found["response"]["body"]["error"]
    assert is_error
    assert (found["response"]["status_code"], reported["code"]) == (status, code)
    assert (reported["type"], reported["message"]) == (kind, f"line 3: {error}")


def test_row_that_was_left_out_is_an_error():
    found, is_error = answered(row(generated_text=None, finish_reason="filtered"))
    assert is_error
    assert found["response"]["body"]["error"]["code"] == "context_length_exceeded"


def test_request_without_an_answer_of_http_has_an_error_alone():
    found = json.loads(WRITER.refused(3, None, unexecuted("batch_expired")).data)
    assert (found["response"], found["error"]["code"]) == (None, "batch_expired")


def test_lines_are_ascii_without_ends_of_lines_inside():
    data = WRITER.answered([row(generated_text="\u2028\x85\ud800")]).data
    assert data.isascii()
    assert len(data.decode().splitlines()) == 1


PLACES = [
    {"token_ids": [1, 2, 3], "logprobs": [-2.0, -0.5, -1.0]},
    {"token_ids": [2, 1], "logprobs": [-0.25, -math.inf]},
    {"token_ids": [0, 5], "logprobs": [-0.1, -3.0]},
]


def chat_logprobs(num_top, **values):
    found, _ = answered(row(logprobs=PLACES, num_logprobs=num_top, **values))
    return found["response"]["body"]["choices"][0]["logprobs"]


def test_logprobs_of_a_chat_are_cut_to_those_asked_for():
    content = chat_logprobs(1)["content"]
    assert [place["token"] for place in content] == ["a", "b"]
    assert [[top["token"] for top in place["top_logprobs"]] for place in content] == [["b"], ["b"]]
    assert content[0]["bytes"] == [97]


def test_logprob_of_the_sampled_token_is_told_also_outside_of_the_top():
    assert [place["logprob"] for place in chat_logprobs(0)["content"]] == [-2.0, -0.25]


def test_impossible_token_has_a_number_that_json_has():
    assert chat_logprobs(2)["content"][1]["top_logprobs"][1]["logprob"] == -9999.0


def test_last_token_stays_where_the_length_was_the_end():
    assert len(chat_logprobs(1, finish_reason="length")["content"]) == 3


def test_logprobs_of_a_completion_have_their_own_form():
    found, _ = answered(row(endpoint=COMPLETIONS, logprobs=PLACES, num_logprobs=2))
    assert found["response"]["body"]["choices"][0]["logprobs"] == {
        "tokens": ["a", "b"],
        "token_logprobs": [-2.0, -0.25],
        "top_logprobs": [{"b": -0.5, "c": -1.0}, {"b": -0.25, "a": -9999.0}],
        "text_offset": [0, 1],
    }


def test_refusal_survives_its_record():
    refusal = Refusal("m", code="c", param="p", status=404)
    assert Refusal(**refusal.record()).record() == refusal.record()


CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}


def test_calls_are_in_the_message_and_why_it_ended():
    found, _ = answered(row(generated_text="", reasoning="hm", tool_calls=[CALL]))
    (choice,) = found["response"]["body"]["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"] == {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "reasoning": "hm",
        "tool_calls": [CALL],
    }


def test_each_sample_has_its_own_calls():
    samples = {name: ["a", "b"] for name in ("generated_text", "finish_reason")}
    counts = {"num_generated_tokens": [1, 1], "tool_calls": [[], [CALL]]}
    found, _ = answered(row(**samples | counts))
    choices = found["response"]["body"]["choices"]
    assert [choice["message"].get("tool_calls") for choice in choices] == [None, [CALL]]
