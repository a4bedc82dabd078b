"""What an endpoint is asked for the embedding of one row, and what its answer says; no network."""

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from raybatch.backends.openai.body import BadAnswer, shown, with_usage
from raybatch.backends.openai.options import OpenAIOptions
from raybatch.records.payload import POOLING
from raybatch.records.types import Completion, Request, Vector


def embedding_body(
    request: Request, options: OpenAIOptions, model: str
) -> tuple[str, dict[str, Any]]:
    """Return the path below the API and the JSON body for a request.

    Options of the row are sent where they are set; `dimensions` is OpenAI's, the others vLLM's.
    """
    payload = request.payload
    body: dict[str, Any] = {
        "model": model,
        "input": payload.get("prompt") or request.prompt_token_ids.tolist(),
        # a third of the bytes
        "encoding_format": "base64",
        **payload.get(POOLING, {}),
        **options.extra_body,
    }
    return "/embeddings", {name: value for name, value in body.items() if value is not None}


def embedding_of(request: Request, answer: object, options: OpenAIOptions) -> list[Completion]:
    """Return the completion of a row, with its vector, from the JSON of an answer.

    Raises:
        BadAnswer: it has no usable embedding.
    """
    data = answer.get("data") if isinstance(answer, Mapping) else None
    if not isinstance(data, Sequence) or len(data) != 1 or not isinstance(data[0], Mapping):
        raise BadAnswer(f"the endpoint's answer has not one embedding: {shown(answer)}")
    completion = Completion(
        request_id=request.request_id,
        sample_idx=0,
        finish_reason="stop",
        vector=read_vector(data[0].get("embedding")),
    )
    assert isinstance(answer, Mapping), "it has data"
    return with_usage([completion], answer.get("usage"), options)


def read_vector(said: object) -> Vector:
    """Return the numbers of an embedding, which servers write as a list or in base64.

    Raises:
        BadAnswer: it is neither.
    """
    try:
        if isinstance(said, str):
            vector = np.frombuffer(base64.b64decode(said, validate=True), "<f4")
        else:
            vector = np.array(said, np.float32)
    except (binascii.Error, ValueError, TypeError):
        raise BadAnswer(f"an embedding is neither numbers nor base64: {shown(said)}") from None
    if vector.ndim != 1 or not vector.size or not np.isfinite(vector).all():
        raise BadAnswer(f"an embedding is no list of finite numbers: {shown(said)}")
    return vector.astype(np.float32, copy=False)
