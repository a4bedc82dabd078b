"""Prompts for an endpoint, and the options of a stage that endpoints do not support.

Rows are sent as messages or text. Plans need token ids: from a tokenizer that the options name,
else triples of bytes, which are equal for equal beginnings of texts.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from raybatch.config import SpecialTokens
from raybatch.errors import ConfigError
from raybatch.records.types import TokenIds
from raybatch.text.chat import InvalidPrompt, check_messages, for_api, map_texts
from raybatch.text.tokenizer import Prompt, Tokenizer
from raybatch_openai.endpoint.options import OpenAIOptions, openai_options

if TYPE_CHECKING:
    from raybatch.rows.options import StageConfig

TRIPLE_BYTES = 3


class EndpointTokenizer:
    """Tokenizer for an endpoint: the payload of a prompt is its request, the ids serve plans.

    Without `inner`, the tokenizer of the model, ids are `triples`.
    """

    def __init__(self, options: OpenAIOptions, inner: Tokenizer | None = None) -> None:
        self._inner = inner
        # the endpoint applies the template
        self.has_chat_template = options.endpoint != "completions"
        self.vocab_size = (1 << 31) - 1 if inner is None else inner.vocab_size
        self.bos_id = None if inner is None else inner.bos_id
        # the endpoint ends answers itself
        self.special_token_ids: Mapping[str, int] = {}

    def count_special(self, text: str) -> int:
        return 0 if self._inner is None else self._inner.count_special(text)

    def template_reads(self, name: str, **_: object) -> bool:
        # a field of the request
        return name == "tools"

    def read(self, text: str, *, special_tokens: SpecialTokens = "escape") -> Prompt:
        """Return the prompt of a text; the endpoint itself interprets special tokens in it."""
        if not isinstance(text, str):
            raise InvalidPrompt(f"prompt must be a string, got {type(text).__name__}")
        if not text:
            raise InvalidPrompt("prompt is empty")
        payload = _json({"prompt": text})
        if self._inner is None:
            return Prompt(triples(text), payload=payload)
        return self._inner.read(text, special_tokens="allow")._replace(payload=payload)

    def read_chat(
        self, messages: object, *, row_options: Mapping[str, Any] | None = None, **_: object
    ) -> Prompt:
        """Return a prompt of messages; template options are refused, see `check_stage`."""
        fields = dict(row_options or {})
        if others := [name for name in fields if name != "tools"]:
            raise InvalidPrompt(
                f"chat template options ({', '.join(others)}) have no effect on an endpoint, which "
                "renders messages itself"
            )
        checked = for_api(check_messages(messages, kinds=None))
        # fields that rows share come first
        payload = _json({**fields, "messages": checked})
        short = map_texts(checked, _shortened)
        contents = (m["content"] for m in checked if isinstance(m["content"], list))
        has_media = any(part["type"] != "text" for content in contents for part in content)
        if self._inner is None or not self._inner.has_chat_template or has_media:
            # triples of the whole text, so that different messages never have equal ids
            return Prompt(triples(_json({**fields, "messages": short})), payload=payload)
        encoded = self._inner.read_chat(checked, row_options=fields, special_tokens="allow")
        return encoded._replace(payload=payload)

    def decode(
        self,
        token_ids: npt.ArrayLike,
        skip_special_tokens: bool = True,
        *,
        after: npt.ArrayLike | None = None,
    ) -> str:
        return self.decode_batch([token_ids], skip_special_tokens, after=[after])[0]

    def decode_batch(
        self,
        batch: Sequence[npt.ArrayLike],
        skip_special_tokens: bool = True,
        *,
        after: Sequence[npt.ArrayLike | None] | None = None,
    ) -> list[str]:
        if self._inner is not None:
            return self._inner.decode_batch(batch, skip_special_tokens, after=after)
        return [text_of_triples(np.asarray(token_ids, np.int32)) for token_ids in batch]


def check_stage(config: "StageConfig") -> None:
    """Raise ConfigError if a stage has an option that endpoints do not support."""
    options = openai_options(config.backend.options)
    if config.chat_template is not None or config.chat_template_kwargs:
        raise ConfigError(
            "chat_template and chat_template_kwargs have no effect on an endpoint, which renders "
            "messages itself; if the server supports them, set backend.options.extra_body"
        )
    is_chat = config.messages is not None or config.system is not None or config.chat is True
    if config.task == "embed" and options.endpoint != "auto":
        raise ConfigError(
            f"backend.options.endpoint={options.endpoint!r} has no effect with task 'embed', which "
            "requests embeddings; leave it out"
        )
    if config.task == "embed" and is_chat:
        raise ConfigError(
            "task 'embed' on an endpoint needs texts; leave messages, system and chat=True out"
        )
    if options.endpoint == "completions" and is_chat:
        raise ConfigError(
            "backend.options.endpoint is 'completions', which needs texts; for messages, system "
            "and chat=True set endpoint: chat"
        )
    is_text = config.prompt is not None and config.chat is False
    if options.endpoint == "chat" and (config.tokenized_prompt is not None or is_text):
        raise ConfigError(
            "backend.options.endpoint is 'chat', which needs messages; for tokenized_prompt, and "
            "prompt with chat=False, set endpoint: completions"
        )
    if config.on_too_long.startswith("truncate") and config.tokenized_prompt is None:
        raise ConfigError(
            f"on_too_long={config.on_too_long!r} cuts token ids, but endpoints get texts; leave it "
            "out, or set on_too_long='drop'"
        )
    has_limit = options.max_model_len is not None or config.engine.max_model_len is not None
    # tokenized prompts have the ids that the endpoint gets
    if has_limit and options.tokenizer is None and config.tokenized_prompt is None:
        raise ConfigError(
            "max_model_len needs backend.options.tokenizer to count the tokens of prompts; leave "
            "it out, and the endpoint refuses rows that are too long"
        )


def triples(text: str) -> TokenIds:
    """Return the UTF-8 bytes of a text, three per id, with their number in the top byte.

    Example:
        >>> triples("abcd").tolist() == [*triples("abc").tolist(), (1 << 24) + ord("d")]
        True
    """
    data = np.frombuffer(_utf8(text), np.uint8)
    padded = np.zeros((-(-len(data) // TRIPLE_BYTES), TRIPLE_BYTES), np.int32)
    padded.reshape(-1)[: len(data)] = data
    sizes = np.minimum(
        len(data) - TRIPLE_BYTES * np.arange(len(padded), dtype=np.int32), TRIPLE_BYTES
    )
    ids = padded[:, 0] | padded[:, 1] << 8 | padded[:, 2] << 16 | sizes << 24
    return np.asarray(ids, np.int32)


def text_of_triples(token_ids: TokenIds) -> str:
    """Return the text of triples, without incomplete characters at the ends."""
    data = b"".join(
        int(token_id & 0xFFFFFF).to_bytes(TRIPLE_BYTES, "little")[: int(token_id) >> 24]
        for token_id in token_ids
    )
    return data.decode("utf-8", "ignore")


def _shortened(text: str) -> str:
    """Return the text; a data: URL is replaced by a short one with its hash."""
    if not text.startswith("data:"):
        return text
    return f"data:{hashlib.blake2b(text.encode(), digest_size=32).hexdigest()}"


def _json(payload: Mapping[str, Any]) -> str:
    try:
        text = json.dumps(payload, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise InvalidPrompt(f"the messages cannot be encoded as JSON: {error}") from error
    _utf8(text)
    return text


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidPrompt("the prompt is not valid Unicode: it has a lone surrogate") from error
