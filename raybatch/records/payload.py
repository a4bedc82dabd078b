"""The payload of a request: what travels with its tokens, as JSON under the keys named here.

Endpoints are sent a prompt in place of tokens, under the names of OpenAI's API. The prompt of a row
with images is in its payload: `Request.prompt_token_ids` has stand-ins for the tokens of an image,
which follow from its bytes, so that equal images are equal prefixes of plans.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from raybatch.records.types import Request, TokenIds

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


def with_images(payload: str | None, prompt_ids: TokenIds, images: Sequence[bytes]) -> str | None:
    """Return a payload with images, files in the order of their places in the prompt.

    `prompt_ids` are the prompt as the chat template writes it, before images are put into it.
    """
    encoded = [base64.b64encode(image).decode() for image in images]
    return add_payload(payload, {PROMPT_IDS: prompt_ids.tolist(), IMAGES: encoded})


def images_of(payload: Mapping[str, Any]) -> list[bytes]:
    """Return the files of the images of a request; none where it has none."""
    return [base64.b64decode(image) for image in payload.get(IMAGES, ())]


def prompt_ids_of(request: Request) -> TokenIds:
    """Return the prompt before images, which the engine puts in itself."""
    ids = request.payload.get(PROMPT_IDS)
    return request.prompt_token_ids if ids is None else np.asarray(ids, np.int32)
