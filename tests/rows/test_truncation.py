"""What a cut leaves: the begin token, the frame of a chat, and one end of the longest text."""

import json

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raybatch.rows.prepare import _warn_of_cuts, fit_prompt
from raybatch.text.tokenizer import Prompt, Tokenizer
from tests.engine.tiny_tokenizers import byte_level_bpe, llama_bpe
from tests.stages.support import ASSISTANT, SYSTEM, USER, answer, fake_stage, local

SIDES = ("truncate_left", "truncate_right")
TOKENIZERS = {"bpe": Tokenizer(byte_level_bpe()), "llama": Tokenizer(llama_bpe())}
TEMPLATES = {
    "own": None,
    "trimmed": "{{ bos_token }}{% for m in messages %}<{{ m.role }}> {{ m.content | trim }}\n"
    "{% endfor %}answer:",
    "quoted": "{% for m in messages %}{{ m.role }} says {{ m.content | tojson }};{% endfor %} yes",
}
WORDS = st.text(st.sampled_from("abc the ü日\n<|im_end|></s>"), min_size=1, max_size=60)
ROWS = {"max_tokens": 4, "max_model_len": 60}


def cut(encoded, side, **options):
    return fit_prompt(Prompt(**encoded._asdict()), on_too_long=side, **(ROWS | options))


def read_chat(tokenizer, contents, template):
    roles = ["system", *["user", "assistant"] * len(contents)]
    messages = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]
    # a prompt that ends in an answer would continue it
    messages.append({"role": "user", "content": "?"})
    return tokenizer.read_chat(messages, chat_template=template, cut_from=0)


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_a_cut_takes_tokens_of_the_longest_message_alone(data):
    tokenizer = TOKENIZERS[data.draw(st.sampled_from(sorted(TOKENIZERS)))]
    template = TEMPLATES[data.draw(st.sampled_from(sorted(TEMPLATES)))]
    contents = data.draw(st.lists(WORDS, max_size=2))
    place = data.draw(st.integers(0, len(contents)))
    long = "a long text, " * 20
    contents.insert(place, long)
    encoded = read_chat(tokenizer, contents, template)
    side = data.draw(st.sampled_from(SIDES))
    prompt = cut(encoded, side, max_model_len=200)
    start, stop = encoded.cuttable
    inside = tokenizer.decode(encoded.token_ids[start:stop], False)
    assert inside.strip() in long
    assert len(inside) > len(long) - 10
    if prompt.error:
        assert len(encoded.token_ids) - (stop - start) >= 199
        return
    ids = encoded.token_ids
    num = len(ids) - min(len(prompt.token_ids), len(ids))
    first = start if side == "truncate_left" else stop - num
    assert np.delete(ids, slice(first, first + num)).tolist() == prompt.token_ids.tolist()
    assert first >= start
    assert first + num <= stop
    assert len(prompt.token_ids) <= 199


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("template", ["own", "trimmed"])
@pytest.mark.parametrize("name", sorted(TOKENIZERS))
def test_a_history_of_many_messages_loses_turns_and_keeps_its_frame(name, template, side):
    tokenizer = TOKENIZERS[name]
    if template == "own" and not tokenizer.has_chat_template:
        pytest.skip("the tokenizer has no template")
    system = {"role": "system", "content": "be brief"}
    turns = [{"role": ("user", "assistant")[i % 2], "content": f"turn {i}"} for i in range(41)]
    options = {"chat_template": TEMPLATES[template], "cut_from": 120}
    encoded = tokenizer.read_chat([system, *turns], **options)
    assert len(encoded.token_ids) > 300
    prompt = cut(encoded, side, max_model_len=120)
    assert not prompt.error
    assert len(prompt.token_ids) == 116
    text = tokenizer.decode(prompt.token_ids, False)
    whole = tokenizer.decode(encoded.token_ids, False)
    assert text[: text.index("be brief") + 8] == whole[: whole.index("be brief") + 8]
    assert text[-7:] == whole[-7:]
    assert ("turn 40"[-3:] in text) == (side == "truncate_left")


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(TOKENIZERS)), WORDS, st.sampled_from(SIDES))
def test_a_plain_prompt_is_cut_as_the_tokenizer_itself_truncates(name, text, side):
    tokenizer = TOKENIZERS[name]
    encoded = tokenizer.read(text * 9)
    hub = tokenizer.hugging_face
    hub.truncation_side = side.removeprefix("truncate_")
    room = ROWS["max_model_len"] - ROWS["max_tokens"]
    prompt = cut(encoded, side)
    if len(encoded.token_ids) < ROWS["max_model_len"]:
        assert prompt.token_ids.tolist() == encoded.token_ids.tolist()
    elif not encoded.num_special:
        fast = hub.backend_tokenizer
        fast.enable_truncation(room, direction=hub.truncation_side)
        expected = fast.encode(text * 9).ids
        fast.no_truncation()
        assert prompt.token_ids.tolist() == expected


@pytest.mark.parametrize(
    ("side", "kept"), [("truncate_left", b"efgh"), ("truncate_right", b"abcd")]
)
def test_a_chat_that_is_cut_still_asks_for_an_answer(chat_model, side, kept):
    options = {"system": "s", "on_too_long": side, "fake": {"max_model_len": 12}}
    stage = local(fake_stage(chat_model, prompt="{x}", **options))
    answer(stage, pa.table({"x": ["abcdefgh"]}))
    [request] = stage.pool.requests
    expected = [SYSTEM, ord("s"), USER, *kept, ASSISTANT]
    assert request.prompt_token_ids.tolist() == expected


def test_a_prompt_in_tokens_keeps_its_begin_token(model, tmp_path):
    for file in model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((model / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"bos_token": "<|user|>"}))
    options = {"tokenized_prompt": "ids", "on_too_long": "truncate_left"}
    stage = local(fake_stage(tmp_path, **options, fake={"max_model_len": 8}))
    ids = [[USER, *range(10)], list(range(10))]
    answer(stage, pa.table({"ids": ids}))
    prompts = [request.prompt_token_ids.tolist() for request in stage.pool.requests]
    assert prompts == [[USER, 7, 8, 9], [6, 7, 8, 9]]


def test_where_the_frame_alone_is_too_long_the_row_says_so():
    tokenizer = TOKENIZERS["bpe"]
    encoded = read_chat(tokenizer, ["other " * 40, "the longest " * 40], None)
    prompt = cut(encoded, "truncate_left")
    assert prompt.error.startswith("PromptTooLong")
    assert "only the longest text is cut" in prompt.error


def test_a_template_that_changes_the_longest_text_is_not_cut():
    tokenizer = TOKENIZERS["bpe"]
    template = "{{ messages[0].content | length }} {{ messages[0].content | upper }} " * 20
    encoded = read_chat(tokenizer, ["long " * 40], template)
    assert encoded.cuttable == (0, 0)
    assert cut(encoded, "truncate_right").error.startswith("PromptTooLong")


@pytest.mark.parametrize("max_tokens", [40, 60, 10_000])
def test_a_cut_leaves_half_of_the_context_to_the_prompt(max_tokens):
    encoded = TOKENIZERS["llama"].read("a long text, " * 50)
    prompt = cut(encoded, "truncate_left", max_tokens=max_tokens)
    assert len(prompt.token_ids) == 30


def test_cuts_are_told_once(caplog):
    _warn_of_cuts.cache_clear()
    encoded = TOKENIZERS["llama"].read("a long text, " * 50)
    for _ in range(2):
        cut(encoded, "truncate_left")
    assert caplog.text.count("on_too_long='truncate_left' cuts prompts") == 1
