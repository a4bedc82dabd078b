"""The demo model's tokenizer and chat template."""

import random

import pytest

from raybatch.demo.task import WORDS, make_document


@pytest.mark.parametrize(
    "text",
    [
        "Mara Voss lives in Oak Hill.",
        "  two leading spaces,\n\nblank lines\tand tabs ",
        "naïve café, 日本 🙂 \x00\x7f",
        "supercalifragilistic 1234567 $%&",
        "",
    ],
)
def test_any_text_survives_encoding_and_decoding(tokenizer, text):
    assert text == tokenizer.decode(tokenizer(text).input_ids)


def test_every_byte_is_a_token(tokenizer):
    text = bytes(range(256)).decode("latin-1")
    assert text == tokenizer.decode(tokenizer(text).input_ids)


def test_words_of_the_task_are_single_tokens(tokenizer):
    texts = {word for entries in WORDS.values() for entry in entries for word in entry.split()}
    assert [] == [word for word in sorted(texts) if len(tokenizer(f" {word}").input_ids) > 1]


def test_documents_use_about_one_token_a_word(tokenizer):
    document = make_document(random.Random(0), 24)
    words_and_marks = len(document.text.split()) + sum(document.text.count(c) for c in ',.:"-')
    assert len(tokenizer(document.text).input_ids) <= words_and_marks


def test_chat_template_renders_every_role(tokenizer):
    chat = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Hello?"},
        {"role": "assistant", "content": "Hello."},
    ]
    expected = (
        "<|im_start|>system\nBe short.<|im_end|>\n"
        "<|im_start|>user\nHello?<|im_end|>\n"
        "<|im_start|>assistant\nHello.<|im_end|>\n"
    )
    assert expected == tokenizer.apply_chat_template(chat, tokenize=False)


def test_generation_prompt_opens_the_assistant_turn(tokenizer):
    chat = [{"role": "user", "content": "Hello?"}]
    rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert "<|im_start|>user\nHello?<|im_end|>\n<|im_start|>assistant\n" == rendered
