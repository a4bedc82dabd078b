"""Reads images of rows, puts them into chat messages, and counts their tokens for plans.

Nothing is fetched over the network.
"""

import base64
import binascii
import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import date, time, timedelta
from decimal import Decimal
from functools import cached_property, partial
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit
from uuid import UUID

import numpy as np
import pyarrow as pa

from raybatch.backends.registry import type_of
from raybatch.errors import ConfigError, error_text
from raybatch.models.source import resolve_config
from raybatch.records.payload import with_images
from raybatch.records.types import TokenIds
from raybatch.rows.options import StageConfig
from raybatch.text.chat import InvalidPrompt
from raybatch.text.tokenizer import Prompt

logger = logging.getLogger(__name__)

# an image is its file, or its path or URL, as in Hugging Face datasets
_IMAGE_TYPE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
MEDIA_TYPE = pa.struct([("image", pa.list_(_IMAGE_TYPE))])

_TYPES = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"RIFF": "webp"}
# PIL modes that PNG supports; CMYK is not one of them
_PNG_MODES = frozenset({"1", "I", "I;16", "L", "LA", "P", "RGB", "RGBA"})
_PLAIN = (str, bytes, bool, int, float, date, time, timedelta, Decimal, UUID)
# message part that represents an image in a chat template
IMAGE_PART: Mapping[str, Any] = {"type": "image"}
_KINDS = ("image", "image_url", "image_pil", "input_image")
Images = Sequence[bytes]
# assumed tokens of an image if unknown; a low number, so that no row is refused for it
_UNKNOWN_TOKENS = 16
# number of different stand-in tokens
_STAND_INS = 1 << 14
_PLACEHOLDERS = ("image_token_id", "image_token_index")


class ImageReader:
    """Read the images of a stage's rows and put them into prompts; built once per feeder.

    For plans it counts the tokens of images by the files of the model, and makes stand-ins.
    """

    def __init__(self, config: StageConfig, vocab_size: int) -> None:
        backend_type = type_of(config.backend)
        self._is_endpoint = backend_type.is_endpoint
        # other backends, and pooling tasks, read text only
        self._is_on = config.task == "generate" and backend_type.reads_images
        kwargs = dict(config.backend.options.get("engine_kwargs") or {})
        folder = kwargs.get("allowed_local_media_path")
        self._read = partial(read_image, folder=folder, max_bytes=config.max_row_bytes)
        options = kwargs.get("mm_processor_kwargs") or {}
        self._model, self._processor_options = config.model, options
        # the tokenizer may have more tokens than the model
        self._below = min(vocab_size, _STAND_INS)

    def images_of(self, value: Any) -> Images:  # noqa: ANN401 - data of a row
        """Return the image files in a value of a column; a wrong value raises any error."""
        if isinstance(value, Exception):
            raise value
        return [self._read(source) for source in images_in(value) or ()]

    def take_out(self, messages: Any, of_column: Images = ()) -> tuple[Any, list[bytes]]:  # noqa: ANN401
        """Return messages with `IMAGE_PART` for each image, and the images in order.

        Images of the row's column fill image parts that have no image; without such parts they go
        before the text of the last message. For an endpoint the messages keep the images.
        """
        if not self._is_on or not isinstance(messages, list) or not messages:
            return messages, []
        left, images = list(of_column), list[bytes]()
        changed = [self._without_images(message, left, images) for message in messages]
        if left and len(left) < len(of_column):
            raise InvalidPrompt(
                f"the row has {len(of_column)} images, but fewer image parts without an image"
            )
        if left:
            if images:
                raise InvalidPrompt("the row has images in its messages and in its column; use one")
            changed[-1], images = _before_text(changed[-1], len(left)), left
        return (_filled(changed, images), []) if self._is_endpoint else (changed, images)

    def put_in(self, encoded: Prompt, images: Images) -> Prompt:
        """Return a prompt with the images in its payload, and stand-in tokens in their places."""
        if not images:
            return encoded
        if self._is_endpoint:
            raise InvalidPrompt("an endpoint takes images in messages, but the prompt is text")
        ids, stand_ins = encoded.known_ids, [self._stand_ins(image) for image in images]
        places = np.flatnonzero(np.isin(ids, self._placeholders))
        if len(places) == len(images):
            parts = np.split(ids, np.sort(np.concatenate([places, places + 1])))
            # every second part is a placeholder
            parts[1::2] = stand_ins
        else:
            # unknown places: stand-ins first, so that rows of other images share no prefix
            parts = [*stand_ins, ids]
        payload = with_images(encoded.payload, ids, images)
        tokens, num = np.concatenate(parts), len(images)
        return encoded._replace(token_ids=tokens, payload=payload, num_images=num, engine_ids=ids)

    def _without_images(self, message: Any, left: list[bytes], images: list[bytes]) -> Any:  # noqa: ANN401
        """Return a message with `IMAGE_PART` for images, which are added to `images`."""
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list):
            return message
        parts: list[Any] = []
        for part in content:
            is_image = isinstance(part, Mapping) and part.get("type") in _KINDS
            source = _source(part) if is_image else None
            # endpoints fetch images themselves
            if not is_image or (self._is_endpoint and source is not None):
                parts.append(part)
                continue
            if source is None and not left:
                raise InvalidPrompt("the messages have more image parts than the row has images")
            images.append(left.pop(0) if source is None else self._read(source))
            parts.append(dict(IMAGE_PART))
        return {**message, "content": parts}

    def _stand_ins(self, image: bytes) -> TokenIds:
        """Return as many stand-in tokens as an image uses, int32, derived from its content."""
        seed = int.from_bytes(hashlib.blake2b(image, digest_size=16).digest(), "little")
        chance = np.random.Generator(np.random.PCG64(seed))
        return chance.integers(0, self._below, self._count(image), np.int32)

    def _count(self, image: bytes) -> int:
        try:
            from PIL import Image, UnidentifiedImageError
        except ImportError:
            return _UNKNOWN_TOKENS
        try:
            with Image.open(BytesIO(image)) as opened:
                width, height = opened.size
        except UnidentifiedImageError as error:
            # PIL's message contains a memory address, which differs between runs
            raise InvalidPrompt("an image cannot be read: PIL does not know its format") from error
        except Exception as error:  # PIL raises any error for corrupt files
            raise InvalidPrompt(f"an image cannot be read: {error_text(error)}") from error
        return self._num_tokens(height, width)

    @cached_property
    def _num_tokens(self) -> Callable[[int, int], int]:
        """The number of tokens by height and width of an image, from the model's processor."""
        try:
            from transformers import AutoProcessor

            folder = resolve_config(self._model)
            processor = AutoProcessor.from_pretrained(folder, trust_remote_code=False)

            def count(height: int, width: int) -> int:
                options = {"image_sizes": [(height, width)], **self._processor_options}
                return int(processor._get_num_multimodal_tokens(**options).num_image_tokens[0])

            count(64, 64)
        except Exception as error:  # processors need further packages, and few can count
            logger.info(
                "the number of tokens per image is unknown (%s); plans assume %d",
                error_text(error),
                _UNKNOWN_TOKENS,
            )
            return lambda height, width: _UNKNOWN_TOKENS
        return count

    @cached_property
    def _placeholders(self) -> list[int]:
        """The tokens that a chat template writes for an image, by the model's config."""
        try:
            config = json.loads(
                (resolve_config(self._model) / "config.json").read_text(encoding="utf-8")
            )
        except (OSError, ValueError, ConfigError):
            return []
        return [config[name] for name in _PLACEHOLDERS if isinstance(config.get(name), int)]


def _filled(messages: Sequence[Any], images: Images) -> list[Any]:
    """Return messages with each `IMAGE_PART` replaced by a data: URL, for endpoints."""
    urls = ({"type": "image_url", "image_url": {"url": data_url(image)}} for image in images)
    return [
        {**m, "content": [next(urls) if part == IMAGE_PART else part for part in m["content"]]}
        if isinstance(m, Mapping) and isinstance(m.get("content"), list)
        else m
        for m in messages
    ]


def _source(part: Mapping[str, Any]) -> Any:  # noqa: ANN401 - data of a row
    """Return the image of a part, or its URL or path; None if the part is only a place."""
    for name in ("image", "image_pil", "image_url", "url", "path"):
        source = part.get(name)
        if isinstance(source, Mapping) and source.get("url") is not None:
            return source["url"]
        if source is not None:
            return source
    return None


def _before_text(message: Any, num_images: int) -> Any:  # noqa: ANN401 - data of a row
    content = message.get("content") if isinstance(message, Mapping) else None
    texts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(texts, list):
        return message
    return {**message, "content": [dict(IMAGE_PART) for _ in range(num_images)] + texts}


def read_image(source: Any, *, folder: str | None, max_bytes: int) -> bytes:  # noqa: ANN401
    """Return the file of an image: bytes, a data: URL, a path, a PIL image, or a struct of these.

    Paths are only read below `folder` (vLLM's `allowed_local_media_path`); None reads none.
    InvalidPrompt: the value is none of these, or cannot be read.
    """
    source = _held(source)
    image = _from_text(source, folder, max_bytes) if isinstance(source, str) else source
    if not isinstance(image, bytes):
        raise InvalidPrompt(f"an image is bytes or a data: URL, got {type(image).__name__}")
    if not image:
        raise InvalidPrompt("an image is empty")
    return image


def _from_text(text: str, folder: str | None, max_bytes: int) -> bytes:
    if text.startswith("data:"):
        head, _, data = text.partition(",")
        if not head.endswith(";base64"):
            raise InvalidPrompt(f"a data: URL of an image must be base64, got {head[:80]!r}")
        try:
            return base64.b64decode(data, validate=True)
        except binascii.Error as error:
            raise InvalidPrompt(f"a data: URL of an image is not base64: {error}") from error
    scheme = urlsplit(text).scheme
    if scheme not in ("", "file"):
        raise InvalidPrompt(
            f"images are not fetched from URLs, got one with {scheme[:20]}:; load them into a "
            "column of bytes before this stage"
        )
    if not folder:
        raise InvalidPrompt(
            "an image path needs engine_kwargs.allowed_local_media_path, which is not set"
        )
    real = Path(unquote(urlsplit(text).path) if scheme else text).resolve()
    if not real.is_relative_to(Path(folder).resolve()):
        raise InvalidPrompt("an image is outside of allowed_local_media_path")
    try:
        if real.stat().st_size > max_bytes:
            raise InvalidPrompt("an image is larger than max_row_bytes")
        return real.read_bytes()
    except OSError as error:
        raise InvalidPrompt(f"an image cannot be read: {error_text(error)}") from error


def is_picture(value: object) -> bool:
    """Return whether a value is a PIL image, without importing PIL."""
    return all(hasattr(value, name) for name in ("save", "getbands", "size"))


def file_of(picture: Any) -> bytes:  # noqa: ANN401 - of PIL
    """Return a PIL image as a PNG file: lossless, or in RGB if PNG lacks its mode."""
    buffer = BytesIO()
    held = picture if picture.mode in _PNG_MODES else picture.convert("RGB")
    held.save(buffer, "PNG")
    return buffer.getvalue()


def data_url(image: bytes) -> str:
    """Return the file of an image as a data: URL."""
    kind = next((name for magic, name in _TYPES.items() if image.startswith(magic)), "png")
    return f"data:image/{kind};base64,{base64.b64encode(image).decode()}"


def plain(value: Any, *, has_urls: bool = False) -> Any:  # noqa: ANN401 - data of a row
    """Return a value with JSON types: arrays as lists, PIL images as PNG bytes or data: URLs."""
    if value is None or isinstance(value, _PLAIN):
        return value
    if isinstance(value, Mapping):
        if bad := [key for key in value if not isinstance(key, str | int | float | None)]:
            raise TypeError(f"the key {bad[0]!r} has no JSON form; convert it to a text")
        return {key: plain(item, has_urls=has_urls) for key, item in value.items()}
    if isinstance(value, list | tuple):
        make = list if isinstance(value, list) else tuple
        return make(plain(item, has_urls=has_urls) for item in value)
    if is_picture(value):
        return data_url(file_of(value)) if has_urls else file_of(value)
    if hasattr(value, "tolist"):
        return plain(value.tolist(), has_urls=has_urls)
    if isinstance(value, type):
        hint = " (use its model_json_schema())" if hasattr(value, "model_json_schema") else ""
        raise TypeError(f"the class {value.__name__} has no JSON form{hint}")
    kind = type(value).__name__
    raise TypeError(f"{kind} has no JSON form; convert it to texts, numbers, lists or dicts")


def images_in(value: Any) -> list[Any] | None:  # noqa: ANN401 - data of a row
    """Return the images in a row's media, in any form of ray.data.llm; None without any."""
    if isinstance(value, Mapping) and not {"bytes", "path"} & value.keys():
        if others := [kind for kind, of in value.items() if kind != "image" and of is not None]:
            raise TypeError(f"only images are supported, got {', '.join(map(str, others))}")
        value = value.get("image")
    if isinstance(value, np.ndarray) and value.dtype == object:
        value = value.tolist()
    return list(value) if isinstance(value, list | tuple) else None if value is None else [value]


def media(value: Any) -> dict[str, Any] | None:  # noqa: ANN401 - data of a row
    """Return media of a row in the form of `MEDIA_TYPE`."""
    if value is None:
        return None
    images = images_in(value)
    return {"image": None if images is None else [_struct_of(image) for image in images]}


def _struct_of(value: Any) -> dict[str, Any]:  # noqa: ANN401 - data of a row
    file = _held(value)
    if isinstance(file, str):
        return {"bytes": None, "path": file}
    if not isinstance(file, bytes):
        kind = type(file).__name__
        raise TypeError(f"an image must be bytes, a data: URL or a PIL image, got {kind}")
    return {"bytes": file, "path": None}


def _held(value: Any) -> Any:  # noqa: ANN401 - data of a row
    """Return the file or the text of an image in a struct or of PIL; other values unchanged."""
    if isinstance(value, Mapping):  # as in Hugging Face datasets
        data = value.get("bytes")
        return _held(value.get("path") if data is None else data)
    return file_of(value) if is_picture(value) else value
