"""Template syntax in data is text, and a hostile chat template reaches nothing."""

import pyarrow as pa
import pytest

from tests.stages.support import answer, fake_stage, local

INNER = "{% for m in messages %}{{ m.content }}{% endfor %}"


def answered(model, text, **options):
    stage = local(fake_stage(model, prompt="{text}", **options))
    table = answer(stage, pa.table({"text": [text], "secret": ["s3"]}))
    prompts = [
        bytes(i for i in r.prompt_token_ids.tolist() if i < 256) for r in stage.pool.requests
    ]
    return prompts, table.column("__inference_error__").to_pylist()[0]


@pytest.mark.parametrize(
    "text", ["{{ 7 * 7 }}", "{% for i in range(9) %}x{% endfor %}", "{secret}", "{text}", "{# x #}"]
)
def test_template_syntax_in_a_value_stays_text(chat_model, text):
    assert answered(chat_model, text) == ([text.encode()], "")


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}" + INNER,
        "{{ cycler.__init__.__globals__.os.system('touch x') }}" + INNER,
        "{% for i in range(100000000) %}x{% endfor %}" + INNER,
        "{% set _ = messages.append(messages[0]) %}" + INNER,
        "{% include '/etc/passwd' %}" + INNER,
        "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}" + INNER,
        "{{ 'a' * 200000000 }}" + INNER,
    ],
    ids=["classes", "globals", "endless", "changes", "files", "nested", "large"],
)
def test_hostile_chat_template_ends_in_an_error_row(chat_model, template):
    prompts, error = answered(chat_model, "a", chat_template=template)
    assert prompts == []
    assert error.startswith("RenderError: ")
