"""The tokenizer and the chat template of a folder, as its files define them."""

import json

import pytest

from raybatch.errors import ConfigError
from raybatch.text.text_files import check_template, check_tokenizer, template_of
from raybatch.text.tokenizer import Tokenizer
from tests.stages.support import make_tokenizer

BROKEN = "{% for m in messages %}\n{{ m.content }}\n{% end"


@pytest.fixture
def folder(tmp_path):
    return make_tokenizer(tmp_path / "model", has_chat_template=False)


def set_config(folder, **options):
    path = folder / "tokenizer_config.json"
    stored = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**stored, **options}))


def named(*pairs):
    return [{"name": name, "template": text} for name, text in pairs]


def test_a_folder_with_a_template_passes(tmp_path):
    chat = make_tokenizer(tmp_path / "chat", has_chat_template=True)
    check_tokenizer(chat)
    assert template_of(chat, has_tools=False) is not None
    check_template(chat, has_tools=False)


def test_a_folder_without_a_template_passes(folder):
    check_tokenizer(folder)
    assert template_of(folder, has_tools=True) is None
    check_template(folder, has_tools=True)


def test_a_folder_without_a_tokenizer_is_refused(folder):
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json, so no prompt can be tokenized"):
        check_tokenizer(folder)


@pytest.mark.parametrize("name", ["tokenizer.model", "vocab.json", "merges.txt", "tekken.json"])
def test_a_tokenizer_of_another_form_is_left_to_transformers(folder, name):
    (folder / "tokenizer.json").unlink()
    (folder / name).touch()
    check_tokenizer(folder)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_damaged_file_of_a_tokenizer_is_named(folder, name):
    (folder / name).write_text('{"version": ')
    with pytest.raises(ConfigError, match=f"{folder}/{name} is no"):
        check_tokenizer(folder)


@pytest.mark.parametrize(
    ("text", "line"),
    [(BROKEN, 3), ("{{ m.content ", 1), ("\n{{ x | no_such_filter }}", 2), ("{% endfor %}", 1)],
)
def test_a_template_that_cannot_be_parsed_is_told_with_file_and_line(folder, text, line):
    path = folder / "chat_template.jinja"
    path.write_text(text)
    with pytest.raises(ConfigError) as found:
        check_template(folder, has_tools=False)
    message = str(found.value)
    assert f"{path}, line {line}: the chat template cannot be parsed: " in message
    assert "give another as chat_template, or send plain text with chat=False" in message
    assert "\n" not in message


def test_a_template_in_the_config_is_read_where_it_has_no_file(folder):
    set_config(folder, chat_template=BROKEN)
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json, line 3: the chat template"):
        check_template(folder, has_tools=False)


def test_a_template_of_a_use_that_is_not_asked_for_may_be_broken(folder):
    set_config(folder, chat_template=named(("default", "{{ 1 }}"), ("tool_use", BROKEN)))
    check_template(folder, has_tools=False)
    with pytest.raises(ConfigError, match="cannot be parsed"):
        check_template(folder, has_tools=True)


@pytest.mark.parametrize("has_tools", [False, True])
@pytest.mark.parametrize(
    ("in_config", "files"),
    [
        ("of the config", {}),
        ("of the config", {"chat_template.jinja": "of the file"}),
        (named(("default", "first"), ("tool_use", "second")), {}),
        (named(("default", "first"), ("rag", "second")), {}),
        (
            None,
            {
                "chat_template.jinja": "of the file",
                "additional_chat_templates/tool_use.jinja": "of tools",
            },
        ),
        (named(("default", "first"), ("tool_use", "second")), {"chat_template.jinja": "a file"}),
    ],
)
def test_the_template_is_the_one_that_transformers_takes(folder, in_config, files, has_tools):
    set_config(folder, **({} if in_config is None else {"chat_template": in_config}))
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    tokenizer = Tokenizer.load(folder).hugging_face
    expected = tokenizer.get_chat_template(tools=[{}] if has_tools else None)
    found = template_of(folder, has_tools=has_tools)
    assert found is not None
    assert expected == found.text
