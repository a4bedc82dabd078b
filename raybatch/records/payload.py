"""The payload of a request: JSON that travels with its tokens, with the keys named here.

Endpoints get the prompt in place of tokens, with the names of OpenAI's API. The prompt of a row
with images is in its payload: `Request.prompt_token_ids` has stand-ins for the tokens of an image,
derived from its bytes, so that plans treat equal images as equal prefixes.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from raybatch.records.types import Request, TokenIds

# adapter of the row: a folder or a URI; the first of the keys, see `adapter_in`
LORA = "adapter"
# chat template options, read by parsers of answers
CHAT = "chat"
# token at which the second sequence of a pair begins
DOCUMENT_AT = "document_at"
# image files; also in the options of a request to vLLM
IMAGES = "images"
# options of `raybatch.records.pooling.Pooling` that are set
POOLING = "pooling"
# tokens of a prompt before images are put into it
PROMPT_IDS = "prompt_ids"
# first token with token type 1, for models with token types
TYPES_AT = "types_at"

_ADAPTER = f'{{"{LORA}":'
_decode = json.JSONDecoder().raw_decode


def add_payload(text: str | None, more: Mapping[str, Any]) -> str | None:
    """Return a payload (JSON text, None if empty) with more keys; equal ones are equal texts."""
    if not more:
        return text
    known = {} if text is None else json.loads(text)
    return json.dumps({**known, **more}, sort_keys=True, separators=(",", ":"))


def adapter_in(text: str | None) -> str | None:
    """Return the adapter in a payload of `add_payload`, without parsing its images."""
    if text is None or not text.startswith(_ADAPTER):
        return None
    adapter: str = _decode(text, len(_ADAPTER))[0]
    return adapter


def with_images(payload: str | None, prompt_ids: TokenIds, images: Sequence[bytes]) -> str | None:
    """Return a payload with image files, in the order of their places in the prompt.

    `prompt_ids` are the tokens of the rendered prompt, before images are inserted.
    """
    encoded = [base64.b64encode(image).decode() for image in images]
    return add_payload(payload, {PROMPT_IDS: prompt_ids.tolist(), IMAGES: encoded})


def images_of(payload: Mapping[str, Any]) -> list[bytes]:
    """Return the image files in the payload of a request."""
    return [base64.b64decode(image) for image in payload.get(IMAGES, ())]


def prompt_ids_of(request: Request) -> TokenIds:
    """Return the prompt tokens before images are inserted, which the engine does itself."""
    ids = request.payload.get(PROMPT_IDS)
    return request.prompt_token_ids if ids is None else np.asarray(ids, np.int32)
