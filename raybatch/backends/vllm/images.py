"""Prompts with images, as vLLM takes them, and what it remembers of images that it was given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.inputs.engine import tokens_input
from vllm.multimodal.cache import MultiModalCacheMissError
from vllm.multimodal.media.image import ImageMediaIO
from vllm.v1.engine.llm_engine import LLMEngine

from raybatch.errors import error_text


def prompt_of(engine: LLMEngine, token_ids: list[int], images: Sequence[bytes]) -> Any:  # noqa: ANN401
    """Return a prompt of vLLM; images are read as its server reads data: URLs.

    From here on vLLM takes the images for sent, also where the request is refused afterwards: see
    `forget_images`.

    Args:
        engine: that is to run it.
        token_ids: with one mark in the place of each image.
        images: files.

    Raises:
        ValueError: the model or its processor cannot read them.
    """
    if not images:
        return tokens_input(token_ids)
    if not engine.vllm_config.model_config.is_multimodal_model:
        raise ValueError("the model reads text alone, and the row has images")
    reader = ImageMediaIO()
    try:
        data = {"image": [reader.load_bytes(image) for image in images]}
        prompt = {"prompt_token_ids": token_ids, "multi_modal_data": data}
        return engine.renderer.render_cmpl([prompt])[0]
    except Exception as error:  # processors raise whatever they meet in a file
        raise ValueError(f"the images cannot be read: {error_text(error)}") from error


def forget_images(engine: LLMEngine, missing: MultiModalCacheMissError) -> None:
    """Have vLLM send images anew that its core has not; a prompt made after this call has them.

    Args:
        engine: whose other requests and images are left alone.
        missing: what the core said.
    """
    cache = engine.renderer.mm_processor_cache
    for name in missing.mm_hashes:
        cache.invalidate(name)
