"""Decides who loads the weights of a model: raybatch into a folder, or vLLM itself."""

from collections.abc import Mapping
from typing import Any

from raybatch.models.source import resolve_model, resolve_tokenizer

# values of `load_format` that read no weights of the model's folder
_ELSEWHERE = ("dummy", "tensorizer")
# and those that read them from a bucket, next to which vLLM finds config and tokenizer by itself
_STREAMED = ("runai_streamer", "runai_streamer_sharded")
_BUCKETS = ("s3://", "gs://", "az://")


def is_streamed(model: str, engine_kwargs: Mapping[str, Any]) -> bool:
    """Return whether vLLM itself reads the model from its bucket."""
    return engine_kwargs.get("load_format") in _STREAMED and model.startswith(_BUCKETS)


def fetches_weights(model: str, engine_kwargs: Mapping[str, Any]) -> bool:
    """Return whether raybatch downloads the weights to the host of an engine."""
    is_elsewhere = engine_kwargs.get("load_format") in _ELSEWHERE
    return not is_elsewhere and not is_streamed(model, engine_kwargs)


def model_for(model: str, engine_kwargs: Mapping[str, Any]) -> str:
    """Download the files of a model that the engine needs; return vLLM's argument `model`."""
    if is_streamed(model, engine_kwargs):
        return model
    resolve = resolve_model if fetches_weights(model, engine_kwargs) else resolve_tokenizer
    return str(resolve(model))
