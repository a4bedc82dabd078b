"""The model of a stage on the driver and its feeders: folder, tokenizer, context length.

An endpoint renders and tokenizes itself; rows are sent as messages or text. Plans still need token
ids: from a tokenizer that the options name, else triples of bytes, which are equal for equal
beginnings of texts.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raybatch.backends.openai.options import OpenAIOptions, openai_options
from raybatch.backends.registry import check_files, type_of
from raybatch.config import SpecialTokens
from raybatch.errors import ConfigError
from raybatch.models.config import read_model_spec, warn_of_end_tokens
from raybatch.models.source import (
    check_weights_exist,
    is_local_model,
    lacks_weights,
    resolve_config,
    resolve_tokenizer,
)
from raybatch.policy.ownership import Ownership, default_share_by, max_shards
from raybatch.records.types import TokenIds
from raybatch.rows.options import StageConfig
from raybatch.rows.prompt_inputs import prompt_form
from raybatch.text.chat import InvalidPrompt, check_messages, for_api, map_texts
from raybatch.text.tokenizer import Prompt, Tokenizer

TRIPLE_BYTES = 3


def find_model(config: StageConfig) -> Path | None:
    """Return the folder of the stage's model; it may lack weights if they are elsewhere.

    For an endpoint it only has the tokenizer; None if the options name none.
    """
    backend_type = type_of(config.backend)
    if backend_type.is_endpoint:
        tokenizer = openai_options(config.backend.options).tokenizer
        return None if tokenizer is None else resolve_tokenizer(tokenizer)
    if not backend_type.has_weights and Path(config.model).is_dir():
        return Path(config.model)  # this backend needs no weights in the folder
    return resolve_config(config.model)


def load_tokenizer(config: StageConfig, folder: Path | None) -> "PromptTokenizer":
    """Return the tokenizer for the prompts of a stage; `folder` is from `find_model`."""
    tokenizer = None if folder is None else Tokenizer.load(folder)
    if type_of(config.backend).is_endpoint:
        return EndpointTokenizer(openai_options(config.backend.options), tokenizer)
    assert tokenizer is not None, "only an endpoint's model has no folder"
    return tokenizer


def check_model(config: StageConfig, schema: pa.Schema) -> None:
    """Raise if this host can tell that the model, a grammar or a memory budget cannot work.

    No weights are loaded and no engine is started. Config and tokenizer of a remote model are
    fetched; the engines check its weights.

    Raises:
        ConfigError: for the first problem.
        CapacityError: the KV cache does not hold a block.
    """
    backend_type, engine = type_of(config.backend), config.engine
    is_here = not backend_type.is_endpoint and is_local_model(config.model)
    has_weights = is_here and not (backend_type.has_weights and lacks_weights(config.model))
    folder = find_model(config)
    if folder is not None:
        reads = _reads_template(config, schema)
        has_tools = bool(config.tools) and not isinstance(config.tools, str)
        check_files(
            folder,
            config.backend,
            reads_template=reads,
            has_tools=has_tools,
            has_weights=has_weights,
        )
        if not (has_weights or backend_type.is_endpoint) and backend_type.reads_safetensors(
            config.backend
        ):
            check_weights_exist(config.model, folder)
    max_model_len(config, folder)
    if config.task == "generate" and not backend_type.is_endpoint and folder is not None:
        warn_of_end_tokens(folder)
    if engine.weights == "shared" and folder is not None:
        _check_slots(config, folder)
    constraint = config.sampling.structured_outputs
    if isinstance(constraint, str) and backend_type.checks_grammars:
        from raybatch.engine.sampling.grammars import check_grammar

        if error := check_grammar(constraint):
            raise ConfigError(f"sampling.{error}")
    budgets = (engine.kv_cache_bytes, engine.host_kv_bytes, engine.device_weight_bytes)
    has_budget = backend_type.obeys_engine_options and any(
        isinstance(budget, int) for budget in budgets
    )
    # without torch on the driver, the engines check budgets
    if has_budget and find_spec("torch") is not None:
        from raybatch.engine.loading.loaded_model import check_budgets

        assert folder is not None, "only an endpoint's model has no folder"
        check_budgets(folder, engine, has_weights=has_weights)


def _check_slots(config: StageConfig, folder: Path) -> None:
    """Raise ConfigError if a group needs more buffers for shared weights."""
    size, num_slots = config.pool.share_group, config.engine.explicit_buffers
    if size is None or num_slots is None:
        return
    shares_shards = type_of(config.backend).shares_shards
    try:
        spec = read_model_spec(folder)
    except ConfigError:
        if shares_shards:
            raise
        # an engine that supports more models counts layers itself
        return
    by = default_share_by(max_shards(spec), size, shares_shards=shares_shards)
    Ownership(size=size, num_layers=spec.num_layers, by=by).check_slots(num_slots)


def _reads_template(config: StageConfig, schema: pa.Schema) -> bool:
    """Return whether rows are rendered with the chat template of the model, if it has one."""
    is_endpoint = type_of(config.backend).is_endpoint
    if is_endpoint and openai_options(config.backend.options).endpoint == "completions":
        return False
    form, _ = prompt_form(schema, config)
    if config.chat_template is not None or form in ("ids", "pair"):
        return False
    return form in ("contents", "messages", "row") or config.is_chat(has_template=True)


def max_model_len(config: StageConfig, model_dir: Path | None) -> int | None:
    """Return the maximum tokens of prompt plus output; None if unknown."""
    # called even if the option is set: the backend may refuse the model
    length = type_of(config.backend).max_model_len(config.backend, config.engine, model_dir)
    return length if config.engine.max_model_len is None else config.engine.max_model_len


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
        """Return a prompt of messages; template options are refused, see `check_endpoint`."""
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


PromptTokenizer = Tokenizer | EndpointTokenizer


def check_endpoint(config: StageConfig) -> None:
    """Raise ConfigError if a stage has an option that endpoints do not support."""
    if not type_of(config.backend).is_endpoint:
        return
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
