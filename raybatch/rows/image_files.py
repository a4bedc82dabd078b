"""Files of images, of what rows hold or a user's function returns; nothing is fetched."""

import base64
import binascii
from collections.abc import Mapping
from datetime import date, time, timedelta
from decimal import Decimal
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit
from uuid import UUID

import numpy as np
import pyarrow as pa

from raybatch.errors import error_text
from raybatch.text.chat import InvalidPrompt

# an image is its file, or a text that says where it is, as in datasets of Hugging Face
_IMAGE_TYPE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
MEDIA_TYPE = pa.struct([("image", pa.list_(_IMAGE_TYPE))])

_TYPES = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"RIFF": "webp"}
# modes of PIL that PNG has; CMYK of JPEG files for print is none of them
_PNG_MODES = frozenset({"1", "I", "I;16", "L", "LA", "P", "RGB", "RGBA"})
_PLAIN = (str, bytes, bool, int, float, date, time, timedelta, Decimal, UUID)


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
