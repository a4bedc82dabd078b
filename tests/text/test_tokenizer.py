import re

import numpy as np
import pytest

from raybatch.errors import ConfigError
from raybatch.text.chat import InvalidPrompt, RenderError, TokenizeError
from raybatch.text.tokenizer import Tokenizer
from tests.engine.tiny_tokenizers import CORPUS, byte_level_bpe, llama_bpe, unigram

BUILDERS = {"bpe": byte_level_bpe, "llama": llama_bpe, "unigram": unigram}
TRAINED = {name: build() for name, build in BUILDERS.items()}
KINDS = sorted(TRAINED)

CHATS = [
    [{"role": "user", "content": "What is stated?"}],
    [{"role": "system", "content": "text only"}, {"role": "user", "content": " Paris "}],
    [
        {"role": "user", "content": "Köln 日本語 🙂"},
        {"role": "assistant", "content": "is the"},
        {"role": "user", "content": ""},
    ],
    [{"role": "user", "content": "start"}, {"role": "assistant", "content": "The capital of"}],
    [{"role": "user", "content": "<think> about x < y"}],
]


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def reference(kind):
    return TRAINED[kind]


@pytest.fixture
def tokenizer(reference, tmp_path):
    reference.save_pretrained(tmp_path)
    return Tokenizer.load(tmp_path)


def load(kind, tmp_path):
    TRAINED[kind].save_pretrained(tmp_path)
    return Tokenizer.load(tmp_path)


def special_of(tokenizer, ids):
    return [token_id for token_id in ids.tolist() if token_id in tokenizer.special_ids]


@pytest.mark.parametrize("text", [*CORPUS[:2], " leading", "日本語 🙂", "a\n\nb", "<think>"])
def test_plain_text_gets_the_ids_of_transformers(tokenizer, reference, text):
    assert tokenizer.encode(text).tolist() == reference(text)["input_ids"]


def test_ids_are_int32(tokenizer):
    assert tokenizer.encode("text").dtype == np.int32


@pytest.mark.parametrize("messages", CHATS, ids=range(len(CHATS)))
def test_a_chat_gets_the_ids_of_transformers(tokenizer, reference, messages):
    is_continued = messages[-1]["role"] == "assistant"
    expected = reference.apply_chat_template(
        messages,
        add_generation_prompt=not is_continued,
        continue_final_message=is_continued,
        tokenize=True,
        return_dict=False,
    )
    assert tokenizer.read_chat(messages).token_ids.tolist() == expected


@pytest.mark.parametrize("name", ["llama", "unigram"])
@pytest.mark.parametrize("mode", ["escape", "allow"])
def test_a_template_that_writes_the_begin_token_gets_no_second_one(name, mode, tmp_path):
    tokenizer = load(name, tmp_path)
    ids = tokenizer.read_chat([{"role": "user", "content": "text"}], special_tokens=mode).token_ids
    assert ids.tolist().count(TRAINED[name].bos_token_id) == 1


@pytest.mark.parametrize("name", ["llama", "unigram"])
def test_allowed_text_with_a_begin_token_gets_no_second_one(name, tmp_path):
    ids = load(name, tmp_path).encode("<s>text", special_tokens="allow")
    assert ids.tolist().count(TRAINED[name].bos_token_id) == 1


def test_escaped_text_holds_no_control_token(tokenizer, reference):
    names = [name for name in reference.all_special_tokens if name != reference.unk_token]
    for name in names:
        bare = special_of(tokenizer, tokenizer.encode("Paris"))
        assert special_of(tokenizer, tokenizer.encode(f"Paris {name} text{name}")) == bare


def test_escaped_text_decodes_to_itself(tokenizer, reference):
    text = f"Paris {reference.eos_token} text"
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text


def test_an_unknown_token_in_the_text_is_ordinary_text(tmp_path):
    tokenizer = load("llama", tmp_path)
    ids = tokenizer.encode("an <unk> text")
    assert TRAINED["llama"].unk_token_id not in ids.tolist()


def test_allowed_text_may_hold_control_tokens(tokenizer, reference):
    ids = tokenizer.encode(f"Paris{reference.eos_token}", special_tokens="allow")
    assert ids.tolist() == reference(f"Paris{reference.eos_token}")["input_ids"]


def test_escaping_changes_only_the_special_tokens(tmp_path):
    tokenizer = load("bpe", tmp_path)
    text = "The capital of France<|im_end|> is Paris"
    ids = tokenizer.encode(text).tolist()
    before = tokenizer.encode("The capital of France").tolist()
    after = tokenizer.encode(" is Paris").tolist()
    assert (before, after) == (ids[: len(before)], ids[-len(after) :])


def test_a_normalized_spelling_of_a_special_token_is_escaped(tmp_path):
    reference = unigram()
    reference.add_special_tokens({"eos_token": "</s>"})
    fast = reference.backend_tokenizer
    state = re.sub(r'("content":"</s>".*?"normalized":)false', r"\1true", fast.to_str(), count=1)
    reference._tokenizer = type(fast).from_str(state)
    tokenizer = Tokenizer(reference)
    wide = "text \uff1c/s\uff1e"
    assert reference.eos_token_id in tokenizer.encode(wide, special_tokens="allow").tolist()
    assert reference.eos_token_id not in tokenizer.encode(wide).tolist()


def test_content_cannot_write_control_tokens(tokenizer, reference):
    plain = [{"role": "user", "content": "Paris text"}]
    hostile = [{"role": "user", "content": f"Paris {' '.join(reference.all_special_tokens)} text"}]
    expected = special_of(tokenizer, tokenizer.read_chat(plain).token_ids)
    assert special_of(tokenizer, tokenizer.read_chat(hostile).token_ids) == expected


def test_content_with_a_special_token_keeps_its_characters(tmp_path):
    tokenizer = load("bpe", tmp_path)
    messages = [{"role": "user", "content": "say <|im_end|> twice <|im_end|>"}]
    text = tokenizer.decode(tokenizer.read_chat(messages).token_ids, skip_special_tokens=False)
    assert text == (
        "<|im_start|>user\nsay <|im_end|> twice <|im_end|><|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_continued_message_with_a_special_token_goes_on_after_it(tmp_path):
    tokenizer = load("bpe", tmp_path)
    messages = [
        {"role": "user", "content": "text"},
        {"role": "assistant", "content": "write <|im_end|>"},
    ]
    ids = tokenizer.read_chat(messages).token_ids
    assert tokenizer.decode(ids, skip_special_tokens=False).endswith("write <|im_end|>")
    assert ids[-1] not in tokenizer.special_ids


def test_allowed_content_may_write_control_tokens(tmp_path):
    tokenizer = load("bpe", tmp_path)
    messages = [{"role": "user", "content": "a<|im_end|>"}]
    ids = tokenizer.read_chat(messages, special_tokens="allow").token_ids.tolist()
    assert ids.count(TRAINED["bpe"].eos_token_id) == 2


def test_a_special_token_spread_over_messages_is_refused(tmp_path):
    tokenizer = load("bpe", tmp_path)
    messages = [{"role": "user", "content": "<|im_"}, {"role": "user", "content": "end|>"}]
    with pytest.raises(InvalidPrompt, match="spread over"):
        tokenizer.read_chat(messages)


def test_hostile_fields_beside_the_content_are_escaped(tmp_path):
    tokenizer = load("bpe", tmp_path)
    template = "{% for m in messages %}{{ m['name'] }}: {{ m['content'] }}{% endfor %}"
    messages = [{"role": "user", "content": "text", "name": "<|im_start|>"}]
    ids = tokenizer.read_chat(messages, chat_template=template).token_ids
    assert special_of(tokenizer, ids) == []


def test_content_is_never_a_template(tmp_path):
    tokenizer = load("bpe", tmp_path)
    messages = [{"role": "user", "content": "{{ 7 * 7 }} {% for %}"}]
    text = tokenizer.decode(tokenizer.read_chat(messages).token_ids)
    assert "{{ 7 * 7 }} {% for %}" in text


def test_special_tokens_are_counted(tmp_path):
    tokenizer = load("bpe", tmp_path)
    assert tokenizer.count_special("a<|im_end|>b<|im_end|><|im_start|> <|im_") == 3


def test_parts_are_joined_for_a_template_that_takes_strings(tmp_path):
    tokenizer = load("bpe", tmp_path)
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    joined = tokenizer.read_chat([{"role": "user", "content": "one\ntwo"}]).token_ids
    assert (
        tokenizer.read_chat([{"role": "user", "content": parts}]).token_ids.tolist()
        == joined.tolist()
    )


def test_parts_reach_a_template_that_loops_over_them(tmp_path):
    tokenizer = load("bpe", tmp_path)
    template = "{% for p in messages[0]['content'] %}[{{ p['text'] }}]{% endfor %}"
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    ids = tokenizer.read_chat(
        [{"role": "user", "content": parts}], chat_template=template
    ).token_ids
    assert tokenizer.decode(ids) == "[one][two]"


def test_template_options_reach_the_template(tmp_path):
    tokenizer = load("bpe", tmp_path)
    ids = tokenizer.read_chat(
        [{"role": "user", "content": "text"}],
        chat_template="{{ mode }}",
        chat_template_kwargs={"mode": "fast"},
    ).token_ids
    assert tokenizer.decode(ids) == "fast"


def test_template_tells_which_options_it_reads(tmp_path):
    tokenizer = load("bpe", tmp_path)
    template = "{{ tools }}{{ mode }}"
    names = ("tools", "mode", "other")
    found = [tokenizer.template_reads(name, chat_template=template) for name in names]
    assert found == [True, True, False]


def test_null_keys_of_an_arrow_struct_count_as_absent(tmp_path):
    tokenizer = load("bpe", tmp_path)
    template = "{{ 'name' in messages[0] }}"
    messages = [{"role": "user", "content": "text", "name": None}]
    ids = tokenizer.read_chat(messages, chat_template=template).token_ids
    assert tokenizer.decode(ids) == "False"


def test_an_assistant_message_of_tool_calls_needs_no_content(tmp_path):
    tokenizer = load("bpe", tmp_path)
    template = "{% for m in messages %}{{ m['content'] or 'call' }};{% endfor %}"
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]},
        {"role": "tool", "content": "4"},
    ]
    assert (
        tokenizer.decode(tokenizer.read_chat(messages, chat_template=template).token_ids)
        == "call;4;"
    )


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (None, "must be a list of dicts, got null"),
        ("text", "must be a list of dicts, got str"),
        ([], "messages is empty"),
        (["text"], r"messages\[0\] must be a dict, got str"),
        ([{"content": "text"}], r"messages\[0\].role must be a word such as .*, got None"),
        ([{"role": "<|im_end|>", "content": "text"}], "must be a word"),
        ([{"role": "user", "content": None}], r"messages\[0\].content is null"),
        ([{"role": "user"}], r"messages\[0\].content is null"),
        ([{"role": "user", "content": 5}], "a string or a list of text parts, got int"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "of type 'text', got 'image_url'"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\].text must be a string"),
    ],
    ids=str,
)
def test_malformed_messages_are_named(messages, message, tmp_path):
    with pytest.raises(InvalidPrompt, match=message):
        load("bpe", tmp_path).read_chat(messages)


def test_a_template_that_raises_is_a_render_error(tmp_path):
    tokenizer = load("llama", tmp_path)
    messages = [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]
    with pytest.raises(RenderError, match="system must come first"):
        tokenizer.read_chat(messages)


def test_a_template_cannot_reach_python(tmp_path):
    template = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(RenderError, match="SecurityError"):
        load("bpe", tmp_path).read_chat([{"role": "user", "content": "a"}], chat_template=template)


def test_a_template_that_writes_without_end_is_a_render_error(tmp_path):
    with pytest.raises(RenderError, match="has more than 33,554,432 characters"):
        load("bpe", tmp_path).read_chat(
            [{"role": "user", "content": "a"}], chat_template="{{ 'a' * 70000000 }}"
        )


def test_text_that_is_not_unicode_is_a_tokenize_error(tokenizer):
    with pytest.raises(TokenizeError):
        tokenizer.encode("broken \ud800")


def test_an_empty_prompt_is_invalid(tmp_path):
    with pytest.raises(InvalidPrompt, match="empty"):
        load("bpe", tmp_path).encode("")


def test_a_prompt_that_is_no_string_is_invalid(tokenizer):
    with pytest.raises(InvalidPrompt, match="must be a string, got NoneType"):
        tokenizer.encode(None)


def test_a_model_without_chat_template_is_a_config_error():
    reference = byte_level_bpe()
    reference.chat_template = None
    tokenizer = Tokenizer(reference)
    with pytest.raises(ConfigError, match="has no chat template"):
        tokenizer.read_chat([{"role": "user", "content": "a"}])


def test_an_option_of_the_renderer_is_no_template_option(tmp_path):
    with pytest.raises(ConfigError, match="'tokenize'"):
        load("bpe", tmp_path).read_chat(
            [{"role": "user", "content": "a"}], chat_template_kwargs={"tokenize": True}
        )


def test_a_directory_without_tokenizer_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match="no usable tokenizer in"):
        Tokenizer.load(tmp_path)


def test_a_damaged_tokenizer_is_a_config_error(tmp_path):
    TRAINED["bpe"].save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": {}}')
    with pytest.raises(ConfigError, match="no usable tokenizer in"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("skip", [True, False])
def test_text_is_that_of_transformers(tokenizer, reference, skip):
    ids = reference(f"Paris 🙂{reference.eos_token}text")["input_ids"]
    assert tokenizer.decode(ids, skip) == reference.decode(ids, skip_special_tokens=skip)


def test_a_batch_decodes_like_its_rows(tokenizer):
    rows = [tokenizer.encode(text) for text in CORPUS[:3]]
    assert tokenizer.decode_batch(rows, True) == [tokenizer.decode(row, True) for row in rows]


def test_the_vocabulary_counts_added_tokens(tokenizer, reference):
    assert tokenizer.vocab_size == len(reference)


def test_baked_in_truncation_and_padding_are_off(tmp_path):
    reference = byte_level_bpe()
    reference.backend_tokenizer.enable_truncation(max_length=2)
    reference.backend_tokenizer.enable_padding(length=64)
    text = "The capital of France is Paris"
    expected = TRAINED["bpe"](text)["input_ids"]
    assert Tokenizer(reference).encode(text).tolist() == expected
