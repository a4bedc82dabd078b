"""Images of rows: their files, their places in messages and payloads, stand-ins for the plan.

Nothing is fetched.
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
from raybatch.text.tokenizer import Encoded

logger = logging.getLogger(__name__)

# an image is its file, or a text that says where it is, as in datasets of Hugging Face
_IMAGE_TYPE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
MEDIA_TYPE = pa.struct([("image", pa.list_(_IMAGE_TYPE))])

_TYPES = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"RIFF": "webp"}
# modes of PIL that PNG has; CMYK of JPEG files for print is none of them
_PNG_MODES = frozenset({"1", "I", "I;16", "L", "LA", "P", "RGB", "RGBA"})
_PLAIN = (str, bytes, bool, int, float, date, time, timedelta, Decimal, UUID)
# what a chat template is shown in the place of an image
IMAGE_PART: Mapping[str, Any] = {"type": "image"}
_KINDS = ("image", "image_url", "image_pil", "input_image")
Images = Sequence[bytes]
# where the tokens of an image are unknown; too few, so that no row is refused for it
_UNKNOWN_TOKENS = 16
# different tokens among stand-ins
_STAND_INS = 1 << 14
_PLACEHOLDERS = ("image_token_id", "image_token_index")


class ImageReader:
    """Reads the images of the rows of a stage; built once per feeder."""

    def __init__(self, config: StageConfig, vocab_size: int) -> None:
        facts = type_of(config.backend)
        self._is_endpoint = facts.is_endpoint
        # others read text, and what is pooled is text
        self._is_on = config.task == "generate" and facts.reads_images
        kwargs = dict(config.backend.options.get("engine_kwargs") or {})
        folder = kwargs.get("allowed_local_media_path")
        self._read = partial(read_image, folder=folder, max_bytes=config.max_row_bytes)
        options = kwargs.get("mm_processor_kwargs") or {}
        self._tokens = ImageTokens(config.model, vocab_size, options)

    def images_of(self, value: Any) -> Images:  # noqa: ANN401 - data of a row
        """Return the images that the value of a column is; what is none raises anything."""
        if isinstance(value, Exception):
            raise value
        return [self._read(source) for source in images_in(value) or ()]

    def take_out(self, messages: Any, of_column: Images = ()) -> tuple[Any, list[bytes]]:  # noqa: ANN401
        """Return messages with bare parts for images, and the images in their order.

        Those of the column are for parts that have none; without such parts they come before the
        text of the last message.
        """
        if not self._is_on or not isinstance(messages, list) or not messages:
            return messages, []
        left, images = list(of_column), list[bytes]()
        changed = [self._without_images(message, left, images) for message in messages]
        if left and len(left) < len(of_column):
            raise InvalidPrompt(f"the row has {len(of_column)} images, and places for fewer")
        if left:
            if images:
                raise InvalidPrompt("the row has images in its messages and in its column")
            changed[-1], images = _before_text(changed[-1], len(left)), left
        return (_filled(changed, images), []) if self._is_endpoint else (changed, images)

    def put_in(self, encoded: Encoded, images: Images) -> Encoded:
        """Return a prompt with images: in its payload, and as stand-ins among its tokens."""
        if not images:
            return encoded
        if self._is_endpoint:
            raise InvalidPrompt("an endpoint takes images in messages, and the row has a text")
        ids, stand_ins = encoded.token_ids, [self._tokens.stand_ins(image) for image in images]
        places = np.flatnonzero(np.isin(ids, self._tokens.placeholders))
        if len(places) == len(images):
            parts = np.split(ids, np.sort(np.concatenate([places, places + 1])))
            # every second part is a placeholder
            parts[1::2] = stand_ins
        else:
            # their places are unknown: nothing is shared with rows of other images
            parts = [*stand_ins, ids]
        payload = with_images(encoded.payload, ids, images)
        tokens, num = np.concatenate(parts), len(images)
        return encoded._replace(token_ids=tokens, payload=payload, num_images=num, asked_ids=ids)

    def _without_images(self, message: Any, left: list[bytes], images: list[bytes]) -> Any:  # noqa: ANN401
        """Return a message with bare parts; its images are added to `images`."""
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list):
            return message
        parts: list[Any] = []
        for part in content:
            is_image = isinstance(part, Mapping) and part.get("type") in _KINDS
            source = _source(part) if is_image else None
            # an endpoint fetches by itself
            if not is_image or (self._is_endpoint and source is not None):
                parts.append(part)
                continue
            if source is None and not left:
                raise InvalidPrompt("a part of the messages is an image, and the row has none")
            images.append(left.pop(0) if source is None else self._read(source))
            parts.append(dict(IMAGE_PART))
        return {**message, "content": parts}


def _filled(messages: Sequence[Any], images: Images) -> list[Any]:
    """Return messages whose bare parts are images as an endpoint takes them."""
    urls = ({"type": "image_url", "image_url": {"url": data_url(image)}} for image in images)
    return [
        {**m, "content": [next(urls) if part == IMAGE_PART else part for part in m["content"]]}
        if isinstance(m, Mapping) and isinstance(m.get("content"), list)
        else m
        for m in messages
    ]


def _source(part: Mapping[str, Any]) -> Any:  # noqa: ANN401 - data of a row
    """Return where the image of a part is; None where the part is only its place."""
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


class ImageTokens:
    """What a model makes of images, as far as its files tell."""

    def __init__(self, model: str, vocab_size: int, processor_options: Mapping[str, Any]) -> None:
        self._model = model
        # a tokenizer may have tokens at its end that the model has not
        self._below = min(vocab_size, _STAND_INS)
        self._processor_options = processor_options

    def stand_ins(self, image: bytes) -> TokenIds:
        """Return as many tokens as an image takes, int32; other images have other ones."""
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
            # its own text has an address of memory, another one in each run
            raise InvalidPrompt("an image cannot be read: PIL knows no such format") from error
        except Exception as error:  # files may be broken in any way
            raise InvalidPrompt(f"an image cannot be read: {error_text(error)}") from error
        return self._num_tokens(height, width)

    @cached_property
    def _num_tokens(self) -> Callable[[int, int], int]:
        """From the height and width of an image to its tokens: the processor of the model."""
        try:
            from transformers import AutoProcessor

            folder = resolve_config(self._model)
            processor = AutoProcessor.from_pretrained(folder, trust_remote_code=False)

            def count(height: int, width: int) -> int:
                options = {"image_sizes": [(height, width)], **self._processor_options}
                return int(processor._get_num_multimodal_tokens(**options).num_image_tokens[0])

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
            config = json.loads(
                (resolve_config(self._model) / "config.json").read_text(encoding="utf-8")
            )
        except (OSError, ValueError, ConfigError):
            return []
        return [config[name] for name in _PLACEHOLDERS if isinstance(config.get(name), int)]


def read_image(source: Any, *, folder: str | None, max_bytes: int) -> bytes:  # noqa: ANN401
    """Return the file of an image: bytes, a data: URL, a path, of PIL, or in a struct.

    Paths are read below `folder` alone (vLLM's `allowed_local_media_path`); None reads none. What
    is none of them, or cannot be read, is an InvalidPrompt.
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
            raise InvalidPrompt(f"a data: URL of an image is no base64: {error}") from error
    scheme = urlsplit(text).scheme
    if scheme not in ("", "file"):
        raise InvalidPrompt(
            f"images are not fetched, got a URL with {scheme[:20]}:; load them in a step "
            "before, into a column of bytes"
        )
    if not folder:
        raise InvalidPrompt(
            "images of the file system are read below engine_kwargs.allowed_local_media_path, "
            "which is not set"
        )
    real = Path(unquote(urlsplit(text).path) if scheme else text).resolve()
    if not real.is_relative_to(Path(folder).resolve()):
        raise InvalidPrompt("an image lies outside of allowed_local_media_path")
    try:
        if real.stat().st_size > max_bytes:
            raise InvalidPrompt("an image is larger than max_row_bytes")
        return real.read_bytes()
    except OSError as error:
        raise InvalidPrompt(f"an image cannot be read: {error_text(error)}") from error


def is_picture(value: object) -> bool:
    """Return whether a value is an image of PIL, which nothing here imports."""
    return all(hasattr(value, name) for name in ("save", "getbands", "size"))


def file_of(picture: Any) -> bytes:  # noqa: ANN401 - of PIL
    """Return the file of an image of PIL: without loss, or in RGB where PNG lacks its colours."""
    buffer = BytesIO()
    held = picture if picture.mode in _PNG_MODES else picture.convert("RGB")
    held.save(buffer, "PNG")
    return buffer.getvalue()


def data_url(image: bytes) -> str:
    """Return the URL that holds the file of an image."""
    kind = next((name for magic, name in _TYPES.items() if image.startswith(magic)), "png")
    return f"data:image/{kind};base64,{base64.b64encode(image).decode()}"


def plain(value: Any, *, has_urls: bool = False) -> Any:  # noqa: ANN401 - data of a row
    """Return a value as JSON can have it: files for images of PIL, and lists for arrays."""
    if value is None or isinstance(value, _PLAIN):
        return value
    if isinstance(value, Mapping):
        if bad := [key for key in value if not isinstance(key, str | int | float | None)]:
            raise TypeError(f"the key {bad[0]!r} has no form in JSON; make a text of it")
        return {key: plain(item, has_urls=has_urls) for key, item in value.items()}
    if isinstance(value, list | tuple):
        make = list if isinstance(value, list) else tuple
        return make(plain(item, has_urls=has_urls) for item in value)
    if is_picture(value):
        return data_url(file_of(value)) if has_urls else file_of(value)
    if hasattr(value, "tolist"):
        return plain(value.tolist(), has_urls=has_urls)
    if isinstance(value, type):
        way = " (take its model_json_schema())" if hasattr(value, "model_json_schema") else ""
        raise TypeError(f"the class {value.__name__} has no form in JSON{way}")
    kind = type(value).__name__
    raise TypeError(f"{kind} has no form in JSON; make texts, numbers, lists or dicts of it")


def images_in(value: Any) -> list[Any] | None:  # noqa: ANN401 - data of a row
    """Return the images of media in any form of ray.data.llm, one or a list; None without any."""
    if isinstance(value, Mapping) and not {"bytes", "path"} & value.keys():
        if others := [kind for kind, of in value.items() if kind != "image" and of is not None]:
            raise TypeError(f"of media only images are read, got {', '.join(map(str, others))}")
        value = value.get("image")
    if isinstance(value, np.ndarray) and value.dtype == object:
        value = value.tolist()
    return list(value) if isinstance(value, list | tuple) else None if value is None else [value]


def media(value: Any) -> dict[str, Any] | None:  # noqa: ANN401 - data of a row
    """Return media of a row in the one form that a column of them has, `MEDIA_TYPE`."""
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
        raise TypeError(f"an image is bytes, a data: URL or an image of PIL, got {kind}")
    return {"bytes": file, "path": None}


def _held(value: Any) -> Any:  # noqa: ANN401 - data of a row
    """Return the file or the text of an image in a struct or of PIL; anything else as it is."""
    if isinstance(value, Mapping):  # as datasets of Hugging Face have them
        data = value.get("bytes")
        return _held(value.get("path") if data is None else data)
    return file_of(value) if is_picture(value) else value
