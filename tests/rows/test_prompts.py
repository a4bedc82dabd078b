import pyarrow as pa
import pytest

from raybatch.errors import ConfigError
from raybatch.rows.schema import ERROR_COLUMN
from tests.stages.support import ASSISTANT, EOS, SYSTEM, USER, answer, fake_stage, local


def errors(table: pa.Table) -> list[str]:
    return table.column(ERROR_COLUMN).to_pylist()


def error_classes(table: pa.Table) -> list[str]:
    return [error.partition(":")[0] for error in errors(table)]


def sent_prompts(stage) -> list[list[int]]:
    return [request.prompt_token_ids.tolist() for request in stage.pool.requests]


def test_template_becomes_a_user_message_where_the_model_has_a_chat_template(chat_model):
    stage = local(fake_stage(chat_model, prompt="{text}"))
    answer(stage, pa.table({"text": ["a"]}))
    assert sent_prompts(stage) == [[USER, ord("a"), ASSISTANT]]


def test_chat_false_leaves_the_template_plain(chat_model):
    stage = local(fake_stage(chat_model, prompt="{text}", chat=False))
    answer(stage, pa.table({"text": ["a"]}))
    assert sent_prompts(stage) == [[ord("a")]]


def test_system_message_comes_first(chat_model):
    stage = local(fake_stage(chat_model, prompt="{text}", system="s"))
    answer(stage, pa.table({"text": ["a"]}))
    assert sent_prompts(stage) == [[SYSTEM, ord("s"), USER, ord("a"), ASSISTANT]]


def test_special_tokens_in_data_are_text(chat_model):
    stage = local(fake_stage(chat_model, prompt="{text}"))
    answer(stage, pa.table({"text": ["<|eos|>"]}))
    assert EOS not in sent_prompts(stage)[0]


def test_special_tokens_can_be_allowed(model):
    stage = local(fake_stage(model, prompt="{text}", special_tokens="allow"))
    answer(stage, pa.table({"text": ["<|eos|>a"]}))
    assert sent_prompts(stage) == [[EOS, ord("a")]]


def test_messages_come_from_a_column_a_function_or_templates(chat_model):
    table = pa.table({"text": ["a"], "m": [[{"role": "user", "content": "a"}]]})
    expected = [[USER, ord("a"), ASSISTANT]]
    for messages in (
        "m",
        lambda row: [{"role": "user", "content": row["text"]}],
        [{"role": "user", "content": "{text}"}],
    ):
        stage = local(fake_stage(chat_model, messages=messages))
        answer(stage, table)
        assert sent_prompts(stage) == expected


def test_messages_may_be_json_texts(chat_model):
    table = pa.table({"m": ['[{"role": "user", "content": "a"}]', "no json"]})
    stage = local(fake_stage(chat_model, messages="m"))
    out = answer(stage, table)
    assert sent_prompts(stage) == [[USER, ord("a"), ASSISTANT]]
    assert error_classes(out) == ["", "InvalidPrompt"]


def test_failing_messages_function_is_a_row_error(chat_model):
    table = pa.table({"text": ["a", "b"]})

    def messages(row):
        return [{"role": "user", "content": {"a": "x"}[row["text"]]}]

    out = answer(local(fake_stage(chat_model, messages=messages)), table)
    assert errors(out) == ["", "RenderError: KeyError: 'b'"]


def test_messages_without_a_chat_template_name_the_model(model):
    stage = local(fake_stage(model, messages="m"))
    with pytest.raises(ConfigError, match="has no chat template"):
        answer(stage, pa.table({"m": [[{"role": "user", "content": "a"}]]}))


def test_tokenized_prompts_are_checked_per_row(model):
    ids = pa.array([[1, 2], None, [], [1, 999], [1, None]], pa.list_(pa.int64()))
    stage = local(fake_stage(model, tokenized_prompt="ids"))
    out = answer(stage, pa.table({"ids": ids}))
    assert error_classes(out) == ["", *["InvalidPrompt"] * 4]
    assert sent_prompts(stage) == [[1, 2]]


def test_prompt_column_is_taken_by_its_name(model):
    stage = local(fake_stage(model))
    answer(stage, pa.table({"prompt": ["a"]}))
    assert sent_prompts(stage) == [[ord("a")]]


def test_missing_column_is_named_with_a_suggestion(model):
    with pytest.raises(ConfigError, match=r"no column 'txt' \(did you mean 'text'\?\)"):
        answer(local(fake_stage(model, prompt="{txt}")), pa.table({"text": ["a"]}))


def test_several_samples_make_lists(model):
    stage = fake_stage(model, prompt="{text}", sampling={"max_tokens": 3, "n": 2})
    out = answer(local(stage), pa.table({"text": ["a", None]}))
    good, bad = out.to_pylist()
    assert out.schema.field("generated_tokens").type == pa.list_(pa.list_(pa.int32()))
    assert [len(tokens) for tokens in good["generated_tokens"]] == [3, 3]
    assert good["generated_tokens"][0] != good["generated_tokens"][1]
    assert (good["finish_reason"], bad["finish_reason"]) == (["length"] * 2, ["error"] * 2)


@pytest.mark.parametrize(
    ("policy", "expected", "reason"),
    [
        ("truncate_left", [b"efgh"], "length"),
        ("truncate_right", [b"abcd"], "length"),
        ("drop", [], "filtered"),
        ("error", [], "error"),
    ],
)
def test_too_long_prompts_leave_room_for_the_output_as_the_policy_says(
    model, policy, expected, reason
):
    stage = local(fake_stage(model, prompt="{text}", on_too_long=policy, fake={"max_model_len": 8}))
    out = answer(stage, pa.table({"text": ["abcdefgh"]}))
    assert [bytes(prompt) for prompt in sent_prompts(stage)] == expected
    assert out.column("finish_reason").to_pylist() == [reason]


def test_output_is_bounded_by_the_context(model):
    stage = fake_stage(model, prompt="{text}", fake={"max_model_len": 6})
    out = answer(local(stage), pa.table({"text": ["abcd"]}))
    assert out.column("num_generated_tokens").to_pylist() == [2]
    assert out.column("finish_reason").to_pylist() == ["length"]


def test_empty_prompt_is_a_row_error_where_the_tokenizer_adds_tokens(bos_model):
    out = answer(local(fake_stage(bos_model, prompt="{text}")), pa.table({"text": ["", "a"]}))
    assert errors(out) == ["InvalidPrompt: the prompt is empty, and there is no chat template", ""]


def test_empty_text_inside_a_template_is_a_prompt(model):
    out = answer(local(fake_stage(model, prompt="Q: {text}")), pa.table({"text": [""]}))
    assert errors(out) == [""]


def test_empty_user_message_is_a_prompt(chat_model):
    out = answer(local(fake_stage(chat_model, prompt="{text}")), pa.table({"text": [""]}))
    assert errors(out) == [""]


def test_time_in_an_unknown_zone_is_a_row_error_where_a_template_takes_it(model):
    table = pa.table({"t": pa.array([1, None], pa.timestamp("us", "Nowhere/City"))})
    out = answer(local(fake_stage(model, prompt="{t}")), table)
    assert error_classes(out) == ["InvalidPrompt", "InvalidPrompt"]
    assert "Nowhere/City" in errors(out)[0]


@pytest.mark.parametrize("kind", [pa.large_string(), pa.string_view()])
def test_texts_of_every_layout_are_prompts_and_pass_through(model, kind):
    table = pa.table({"text": pa.array(["a", None], pa.string()).cast(kind)})
    out = answer(local(fake_stage(model, prompt="{text}")), table)
    assert error_classes(out) == ["", "InvalidPrompt"]
    assert out.select(["text"]).equals(table)


def test_column_that_can_be_no_prompt_is_refused_with_the_way_out(model):
    with pytest.raises(ConfigError, match=r"column 'text' has type binary.* to string"):
        answer(local(fake_stage(model, prompt="{text}")), pa.table({"text": [b"a"]}))


TOOLS_TEMPLATE = "{{ tools[0].name if tools else 'none' }}:{{ messages[0].content }}"


def prompts_with_options(chat_model, *options):
    stage = local(
        fake_stage(
            chat_model,
            messages="m",
            chat_template=TOOLS_TEMPLATE,
            chat_template_kwargs={"tools": [{"name": "of the stage"}]},
            chat_template_kwargs_column="options",
        )
    )
    messages = [[{"role": "user", "content": "a"}]] * len(options)
    table = answer(stage, pa.table({"m": messages, "options": list(options)}))
    return [bytes(ids) if max(ids) < 256 else ids for ids in sent_prompts(stage)], errors(table)


def test_options_of_the_chat_template_come_from_a_column_and_win(chat_model):
    prompts, _ = prompts_with_options(chat_model, '{"tools": [{"name": "own"}]}', None)
    assert prompts == [b"own:a", b"of the stage:a"]


def test_special_tokens_in_options_of_a_row_are_text(chat_model):
    prompts, _ = prompts_with_options(chat_model, '{"tools": [{"name": "<|eos|>"}]}')
    assert prompts == [b"<|eos|>:a"]


@pytest.mark.parametrize("options", ["[1]", "{", '{"chat_template": "x"}'])
def test_bad_options_of_a_row_are_its_error(chat_model, options):
    _, found = prompts_with_options(chat_model, options, "{}")
    assert [error.partition(":")[0] for error in found] == ["InvalidPrompt", ""]
