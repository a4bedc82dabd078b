"""Chat templates in the manner of eight families of models, and histories that people have."""

import json
from copy import deepcopy
from dataclasses import dataclass
from random import Random
from typing import Any

_QWEN = """
{%- set first = messages[0] %}
{%- if tools or first.role == 'system' %}
    {{- '<|im_start|>system\n' }}
    {{- first.content if first.role == 'system' else 'Be of use.' }}
    {%- for tool in tools or [] %}
        {{- '\n<tool>' + (tool | tojson) + '</tool>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endif %}
{%- set seen = namespace(question=-1) %}
{%- for message in messages if message.role == 'user' %}
    {%- set seen.question = seen.question + 1 %}
{%- endfor %}
{%- set asked = namespace(count=-1) %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'user' %}
        {%- set asked.count = asked.count + 1 %}
    {%- endif %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set thought = '' %}
        {%- if message.reasoning_content is string %}
            {%- set thought = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if thought and asked.count == seen.question %}
            {{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\n<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}
            {%- if call.function.arguments is string %}
                {{- call.function.arguments }}
            {%- else %}
                {{- call.function.arguments | tojson }}
            {%- endif %}
            {{- '}</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' + content + '\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}
"""

_LLAMA = """
{{- bos_token }}
{%- set system = '' %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' + system }}
{%- for tool in tools or [] %}
    {{- '\n' + (tool | tojson(indent=4)) }}
{%- endfor %}
{{- '<|eot_id|>' }}
{%- for message in messages %}
    {%- if message.role in ['ipython', 'tool'] %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\n\n' }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception('one call at a time') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + call.name }}
        {{- '", "parameters": ' + (call.arguments | tojson) + '}<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
        {{- message['content'] | trim }}
        {{- '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""

_MISTRAL = """
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set loop_messages = messages[1:] %}
    {{- '[SYSTEM_PROMPT]' }}
    {%- if messages[0]['content'] is string %}
        {{- messages[0]['content'] }}
    {%- else %}
        {%- for block in messages[0]['content'] %}
            {{- block['text'] }}
        {%- endfor %}
    {%- endif %}
    {{- '[/SYSTEM_PROMPT]' }}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- if tools %}
    {{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
{%- endif %}
{%- set turn = namespace(of_user=true) %}
{%- for message in loop_messages %}
    {%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
        {%- if (message.role == 'user') != turn.of_user %}
            {{- raise_exception('roles must take turns') }}
        {%- endif %}
        {%- set turn.of_user = not turn.of_user %}
    {%- endif %}
    {%- if message.role == 'user' %}
        {{- '[INST]' }}
        {%- if message.content is string %}
            {{- message.content }}
        {%- else %}
            {%- for block in message.content %}
                {{- block.text if block.type == 'text' else '[IMG]' }}
            {%- endfor %}
        {%- endif %}
        {{- '[/INST]' }}
    {%- elif message.role == 'assistant' %}
        {%- if message.content is string %}
            {{- message.content }}
        {%- else %}
            {%- for block in message.content or [] %}
                {{- block.text }}
            {%- endfor %}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- if call.id is not defined or call.id | length != 9 %}
                {{- raise_exception('ids of calls have 9 letters') }}
            {%- endif %}
            {{- '[TOOL_CALLS]' + call.function.name + '[CALL_ID]' + call.id + '[ARGS]' }}
            {{- call.function.arguments | tojson }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS]' + message.tool_call_id + '[TOOL_CONTENT]' }}
        {{- message.content | string + '[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception('no role of this model: ' + message.role) }}
    {%- endif %}
{%- endfor %}
"""

_GEMMA = """
{{- bos_token }}
{%- set prefix = '' %}
{%- if messages[0]['role'] == 'system' %}
    {%- if messages[0]['content'] is string %}
        {%- set prefix = messages[0]['content'] + '\n\n' %}
    {%- else %}
        {%- set prefix = messages[0]['content'][0]['text'] + '\n\n' %}
    {%- endif %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('user and model must take turns') }}
    {%- endif %}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
    {{- '<start_of_turn>' + role + '\n' + (prefix if loop.first else '') }}
    {%- if message['content'] is string %}
        {{- message['content'] | trim }}
    {%- elif message['content'] is iterable %}
        {%- for item in message['content'] %}
            {%- if item['type'] == 'image' %}
                {{- '<start_of_image>' }}
            {%- elif item['type'] == 'text' %}
                {{- item['text'] | trim }}
            {%- endif %}
        {%- endfor %}
    {%- else %}
        {{- raise_exception('no content') }}
    {%- endif %}
    {{- '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<start_of_turn>model\n' }}
{%- endif %}
"""

_DEEPSEEK = """
{%- set ns = namespace(system='', is_tool=false) %}
{%- for message in messages if message['role'] == 'system' %}
    {%- set ns.system = ns.system + ('\n\n' if ns.system else '') + message['content'] %}
{%- endfor %}
{{- bos_token + ns.system }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}
        {%- set ns.is_tool = false %}
        {{- '<|User|>' + message['content'] }}
    {%- elif message['role'] == 'assistant' and message['content'] is none %}
        {%- set ns.is_tool = false %}
        {%- for call in message['tool_calls'] %}
            {{- '<|Assistant|>' if loop.first else '\n' }}
            {{- '<|call|>' + call['type'] + '<|sep|>' + call['function']['name'] + '\n' }}
            {{- call['function']['arguments'] + '<|/call|>' }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif message['role'] == 'assistant' %}
        {%- set content = message['content'] %}
        {%- if '</think>' in content %}
            {%- set content = content.split('</think>')[-1] %}
        {%- endif %}
        {{- ('' if ns.is_tool else '<|Assistant|>') + content + eos_token }}
        {%- set ns.is_tool = false %}
    {%- elif message['role'] == 'tool' %}
        {{- ('\n' if ns.is_tool else '<|outputs|>') + '<|output|>' + message['content'] }}
        {%- set ns.is_tool = true %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and not ns.is_tool %}
    {{- '<|Assistant|><think>\n' }}
{%- endif %}
"""

_HARMONY = """
{%- set ns = namespace(call='') %}
{{- '<|start|>system<|message|>Reasoning: ' + reasoning_effort | default('medium') + '<|end|>' }}
{%- set first = messages[0] %}
{%- if first.role in ["developer", "system"] or tools %}
    {{- '<|start|>developer<|message|>' }}
    {%- if first.role in ["developer", "system"] %}
        {{- '# Instructions\n\n' + first.content }}
        {%- set messages = messages[1:] %}
    {%- endif %}
    {%- for tool in tools or [] %}
        {{- '\ntype ' + tool.function.name + ' = ' + (tool.function.parameters | tojson) }}
    {%- endfor %}
    {{- '<|end|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- if message.reasoning is defined and (message.tool_calls or loop.last) %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' }}
            {{- message.reasoning + '<|end|>' }}
        {%- endif %}
        {%- if 'tool_calls' in message %}
            {%- set call = message.tool_calls[0].function %}
            {%- set ns.call = call.name %}
            {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json' }}
            {{- '<|message|>' + (call.arguments | tojson) + '<|call|>' }}
        {%- else %}
            {%- set ns.call = '' %}
            {{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
        {%- endif %}
    {%- elif message.role == 'tool' %}
        {%- if not ns.call %}
            {{- raise_exception('a result without a call') }}
        {%- endif %}
        {{- '<|start|>functions.' + ns.call + ' to=assistant<|channel|>commentary<|message|>' }}
        {{- message.content | tojson + '<|end|>' }}
    {%- elif message.role == 'user' %}
        {{- '<|start|>user<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant' }}
{%- endif %}
"""

_PHI = """
{%- for message in messages %}
{%- if message['role'] == 'system' and 'tools' in message and message['tools'] is not none %}
{{- '<|system|>' + message['content'] + '<|tool|>' + message['tools'] + '<|/tool|><|end|>' }}
{%- elif message['role'] in ['system', 'user', 'assistant'] %}
{{- '<|' + message['role'] + '|>' + message['content'] }}
{%- for call in message.tool_calls or [] %}
{{- '<|tool_call|>' + call | tojson + '<|/tool_call|>' }}
{%- endfor %}
{{- '<|end|>' }}
{%- elif message['role'] == 'tool' %}
{{- '<|tool_response|>' + message['content'] + '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- else %}{{- eos_token }}{%- endif %}
"""

_HERMES = """
{%- macro shown(value) %}
    {{- value if value is string else value | tojson }}
{%- endmacro %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {{- message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '\n<function=' + call.function.name + '>' }}
        {%- for name, value in call.function.arguments.items() %}
            {{- '<' + name + '>' + shown(value) + '</' + name + '>' }}
        {%- endfor %}
        {{- '</function>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""


@dataclass(frozen=True, kw_only=True)
class Family:
    """A template, and what its author can tell of it."""

    template: str
    takes_parts: tuple[str, ...] = ()
    """Roles of which it shows each part; of others the texts are joined."""
    knows_developer: bool = False
    asks_for_null: bool = False
    wants_texts: bool = False
    """It puts arguments of calls together with texts."""


FAMILIES = {
    "qwen": Family(template=_QWEN),
    "llama": Family(template=_LLAMA),
    "mistral": Family(template=_MISTRAL, takes_parts=("system", "user", "assistant")),
    "gemma": Family(template=_GEMMA, takes_parts=("user", "assistant")),
    "deepseek": Family(template=_DEEPSEEK, asks_for_null=True, wants_texts=True),
    "harmony": Family(template=_HARMONY, knows_developer=True),
    "phi": Family(template=_PHI),
    "hermes": Family(template=_HERMES),
}

TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}},
    }
]
_WORDS = [
    "Paris",
    " is",
    "\n",
    "{{ x }}",
    '"',
    "Köln ",
    "日本",
    " </b>",
    "{",
    "?",
    "  ",
    "\\n",
    "7",
]
_VALUES: list[Any] = [3, -1.5, "x", 'a "b"', True, [], [1, "c"], {"k": {"deep": 1}}, "é", "\n"]
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal", "thinking")


def history(rng: Random) -> list[dict[str, Any]]:
    """Return messages in the form that the documentation of transformers has, of random length.

    Some break the rules of some templates. A content is text, or a list of the texts of parts, or
    null beside calls.
    """
    messages = []
    roles = rng.choice([[], [], ["system"], ["system"], ["developer"], ["system", "developer"]])
    messages += [{"role": role, "content": _content(rng)} for role in roles]
    for _ in range(rng.randint(1, 3)):
        messages.append({"role": "user", "content": _content(rng)})
        if rng.random() < 0.1:
            role = rng.choice(["user", "system", "developer", "critic"])
            messages.append({"role": role, "content": _content(rng)})
        if rng.random() < 0.4:
            messages += _calling(rng)
        if rng.random() < 0.8:
            messages.append(_with_reasoning(rng, {"role": "assistant", "content": _content(rng)}))
    if rng.random() < 0.7 and messages[-1]["role"] != "user":
        messages.append({"role": "user", "content": _content(rng)})
    return messages


def _calling(rng: Random) -> list[dict[str, Any]]:
    calls = [
        {"id": f"call{rng.randrange(10**5):05}", "type": "function", "function": _function(rng)}
        for _ in range(rng.choice([1, 1, 1, 2]))
    ]
    content = rng.choice([None, None, _text(rng)])
    asking = {"role": "assistant", "content": content, "tool_calls": calls}
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": _content(rng)} for call in calls
    ]
    return [_with_reasoning(rng, asking), *results]


def _function(rng: Random) -> dict[str, Any]:
    names = rng.sample(["a", "b", "c d"], rng.randint(0, 3))
    return {"name": "add", "arguments": {name: deepcopy(rng.choice(_VALUES)) for name in names}}


def _with_reasoning(rng: Random, message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "reasoning": _text(rng)} if rng.random() < 0.3 else message


def _text(rng: Random) -> str:
    return rng.choice(["a", "B", "so"]) + "".join(rng.choices(_WORDS, k=rng.randint(0, 6)))


def _content(rng: Random) -> str | list[str]:
    return [_text(rng) for _ in range(rng.randint(1, 3))] if rng.random() < 0.25 else _text(rng)


def documented(family: Family, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a history as transformers takes it, by the rules that our page of tools names."""
    shown = []
    for message in messages:
        one, content, role = dict(message), message["content"], message["role"]
        if isinstance(content, list):
            if role == "developer" and not family.knows_developer:
                role = "system"
            parts = [{"type": "text", "text": text} for text in content]
            one["content"] = parts if role in family.takes_parts else "\n".join(content)
        if content is None and not family.asks_for_null:
            one["content"] = ""
        if family.wants_texts and "tool_calls" in one:
            one["tool_calls"] = [_with_text(call) for call in one["tool_calls"]]
        if "reasoning" in one:
            one["reasoning_content"] = one["reasoning"]
        shown.append(one)
    if family.knows_developer or all(one["role"] != "developer" for one in shown):
        return shown
    systems = [one for one in messages if one["role"] in ("system", "developer")]
    others = [one for one in shown if one["role"] not in ("system", "developer")]
    if len(systems) == 1 and shown[0]["role"] == "developer":
        return [{**shown[0], "role": "system"}, *others]
    texts = [c if isinstance(c := one["content"], str) else "\n".join(c) for one in systems]
    return [{"role": "system", "content": "\n\n".join(texts)}, *others]


def _with_text(call: dict[str, Any]) -> dict[str, Any]:
    text = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": text}}


def in_the_wild(rng: Random, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a history in one of the forms in which clients and datasets have it."""
    dressed = []
    for message in messages:
        one = dict(message)
        if isinstance(one["content"], list):
            one["content"] = [_part(rng, text) for text in one["content"]]
        elif one["content"] is not None and rng.random() < 0.1:
            one["content"] = [one["content"]]
        if "tool_calls" in one:
            one["tool_calls"] = [_dressed_call(rng, call) for call in one["tool_calls"]]
        elif rng.random() < 0.2 and one["role"] == "assistant":
            one["tool_calls"] = rng.choice([None, []])
        if "reasoning" in one and rng.random() < 0.5:
            one["reasoning_content"] = one.pop("reasoning")
        if rng.random() < 0.2:
            one["name"] = None
        dressed.append(one)
    return dressed


def _part(rng: Random, text: str) -> Any:
    kind = rng.choice([*_TEXT_PARTS, None])
    if kind is None:
        return text
    return {"type": kind, kind if kind in ("refusal", "thinking") else "text": text}


def _dressed_call(rng: Random, call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    forms = [function["arguments"], json.dumps(function["arguments"])]
    arguments = rng.choice(forms if function["arguments"] else [*forms, "", None, "[]", "no JSON"])
    return {**call, "function": {**function, "arguments": arguments}}
