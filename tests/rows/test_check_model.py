"""Which files of a model's folder a stage is refused for: those that its rows would need."""

import pyarrow as pa
import pytest

from raybatch.errors import ConfigError
from raybatch.rows.options import build_stage_config
from raybatch.rows.stage_model import check_model
from tests.stages.support import make_tokenizer

TEXT = pa.schema([("text", pa.string())])
ASKED = {"prompt": "{text}"}
IDS = pa.schema([("tokenized_prompt", pa.list_(pa.int32()))])
MESSAGES = pa.schema([("messages", pa.string())])
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """A folder whose chat templates cannot be parsed."""
    folder = make_tokenizer(tmp_path_factory.mktemp("model") / "chat", has_chat_template=False)
    (folder / "chat_template.jinja").write_text("{% if")
    return folder


def check(folder, schema=TEXT, **options):
    options = {"backend": "fake", **options}
    check_model(build_stage_config(str(folder), options, where="LLMStage"), schema)


def of_endpoint(folder, endpoint):
    options = {"base_url": "http://127.0.0.1:9/v1", "tokenizer": str(folder), "endpoint": endpoint}
    return {"kind": "openai", "options": options}


@pytest.mark.parametrize(
    ("options", "schema"),
    [
        (ASKED, TEXT),
        (ASKED | {"chat": True}, TEXT),
        ({"messages": "text"}, TEXT),
        ({"messages": [{"role": "user", "content": "{text}"}]}, TEXT),
        ({}, MESSAGES),
        (ASKED | {"task": "embed", "chat": True}, TEXT),
    ],
)
def test_a_template_that_rows_are_rendered_with_must_parse(broken, options, schema):
    with pytest.raises(ConfigError, match=r"chat_template\.jinja, line 1: .* cannot be parsed"):
        check(broken, schema, **options)


@pytest.mark.parametrize(
    ("options", "schema"),
    [
        (ASKED | {"chat": False}, TEXT),
        (ASKED | {"chat_template": "{{ messages }}"}, TEXT),
        ({"tokenized_prompt": "text"}, TEXT),
        ({}, IDS),
        (ASKED | {"task": "embed"}, TEXT),
        ({"task": "score", "query": "{text}", "document": "{text}"}, TEXT),
    ],
)
def test_a_template_that_no_row_needs_may_be_broken(broken, options, schema):
    check(broken, schema, **options)


def test_a_template_for_tools_is_looked_at_where_the_stage_has_tools(tmp_path):
    folder = make_tokenizer(tmp_path / "m", has_chat_template=False)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{% if")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    check(folder, **ASKED)
    with pytest.raises(ConfigError, match=r"tool_use\.jinja, line 1"):
        check(folder, **ASKED, tools=[TOOL])


def test_the_tokenizer_of_an_endpoint_is_looked_at(broken, tmp_path):
    check(broken, **ASKED, backend=of_endpoint(broken, "completions"))
    with pytest.raises(ConfigError, match="cannot be parsed"):
        check(broken, **ASKED, backend=of_endpoint(broken, "chat"))
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        check(tmp_path, **ASKED, backend=of_endpoint(tmp_path, "completions"))
