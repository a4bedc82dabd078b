"""Prompts whose tokens are pooled: a query with a document."""

from typing import Literal

import numpy as np

from raybatch.config import SpecialTokens
from raybatch.records.payload import DOCUMENT_AT, TYPES_AT, add_payload
from raybatch.text.chat import InvalidPrompt
from raybatch.text.tokenizer import Encoded, Tokenizer, encoding_of


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
        both = [tokenizer.read(text, special_tokens=special_tokens) for text in (query, document)]
        border, (before, after) = len(both[0].token_ids), tokenizer.frame
        ids = np.concatenate([one.token_ids for one in both])
        payload = add_payload(None, {DOCUMENT_AT: border})
        cuttable = border + before, len(ids) - after
        return Encoded(ids, sum(one.num_special for one in both), payload, cuttable)
    fast, num_special = tokenizer.fast_for(query + document, special_tokens)
    if form == "joined":
        encoding = encoding_of(fast, query + document)
        places = [i for i, sequence in enumerate(encoding.sequence_ids) if sequence is not None]
        if not places:
            raise InvalidPrompt("prompt is empty")
        stop = places[-1] + 1
        start = next((i for i in places if encoding.offsets[i][0] >= len(query)), stop)
        return Encoded(np.asarray(encoding.ids, np.int32), num_special, cuttable=(start, stop))
    encoding = encoding_of(fast, query, document)
    types = np.asarray(encoding.type_ids)
    places = [i for i, sequence in enumerate(encoding.sequence_ids) if sequence == 1]
    if not places:
        raise InvalidPrompt("the document is empty")
    has_types = tokenizer.has_types and types.any()
    payload = add_payload(None, {TYPES_AT: int(np.argmax(types))} if has_types else {})
    ids, cuttable = np.asarray(encoding.ids, np.int32), (places[0], places[-1] + 1)
    return Encoded(ids, num_special, payload, cuttable)
