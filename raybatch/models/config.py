"""Reads a checkpoint's config.json into a frozen `ModelSpec`.

The file is parsed directly, so that an engine starts without importing transformers; defaults of
missing keys are those of the architecture in transformers.
"""

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from raybatch.errors import ConfigError
from raybatch.models.json_files import SAME_MODEL, JsonValues, backends_for, read_json

_logger = logging.getLogger(__name__)

CheckpointDType = Literal["float32", "bfloat16", "float16"]
Windows = tuple[int | None, ...]
RopeType = Literal["default", "linear", "llama3", "yarn"]

# sanity limit: lists per layer are built before any tensor is read
_MAX_LAYERS = 10_000
# files with end tokens
_TOKENIZER, _CONFIG, _GENERATION = "tokenizer_config.json", "config.json", "generation_config.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeSpec:
    """Options of rotary position embedding; those after `factor` only apply to some kinds.

    Args:
        factor: context extension relative to the original training.
        original_max_positions: context of the original training (llama3, yarn).
        truncate: round the bounds of the ramp to integers (yarn).
        attention_factor: scale of cos and sin (yarn).
    """

    kind: RopeType = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeSpec:
    """The mixture-of-experts layers of a model.

    Args:
        top_k: experts per token.
        ffn_dim: hidden size of one expert.
        norm_topk_prob: normalise the weights of the chosen experts to sum to 1.
    """

    num_experts: int
    top_k: int
    ffn_dim: int
    norm_topk_prob: bool
    is_sparse: tuple[bool, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """Everything that the engine needs to know about a model except its weights.

    Args:
        windows: for each layer the number of positions that a token attends to, including its own;
            None: all.
        eos_token_ids: tokens that end a sequence, ascending.
        max_model_len: most tokens of a prompt plus its output.
    """

    architecture: str
    vocab_size: int
    model_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_dim: int
    rms_eps: float
    has_qkv_bias: bool
    has_o_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    is_tied: bool
    rope: RopeSpec
    windows: Windows
    moe: MoeSpec | None
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    dtype: CheckpointDType

    def is_sparse(self, layer_idx: int) -> bool:
        return self.moe is not None and self.moe.is_sparse[layer_idx]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFamily:
    """Differences of an architecture from Llama.

    A new family is one more record in `FAMILIES`. Other differences (another norm, activation or
    kind of block) need code in `models/checkpoint.py` (tensor names), `engine/weights/loading.py`
    (their assembly) and `engine/forward/decoder.py`. Add a tiny model to
    `tests/engine/tiny_models.py`: its tokens must equal those of transformers.

    Args:
        defaults: transformers' defaults for keys missing in config.json.
        always_qkv_bias: q, k and v have a bias and o has none, for any `attention_bias`.
        windows: which layers have a sliding window; "if used": only with `use_sliding_window`.
        read_moe: returns the `MoeSpec` for a config and a number of layers; None for a dense
            family.
    """

    defaults: Mapping[str, Any]
    always_qkv_bias: bool = False
    may_have_mlp_bias: bool = False
    has_qk_norm: bool = False
    windows: Literal["none", "of all", "of all if used", "by layer if used"]
    read_moe: Callable[[JsonValues, int], MoeSpec] | None = None


def _read_windows(config: JsonValues, family: ModelFamily, num_layers: int) -> Windows:
    value, has_windows = config.get("sliding_window"), family.windows != "none"
    if family.windows in ("of all if used", "by layer if used"):
        has_windows = config.get("use_sliding_window", False)
    window = int(value) if has_windows and value is not None else None
    if window is None or family.windows != "by layer if used":
        return (window,) * num_layers
    first = int(config.get("max_window_layers", num_layers))
    kinds = config.get("layer_types") or [
        "sliding_attention" if i >= first else "full_attention" for i in range(num_layers)
    ]
    if len(kinds) != num_layers or set(kinds) - {"sliding_attention", "full_attention"}:
        raise ConfigError(
            f"{config.where}: layer_types must name full_attention or sliding_attention for each "
            f"of the {num_layers} layers, got {kinds!r}"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _mixtral_moe(config: JsonValues, num_layers: int) -> MoeSpec:
    return MoeSpec(
        num_experts=config.size("num_local_experts"),
        top_k=config.size("num_experts_per_tok"),
        ffn_dim=config.size("intermediate_size"),
        norm_topk_prob=True,
        is_sparse=(True,) * num_layers,
    )


def _qwen3_moe(config: JsonValues, num_layers: int) -> MoeSpec:
    step = config.size("decoder_sparse_step", 1)
    dense = set(config.get("mlp_only_layers") or ())
    # transformers 5 writes num_local_experts, earlier versions num_experts
    key = "num_local_experts" if "num_local_experts" in config.values else "num_experts"
    return MoeSpec(
        num_experts=config.size(key),
        top_k=config.size("num_experts_per_tok"),
        ffn_dim=config.size("moe_intermediate_size"),
        norm_topk_prob=bool(config.get("norm_topk_prob", False)),
        is_sparse=tuple(i not in dense and (i + 1) % step == 0 for i in range(num_layers)),
    )


def _read_moe(config: JsonValues, family: ModelFamily, num_layers: int) -> MoeSpec | None:
    moe = family.read_moe(config, num_layers) if family.read_moe else None
    if moe is not None and moe.top_k > moe.num_experts:
        raise ConfigError(
            f"{config.where}: num_experts_per_tok must be within 1..{moe.num_experts} (the "
            f"experts), got {moe.top_k}"
        )
    return moe


FAMILIES: Mapping[str, ModelFamily] = {
    "LlamaForCausalLM": ModelFamily(
        defaults={"eos_token_id": 2, "max_position_embeddings": 2048},
        may_have_mlp_bias=True,
        windows="none",
    ),
    "MistralForCausalLM": ModelFamily(
        defaults={
            "eos_token_id": 2,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
        },
        windows="of all",
    ),
    "Qwen2ForCausalLM": ModelFamily(
        defaults={"sliding_window": 4096, "max_window_layers": 28},
        always_qkv_bias=True,
        windows="by layer if used",
    ),
    "Qwen3ForCausalLM": ModelFamily(
        defaults={"sliding_window": 4096, "max_window_layers": 28, "head_dim": 128},
        has_qk_norm=True,
        windows="by layer if used",
    ),
    "MixtralForCausalLM": ModelFamily(
        defaults={
            "eos_token_id": 2,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        windows="of all",
        read_moe=_mixtral_moe,
    ),
    "Qwen3MoeForCausalLM": ModelFamily(
        defaults={
            "sliding_window": 4096,
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
        has_qk_norm=True,
        windows="of all if used",
        read_moe=_qwen3_moe,
    ),
}


def read_model_spec(path: Path) -> ModelSpec:
    """Read the spec of the checkpoint in folder `path`.

    Raises:
        ConfigError: config.json is missing, invalid, or needs unsupported features.
    """
    raw = read_json(path / "config.json")
    if raw is None:
        raise ConfigError(
            f"{path} has no config.json; pass the folder of a Hugging Face checkpoint"
        )
    architecture = _read_architecture(raw, path)
    family = FAMILIES[architecture]
    config = JsonValues({**family.defaults, **raw}, where=str(path / "config.json"))
    _refuse_unsupported(config)
    num_heads = config.size("num_attention_heads")
    num_kv_heads = config.get("num_key_value_heads") or num_heads
    head_dim = config.get("head_dim") or config.size("hidden_size") // num_heads
    if num_heads % num_kv_heads or head_dim % 2:
        raise ConfigError(
            f"{config.where}: {num_heads} query heads, {num_kv_heads} KV heads and head_dim "
            f"{head_dim} are not supported; heads must divide evenly and head_dim must be even"
        )
    num_layers = config.size("num_hidden_layers", maximum=_MAX_LAYERS)
    has_attention_bias = bool(config.get("attention_bias", False))
    rope, max_positions = _read_rope(
        config, max_positions=config.size("max_position_embeddings", 32768)
    )
    vocab_size = config.size("vocab_size")
    return ModelSpec(
        architecture=architecture,
        vocab_size=vocab_size,
        model_dim=config.size("hidden_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        ffn_dim=config.size("intermediate_size"),
        rms_eps=config.number("rms_norm_eps", 1e-6, may_be_zero=True),
        has_qkv_bias=family.always_qkv_bias or has_attention_bias,
        has_o_bias=has_attention_bias and not family.always_qkv_bias,
        has_mlp_bias=family.may_have_mlp_bias and bool(config.get("mlp_bias", False)),
        has_qk_norm=family.has_qk_norm,
        is_tied=bool(config.get("tie_word_embeddings", False)),
        rope=rope,
        windows=_read_windows(config, family, num_layers),
        moe=_read_moe(config, family, num_layers),
        eos_token_ids=end_tokens(path, config.get("eos_token_id"), below=vocab_size),
        max_model_len=max_positions,
        dtype=_read_dtype(config),
    )


def _read_architecture(raw: Mapping[str, Any], path: Path) -> str:
    named = raw.get("architectures") or []
    if known := [str(name) for name in named if name in FAMILIES]:
        return known[0]
    if not named and raw.get("model_type") is None:
        raise ConfigError(
            f"{path / 'config.json'} has no 'architectures'; pass the folder of a Hugging Face "
            "checkpoint"
        )
    names = ", ".join(map(str, named)) or f"model_type {raw.get('model_type')!r}"
    raise ConfigError(
        f"{path / 'config.json'}: architecture {names} is not supported by the native engine; "
        f"it runs {', '.join(FAMILIES)}; {backends_for([*map(str, named)])}"
    )


def _refuse_unsupported(config: JsonValues) -> None:
    if config.get("quantization_config"):
        raise ConfigError(
            f"{config.where}: quantized checkpoints are not supported by the native engine; "
            "pass the float32, bfloat16 or float16 checkpoint, or set backend: vllm, which runs "
            "most of them"
        )
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ConfigError(
            f"{config.where}: hidden_act {activation!r} is not supported by the native engine, "
            f"only silu; {SAME_MODEL}"
        )


def _read_rope(config: JsonValues, *, max_positions: int) -> tuple[RopeSpec, int]:
    """Return the options in a parsed config.json and the longest context they allow.

    Both the keys of transformers 5 (`rope_parameters`) and the older `rope_theta` and
    `rope_scaling` are read.

    Raises:
        ConfigError: unsupported scaling, or not a number where one is required.
    """
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(scaling, Mapping):
        raise ConfigError(f"{config.where}: RoPE options must be an object, got {scaling!r}")
    # null is the same as missing
    set_options = {key: value for key, value in scaling.items() if value is not None}
    options = JsonValues(set_options, config.where)
    kind: Any = options.get("rope_type", options.get("type", "default"))
    if kind not in get_args(RopeType):
        raise ConfigError(
            f"{config.where}: rope type {kind!r} is not supported by the native engine, "
            f"only {', '.join(get_args(RopeType))}; {SAME_MODEL}"
        )
    if any(values.get("partial_rotary_factor") not in (None, 1) for values in (config, options)):
        raise ConfigError(
            f"{config.where}: partial_rotary_factor other than 1 is not supported by the native "
            f"engine; {SAME_MODEL}"
        )
    # transformers prefers the top-level key
    key = "original_max_position_embeddings"
    has_own = config.get(key) is not None
    original = (config if has_own else options).size(key, max_positions)
    factor = options.number("factor", max_positions / original if kind == "yarn" else 1.0)
    has_theta = "rope_theta" in set_options or config.get("rope_theta") is None
    theta = (options if has_theta else config).number("rope_theta", 10000.0)
    spec = RopeSpec(
        kind=kind,
        theta=theta,
        factor=factor,
        original_max_positions=original,
        low_freq_factor=options.number("low_freq_factor", 1.0),
        high_freq_factor=options.number("high_freq_factor", 4.0),
        beta_fast=options.number("beta_fast", 32.0),
        beta_slow=options.number("beta_slow", 1.0),
        truncate=bool(options.get("truncate", True)),
        attention_factor=_attention_factor(options, factor) if kind == "yarn" else 1.0,
    )
    longest = int(original * factor) if kind == "yarn" else max_positions
    return spec, max(max_positions, longest)


def _attention_factor(options: JsonValues, factor: float) -> float:
    def scale(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if options.get("attention_factor") is not None:
        return options.number("attention_factor", 1.0)
    mscale, mscale_all = (
        options.number(key, 0.0, may_be_zero=True) for key in ("mscale", "mscale_all_dim")
    )
    if mscale and mscale_all:
        return scale(mscale) / scale(mscale_all)
    return scale(1.0)


def _read_dtype(config: JsonValues) -> CheckpointDType:
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    if (name := name.removeprefix("torch.")) in ("float32", "bfloat16", "float16"):
        return name  # type: ignore[return-value]
    raise ConfigError(
        f"{config.where}: dtype {name!r} is not supported by the native engine, only float32, "
        f"bfloat16 and float16; {SAME_MODEL}"
    )


def end_tokens(folder: Path, of_config: int | list[int] | None, *, below: int) -> tuple[int, ...]:
    """Return the tokens that end a sequence, ascending; `of_config` are those of config.json.

    As in vLLM, they include those of the tokenizer and of generation_config.json. Only ids `below`
    the vocabulary size count.
    """
    named = {token_id for ids in _named(folder, of_config).values() for token_id in ids}
    return tuple(sorted(token_id for token_id in named if 0 <= token_id < below))


def warn_of_end_tokens(folder: Path) -> None:
    """Log a warning if the files of a model name different end tokens, and none names all."""
    config = read_json(folder / _CONFIG) or {}
    text_config = config.get("text_config") or config
    named = {
        file: ids for file, ids in _named(folder, text_config.get("eos_token_id")).items() if ids
    }
    if not named or set().union(*named.values()) in named.values():
        return
    files = ", ".join(
        f"{', '.join(map(str, sorted(ids)))} by {file}" for file, ids in named.items()
    )
    _logger.warning(
        "the files of %s disagree on the end token (%s): answers end at any of them; if that is "
        "wrong, set sampling.ignore_eos and sampling.stop_token_ids",
        folder,
        files,
    )


def _named(folder: Path, of_config: int | list[int] | None) -> dict[str, set[int]]:
    generation = read_json(folder / _GENERATION) or {}
    named = {
        _TOKENIZER: _of_tokenizer(folder),
        _CONFIG: of_config,
        _GENERATION: generation.get("eos_token_id"),
    }
    return {file: _ids(value, folder / file) for file, value in named.items()}


def _ids(value: int | list[int] | None, file: Path) -> set[int]:
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(isinstance(token_id, bool) or not isinstance(token_id, int) for token_id in ids):
        raise ConfigError(
            f"{file}: eos_token_id must be a token id or a list of token ids, got {value!r}"
        )
    return set(ids)


def _of_tokenizer(folder: Path) -> int | None:
    """Return the tokenizer's end token, as transformers reads it; None if no file has one."""
    config = read_json(folder / _TOKENIZER) or {}
    added: Mapping[str, Any] | None = config.get("added_tokens_decoder")
    name = config.get("eos_token")
    if added is None:
        name = (read_json(folder / "special_tokens_map.json") or {}).get("eos_token", name)
    name = name.get("content") if isinstance(name, dict) else name
    if name is None:
        return None
    found = [int(token_id) for token_id, token in (added or {}).items() if token["content"] == name]
    if found:
        return found[0]
    state = read_json(folder / "tokenizer.json") or {}
    found = [
        int(token["id"]) for token in state.get("added_tokens") or () if token["content"] == name
    ]
    return found[0] if found else _place(name, (state.get("model") or {}).get("vocab") or {})


def _place(name: str, vocab: Mapping[str, int] | Iterable[tuple[str, float]]) -> int | None:
    if isinstance(vocab, Mapping):
        return vocab.get(name)
    return next((place for place, (piece, _) in enumerate(vocab) if piece == name), None)
