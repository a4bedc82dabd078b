"""Options of vLLM's `SamplingParams` that `Sampling` has not: of no effect, or refused by name."""

import logging
from collections.abc import Mapping
from functools import cache
from typing import Any

from raybatch.errors import ConfigError

logger = logging.getLogger(__name__)

# how vLLM hands tokens and texts over, which is the stage's business here
_NO_EFFECT = frozenset(
    {
        "detokenize",
        "flat_logprobs",
        "output_kind",
        "output_text_buffer_length",
        "skip_clone",
        "skip_reading_prefix_cache",
        "stream_interval",
    }
)
# options that decide an answer and that nothing here does, with the value that asks for nothing
_REFUSED: Mapping[str, Any] = {
    "allowed_token_ids": None,
    "bad_words": [],
    "extra_args": {},
    "logit_bias": {},
    "logprob_token_ids": [],
    "prompt_logprob_start": None,
    "prompt_logprob_token_ids": None,
    "prompt_logprobs": None,
    "repetition_detection": None,
    "routed_experts_prompt_start": 0,
    "spaces_between_special_tokens": True,
    "thinking_token_budget": None,
    "trace_decode_token_ids": None,
    "watermarking": False,
}
_RENAMED = {"guided_decoding": "structured_outputs"}


def own_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options without those that change nothing here.

    Args:
        options: of one row, with the names of vLLM; none is None.

    Raises:
        ConfigError: an option of vLLM that would change the answer, and that is not supported.
    """
    kept = {}
    for name, value in options.items():
        if name in _NO_EFFECT:
            tell_once(name)
        elif name in _RENAMED:
            raise ConfigError(f"{name} has another name in vLLM now: {_RENAMED[name]}")
        elif name not in _REFUSED:
            kept[name] = value
        elif value != _REFUSED[name]:
            raise ConfigError(f"{name} is an option of vLLM that is not supported; leave it out")
    return kept


@cache
def tell_once(name: str) -> None:
    """Log that an option has no effect, once in this process."""
    logger.warning("the sampling option %s has no effect: texts and tokens are always there", name)
