"""The same histories have the same prompts here and by vLLM's own renderer, or both refuse them.

What stays different is named in docs/how-to/tools-and-reasoning.md, and here by its case.
"""

from copy import deepcopy
from random import Random

import pytest
from transformers import PreTrainedTokenizerFast

from raybatch.models.source import resolve_model
from raybatch.text.tokenizer import Tokenizer
from tests.rows.chat_families import FAMILIES, TOOLS, Family, history, in_the_wild
from tests.rows.test_chat_families import prompt_of
from tests.stages.support import make_tokenizer
from tests.tiers import examples

NUM_HISTORIES = examples(2000, full=10_000)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = make_tokenizer(tmp_path_factory.mktemp("families") / "model")
    named = {"bos_token": "<|system|>", "eos_token": "<|eos|>"}
    return Tokenizer(PreTrainedTokenizerFast.from_pretrained(folder, **named))


@pytest.fixture(scope="module")
def render(tokenizer):
    """Return what vLLM makes of messages and a template: a prompt, None for a refusal."""
    from vllm.config import ModelConfig
    from vllm.renderers.chat_utils import parse_chat_messages
    from vllm.renderers.hf import resolve_chat_template_content_format, safe_apply_chat_template

    model = ModelConfig(model=str(resolve_model("demo")), dtype="float32")
    reference = tokenizer.hugging_face

    def rendered(messages, template: str, tools) -> str | None:
        # as its server does with the older name
        given = [
            {("reasoning" if key == "reasoning_content" else key): value for key, value in one}
            for one in (message.items() for message in deepcopy(messages))
        ]
        about = {"tokenizer": reference, "model_config": model}
        options = {"chat_template": template, "tools": tools or None, "tokenize": False}
        try:
            form = resolve_chat_template_content_format(template, tools or None, "auto", **about)
            conversation, _, _ = parse_chat_messages(given, model, form)
            return safe_apply_chat_template(
                model, reference, conversation, add_generation_prompt=True, **options
            )
        except Exception:  # a template may raise anything
            return None

    return rendered


def differs(family: Family, messages) -> bool:
    """Return whether a history is one of those that the page of tools names."""
    calls = [message for message in messages if "tool_calls" in message]
    if calls and family.wants_texts:
        return True  # vLLM shows objects, at which these templates fail
    if family.asks_for_null and any(message["content"] is None for message in calls):
        return True  # vLLM shows ""
    # the texts of parts that vLLM gives to a template which shows the first alone
    is_split = any(
        isinstance(message["content"], list) and message["role"] in ("system", "developer")
        for message in messages
    )
    return is_split and bool(family.takes_parts) and "system" not in family.takes_parts


@pytest.mark.parametrize("name", FAMILIES)
def test_a_history_has_the_prompt_of_vllm_or_both_refuse_it(tokenizer, render, name):
    family = FAMILIES[name]
    num_equal = num_other = 0
    for seed in range(NUM_HISTORIES):
        rng = Random(seed)
        messages = history(rng)
        tools = TOOLS if rng.random() < 0.3 else []
        dressed = in_the_wild(rng, messages)
        options = {"tools": tools} if tools else {}
        if messages[-1]["role"] == "assistant":
            options |= {"add_generation_prompt": True, "continue_final_message": False}
        found = prompt_of(tokenizer, dressed, family.template, **options)
        expected = render(dressed, family.template, tools)
        if differs(family, messages):
            num_other += expected != found
            continue
        assert expected == found, (seed, dressed)
        num_equal += expected is not None
    assert num_equal > NUM_HISTORIES / 5
    # a difference that is gone has no place in the page
    assert bool(num_other) == (name in ("deepseek", "gemma"))
