"""Options of an OpenAI-compatible endpoint; they name environment variables, never a secret."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args
from urllib.parse import urlsplit

from raybatch.config import check_choice, check_min, check_whole, from_mapping
from raybatch.errors import ConfigError

Endpoint = Literal["chat", "completions", "auto"]
MaxTokensField = Literal["max_tokens", "max_completion_tokens"]

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# of all options, those that decide an answer
_DECISIVE = (
    "base_url",
    "endpoint",
    "tokenizer",
    "max_model_len",
    "send_seed",
    "extra_body",
)
# what the backend itself says in a request
_OWN_FIELDS = ("model", "messages", "prompt", "input", "n", "stream", "stream_options")


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenAIOptions:
    """Options of the backend "openai".

    Args:
        base_url: of the API, with its version, such as "http://localhost:8000/v1".
        model: name at the endpoint; None takes the stage's model.
        api_key_env: environment variable that holds the API key where replicas run.
        api_key_file: in place of `api_key_env` a file with the key, on every host with replicas.
        headers_env: header to the environment variable that holds its value.
        endpoint: "chat" or "completions"; "auto" asks each row at the one that its prompt is for.
        max_concurrency: samples in flight at most; how many really are adapts to the endpoint.
        first_concurrency: samples in flight at first.
        timeout_s: of one request, from the connection to the last byte.
        max_retries: how often a row is asked again after failures that may pass.
        requests_per_minute: of all replicas together; None knows no limit.
        tokens_per_minute: prompt and output, of all replicas together; None knows no limit.
        price_per_million_input_tokens: None knows no price.
        price_per_million_cached_input_tokens: None takes that of other input tokens.
        price_per_million_output_tokens: None knows no price.
        max_tokens_field: name of the output limit in chat requests.
        send_seed: send a seed with rows whose temperature is above 0.
        extra_body: put into every request; null takes a field out.
        tokenizer: folder, hub id or "demo" with the model's tokenizer, for exact lengths in plans;
            None plans with triples of bytes.
        max_model_len: longest prompt plus output; needs a tokenizer, or rows of token ids.
        return_reasoning: add a column `reasoning` of what the endpoint tells of it.
        return_tool_calls: add a column `tool_calls`; without it a message that is nothing but
            calls has their JSON as its text.

    Raises:
        ConfigError: a value is out of range, or looks like a secret.
    """

    WHERE: ClassVar[str] = "backend.options."

    base_url: str
    model: str | None = None
    api_key_env: str | None = None
    api_key_file: str | None = None
    headers_env: Mapping[str, str] = field(default_factory=dict)
    endpoint: Endpoint = "auto"
    max_concurrency: int = 256
    first_concurrency: int = 16
    timeout_s: float = 600.0
    max_retries: int = 8
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    price_per_million_input_tokens: float | None = None
    price_per_million_cached_input_tokens: float | None = None
    price_per_million_output_tokens: float | None = None
    max_tokens_field: MaxTokensField = "max_tokens"
    send_seed: bool = True
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: str | None = None
    max_model_len: int | None = None
    return_reasoning: bool = False
    return_tool_calls: bool = False

    def __post_init__(self) -> None:
        _check_url(self.base_url)
        _check_variables(self)
        if self.api_key_file is not None and (
            self.api_key_env is not None or not isinstance(self.api_key_file, str)
        ):
            raise ConfigError(
                "backend.options.api_key_file is a path, and stands without api_key_env"
            )
        check_choice(self, "endpoint", get_args(Endpoint))
        check_choice(self, "max_tokens_field", get_args(MaxTokensField))
        check_whole(self, "max_concurrency", 1)
        check_whole(self, "first_concurrency", 1)
        check_whole(self, "max_retries", 0)
        check_min(self, "timeout_s", 0.001)
        for name in ("requests_per_minute", "tokens_per_minute"):
            if getattr(self, name) is not None:
                check_min(self, name, 0.001)
        for name in _PRICES:
            if getattr(self, name) is not None:
                check_min(self, name, 0)
        if self.max_model_len is not None:
            check_whole(self, "max_model_len", 2)
        for name in ("return_reasoning", "return_tool_calls"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"backend.options.{name} must be true or false")
        if not isinstance(self.extra_body, Mapping):
            raise ConfigError("backend.options.extra_body must be a mapping of request fields")
        if own := sorted(set(self.extra_body) & set(_OWN_FIELDS)):
            raise ConfigError(
                f"backend.options.extra_body sets {', '.join(own)}, which the backend says itself; "
                "leave them out"
            )

    @property
    def has_prices(self) -> bool:
        """Whether a run can say what it costs."""
        return any(getattr(self, name) is not None for name in _PRICES)

    def cost(self, input_tokens: int, cached_tokens: int, output_tokens: int) -> float:
        """Return the price of one request; `input_tokens` has the cached ones in it."""
        price = self.price_per_million_input_tokens or 0.0
        cached_price = self.price_per_million_cached_input_tokens
        total = (input_tokens - cached_tokens) * price
        total += cached_tokens * (price if cached_price is None else cached_price)
        total += output_tokens * (self.price_per_million_output_tokens or 0.0)
        return total / 1e6


_PRICES = (
    "price_per_million_input_tokens",
    "price_per_million_cached_input_tokens",
    "price_per_million_output_tokens",
)


def openai_options(options: Mapping[str, Any]) -> OpenAIOptions:
    """Return the options of a backend config.

    Raises:
        ConfigError: one is unknown, missing or wrong.
    """
    if "base_url" not in options:
        raise ConfigError(
            "backend.options: base_url is missing; name the API of the endpoint with its version, "
            "such as base_url: http://localhost:8000/v1"
        )
    return from_mapping(OpenAIOptions, options, where="backend.options")


def decisive_options(options: Mapping[str, Any], model: str) -> dict[str, Any]:
    """Return those of the options that decide an answer; `model` is the stage's."""
    found = openai_options(options)
    return {
        **{name: getattr(found, name) for name in _DECISIVE},
        "model": model if found.model is None else found.model,
    }


def headers_of(options: OpenAIOptions, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the headers with secrets; for the process that asks the endpoint alone.

    Raises:
        ConfigError: a variable is not set, or its value cannot be sent.
    """
    headers = {}
    for header, variable in options.headers_env.items():
        headers[header] = _checked(
            environment.get(variable), f"the environment variable {variable}"
        )
    key = None
    if options.api_key_env is not None:
        where = f"the environment variable {options.api_key_env}"
        key = _checked(environment.get(options.api_key_env), where)
    elif options.api_key_file is not None:
        where = f"the file {options.api_key_file}"
        try:
            key = _checked(Path(options.api_key_file).read_text(encoding="utf-8"), where)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{where} of api_key_file cannot be read where the replica runs "
                f"({type(error).__name__}); mount it on every host"
            ) from None
    return headers if key is None else {**headers, "Authorization": f"Bearer {key}"}


def _checked(value: str | None, where: str) -> str:
    """Return what a header can hold; the value itself is in no error."""
    value = (value or "").strip()
    if not value:
        raise ConfigError(
            f"{where} is not set where the replica runs, or is empty; set it before Ray starts on "
            "that host, or name a mounted file in api_key_file"
        )
    if not value.isascii() or not value.isprintable():
        raise ConfigError(f"{where} holds no header value")
    return value


def _check_url(url: object) -> None:
    parts = urlsplit(url) if isinstance(url, str) else None
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
        # as it stands it may hold a password
        raise ConfigError(
            "backend.options.base_url must be an http or https URL of the API with its version, "
            "such as http://localhost:8000/v1"
        )
    if parts.username or parts.password or parts.query:
        raise ConfigError(
            "backend.options.base_url must hold no password and no query; name the variable of the "
            "key in api_key_env, or of another header in headers_env"
        )


def _check_variables(options: OpenAIOptions) -> None:
    named = {"api_key_env": options.api_key_env}
    if not isinstance(options.headers_env, Mapping):
        raise ConfigError(
            "backend.options.headers_env must map headers to the names of environment variables"
        )
    named |= {f"headers_env[{header!r}]": name for header, name in options.headers_env.items()}
    for option, name in named.items():
        is_name = isinstance(name, str) and _VARIABLE.fullmatch(name) and len(name) <= 64
        if name is not None and not is_name:
            # the value may be the secret itself, so it is not repeated
            raise ConfigError(
                f"backend.options.{option} must be the name of an environment variable, such as "
                "OPENAI_API_KEY, and not the value itself"
            )
