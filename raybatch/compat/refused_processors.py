"""Configs of ray.data.llm for what runs otherwise here: each says how when it is made."""

from typing import Any

from raybatch.errors import ConfigError

_ENDPOINT = (
    'ProcessorConfig(model_source=..., backend={"kind": "openai", "options": {"base_url": ...}}), '
    "which sends messages or prompts to an endpoint of OpenAI's API and takes care of rate limits "
    "and retries (docs/how-to/endpoints.md)"
)


class _Refused(type):
    """Makes a call of the class an error that names what to use."""

    instead: str

    def __call__(cls, *args: object, **options: object) -> Any:  # noqa: ANN401
        raise ConfigError(f"{cls.__name__} is not supported; use {cls.instead}")


class HttpRequestProcessorConfig(metaclass=_Refused):
    """Refused: requests to an endpoint are a backend of any stage."""

    instead = _ENDPOINT


class HttpRequestStageConfig(metaclass=_Refused):
    """Refused, as `HttpRequestProcessorConfig`."""

    instead = _ENDPOINT


class ServeDeploymentProcessorConfig(metaclass=_Refused):
    """Refused: processors with the same model and options share their engines anyway."""

    instead = (
        "vLLMEngineProcessorConfig: processors with the same model and options share their engines "
        "within one driver; a server of Ray Serve LLM that runs already is an endpoint: "
        f"{_ENDPOINT}"
    )


class SGLangEngineProcessorConfig(metaclass=_Refused):
    """Refused: SGLang does not run inside a replica."""

    instead = f"vLLMEngineProcessorConfig, or a server of SGLang as an endpoint: {_ENDPOINT}"
