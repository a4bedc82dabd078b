"""Tokens that stand for images in plans: how many an image takes, and which."""

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from raybatch.errors import ConfigError, error_text
from raybatch.models.source import resolve_model
from raybatch.records.types import TokenIds
from raybatch.text.chat import InvalidPrompt

logger = logging.getLogger(__name__)

# where nothing says how many tokens an image takes; too few, so that no row is refused for it
_UNKNOWN_TOKENS = 16
# different tokens among stand-ins
_STAND_INS = 1 << 14
_PLACEHOLDERS = ("image_token_id", "image_token_index")


class ImageTokens:
    """What a model makes of images, as far as its files tell.

    Args:
        model: of the stage.
        vocab_size: of the tokenizer.
        processor_options: of the model's processor, vLLM's `mm_processor_kwargs`.
    """

    def __init__(
        self, model: str, *, vocab_size: int, processor_options: Mapping[str, Any]
    ) -> None:
        self._model = model
        # a tokenizer may have tokens at its end that the model has not
        self._below = min(vocab_size, _STAND_INS)
        self._processor_options = processor_options

    def stand_ins(self, image: bytes) -> TokenIds:
        """Return as many tokens as an image takes, int32; other images have other ones.

        Raises:
            InvalidPrompt: the image cannot be read.
        """
        seed = int.from_bytes(hashlib.blake2b(image, digest_size=16).digest(), "little")
        chance = np.random.Generator(np.random.PCG64(seed))
        return chance.integers(0, self._below, self._count(image), np.int32)

    def _count(self, image: bytes) -> int:
        try:
            from PIL import Image
        except ImportError:
            return _UNKNOWN_TOKENS
        try:
            with Image.open(BytesIO(image)) as opened:
                width, height = opened.size
        except Exception as error:  # files may be broken in any way
            raise InvalidPrompt(f"an image cannot be read: {error_text(error)}") from error
        return self._num_tokens(height, width)

    @cached_property
    def _num_tokens(self) -> Callable[[int, int], int]:
        """What says how many tokens an image of a size takes: the processor of the model."""
        try:
            from transformers import AutoProcessor

            processor = AutoProcessor.from_pretrained(self._folder, trust_remote_code=False)

            def count(height: int, width: int) -> int:
                sizes = [(height, width)]
                told = processor._get_num_multimodal_tokens(
                    image_sizes=sizes, **self._processor_options
                )
                return int(told.num_image_tokens[0])

            count(64, 64)
        except Exception as error:  # processors need packages of their own, and few can count
            logger.info(
                "nothing here tells how many tokens an image takes (%s); plans take %d",
                error_text(error),
                _UNKNOWN_TOKENS,
            )
            return lambda height, width: _UNKNOWN_TOKENS
        return count

    @cached_property
    def placeholders(self) -> list[int]:
        """The token that a chat template writes for an image, as far as the model's config says."""
        try:
            config = json.loads((self._folder / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError, ConfigError):
            return []
        return [config[name] for name in _PLACEHOLDERS if isinstance(config.get(name), int)]

    @cached_property
    def _folder(self) -> Path:
        return resolve_model(self._model)
