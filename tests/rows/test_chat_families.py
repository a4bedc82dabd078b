"""Histories as people have them give the prompts of transformers, with templates of eight families.

`tests/backends/test_vllm_chat.py` asks vLLM the same.
"""

from random import Random

import pytest
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from raybatch.text.chat import PromptError
from raybatch.text.tokenizer import Tokenizer
from tests.rows.chat_families import FAMILIES, TOOLS, documented, history, in_the_wild
from tests.stages.support import make_tokenizer
from tests.tiers import examples

NUM_HISTORIES = examples(2000, full=10_000)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = make_tokenizer(tmp_path_factory.mktemp("families") / "model")
    named = {"bos_token": "<|system|>", "eos_token": "<|eos|>"}
    return Tokenizer(PreTrainedTokenizerFast.from_pretrained(folder, **named))


def prompt_of(tokenizer: Tokenizer, messages, template: str, **options) -> str | None:
    """Return the prompt of messages, None where they are refused."""
    try:
        ids = tokenizer.read_chat(
            messages, chat_template=template, row_options=options, special_tokens="allow"
        ).token_ids
    except PromptError:
        return None
    return tokenizer.decode(ids, skip_special_tokens=False)


def prompt_of_transformers(
    reference: PreTrainedTokenizerFast, messages, template: str, **options
) -> str | None:
    is_continued = messages[-1]["role"] == "assistant"
    try:
        (rendered,), _ = render_jinja_template(
            [messages],
            chat_template=template,
            add_generation_prompt=not is_continued,
            continue_final_message=is_continued,
            **reference.special_tokens_map,
            **options,
        )
    except Exception:  # a template may raise anything
        return None
    return rendered


@pytest.mark.timeout(600)  # a minute of work in all
@pytest.mark.parametrize("name", FAMILIES)
def test_a_history_has_the_prompt_of_transformers_or_both_refuse_it(tokenizer, name):
    family, template = FAMILIES[name], FAMILIES[name].template
    num_prompts = 0
    for seed in range(NUM_HISTORIES):
        rng = Random(seed)
        messages = history(rng)
        options = {"tools": TOOLS} if rng.random() < 0.3 else {}
        expected = prompt_of_transformers(
            tokenizer.hugging_face, documented(family, messages), template, **options
        )
        dressed = in_the_wild(rng, messages)
        assert expected == prompt_of(tokenizer, dressed, template, **options), (seed, dressed)
        num_prompts += expected is not None
    # most are not refused, so that something is compared
    assert num_prompts > NUM_HISTORIES / 4
