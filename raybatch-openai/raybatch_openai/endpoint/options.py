"""Options of an OpenAI-compatible endpoint; they name environment variables, never a secret."""

import re
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from annotated_types import Ge
from pydantic.dataclasses import dataclass

from raybatch.config.option import (
    CHECKED,
    Answers,
    Decides,
    NonNegative,
    NonNegativeFloat,
    Place,
    Positive,
    Speed,
    Unchecked,
    decided_by,
    fields_of,
    from_mapping,
    options,
)
from raybatch.errors import ConfigError

Endpoint = Literal["chat", "completions", "auto"]
MaxTokensField = Literal["max_tokens", "max_completion_tokens"]

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# options that decide answers as columns do, which the fingerprint of a job names as such
_COLUMNS = ("return_reasoning", "return_tool_calls")
# set by the backend itself
_RESERVED_FIELDS = ("model", "messages", "prompt", "input", "n", "stream", "stream_options")


@options("backend.options.")
@dataclass(frozen=True, kw_only=True, slots=True, config=CHECKED)
class OpenAIOptions:
    """Address, key, rate limits and prices of an endpoint."""

    base_url: Answers[Unchecked[str]]
    """URL of the API with its version, such as "http://localhost:8000/v1"."""
    model: Place[str | None] = None
    """Name of the model at the endpoint; None takes the stage's model."""
    api_key_env: Place[Unchecked[str | None]] = None
    """Environment variable with the API key, on the replicas' hosts."""
    api_key_file: Place[Unchecked[str | None]] = None
    """File with the API key on the replicas' hosts, instead of `api_key_env`."""
    headers_env: Place[Unchecked[Mapping[str, str]]] = field(default_factory=dict)
    """Further headers: header name to the environment variable with its value."""
    endpoint: Answers[Endpoint] = "auto"
    """Either "chat" or "completions"; "auto" chooses by the kind of prompt."""
    max_concurrency: Speed[Positive] = 256
    """Most samples in flight per replica; adapts to the endpoint."""
    first_concurrency: Speed[Positive] = 16
    """Samples in flight at the start."""
    timeout_s: Speed[Annotated[float, Ge(0.001)]] = 600.0
    """Seconds for one request, from the connection to the last byte."""
    max_retries: Speed[NonNegative] = 8
    """Retries of a row after failures that may pass."""
    requests_per_minute: Speed[Annotated[float, Ge(0.001)] | None] = None
    """Limit of all replicas together; None is no limit."""
    tokens_per_minute: Speed[Annotated[float, Ge(0.001)] | None] = None
    """Limit of prompt plus output tokens of all replicas; None is no limit."""
    price_per_million_input_tokens: Speed[NonNegativeFloat | None] = None
    """Price in any currency; None counts no cost."""
    price_per_million_cached_input_tokens: Speed[NonNegativeFloat | None] = None
    """None takes the price of other input tokens."""
    price_per_million_output_tokens: Speed[NonNegativeFloat | None] = None
    """Price in any currency; None counts no cost."""
    max_tokens_field: Speed[MaxTokensField] = "max_tokens"
    """Name of the field for `max_tokens` in chat requests."""
    send_seed: Answers[bool] = True
    """Send a seed with rows whose temperature is above 0."""
    extra_body: Answers[Mapping[str, Any]] = field(default_factory=dict)
    """Fields added to every request; null removes one."""
    tokenizer: Answers[str | None] = None
    """Folder, hub id or "demo" of the model's tokenizer, for exact lengths in plans; None counts
    three bytes as a token."""
    max_model_len: Answers[Annotated[int, Ge(2)] | None] = None
    """Longest prompt plus output; needs a tokenizer, or rows of token ids."""
    return_reasoning: Answers[bool] = False
    """Add a column `reasoning` with the endpoint's reasoning."""
    return_tool_calls: Answers[bool] = False
    """Add a column `tool_calls`; without it a message of only calls has their JSON as its text."""

    def __post_init__(self) -> None:
        _check_url(self.base_url)
        _check_variables(self)
        if self.api_key_file is not None and (
            self.api_key_env is not None or not isinstance(self.api_key_file, str)
        ):
            raise ConfigError(
                "backend.options.api_key_file must be a path, and excludes api_key_env; leave one "
                "of them out"
            )
        if reserved := sorted(set(self.extra_body) & set(_RESERVED_FIELDS)):
            raise ConfigError(
                f"backend.options.extra_body sets {', '.join(reserved)}, which the backend sets "
                "itself; remove them"
            )

    @property
    def has_prices(self) -> bool:
        """Whether a price is set, so that a run reports its cost."""
        prices = [name for name in fields_of(OpenAIOptions) if name.startswith("price_")]
        return any(getattr(self, name) is not None for name in prices)

    def cost(self, input_tokens: int, cached_tokens: int, output_tokens: int) -> float:
        """Return the cost of one request by the prices; `input_tokens` includes `cached_tokens`."""
        price = self.price_per_million_input_tokens or 0.0
        cached_price = self.price_per_million_cached_input_tokens
        total = (input_tokens - cached_tokens) * price
        total += cached_tokens * (price if cached_price is None else cached_price)
        total += output_tokens * (self.price_per_million_output_tokens or 0.0)
        return total / 1e6


def openai_options(options: Mapping[str, Any]) -> OpenAIOptions:
    """Return the checked options in `backend.options`; raise ConfigError for invalid ones."""
    if "base_url" not in options:
        raise ConfigError(
            "backend.options: base_url is missing; set it to the API with its version, "
            "such as base_url: http://localhost:8000/v1"
        )
    return from_mapping(OpenAIOptions, options, where="backend.options")


def decisive_options(options: Mapping[str, Any], model: str) -> dict[str, Any]:
    """Return the options that decide answers, by name, with the model's name at the endpoint.

    `model` is the stage's, for options that name none.
    """
    checked = openai_options(options)
    deciding = {
        name: getattr(checked, name)
        for name, field in fields_of(OpenAIOptions).items()
        if decided_by(field) is Decides.ANSWERS and name not in _COLUMNS
    }
    return {**deciding, "model": model if checked.model is None else checked.model}


def headers_of(options: OpenAIOptions, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the secret request headers, from environment variables and the key file.

    Only the process that sends requests may call it. Raises ConfigError if a secret is missing.
    """

    def of_variable(name: str) -> str:
        return _checked(environment.get(name), f"the environment variable {name}")

    headers = {header: of_variable(name) for header, name in options.headers_env.items()}
    if options.api_key_env is not None:
        headers["Authorization"] = f"Bearer {of_variable(options.api_key_env)}"
    elif options.api_key_file is not None:
        where = f"the file {options.api_key_file}"
        try:
            key = _checked(Path(options.api_key_file).read_text(encoding="utf-8"), where)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{where} of api_key_file cannot be read where the replica runs "
                f"({type(error).__name__}); mount it on every host"
            ) from None
        headers["Authorization"] = f"Bearer {key}"
    return headers


def _checked(value: str | None, where: str) -> str:
    """Return what a header can hold; the value itself is in no error."""
    value = (value or "").strip()
    if not value:
        raise ConfigError(
            f"{where} is not set where the replica runs, or is empty; set it before Ray starts on "
            "that host, or name a mounted file in api_key_file"
        )
    if not value.isascii() or not value.isprintable():
        raise ConfigError(
            f"the value of {where} cannot be in an HTTP header; use printable ASCII characters only"
        )
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
            "backend.options.base_url must not contain a password or a query; put the key into an "
            "environment variable, and name that in api_key_env, or in headers_env for another "
            "header"
        )


def _check_variables(options: OpenAIOptions) -> None:
    if not isinstance(options.headers_env, Mapping):
        raise ConfigError(
            "backend.options.headers_env must map headers to the names of environment variables"
        )
    named = {f"headers_env[{header!r}]": name for header, name in options.headers_env.items()}
    for option, name in {"api_key_env": options.api_key_env, **named}.items():
        is_name = isinstance(name, str) and _VARIABLE.fullmatch(name) and len(name) <= 64
        if name is not None and not is_name:
            # the value may be the secret itself, so it is not repeated
            raise ConfigError(
                f"backend.options.{option} must be the name of an environment variable, such as "
                "OPENAI_API_KEY, and not the value itself"
            )
