"""Where in files of answers and errors the line of each custom_id begins, in 32 bytes a line."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import fsspec
import numpy as np
import pyarrow as pa

from raybatch.backends.openai.body import BadAnswer, read_vector
from raybatch.durable.storage import told_as
from raybatch.errors import ConfigError, error_text
from raybatch.inputs.file_errors import safe_text
from raybatch.planning.checks.repeated_ids import id_hashes
from raybatch.records.types import Vector

_LINES_AT_ONCE = 1024


class Answer(NamedTuple):
    """What a line says of one request.

    Args:
        texts: of each sample; None where there is an error.
        reasons: why each sample has ended.
        usage: as the server counts tokens.
        error: "" or "Type: message".
        vector: that was asked for in place of samples.
    """

    texts: Sequence[str | None]
    reasons: Sequence[str]
    usage: Mapping[str, Any]
    error: str = ""
    vector: Vector | None = None


class AnswerIndex:
    """Finds answers by custom_id; a context that holds the files open.

    Args:
        paths: files of answers and of errors, not compressed.

    Raises:
        ConfigError: a file cannot be read, or holds a line that is no answer.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = paths
        self._files: list[Any] = []
        self.num_samples = 1
        self.has_texts = self.has_vectors = False
        self.num_lines = 0
        found = [self._scan(number, path) for number, path in enumerate(paths)]
        rows = np.concatenate([np.empty((0, 4), np.uint64), *found])
        self._rows = rows[np.lexsort((rows[:, 1], rows[:, 0]))]

    def __enter__(self) -> "AnswerIndex":
        self._files = [fsspec.open(path, "rb").open() for path in self._paths]
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files:
            file.close()

    def find(self, custom_ids: Sequence[str]) -> list[Answer | None]:
        """Return the answer of each request, None for those that no line is about."""
        if not custom_ids:
            return []
        hashes = id_hashes(pa.chunked_array([pa.array(custom_ids, pa.string())]))
        first = np.searchsorted(self._rows[:, 0], hashes[:, 0], side="left")
        stop = np.searchsorted(self._rows[:, 0], hashes[:, 0], side="right")
        return [
            self._answer(custom_id, self._rows[begin:end])
            for custom_id, begin, end in zip(custom_ids, first, stop, strict=True)
        ]

    def _answer(self, custom_id: str, rows: Any) -> Answer | None:  # noqa: ANN401 - uint64 [R, 4]
        for _, _, number, offset in rows.tolist():
            file = self._files[number]
            file.seek(offset)
            line = json.loads(file.readline())
            if line.get("custom_id") == custom_id:
                return read_answer(line)
        return None

    def _scan(self, number: int, path: str) -> Any:  # noqa: ANN401 - uint64 [R, 4]
        found, ids, offsets = [], list[str](), list[int]()
        with (
            told_as(f"{safe_text(path)} cannot be read"),
            fsspec.open(path, "rb") as file,
        ):
            offset = line_number = 0
            while data := file.readline():
                line_number += 1
                if data.strip():
                    custom_id = self._look(data, f"{safe_text(path)}, line {line_number}")
                    if custom_id is not None:
                        ids.append(custom_id)
                        offsets.append(offset)
                offset += len(data)
                if len(ids) >= _LINES_AT_ONCE:
                    found.append(_rows(ids, number, offsets))
                    ids, offsets = [], []
        found.append(_rows(ids, number, offsets))
        return np.concatenate(found)

    def _look(self, data: bytes, where: str) -> str | None:
        try:
            line = json.loads(data)
            answer, custom_id = read_answer(line), line["custom_id"]
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise ConfigError(f"{where} is no line of answers or errors of a batch") from error
        self.num_lines += 1
        self.num_samples = max(self.num_samples, len(answer.texts))
        self.has_texts |= bool(answer.texts)
        self.has_vectors |= answer.vector is not None
        return custom_id if isinstance(custom_id, str) else None


def read_answer(line: Mapping[str, Any]) -> Answer:
    """Return what a line of an output file or of an error file says."""
    if line.get("error"):
        error = line["error"]
        return Answer((), (), {}, f"BatchError: {error.get('code')}: {error.get('message')}")
    response = line["response"]
    body = response["body"]
    if response["status_code"] != 200:
        error = body.get("error") or {}
        is_long = error.get("code") == "context_length_exceeded"
        kind = "PromptTooLong" if is_long else f"BatchError: HTTP {response['status_code']}"
        return Answer((), (), {}, f"{kind}: {error.get('message')}")
    if "data" in body:
        return _embedded(body)
    choices = sorted(body["choices"], key=lambda choice: choice["index"])
    return Answer(
        texts=[_text(choice) for choice in choices],
        reasons=[_reason(choice.get("finish_reason")) for choice in choices],
        usage=body.get("usage") or {},
    )


def _embedded(body: Mapping[str, Any]) -> Answer:
    """Return the one vector of a line; what is none costs the row alone, not the file."""
    usage, data = body.get("usage") or {}, body["data"]
    if len(data) != 1:
        error = f"BadAnswer: the line has {len(data)} embeddings, and a row takes one"
        return Answer((), (), usage, error)
    try:
        return Answer((), ("stop",), usage, vector=read_vector(data[0]["embedding"]))
    except BadAnswer as error:
        return Answer((), (), usage, error_text(error))


def _text(choice: Mapping[str, Any]) -> str:
    if "message" not in choice:
        return str(choice["text"])
    message = choice["message"]
    if message.get("content") is None and message.get("tool_calls"):
        return json.dumps(message["tool_calls"])
    return str(message.get("content") or "")


def _reason(reason: object) -> str:
    return {"length": "length", "content_filter": "filtered"}.get(str(reason), "stop")


def _rows(ids: Sequence[str], number: int, offsets: Sequence[int]) -> Any:  # noqa: ANN401
    if not ids:
        return np.empty((0, 4), np.uint64)
    hashes = id_hashes(pa.chunked_array([pa.array(ids, pa.string())]))
    places = np.array([[number, offset] for offset in offsets], np.uint64)
    return np.concatenate([hashes, places], axis=1)
