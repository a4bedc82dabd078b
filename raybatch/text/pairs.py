"""Prompts whose tokens are pooled: a text that may be cut, and a query with a document."""

from typing import Literal

import numpy as np
from tokenizers import Tokenizer as FastTokenizer

from raybatch.config import SpecialTokens
from raybatch.records.payload import DOCUMENT_AT, TYPES_AT, add_payload
from raybatch.text.chat import InvalidPrompt, TokenizeError
from raybatch.text.prompt_tokenizer import PromptTokenizer
from raybatch.text.tokenizer import Encoded, Tokenizer


def with_frame(encoded: Encoded, tokenizer: PromptTokenizer) -> Encoded:
    """Return a text with the tokens between those that the tokenizer puts around it named.

    A model that pools the first or the last token counts on them, so a cut has to leave them.
    """
    before, after = tokenizer.frame
    return encoded._replace(cuttable=(before, len(encoded.token_ids) - after))


def read_pair(
    tokenizer: Tokenizer,
    query: str,
    document: str,
    *,
    form: Literal["pair", "joined", "apart"],
    special_tokens: SpecialTokens = "escape",
) -> Encoded:
    """Return a query and a document in tokens; only the document may be cut.

    A `form` of "pair" is one sequence as the tokenizer makes it of two texts, "joined" one of the
    texts one after the other, "apart" two sequences.

    Raises:
        InvalidPrompt: a text is empty.
        TokenizeError: the tokenizer failed.
    """
    for name, text in (("query", query), ("document", document)):
        if not text:
            raise InvalidPrompt(f"the {name} is empty")
    if form == "apart":
        return _apart(tokenizer, query, document, special_tokens)
    fast, num_special = tokenizer.fast_for(query + document, special_tokens)
    if form == "joined":
        return _joined(fast, query, document, num_special)
    return _pair(fast, query, document, num_special, has_types=tokenizer.has_types)


def _apart(
    tokenizer: Tokenizer, query: str, document: str, special_tokens: SpecialTokens
) -> Encoded:
    first = tokenizer.read(query, special_tokens=special_tokens)
    second = tokenizer.read(document, special_tokens=special_tokens)
    border = len(first.token_ids)
    before, after = tokenizer.frame
    ids = np.concatenate([first.token_ids, second.token_ids])
    return Encoded(
        ids,
        first.num_special + second.num_special,
        payload=add_payload(None, {DOCUMENT_AT: border}),
        cuttable=(border + before, len(ids) - after),
    )


def _joined(fast: FastTokenizer, query: str, document: str, num_special: int) -> Encoded:
    try:
        encoding = fast.encode(query + document)
    except Exception as error:  # the tokenizer's library raises bare exceptions of any kind
        raise TokenizeError(f"{type(error).__name__}: {error}") from error
    places = [i for i, sequence in enumerate(encoding.sequence_ids) if sequence is not None]
    if not places:
        raise InvalidPrompt("prompt is empty")
    starts = [i for i in places if encoding.offsets[i][0] >= len(query)]
    start = starts[0] if starts else places[-1] + 1
    return Encoded(
        np.asarray(encoding.ids, np.int32), num_special, cuttable=(start, places[-1] + 1)
    )


def _pair(
    fast: FastTokenizer, query: str, document: str, num_special: int, *, has_types: bool
) -> Encoded:
    try:
        encoding = fast.encode(query, document)
    except Exception as error:  # the tokenizer's library raises bare exceptions of any kind
        raise TokenizeError(f"{type(error).__name__}: {error}") from error
    types = np.asarray(encoding.type_ids)
    places = [i for i, sequence in enumerate(encoding.sequence_ids) if sequence == 1]
    if not places:
        raise InvalidPrompt("the document is empty")
    has_types &= bool(types.any())
    payload = add_payload(None, {TYPES_AT: int(np.argmax(types))} if has_types else {})
    return Encoded(
        np.asarray(encoding.ids, np.int32),
        num_special,
        payload=payload,
        cuttable=(places[0], places[-1] + 1),
    )
