"""What the driver has to know of a model that only vLLM runs, read without vLLM."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raybatch.backends.base import ScoreForm
from raybatch.errors import ConfigError, error_text

# ends of the names of architectures that vLLM takes for classifiers
_CLASSIFIERS = ("ForSequenceClassification", "ClassificationModel", "ForTextClassification")

# where configs keep the length of the context; the smallest counts
_POSITIONS = ("max_position_embeddings", "n_positions", "max_target_positions")
_SEQUENCES = ("max_seq_len", "seq_length", "max_sequence_length", "max_seq_length", "seq_len")
_LENGTHS = (*_POSITIONS, *_SEQUENCES, "model_max_length")
# kinds of rotary scaling whose configs name the scaled length already
_SCALED = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")
# of sentence transformers, in the order of vLLM
_SENTENCE_CONFIGS = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
# where configs say how many experts there are
_EXPERTS = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")
# of models that name no length, as in vLLM
_DEFAULT_LENGTH = 2048


def pooled_length(model_dir: Path, *, trust_remote_code: bool = False) -> int:
    """Return the longest prompt that vLLM accepts for a model in a pooling task.

    It is `model_length`, or less if the model has absolute positions and its tokenizer has a limit,
    or if it is a sentence transformer with a limit. `trust_remote_code` as there.
    """
    for name in _SENTENCE_CONFIGS:
        path = model_dir / name
        length = _read_json(path).get("max_seq_length") if path.is_file() else None
        if length is not None:
            return int(length)
    longest = model_length(model_dir, trust_remote_code=trust_remote_code)
    config = _read_config(model_dir, trust_remote_code=trust_remote_code)
    path = model_dir / "tokenizer_config.json"
    if config.get("position_embedding_type") != "absolute" or not path.is_file():
        return longest
    return int(min(longest, _read_json(path).get("model_max_length") or longest))


def model_length(model_dir: Path, *, trust_remote_code: bool = False) -> int:
    """Return the longest prompt plus output that vLLM accepts for a model by default.

    `trust_remote_code` lets code in the folder run if transformers lacks the architecture.
    """
    config = _read_config(model_dir, trust_remote_code=trust_remote_code)
    if config.get("model_max_length"):
        length = float(config["model_max_length"])
    else:
        named = [config[name] for name in _LENGTHS if isinstance(config.get(name), int)]
        length = float(min(named, default=_DEFAULT_LENGTH))
    scalings = _rope_scalings(config)
    if any(_kind(scaling) == "longrope" for scaling in scalings):
        return int(config.get("original_max_position_embeddings") or length)
    if "gemma3" not in str(config.get("model_type")):
        factors = [s.get("factor") for s in scalings if _kind(s) not in _SCALED]
        length *= next((float(factor) for factor in reversed(factors) if factor), 1.0)
    return int(length)


def has_experts(model_dir: Path) -> bool:
    """Return whether vLLM treats a model as a mixture of experts, by its config.json."""
    raw = _read_json(model_dir / "config.json")
    config = raw.get("text_config") or raw
    blocks = config.get("block_configs") or ()
    return any(config.get(name) for name in _EXPERTS) or any(
        isinstance(block, Mapping) and block.get("n_routed_experts") for block in blocks
    )


def _read_config(model_dir: Path, *, trust_remote_code: bool) -> dict[str, Any]:
    """Return the config of the text model: as it lies where that says enough, or with defaults."""
    raw = _read_json(model_dir / "config.json")
    if isinstance(raw.get("max_position_embeddings"), int) and "text_config" not in raw:
        return raw
    # seconds to load, and few models need their defaults
    from transformers import AutoConfig

    try:
        loaded = AutoConfig.from_pretrained(model_dir, trust_remote_code=trust_remote_code)
        config: dict[str, Any] = loaded.get_text_config().to_dict()
    except Exception:  # what transformers does not know, vLLM may
        config = raw.get("text_config") or raw
    return config


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read ({error_text(error)}); pass the folder of a Hugging Face "
            "checkpoint"
        ) from error
    return raw


def _rope_scalings(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the rotary options: one for all layers, or one for each kind of layer."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return [value for value in rope.values() if isinstance(value, Mapping)] or [rope]


def _kind(scaling: Mapping[str, Any]) -> str:
    return str(scaling.get("rope_type") or scaling.get("type") or "default")


def form_of_scores(model_dir: Path, engine_kwargs: Mapping[str, Any]) -> ScoreForm:
    """Return how a model gets query and document of a score, as in vLLM's `LLM.score`."""
    config, overrides = _read_json(model_dir / "config.json"), engine_kwargs.get("hf_overrides")
    config |= overrides if isinstance(overrides, Mapping) else {}
    is_classifier = engine_kwargs.get("convert", "auto") == "classify"
    if engine_kwargs.get("convert", "auto") in ("auto", "none"):
        names = config.get("architectures") or []
        is_classifier = any(name.endswith(_CLASSIFIERS) for name in names)
    if not is_classifier:
        return "apart"
    # classifiers made of a language model have learned the texts without a border
    is_made = any(config.get(name) for name in ("method", "is_original_qwen3_reranker"))
    has_border = config.get("use_pad_token", config.get("use_sep_token", not is_made))
    return "pair" if has_border else "joined"
