"""The model of a stage on the driver and its feeders: folder, tokenizer, context length."""

from importlib.util import find_spec
from pathlib import Path

import pyarrow as pa

from raybatch.backends.openai.options import openai_options
from raybatch.backends.registry import check_files, type_of
from raybatch.errors import ConfigError
from raybatch.models.source import check_hub_model, is_local_model, resolve_model, resolve_tokenizer
from raybatch.rows.endpoint import EndpointTokenizer
from raybatch.rows.options import StageConfig
from raybatch.rows.prompt_inputs import conventional_column
from raybatch.text.prompt_tokenizer import PromptTokenizer
from raybatch.text.tokenizer import Tokenizer


def find_model(config: StageConfig) -> Path | None:
    """Return the folder of the stage's model, downloading it where needed.

    Of an endpoint's model it has the tokenizer alone; None where the options name none.

    Raises:
        ConfigError: nothing is there, or no model.
    """
    facts = type_of(config.backend)
    if facts.is_endpoint:
        tokenizer = openai_options(config.backend.options).tokenizer
        return None if tokenizer is None else resolve_tokenizer(tokenizer)
    if not facts.has_weights and Path(config.model).is_dir():
        return Path(config.model)  # it has no weights, and its folder needs none
    return resolve_model(config.model)


def load_tokenizer(config: StageConfig, folder: Path | None) -> PromptTokenizer:
    """Return what tokenizes the prompts of a stage; `folder` is that of `find_model`.

    Raises:
        ConfigError: there is no tokenizer that can be used.
    """
    tokenizer = None if folder is None else Tokenizer.load(folder)
    if type_of(config.backend).is_endpoint:
        return EndpointTokenizer(openai_options(config.backend.options), tokenizer)
    assert tokenizer is not None, "only an endpoint's model has no folder"
    return tokenizer


def check_model(config: StageConfig, schema: pa.Schema) -> None:
    """Refuse a model, a grammar or memory for it that cannot be run, as far as this host can tell.

    No weights are loaded and no engine is started; a model that lies elsewhere is fetched.

    Args:
        config: of the stage.
        schema: of the rows.

    Raises:
        ConfigError: the first of them.
        CapacityError: the KV cache does not hold a block.
    """
    facts = type_of(config.backend)
    is_elsewhere = not facts.is_endpoint and not is_local_model(config.model)
    if is_elsewhere and "://" not in config.model:
        check_hub_model(config.model)
    folder = find_model(config)
    if folder is not None:
        reads = _reads_template(config, schema)
        has_tools = bool(config.tools) and not isinstance(config.tools, str)
        check_files(folder, config.backend, reads_template=reads, has_tools=has_tools)
    max_model_len(config, folder)
    constraint = config.sampling.structured_outputs
    if isinstance(constraint, str) and facts.checks_grammars:
        from raybatch.engine.sampling.grammars import check_grammar

        if error := check_grammar(constraint):
            raise ConfigError(f"sampling.{error}")
    _check_budgets(config)


def _reads_template(config: StageConfig, schema: pa.Schema) -> bool:
    """Return whether rows are rendered with the chat template of the model, if it has one."""
    is_completion = (
        type_of(config.backend).is_endpoint
        and openai_options(config.backend.options).endpoint == "completions"
    )
    if config.chat_template is not None or is_completion:
        return False
    column = conventional_column(schema, config)
    if config.messages is not None or column == "messages":
        return True
    if config.tokenized_prompt is not None or config.query is not None:
        return False
    # what is pooled is the text itself
    is_chat = config.task == "generate" if config.chat == "auto" else config.chat
    return is_chat and column != "tokenized_prompt"


def _check_budgets(config: StageConfig) -> None:
    """Refuse memory in which the native engine cannot run the model."""
    engine = config.engine
    budgets = (engine.kv_cache_bytes, engine.host_kv_bytes, engine.device_weight_bytes)
    if all(budget is None for budget in budgets):
        return
    if not type_of(config.backend).obeys_engine_options:
        return
    # a driver without torch leaves it to the engines
    if find_spec("torch") is None:
        return
    from raybatch.engine.loading.loaded_model import check_budgets

    folder = find_model(config)
    assert folder is not None, "only an endpoint's model has no folder"
    check_budgets(folder, engine)


def max_model_len(config: StageConfig, model_dir: Path | None) -> int | None:
    """Return the longest prompt plus output that the engines take; None if nothing says it."""
    # also where the length is given: the backend may refuse the model
    length = type_of(config.backend).max_model_len(config.backend, config.engine, model_dir)
    return length if config.engine.max_model_len is None else config.engine.max_model_len
