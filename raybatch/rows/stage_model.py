"""The model of a stage on the driver and its feeders: folder, tokenizer, context length.

An endpoint renders and tokenizes itself; rows are sent as messages or text. Plans still need token
ids, which its own `PromptTokenizer` makes.
"""

from importlib.util import find_spec
from pathlib import Path

import pyarrow as pa

from raybatch.backends.endpoint import PromptTokenizer
from raybatch.backends.registry import check_files, type_of
from raybatch.errors import ConfigError
from raybatch.installation import weight_sharing
from raybatch.models.config import warn_of_end_tokens
from raybatch.models.source import (
    check_weights_exist,
    is_local_model,
    lacks_weights,
    resolve_config,
    resolve_tokenizer,
)
from raybatch.rows.options import StageConfig
from raybatch.rows.prompt_inputs import prompt_form
from raybatch.text.tokenizer import Tokenizer


def find_model(config: StageConfig) -> Path | None:
    """Return the folder of the stage's model; it may lack weights if they are elsewhere.

    For an endpoint it only has the tokenizer; None if the options name none.
    """
    backend_type = type_of(config.backend)
    if backend_type.endpoint is not None:
        tokenizer = backend_type.endpoint.tokenizer(config.backend)
        return None if tokenizer is None else resolve_tokenizer(tokenizer)
    if not backend_type.has_weights and Path(config.model).is_dir():
        return Path(config.model)  # this backend needs no weights in the folder
    return resolve_config(config.model)


def load_tokenizer(config: StageConfig, folder: Path | None) -> PromptTokenizer:
    """Return the tokenizer for the prompts of a stage; `folder` is from `find_model`."""
    tokenizer = None if folder is None else Tokenizer.load(folder)
    if (endpoint := type_of(config.backend).endpoint) is not None:
        return endpoint.prompts(config.backend, tokenizer)
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
        weight_sharing().check_slots(config, folder, backend_type.shares_shards)
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


def _reads_template(config: StageConfig, schema: pa.Schema) -> bool:
    """Return whether rows are rendered with the chat template of the model, if it has one."""
    endpoint = type_of(config.backend).endpoint
    if endpoint is not None and not endpoint.prompts(config.backend, None).has_chat_template:
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
