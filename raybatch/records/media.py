"""Images on the way to an engine: in the payload of a request, beside the tokens of its prompt.

The prompt of such a row is what the payload says. `Request.prompt_token_ids` has stand-ins in it,
as many as an image takes, which follow from its bytes: equal ones are equal prefixes of plans.
"""

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from raybatch.records.payload import IMAGES, PROMPT_IDS, add_payload
from raybatch.records.types import Request, TokenIds


def with_images(payload: str | None, prompt_ids: TokenIds, images: Sequence[bytes]) -> str | None:
    """Return a payload with images, JSON.

    Args:
        payload: what else it holds; None holds nothing.
        prompt_ids: of the prompt as the chat template writes it, before images are put into it.
        images: files, in the order of their places in the prompt.
    """
    encoded = [base64.b64encode(image).decode() for image in images]
    return add_payload(payload, {PROMPT_IDS: prompt_ids.tolist(), IMAGES: encoded})


def images_of(payload: Mapping[str, Any]) -> list[bytes]:
    """Return the files of the images of a request; none where it has none."""
    return [base64.b64decode(image) for image in payload.get(IMAGES, ())]


def prompt_ids_of(request: Request) -> TokenIds:
    """Return the tokens that an engine is given, into which it puts the images itself."""
    ids = request.payload.get(PROMPT_IDS)
    return request.prompt_token_ids if ids is None else np.asarray(ids, np.int32)
