"""Starts the backend of an endpoint: secrets from the environment, and a first question."""

from collections.abc import Mapping

from raybatch.backends.openai.backend import OpenAIBackend
from raybatch.backends.openai.errors import message_of_answer, secrets_in
from raybatch.backends.openai.http import HttpThread
from raybatch.backends.openai.options import OpenAIOptions, headers_of
from raybatch.config import environment, proxy_of
from raybatch.errors import EndpointError, EndpointUnreachable
from raybatch.records.types import Task

_PROBE_S = 30.0


def create(
    options: OpenAIOptions, model: str, *, task: Task = "generate", num_replicas: int = 1
) -> OpenAIBackend:
    """Return a backend for an endpoint that answers and knows the key.

    Args:
        options: of the endpoint.
        model: of the stage.
        task: of the stage.
        num_replicas: that share the budgets.

    Raises:
        ConfigError: a variable of the environment is not set here.
        EndpointError: nothing answers, or the key is refused.
    """
    headers, proxy = headers_of(options, environment()), proxy_of(options.base_url)
    _probe(options, headers, proxy)
    name = model if options.model is None else options.model
    return OpenAIBackend(options, name, headers, task=task, num_replicas=num_replicas, proxy=proxy)


def _probe(options: OpenAIOptions, headers: Mapping[str, str], proxy: str | None) -> None:
    """Raise EndpointError where no request can be answered; it asks for the list of models."""
    timeout_s = min(options.timeout_s, _PROBE_S)
    http = HttpThread(options.base_url, headers, timeout_s, proxy=proxy)
    try:
        http.send(0, "/models", None)
        answers = http.collect(_PROBE_S + 1)
    finally:
        http.close()
    for answer in answers:
        said = message_of_answer(answer, secrets_in(headers))
        if answer.failure == "refused":
            raise EndpointUnreachable(
                f"{options.base_url} cannot be reached ({said}); start the server, or mend base_url"
            )
        # not every endpoint lists its models, and not every key may see the list
        if answer.status == 401:
            raise EndpointError(
                f"{options.base_url} refuses the key ({said}); api_key_env names the variable that "
                "holds it"
            )
