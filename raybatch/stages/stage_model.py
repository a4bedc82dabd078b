"""The model of a stage on the driver and its feeders: folder, tokenizer, context length."""

from importlib.util import find_spec
from pathlib import Path

from raybatch.backends.openai_options import openai_options
from raybatch.backends.options import length_of_model
from raybatch.engine.model_source import (
    check_hub_model,
    is_local_model,
    resolve_model,
    resolve_tokenizer,
)
from raybatch.engine.prompt_tokenizer import PromptTokenizer
from raybatch.engine.tokenizer import Tokenizer
from raybatch.errors import ConfigError
from raybatch.stages.endpoint import EndpointTokenizer
from raybatch.stages.options import StageConfig

__all__ = ["check_model", "find_model", "load_tokenizer", "max_model_len"]


def find_model(config: StageConfig) -> Path | None:
    """Return the folder of the stage's model, downloading it where needed.

    Of an endpoint's model it has the tokenizer alone; None where the options name none.

    Raises:
        ConfigError: nothing is there, or no model.
    """
    if config.backend.kind == "openai":
        tokenizer = openai_options(config.backend.options).tokenizer
        return None if tokenizer is None else resolve_tokenizer(tokenizer)
    if config.backend.kind == "fake" and Path(config.model).is_dir():
        return Path(config.model)  # it has no weights, and its folder needs none
    return resolve_model(config.model)


def load_tokenizer(config: StageConfig, folder: Path | None) -> PromptTokenizer:
    """Return what tokenizes the prompts of a stage; `folder` is that of `find_model`.

    Raises:
        ConfigError: there is no tokenizer that can be used.
    """
    tokenizer = None if folder is None else Tokenizer.load(folder)
    if config.backend.kind == "openai":
        return EndpointTokenizer(openai_options(config.backend.options), tokenizer)
    assert tokenizer is not None, "only an endpoint's model has no folder"
    return tokenizer


def check_model(config: StageConfig, *, is_one_host: bool) -> None:
    """Refuse a model, a grammar or memory for it that cannot be run, as far as this host can tell.

    Args:
        config: of the stage.
        is_one_host: the engines run on this host, so what it lacks of the hub, they lack.

    Raises:
        ConfigError: the first of them.
        CapacityError: the KV cache does not hold a block.
    """
    if config.backend.kind == "openai" or is_local_model(config.model):
        max_model_len(config, find_model(config))
    elif is_one_host and "://" not in config.model:
        check_hub_model(config.model)
    constraint = config.sampling.structured_outputs
    if isinstance(constraint, str) and config.backend.kind in ("native", "transformers"):
        from raybatch.engine.grammars import check_grammar

        if error := check_grammar(constraint):
            raise ConfigError(f"sampling.{error}")
    _check_budgets(config)


def _check_budgets(config: StageConfig) -> None:
    """Refuse memory in which the native engine cannot run the model."""
    engine = config.engine
    budgets = (engine.kv_cache_bytes, engine.host_kv_bytes, engine.device_weight_bytes)
    if config.backend.kind != "native" or all(budget is None for budget in budgets):
        return
    # a driver without torch leaves it to the engines
    if find_spec("torch") is None:
        return
    from raybatch.engine.budgets import check_budgets

    folder = find_model(config)
    assert folder is not None, "only an endpoint's model has no folder"
    check_budgets(folder, engine)


def max_model_len(config: StageConfig, model_dir: Path | None) -> int | None:
    """Return the longest prompt plus output that the engines take; None if nothing says it."""
    # also where the length is given: the backend may refuse the model
    length = length_of_model(config.backend, config.engine, model_dir)
    return length if config.engine.max_model_len is None else config.engine.max_model_len
