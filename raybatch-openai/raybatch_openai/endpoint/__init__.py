"""Endpoints that speak OpenAI's API, as raybatch knows them before one is connected."""

from collections.abc import Callable

from raybatch.backends.base import Backend, BackendType, EngineStart
from raybatch.backends.endpoint import EndpointType
from raybatch.config import BackendConfig, EngineConfig
from raybatch.installation import OPENAI as NEEDS
from raybatch.records.parsed_text import REASONING, TOOL_CALLS
from raybatch_openai.endpoint.options import decisive_options, openai_options
from raybatch_openai.endpoint.prompts import EndpointTokenizer, check_stage


def _create(start: EngineStart) -> Backend:
    from raybatch_openai.endpoint.backend import create

    options = openai_options(start.backend.options)
    # which share the budgets of an endpoint
    num_replicas = start.num_replicas or 1
    return create(options, start.model, task=start.backend.task, num_replicas=num_replicas)


def _parsed_columns(backend: BackendConfig, engine: EngineConfig) -> tuple[str, ...]:
    options = openai_options(backend.options)
    columns = {REASONING: options.return_reasoning, TOOL_CALLS: options.return_tool_calls}
    return tuple(name for name, is_returned in columns.items() if is_returned)


def _cost(backend: BackendConfig) -> Callable[[int, int, int], float] | None:
    options = openai_options(backend.options)
    return options.cost if options.has_prices else None


OPENAI = BackendType(
    kind="openai",
    create=_create,
    max_model_len=lambda backend, *_: backend.options.get("max_model_len"),
    tasks=("generate", "embed"),
    makes="makes text and embeddings",
    package="aiohttp",
    missing=lambda: f"the backend 'openai' needs aiohttp, which comes with {NEEDS}",
    check=lambda backend, _: openai_options(backend.options),
    answering=decisive_options,
    parsed_columns=_parsed_columns,
    num_gpus=lambda *_: 0,
    may_end_process=lambda _: False,
    cost=_cost,
    endpoint=EndpointType(
        tokenizer=lambda backend: openai_options(backend.options).tokenizer,
        prompts=lambda backend, inner: EndpointTokenizer(openai_options(backend.options), inner),
        check_stage=check_stage,
    ),
    has_weights=False,
    refuses_native_options=True,
    reads_images=True,
)
