"""What travels beside the tokens of a request, as JSON under the keys that are named here.

Endpoints are sent a prompt in place of tokens, under the names of OpenAI's API.
"""

import json
from collections.abc import Mapping
from typing import Any

# adapter that answers the row: a folder or a URI; the first of the keys, see `adapter_in`
LORA = "adapter"
# options of a chat template, which parsers of answers read
CHAT = "chat"
# token at which a second sequence begins, whose vector is compared with that of the first
DOCUMENT_AT = "document_at"
# files of images; also among the options of a request inside vLLM
IMAGES = "images"
# options of `raybatch.records.pooling.Pooling` that are set
POOLING = "pooling"
# tokens of a prompt before images are put into it
PROMPT_IDS = "prompt_ids"
# token from which on the type of tokens is 1, for models that tell two texts apart by it
TYPES_AT = "types_at"

_ADAPTER = f'{{"{LORA}":'
_decode = json.JSONDecoder().raw_decode


def add_payload(text: str | None, more: Mapping[str, Any]) -> str | None:
    """Return a payload with more keys; equal payloads are equal texts, and None holds nothing."""
    if not more:
        return text
    known = {} if text is None else json.loads(text)
    return json.dumps({**known, **more}, sort_keys=True, separators=(",", ":"))


def adapter_in(text: str | None) -> str | None:
    """Return the adapter in a payload of `add_payload`, whose images are not read for it."""
    if text is None or not text.startswith(_ADAPTER):
        return None
    adapter: str = _decode(text, len(_ADAPTER))[0]
    return adapter
