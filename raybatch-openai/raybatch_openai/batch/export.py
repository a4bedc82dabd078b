"""Writes the rows of a dataset as OpenAI batch files."""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import IO, Any, NamedTuple

import pyarrow as pa

from raybatch.errors import ConfigError, did_you_mean, error_text
from raybatch.inputs.source import scan_source
from raybatch.planning.source_checks import check_unique_ids
from raybatch.rows.batches import nested_values
from raybatch.rows.prompt_inputs import PromptTemplate, column_of
from raybatch.text.chat import PromptError, check_messages, for_api, lacks_system, read_messages
from raybatch_openai.batch.files import (
    check_none_numbered,
    check_output,
    published,
    rows_with_ids,
    split_ending,
)
from raybatch_openai.batch.requests import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    BodyRules,
    Refusal,
    read_request,
)

# OpenAI's limits of one file
MAX_REQUESTS, MAX_BYTES = 50_000, 200_000_000
_PENALTIES = ("presence_penalty", "frequency_penalty")
_SAMPLING = ("temperature", "max_tokens", "top_p", *_PENALTIES, "seed", "stop", "n")
# endpoint: its URL, and the options of its requests
_ENDPOINTS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "chat": (CHAT, (*_SAMPLING, "max_completion_tokens", "reasoning_effort")),
    "completions": (COMPLETIONS, _SAMPLING),
    "embeddings": (EMBEDDINGS, ("dimensions", "encoding_format")),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Export:
    """Options of `export_rows`; raises ConfigError if they do not fit together."""

    source: str  # Parquet, JSONL or Arrow IPC: a file, a folder or a glob
    output: str  # the first batch file; later ones have a number before the extension
    model: str
    prompt: str | None = None  # template of the user's message, or of the text of other endpoints
    messages: str | None = None  # column of messages, in place of `prompt`
    system: str | None = None  # system message of rows without one
    endpoint: str = "chat"
    id_column: str | None = None  # custom_ids; file and position by default
    sampling: Mapping[str, Any] = field(default_factory=dict)  # of every request
    max_requests: int = MAX_REQUESTS
    max_bytes: int = MAX_BYTES

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise ConfigError("set either --prompt or --messages-column")
        if self.endpoint not in _ENDPOINTS:
            raise ConfigError(f"endpoint must be {' or '.join(_ENDPOINTS)}, got {self.endpoint!r}")
        if self.endpoint != "chat" and (self.messages or self.system) is not None:
            raise ConfigError(
                f"requests for {self.endpoint} take a prompt only; remove --messages-column and "
                "--system"
            )
        if not self.model.strip():
            raise ConfigError("--model is empty; set the name that the server has for the model")
        _, known = _ENDPOINTS[self.endpoint]
        for name in self.sampling:
            if name not in known:
                raise ConfigError(
                    f"requests for {self.endpoint} have no option {name!r}"
                    f"{did_you_mean(name, known)}; they have {', '.join(known)}"
                )
        is_embed = self.endpoint == "embeddings"
        rules = BodyRules(names=(self.model,), task="embed" if is_embed else "generate")
        try:
            read_request(self.request("", self.body_of("x")), rules)
        except Refusal as refusal:
            raise ConfigError(f"--set: {refusal.message}") from None

    def request(self, custom_id: str, prompt: Mapping[str, Any]) -> dict[str, Any]:
        """Return the JSON object of a line; `prompt` has keys of the body, as `body_of` returns."""
        url, _ = _ENDPOINTS[self.endpoint]
        body = {"model": self.model, **prompt, **self.sampling}
        return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}

    def body_of(self, text: str) -> dict[str, Any]:
        """Return a prompt as keys of a request body: `messages`, `prompt` or `input`."""
        if self.endpoint == "chat":
            return {"messages": _messages([{"role": "user", "content": text}], self.system)}
        return {"prompt" if self.endpoint == "completions" else "input": text}


class Exported(NamedTuple):
    """Files and counts of an export; `first_error` is that of the first row left out, or ""."""

    files: tuple[str, ...]
    num_requests: int
    num_left_out: int
    first_error: str


def export_rows(export: Export) -> Exported:
    """Write a request for each row, in order, to one or more batch files.

    Rows without a valid prompt are left out. Holds a small table of rows in memory. Raises
    ConfigError if the source cannot be read, a column is missing, or ids repeat.
    """
    num_requests, num_left_out, first_error = 0, 0, ""
    check_output(export.output)
    check_none_numbered(export.output, "choose another file with --out, or remove it")
    with ExitStack() as stack:
        files = _Files(export, stack)
        for custom_id, prompt in _prompts_with_ids(export):
            if isinstance(prompt, str):
                num_left_out += 1
                first_error = first_error or f"{custom_id}: {prompt}"
                continue
            files.write(json.dumps(export.request(custom_id, prompt)).encode() + b"\n")
            num_requests += 1
    return Exported(tuple(files.names), num_requests, num_left_out, first_error)


def _prompts_with_ids(export: Export) -> Iterator[tuple[str, dict[str, Any] | str]]:
    """Yield the id of each row, and its prompt as keys of a body or its error as a string."""
    source = scan_source(export.source)
    if export.id_column is not None:
        check_unique_ids(source, export.id_column)
    for table, ids, errors in rows_with_ids(source, export.id_column):
        for custom_id, error, prompt in zip(ids, errors, _prompts(export, table), strict=True):
            yield custom_id, error or prompt


def _prompts(export: Export, table: pa.Table) -> Iterator[dict[str, Any] | str]:
    if export.messages is not None:
        for value in nested_values(column_of(table, export.messages)):
            try:
                yield {"messages": _messages(value, export.system)}
            except PromptError as error:
                yield error_text(error)
        return
    assert export.prompt is not None, "an export has a prompt or messages"
    for text in PromptTemplate(export.prompt).render_column(table):
        yield error_text(text) if isinstance(text, PromptError) else export.body_of(text)


def _messages(value: Any, system: str | None) -> list[dict[str, Any]]:  # noqa: ANN401 - of a row
    messages = for_api(check_messages(read_messages(value)))
    if system is not None and lacks_system(messages):
        messages = [{"role": "system", "content": system}, *messages]
    return messages


class _Files:
    """Writes lines to batch files; opens the next file when one is full."""

    def __init__(self, export: Export, stack: ExitStack) -> None:
        self._export = export
        self._stack = stack
        self._num_requests = self._num_bytes = 0
        self.names: list[str] = []
        self._file = self._open()

    def write(self, line: bytes) -> None:
        is_full = self._num_requests >= self._export.max_requests
        if is_full or (self._num_requests and self._num_bytes + len(line) > self._export.max_bytes):
            self._stack.close()
            self._file = self._open()
            self._num_requests = self._num_bytes = 0
        self._file.write(line)
        self._num_requests += 1
        self._num_bytes += len(line)

    def _open(self) -> IO[bytes]:
        self.names.append(_file_name(self._export.output, len(self.names) + 1))
        return self._stack.enter_context(published(self.names[-1]))


def _file_name(first: str, number: int) -> str:
    root, ending = split_ending(first)
    return first if number == 1 else f"{root}.{number}{ending}"
