"""Image files of rows: from bytes, data: URLs and files below a folder; nothing is fetched."""

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from raybatch.errors import error_text
from raybatch.rows.images.values import file_of, is_picture
from raybatch.text.chat import InvalidPrompt


class ImageFiles:
    """Reads the files of images.

    Args:
        folder: below which files may be read, vLLM's `allowed_local_media_path`; None reads none.
        max_bytes: of a file.
    """

    def __init__(self, *, folder: str | None, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes

    def read(self, source: Any) -> bytes:  # noqa: ANN401 - data of a row
        """Return the file of an image.

        Args:
            source: bytes, a data: URL, a path, an image of PIL, or a struct with bytes and path.

        Raises:
            InvalidPrompt: it is none of them, or cannot be read.
        """
        if isinstance(source, Mapping):  # as datasets of Hugging Face have them
            data, path = source.get("bytes"), source.get("path")
            return self.read(path if data is None else data)
        if isinstance(source, bytes):
            image = source
        elif isinstance(source, str):
            image = self._from_text(source)
        elif is_picture(source):
            image = file_of(source)
        else:
            raise InvalidPrompt(f"an image is bytes or a data: URL, got {type(source).__name__}")
        if not image:
            raise InvalidPrompt("an image is empty")
        return image

    def _from_text(self, text: str) -> bytes:
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
        path = unquote(urlsplit(text).path) if scheme else text
        return self._read_file(Path(path))

    def _read_file(self, path: Path) -> bytes:
        if not self._folder:
            raise InvalidPrompt(
                "images of the file system are read below engine_kwargs.allowed_local_media_path, "
                "which is not set"
            )
        real = path.resolve()
        if not real.is_relative_to(Path(self._folder).resolve()):
            raise InvalidPrompt("an image lies outside of allowed_local_media_path")
        try:
            if real.stat().st_size > self._max_bytes:
                raise InvalidPrompt("an image is larger than max_row_bytes")
            return real.read_bytes()
        except OSError as error:
            raise InvalidPrompt(f"an image cannot be read: {error_text(error)}") from error
