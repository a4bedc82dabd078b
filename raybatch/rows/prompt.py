"""Fits the prompt of a row to the context."""

import json
import logging
from functools import cache

import numpy as np

from raybatch.records.payload import DOCUMENT_AT
from raybatch.records.types import Sampling
from raybatch.rows.options import OnTooLong
from raybatch.text.tokenizer import Prompt

logger = logging.getLogger(__name__)

# sampling of every pooled row: a backend ends it with its one vector
POOLED = Sampling(max_tokens=1)
_WAY_OUT = "set on_too_long to cut or drop such rows, or shorten them"
_FRAME = (
    "only the longest text is cut, and the rest of the prompt is too long; shorten it, or set "
    "on_too_long='drop' to drop such rows"
)


def fit_prompt(
    prompt: Prompt, *, max_tokens: int, max_model_len: int | None, on_too_long: OnTooLong
) -> Prompt:
    """Return a prompt that leaves room for at least one token: unchanged, cut, or an error.

    A cut leaves room for `max_tokens`, but at least half of the context for the prompt. Tokens
    that the model needs around a text are kept: its begin token, the frame of a chat.
    """
    ids = prompt.token_ids
    if max_model_len is None or ids is None or prompt.error or len(ids) < max_model_len:
        return prompt
    most, excess = _num_cuttable(prompt), len(ids) - max_model_len + 1
    if on_too_long == "drop":
        return prompt._replace(is_filtered=True)
    if on_too_long == "error" or prompt.num_images or most < excess:
        way_out = _WAY_OUT if on_too_long == "error" else _FRAME
        if prompt.num_images:
            way_out = "a prompt with images is never cut; set on_too_long='drop' to drop such rows"
        error = (
            f"PromptTooLong: the prompt has {len(ids)} tokens, no room for an answer in a context "
            f"of {max_model_len}; {way_out}"
        )
        return prompt._replace(error=error)
    room = max(max_model_len - max_tokens, max_model_len // 2, 1)
    return _cut(prompt, min(len(ids) - room, most), on_too_long)


def fit_pooled(prompt: Prompt, *, max_len: int | None, on_too_long: OnTooLong) -> Prompt:
    """Return the prompt of a pooling task, which may fill the context: unchanged, cut or an error.

    Tokens that the tokenizer adds around a text, and the query of a document, are never cut.
    """
    ids = prompt.token_ids
    if max_len is None or ids is None or prompt.error or len(ids) <= max_len:
        return prompt
    border = json.loads(prompt.payload or "{}").get(DOCUMENT_AT, 0)
    excess = len(ids) - border - max_len
    if max(excess, border - max_len) <= 0:
        return prompt
    if on_too_long == "drop":
        return prompt._replace(is_filtered=True)
    if on_too_long == "error" or border > max_len or _num_cuttable(prompt) < excess:
        of_query = "a query is never cut: shorten it, or remove the row"
        error = (
            f"PromptTooLong: {max(len(ids) - border, border)} prompt tokens in a context of "
            f"{max_len}; {of_query if border > max_len else _WAY_OUT}"
        )
        return prompt._replace(error=error)
    return _cut(prompt, excess, on_too_long)


def _num_cuttable(prompt: Prompt) -> int:
    """Return how many tokens may be cut so that one token of the text is left."""
    start, stop = prompt.cuttable or (0, len(prompt.known_ids))
    return stop - start - 1


def _cut(prompt: Prompt, num_tokens: int, on_too_long: OnTooLong) -> Prompt:
    _warn_of_cuts(on_too_long)
    start, stop = prompt.cuttable or (0, len(prompt.known_ids))
    first = start if on_too_long == "truncate_left" else stop - num_tokens
    # the bounds of `cuttable` are no longer valid
    ids = np.delete(prompt.known_ids, slice(first, first + num_tokens))
    return prompt._replace(token_ids=ids, cuttable=None)


@cache
def _warn_of_cuts(on_too_long: OnTooLong) -> None:
    logger.warning(
        "on_too_long=%r cuts prompts that are longer than the context; set on_too_long='error' to "
        "get error rows instead",
        on_too_long,
    )
