"""Chat templates render as transformers has it, and a hostile one comes to an end."""

import threading

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from raybatch.text import chat_template
from raybatch.text.chat_template import ChatTemplate, TemplateLimitError

USER = [{"role": "user", "content": "two\nlines "}]
CHAT = [
    {"role": "system", "content": "Be kind."},
    *USER,
    {"role": "assistant", "content": " yes, because "},
]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"a": 1}}}]

FRIENDLY = {
    "loop": "{% for m in messages %}<{{ m.role }}>{{ m['content'] }}{% endfor %}",
    "trim": "{% for m in messages %}{{ m.content | trim }}\n{% endfor %}",
    "filter": "{% for m in messages if m.role != 'system' %}{{ loop.index }}{{ m.content }}"
    "{% else %}none{% endfor %}",
    "break": "{% for m in messages %}{% if loop.index0 == 1 %}{% break %}{% endif %}"
    "{{ m.content }}{% endfor %}{{ messages[-1].content }}",
    "namespace": "{% set ns = namespace(last='') %}{% for m in messages[::-1] %}"
    "{% set ns.last = ns.last ~ m.content %}{% endfor %}{{ ns.last }}",
    "macro": "{% macro show(m, end='!') %}{{ m.role + ': ' + m.content }}{{ end }}{% endmacro %}"
    "{% for m in messages %}{{ show(m) }}{% endfor %}",
    "call block": "{% macro box() %}[{{ caller() }}]{% endmacro %}"
    "{% for m in messages %}{% call box() %}{{ m.content }}{% endcall %}{% endfor %}",
    "set block": "{% set all %}{% for m in messages %}{{ m.content }}{% endfor %}{% endset %}"
    "{{ all | upper }}",
    "filter block": "{% filter upper %}{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% endfilter %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% endfor %}",
    "lists": "{% set xs = ['a', 'b'] + ['c'] %}{{ xs | join(', ') }}{{ (1, 2)[0] }}"
    "{{ {'k': messages[0].content}.k }}{{ messages | map(attribute='content') | join('-') }}"
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}"
    "{{ messages[-1].content }}",
    "texts": "{{ 'x' * 3 }}{{ '%s-%03d' % ('a', 7) }}{{ '{} {{}} {:>4}'.format('a', 2) }}"
    "{{ 'a b'.split(' ') | first }}{{ 'a'.center(5) }}{{ 'ab' | replace('b', 'cc') }}"
    "{{ ', '.join(['p', 'q']) }}{{ 'l\nm' | indent(2) }}{{ 2 ** 10 }}{{ 7 % 4 }}"
    "{{ 1700000000 | string }}{{ '%d' | format(1700000000) }}{{ [1] | sum(start=9000000) }}"
    "{{ 3.14159 | round(2) }}{{ messages[-1]['content'] }}",
    "tojson": "{{ messages | tojson }}{{ tools | tojson(indent=2) }}",
    "undefined": "{% if name is defined %}{{ name }}{% else %}nobody{% endif %}"
    "{{ missing | default('d') }}{{ messages[-1].content }}",
    "blanks": "  {% if true %}\n    a\n  {% endif %}\n{{- messages[-1].content -}}  ",
    "dicts": "{% for key, value in messages[0].items() %}{{ key }}={{ value }};{% endfor %}"
    "{% for pair in messages[0] | dictsort %}{{ pair[0] }}{% endfor %}{{ messages[-1].content }}",
}


def reference(template: str, messages, **options) -> str:
    (rendered,), _ = render_jinja_template([messages], chat_template=template, **options)
    return rendered


@pytest.mark.parametrize("template", FRIENDLY.values(), ids=FRIENDLY)
def test_a_template_renders_as_in_transformers(template):
    options = {"add_generation_prompt": True, "tools": TOOLS, "name": "Ada"}
    expected = reference(template, CHAT, **options)
    assert expected == ChatTemplate(template).render(CHAT, **options)


@pytest.mark.parametrize("name", ["loop", "trim", "texts"])
@pytest.mark.parametrize("content", [" yes, because ", [{"type": "text", "text": "so "}]])
def test_a_message_is_continued_as_in_transformers(name, content):
    messages = [*CHAT[:-1], {"role": "assistant", "content": content}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    template = FRIENDLY[name]
    if isinstance(content, list):
        template = "{% for m in messages %}{{ m.content if m.content is string else "
        template += "m.content[0].text }}{% endfor %}"
    expected = reference(template, messages, **options)
    assert expected == ChatTemplate(template).render(messages, **options)


def test_messages_are_not_changed():
    before = [dict(message) for message in CHAT]
    ChatTemplate(FRIENDLY["loop"]).render(
        CHAT, add_generation_prompt=False, continue_final_message=True
    )
    assert before == CHAT


def test_a_message_that_is_not_shown_cannot_be_continued():
    template = ChatTemplate("{{ messages[0].content }}")
    with pytest.raises(ValueError, match="the template changes or drops it"):
        template.render(CHAT, add_generation_prompt=False, continue_final_message=True)


def test_raise_exception_is_raised():
    with pytest.raises(Exception, match="roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}").render(
            USER, add_generation_prompt=True
        )


LOOPS = {
    "nested": "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
    "filtered": "{% for a in range(9999) %}{% for b in range(9999) if false %}{% endfor %}"
    "{% endfor %}",
    "recursive": "{% for a in [1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(40) }}",
    "callers": "{% macro f() %}{{ caller() }}{{ caller() }}{% endmacro %}"
    + "{% call f() %}" * 40
    + "x"
    + "{% endcall %}" * 40,
    "values": "{% for a in range(9999) %}{{ messages | tojson | length }}{% endfor %}",
}


@pytest.mark.parametrize("template", LOOPS.values(), ids=LOOPS)
def test_a_template_that_takes_too_many_steps_is_ended(template, monkeypatch):
    monkeypatch.setattr(chat_template, "MAX_STEPS", 20_000)
    with pytest.raises((TemplateLimitError, RecursionError)):
        ChatTemplate(template).render(USER, add_generation_prompt=True)


LARGE = {
    "product": "{{ 'a' * 200000000 }}",
    "product of a list": "{{ ([0] * 200000000) | length }}",
    "reversed product": "{% set s = 200000000 * 'a' %}",
    "power": "{{ 10 ** 100000000 }}",
    "product of numbers": "{% set ns = namespace(n=2 ** 60000) %}{% for i in range(30) %}"
    "{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "doubled": "{% set ns = namespace(s='aaaaaaaa') %}{% for i in range(40) %}"
    "{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "added": "{% set ns = namespace(s='aaaaaaaa') %}{% for i in range(40) %}"
    "{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "kept": "{% set ns = namespace(s=[]) %}{% for i in range(999) %}"
    "{% set ns.s = ns.s + ['a' * 9999999] %}{% endfor %}",
    "inside itself": "{% set ns = namespace(s=[]) %}{% for i in range(60) %}"
    "{% set ns.s = [ns.s, ns.s] %}{% endfor %}{{ ns.s }}",
    "dicts": "{% set ns = namespace(s='') %}{% for i in range(60) %}"
    "{% set ns.s = dict(a=ns.s, b=ns.s) %}{% endfor %}{{ ns.s | tojson }}",
    "blocks": "{% set a %}{{ 'a' * 9999 }}{% endset %}"
    "{% for i in range(99999) %}{{ a }}{% endfor %}",
    "written": "{% for i in range(99999) %}" + "text " * 400 + "{% endfor %}",
    "format": "{{ '%999999999d' % 1 }}",
    "many formats": "{{ ('%99999d' * 9999) % ((1,) * 9999) }}",
    "star": "{{ '%*d' % (999999999, 1) }}",
    "format filter": "{{ '%999999999d' | format(1) }}",
    "format method": "{{ '{:>999999999}'.format('a') }}",
    "format fields": "{{ ('{0}' * 99999).format('a' * 99999) }}",
    "format width": "{{ '{:{}}'.format('a', 999999999) }}",
    "format map": "{{ '{a:>999999999}'.format_map({'a': 1}) }}",
    "center": "{{ 'a'.center(999999999) }}",
    "center filter": "{{ 'a' | center(999999999) }}",
    "constant filter": "{% if 'a' | center(999999999) %}{% endif %}",
    "mapped": "{{ ['a'] | map('center', 999999999) | list }}",
    "ljust": "{{ 'a'.ljust(999999999) }}",
    "zfill": "{{ '1'.zfill(width=999999999) if false else '1'.zfill(999999999) }}",
    "tabs": "{{ ('\t' * 999).expandtabs(9999999) }}",
    "replace": "{{ ('a' * 99999).replace('a', 'b' * 99999) }}",
    "replace filter": "{{ ('a' * 99999) | replace('a', 'b' * 99999) }}",
    "join": "{{ ('a' * 99999).join(['b'] * 99999) }}",
    "join of letters": "{{ ('a' * 99999).join('b' * 99999) }}",
    "join method of a stream": "{{ ('a' * 99999).join(range(99999) | map('string')) }}",
    "joined by ~": "{% set s = 'a' * 30000000 %}{{ s ~ s ~ s ~ s ~ s ~ s }}",
    "replace in bytes": "{{ ('a' * 99999).encode().replace('a'.encode(), "
    "('b' * 99999).encode()) | length }}",
    "set block in itself": "{% set ns = namespace(s='a' * 99999) %}{% for i in range(40) %}"
    "{% set s %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = s %}{% endfor %}",
    "shown in a block": "{% set big = ['a' * 99999] * 9 %}{% set s %}"
    "{% for i in range(9999) %}{{ big }}{% endfor %}{% endset %}",
    "shown by ~": "{% set big = ['a' * 99999] * 9 %}{% set s = ''" + " ~ big" * 40 + " %}",
    "filter block": "{% filter center(999999999) %}a{% endfilter %}",
    "title": "{{ ('a ' * 9999999) | title | length }}",
    "join filter": "{{ (['b'] * 99999) | join('a' * 99999) }}",
    "join of a stream": "{{ range(99999) | map('string') | join('a' * 99999) }}",
    "indent": "{{ ('\n' * 99999) | indent(99999) }}",
    "indent of json": "{{ messages | tojson(indent=99999999) }}",
    "split": "{{ ('a ' * 9999999).split() | length }}",
    "letters": "{{ ('a' * 9999999) | list | length }}",
    "bytes": "{{ (1).to_bytes(999999999, 'big') | length }}",
    "slices": "{{ [1] | slice(999999999) | list | length }}",
    "batch": "{{ [1] | batch(999999999, 0) | list | length }}",
    "sum": "{{ ([[0]] * 99999) | sum(start=[]) | length }}",
    "translated": "{{ ('a' * 99999).translate({97: 'b' * 99999}) | length }}",
    "precision": "{{ 1.5 | round(999999999, 'ceil') }}",
    "time": "{{ strftime_now('%c' * 999999) }}",
}


@pytest.mark.parametrize("template", LARGE.values(), ids=LARGE)
def test_a_template_that_makes_too_much_is_ended(template):
    with pytest.raises(TemplateLimitError):
        ChatTemplate(template).render(USER, add_generation_prompt=True)


@pytest.mark.parametrize("name", ["lipsum(99)", "'a' | urlize", "'a' | pprint", "[1] | random"])
def test_what_is_for_web_pages_is_not_there(name):
    with pytest.raises(Exception, match=r"No filter named|undefined"):
        ChatTemplate(f"{{{{ {name} }}}}").render(USER, add_generation_prompt=True)


def test_a_rendering_that_takes_too_long_is_ended(monkeypatch):
    monkeypatch.setattr(chat_template, "MAX_CPU_S", 0.01)
    with pytest.raises(TemplateLimitError, match="takes more than 0 s"):
        ChatTemplate(LOOPS["nested"]).render(USER, add_generation_prompt=True)


def test_every_rendering_has_a_budget_of_its_own(monkeypatch):
    monkeypatch.setattr(chat_template, "MAX_STEPS", 100)
    template = ChatTemplate("{% for i in range(60) %}{% endfor %}")
    for _ in range(3):
        assert "" == template.render(USER, add_generation_prompt=True)


def test_threads_have_budgets_of_their_own(monkeypatch):
    monkeypatch.setattr(chat_template, "MAX_STEPS", 1000)
    template = ChatTemplate("{% for i in range(600) %}{% endfor %}ok")
    found: list[str] = []

    def render() -> None:
        found.extend(template.render(USER, add_generation_prompt=True) for _ in range(5))

    threads = [threading.Thread(target=render) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ["ok"] * 20 == found
