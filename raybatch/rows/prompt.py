"""The prompt of a row, and how it fits the context."""

import json
import logging
from functools import cache
from typing import NamedTuple

import numpy as np

from raybatch.records.payload import DOCUMENT_AT
from raybatch.records.types import Sampling, TokenIds
from raybatch.rows.options import OnTooLong

logger = logging.getLogger(__name__)

# of every row that is pooled: a backend ends it with its one vector
POOLED = Sampling(max_tokens=1)
_WAY_OUT = "set on_too_long to cut or drop such rows, or cut them before"
_FRAME = (
    "only the longest text is cut, and what stands around it is too long; shorten that, or set "
    "on_too_long='drop' to drop such rows"
)


class Prompt(NamedTuple):
    """The prompt of one row, or why there is none.

    Args:
        token_ids: int32; also there where the prompt is too long.
        error: "" or "Type: message".
        is_filtered: the row is left out on purpose (`on_too_long="drop"`) and keeps its place.
        num_special: special tokens of the model in the texts of the row.
        payload: JSON for the backend, with the ids or in their place; None sends the ids alone.
        cuttable: tokens that may be cut where the prompt is too long, from and to; None cuts any.
        asked_ids: the ids that an engine gets where `token_ids` has stand-ins for images.
    """

    token_ids: TokenIds | None
    error: str = ""
    is_filtered: bool = False
    num_special: int = 0
    payload: str | None = None
    cuttable: tuple[int, int] | None = None
    num_images: int = 0
    asked_ids: TokenIds | None = None

    @property
    def is_asked(self) -> bool:
        """Whether the row goes to an engine."""
        return not self.error and not self.is_filtered


def fit_prompt(
    prompt: Prompt, *, max_tokens: int, max_model_len: int | None, on_too_long: OnTooLong
) -> Prompt:
    """Return a prompt that one token can follow, cut or refused.

    A cut leaves room for `max_tokens`, but half of the context to the prompt in any case.
    What a model needs around a text stays: its begin token, the frame of a chat.
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
            f"PromptTooLong: the prompt has {len(ids)} tokens, which leave no room for an answer "
            f"in a context of {max_model_len}; {way_out}"
        )
        return prompt._replace(error=error)
    room = max(max_model_len - max_tokens, max_model_len // 2, 1)
    return _cut(prompt, min(len(ids) - room, most), on_too_long)


def fit_pooled(prompt: Prompt, *, max_len: int | None, on_too_long: OnTooLong) -> Prompt:
    """Return the prompt of a pooled row as it fits the context, which it may fill; cut or refused.

    What the tokenizer puts around a text, and the query of a document, is never cut.
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
        of_query = "a query is never cut: shorten it, or leave the row out"
        error = (
            f"PromptTooLong: {max(len(ids) - border, border)} prompt tokens in a context of "
            f"{max_len}; {of_query if border > max_len else _WAY_OUT}"
        )
        return prompt._replace(error=error)
    return _cut(prompt, excess, on_too_long)


def _num_cuttable(prompt: Prompt) -> int:
    """Return how many tokens may be cut so that one of their text is left."""
    assert prompt.token_ids is not None, "a prompt without tokens has an error"
    start, stop = prompt.cuttable or (0, len(prompt.token_ids))
    return stop - start - 1


def _cut(prompt: Prompt, num_tokens: int, on_too_long: OnTooLong) -> Prompt:
    assert prompt.token_ids is not None, "a prompt without tokens has an error"
    _warn_of_cuts(on_too_long)
    start, stop = prompt.cuttable or (0, len(prompt.token_ids))
    first = start if on_too_long == "truncate_left" else stop - num_tokens
    # its bounds are not those of the prompt that is left
    ids = np.delete(prompt.token_ids, slice(first, first + num_tokens))
    return prompt._replace(token_ids=ids, cuttable=None)


@cache
def _warn_of_cuts(on_too_long: OnTooLong) -> None:
    logger.warning(
        "prompts are longer than the context, and on_too_long=%r cuts them to fit; such rows are "
        "answered like others (set on_too_long='error' to have error rows in their place)",
        on_too_long,
    )
