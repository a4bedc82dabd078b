"""The model of a stage on the driver and its feeders: folder, tokenizer, context length.

An endpoint renders and tokenizes by itself, and a row is sent as messages or as text. Plans need
token ids all the same: those of a tokenizer that the options name, else triples of bytes, of which
equal beginnings of texts have equal ones.
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
from raybatch.policy.ownership import Ownership, most_tiles, usual_way
from raybatch.records.types import TokenIds
from raybatch.rows.options import StageConfig
from raybatch.rows.prompt_inputs import prompt_form
from raybatch.text.chat import InvalidPrompt, check_messages, for_api, map_texts
from raybatch.text.tokenizer import Encoded, Tokenizer

TRIPLE_BYTES = 3


def find_model(config: StageConfig) -> Path | None:
    """Return the folder of the stage's model, without weights where they lie elsewhere.

    Of an endpoint's model it has the tokenizer alone; None where the options name none.
    """
    facts = type_of(config.backend)
    if facts.is_endpoint:
        tokenizer = openai_options(config.backend.options).tokenizer
        return None if tokenizer is None else resolve_tokenizer(tokenizer)
    if not facts.has_weights and Path(config.model).is_dir():
        return Path(config.model)  # it has no weights, and its folder needs none
    return resolve_config(config.model)


def load_tokenizer(config: StageConfig, folder: Path | None) -> "PromptTokenizer":
    """Return what tokenizes the prompts of a stage; `folder` is that of `find_model`."""
    tokenizer = None if folder is None else Tokenizer.load(folder)
    if type_of(config.backend).is_endpoint:
        return EndpointTokenizer(openai_options(config.backend.options), tokenizer)
    assert tokenizer is not None, "only an endpoint's model has no folder"
    return tokenizer


def check_model(config: StageConfig, schema: pa.Schema) -> None:
    """Refuse a model, a grammar or memory for it that cannot be run, as far as this host can tell.

    No weights are loaded and no engine is started. Of a model that lies elsewhere the config and
    the tokenizer are fetched, and its engines look at the weights.

    Raises:
        ConfigError: the first of them.
        CapacityError: the KV cache does not hold a block.
    """
    facts, engine = type_of(config.backend), config.engine
    is_here = not facts.is_endpoint and is_local_model(config.model)
    has_weights = is_here and not (facts.has_weights and lacks_weights(config.model))
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
        if not (has_weights or facts.is_endpoint) and facts.reads_safetensors(config.backend):
            check_weights_exist(config.model, folder)
    max_model_len(config, folder)
    if config.task == "generate" and not facts.is_endpoint and folder is not None:
        warn_of_end_tokens(folder)
    if engine.weights == "shared" and folder is not None:
        _check_slots(config, folder)
    constraint = config.sampling.structured_outputs
    if isinstance(constraint, str) and facts.checks_grammars:
        from raybatch.engine.sampling.grammars import check_grammar

        if error := check_grammar(constraint):
            raise ConfigError(f"sampling.{error}")
    budgets = (engine.kv_cache_bytes, engine.host_kv_bytes, engine.device_weight_bytes)
    has_budget = facts.obeys_engine_options and any(isinstance(budget, int) for budget in budgets)
    # a driver without torch leaves it to the engines
    if has_budget and find_spec("torch") is not None:
        from raybatch.engine.loading.loaded_model import check_budgets

        assert folder is not None, "only an endpoint's model has no folder"
        check_budgets(folder, engine, has_weights=has_weights)


def _check_slots(config: StageConfig, folder: Path) -> None:
    """Raise ConfigError where there are fewer buffers for shared weights than a group needs."""
    size, num_slots = config.pool.share_group, config.engine.given_buffers
    if size is None or num_slots is None:
        return
    shares_tiles = type_of(config.backend).shares_tiles
    try:
        spec = read_model_spec(folder)
    except ConfigError:
        if shares_tiles:
            raise
        # of an engine that knows more models, and counts layers itself
        return
    by = usual_way(most_tiles(spec), size, shares_tiles=shares_tiles)
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
    """Return the longest prompt plus output that the engines take; None if nothing says it."""
    # also where the length is given: the backend may refuse the model
    length = type_of(config.backend).max_model_len(config.backend, config.engine, model_dir)
    return length if config.engine.max_model_len is None else config.engine.max_model_len


class EndpointTokenizer:
    """A tokenizer whose prompts carry what an endpoint is sent; ids are triples without `inner`."""

    def __init__(self, options: OpenAIOptions, inner: Tokenizer | None = None) -> None:
        self._inner = inner
        # the endpoint has the template
        self.has_chat_template = options.endpoint != "completions"
        self.vocab_size = (1 << 31) - 1 if inner is None else inner.vocab_size
        self.bos_id = None if inner is None else inner.bos_id
        # the endpoint knows where an answer ends
        self.special_token_ids: Mapping[str, int] = {}

    def count_special(self, text: str) -> int:
        return 0 if self._inner is None else self._inner.count_special(text)

    def template_reads(self, name: str, **_: object) -> bool:
        # it is a field of a request
        return name == "tools"

    def encode(self, text: str, *, special_tokens: SpecialTokens = "escape") -> TokenIds:
        return self.read(text, special_tokens=special_tokens).token_ids

    def read(self, text: str, *, special_tokens: SpecialTokens = "escape") -> Encoded:
        """Return a plain prompt; special tokens in it are whatever the endpoint makes of them."""
        if not isinstance(text, str):
            raise InvalidPrompt(f"prompt must be a string, got {type(text).__name__}")
        if not text:
            raise InvalidPrompt("prompt is empty")
        payload = _json({"prompt": text})
        if self._inner is None:
            return Encoded(triples(text), payload=payload)
        return self._inner.read(text, special_tokens="allow")._replace(payload=payload)

    def read_chat(
        self, messages: object, *, row_options: Mapping[str, Any] | None = None, **_: object
    ) -> Encoded:
        """Return a prompt of messages; `check_endpoint` refuses options of the template."""
        fields = dict(row_options or {})
        if others := [name for name in fields if name != "tools"]:
            raise InvalidPrompt(
                f"options of the chat template ({', '.join(others)}) cannot be sent to an "
                "endpoint, which renders messages itself"
            )
        checked = for_api(check_messages(messages, kinds=None))
        # what many rows share comes first
        payload = _json({**fields, "messages": checked})
        short = map_texts(checked, _shortened)
        contents = (m["content"] for m in checked if isinstance(m["content"], list))
        has_media = any(part["type"] != "text" for content in contents for part in content)
        if self._inner is None or not self._inner.has_chat_template or has_media:
            # the whole text, so that different messages never have equal ids
            return Encoded(triples(_json({**fields, "messages": short})), payload=payload)
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
    """Raise ConfigError where a stage has an option that no endpoint can follow."""
    if not type_of(config.backend).is_endpoint:
        return
    options = openai_options(config.backend.options)
    if config.chat_template is not None or config.chat_template_kwargs:
        raise ConfigError(
            "chat_template and chat_template_kwargs have no effect on an endpoint, which renders "
            "messages itself; a server that takes them takes them in backend.options.extra_body"
        )
    is_chat = config.messages is not None or config.system is not None or config.chat is True
    if config.task == "embed" and options.endpoint != "auto":
        raise ConfigError(
            f"backend.options.endpoint is {options.endpoint!r}, and task 'embed' asks the endpoint "
            "for embeddings; leave it out"
        )
    if config.task == "embed" and is_chat:
        raise ConfigError(
            "embeddings are made of texts; messages, system and chat=True have no place in a "
            "request for one"
        )
    if options.endpoint == "completions" and is_chat:
        raise ConfigError(
            "backend.options.endpoint is 'completions', which takes texts; messages, system and "
            "chat=True need endpoint: chat"
        )
    is_text = config.prompt is not None and config.chat is False
    if options.endpoint == "chat" and (config.tokenized_prompt is not None or is_text):
        raise ConfigError(
            "backend.options.endpoint is 'chat', which takes messages; tokenized_prompt, and "
            "prompt with chat=False, need endpoint: completions"
        )
    if config.on_too_long.startswith("truncate") and config.tokenized_prompt is None:
        raise ConfigError(
            f"on_too_long={config.on_too_long!r} cuts token ids, and an endpoint is sent texts; "
            "leave it out, or set on_too_long='drop'"
        )
    has_limit = options.max_model_len is not None or config.engine.max_model_len is not None
    # else the ids of prompts are those that the endpoint sees
    if has_limit and options.tokenizer is None and config.tokenized_prompt is None:
        raise ConfigError(
            "max_model_len needs backend.options.tokenizer, for without the model's tokenizer "
            "nothing here knows how long a prompt is; leave it out, and the endpoint refuses the "
            "rows that are too long"
        )


def triples(text: str) -> TokenIds:
    """Return the UTF-8 bytes of a text, three in each id, with their number above them.

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
    """Return the text of triples; what is cut in a character at an end is left out."""
    data = b"".join(
        int(token_id & 0xFFFFFF).to_bytes(TRIPLE_BYTES, "little")[: int(token_id) >> 24]
        for token_id in token_ids
    )
    return data.decode("utf-8", "ignore")


def _shortened(text: str) -> str:
    """Return a text that is no longer than an image costs; data: URLs differ as before."""
    if not text.startswith("data:"):
        return text
    return f"data:{hashlib.blake2b(text.encode(), digest_size=32).hexdigest()}"


def _json(payload: Mapping[str, Any]) -> str:
    try:
        text = json.dumps(payload, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise InvalidPrompt(f"the messages cannot be sent as JSON: {error}") from error
    _utf8(text)
    return text


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidPrompt("the prompt has a lone surrogate, which is no character") from error
