"""Compares the tensors of a checkpoint with its config.json: names and shapes; loads no torch."""

import logging
import re
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from raybatch.errors import ConfigError
from raybatch.models.checkpoint import indexed_files, weight_files
from raybatch.models.config import ModelSpec

Shape = tuple[int, ...]

logger = logging.getLogger(__name__)
# as files name them; integers would be taken for weights as they are, and quantised types lack
# the scales that are kept beside them
_FLOATS = frozenset(("F64", "F32", "BF16", "F16", "F8_E4M3", "F8_E5M2"))
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_WAY_OUT = (
    "the weights are incomplete, or the config.json is that of another model: download the "
    "checkpoint again"
)


def needed_tensors(spec: ModelSpec, stored: Container[str]) -> dict[str, Shape]:
    """Return the tensors that a model needs, by name in the checkpoint.

    `stored` are the names in its checkpoint, which say how it keeps its experts: each for itself,
    or stacked.
    """
    table = (spec.vocab_size, spec.model_dim)
    tensors: dict[str, Shape] = {"model.embed_tokens.weight": table}
    for i in range(spec.num_layers):
        prefix = f"model.layers.{i}."
        tensors |= {prefix + name: shape for name, shape in _attention(spec)}
        parts = _sparse(spec, prefix, stored) if spec.is_sparse(i) else _dense(spec)
        tensors |= {prefix + name: shape for name, shape in parts}
    tensors["model.norm.weight"] = (spec.model_dim,)
    if not spec.is_tied:
        tensors["lm_head.weight"] = table
    return tensors


def _attention(spec: ModelSpec) -> Iterator[tuple[str, Shape]]:
    query_dim, kv_dim = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    yield "input_layernorm.weight", (spec.model_dim,)
    for name, num_outputs in (("q", query_dim), ("k", kv_dim), ("v", kv_dim)):
        yield f"self_attn.{name}_proj.weight", (num_outputs, spec.model_dim)
        if spec.has_qkv_bias:
            yield f"self_attn.{name}_proj.bias", (num_outputs,)
    yield "self_attn.o_proj.weight", (spec.model_dim, query_dim)
    if spec.has_o_bias:
        yield "self_attn.o_proj.bias", (spec.model_dim,)
    if spec.has_qk_norm:
        yield "self_attn.q_norm.weight", (spec.head_dim,)
        yield "self_attn.k_norm.weight", (spec.head_dim,)
    yield "post_attention_layernorm.weight", (spec.model_dim,)


def _dense(spec: ModelSpec) -> Iterator[tuple[str, Shape]]:
    wide, narrow = (spec.ffn_dim, spec.model_dim), (spec.model_dim, spec.ffn_dim)
    for name, shape in (("gate", wide), ("up", wide), ("down", narrow)):
        yield f"mlp.{name}_proj.weight", shape
        if spec.has_mlp_bias:
            yield f"mlp.{name}_proj.bias", shape[:1]


def _sparse(spec: ModelSpec, prefix: str, stored: Container[str]) -> Iterator[tuple[str, Shape]]:
    moe = spec.moe
    assert moe is not None, "a sparse layer needs the model's MoeSpec"
    block = "block_sparse_moe." if f"{prefix}block_sparse_moe.gate.weight" in stored else "mlp."
    experts = f"{block}experts."
    yield f"{block}gate.weight", (moe.num_experts, spec.model_dim)
    wide, narrow = (moe.ffn_dim, spec.model_dim), (spec.model_dim, moe.ffn_dim)
    if f"{prefix}{experts}gate_up_proj" in stored:
        yield f"{experts}gate_up_proj", (moe.num_experts, 2 * moe.ffn_dim, spec.model_dim)
    else:
        # Mixtral's w1 is the gate, w3 goes up and w2 down
        is_short = f"{prefix}{experts}0.w1.weight" in stored
        for name in ("w1", "w3") if is_short else ("gate_proj", "up_proj"):
            for e in range(moe.num_experts):
                yield f"{experts}{e}.{name}.weight", wide
    if f"{prefix}{experts}down_proj" in stored:
        yield f"{experts}down_proj", (moe.num_experts, *narrow)
    else:
        name = "w2" if f"{prefix}{experts}0.w2.weight" in stored else "down_proj"
        for e in range(moe.num_experts):
            yield f"{experts}{e}.{name}.weight", narrow


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """What the header of a file has about one tensor.

    Args:
        dtype: as safetensors names it, such as "BF16".
    """

    file: Path
    dtype: str
    shape: Shape


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a checkpoint by name.

    Raises:
        ConfigError: a file is missing, cut, or no safetensors file.
    """
    tensors: dict[str, StoredTensor] = {}
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="np") as file:
                for name in file.keys():  # noqa: SIM118
                    part = file.get_slice(name)
                    tensors[name] = StoredTensor(
                        file=path, dtype=part.get_dtype(), shape=tuple(part.get_shape())
                    )
        except (SafetensorError, OSError) as error:
            raise ConfigError(
                f"{path} is no complete safetensors file ({error}); download it again, in a clone "
                "with `git lfs pull`"
            ) from error
    return tensors


def check_tensors(folder: Path, spec: ModelSpec) -> None:
    """Refuse a checkpoint that lacks a tensor of its model, or has one that is not of it.

    Tensors that the model does not need are none of its concern, as in transformers; whole layers
    beyond those that config.json asks for are logged as a warning.

    Raises:
        ConfigError: names the first of them with its file, and says how many there are.
    """
    stored = stored_tensors(folder)
    needed = needed_tensors(spec, stored)
    _check_missing(folder, needed, stored)
    _check_types(needed, stored)
    _check_shapes(needed, stored)
    _log_unused_layers(spec, stored)


def check_known_tensors(folder: Path, spec: ModelSpec) -> None:
    """Refuse a checkpoint of a model known here that no backend can run, judged by tensor names.

    One whose tensors have other names, or other types, may be read by other libraries.

    Raises:
        ConfigError: as `check_tensors`.
    """
    stored = stored_tensors(folder)
    needed = needed_tensors(spec, stored)
    if needed.keys() & stored.keys():
        _check_missing(folder, needed, stored)
    _check_shapes(needed, stored)
    _log_unused_layers(spec, stored)


def _check_missing(
    folder: Path, needed: Mapping[str, Shape], stored: Mapping[str, StoredTensor]
) -> None:
    if missing := [name for name in needed if name not in stored]:
        name = missing[0]
        why = ""
        if name == "lm_head.weight":
            why = " because tie_word_embeddings is not true there"
        raise ConfigError(
            f"{_place(folder, name)} has no tensor {name!r}, of shape {list(needed[name])}, "
            f"which config.json asks for{why}{_and_more(missing)}; {_WAY_OUT}"
        )


def _check_shapes(needed: Mapping[str, Shape], stored: Mapping[str, StoredTensor]) -> None:
    """Refuse tensors of another shape than a model needs; those that are missing are passed over.

    Raises:
        ConfigError: as `check_tensors`.
    """
    wrong = [name for name in needed if name in stored and stored[name].shape != needed[name]]
    if wrong:
        name, tensor = wrong[0], stored[wrong[0]]
        raise ConfigError(
            f"{tensor.file}: the tensor {name!r} is of shape {list(tensor.shape)}, and config.json "
            f"asks for {list(needed[name])}{_and_more(wrong)}; {_WAY_OUT}"
        )


def _check_types(needed: Mapping[str, Shape], stored: Mapping[str, StoredTensor]) -> None:
    wrong = [name for name in needed if stored[name].dtype not in _FLOATS]
    if wrong:
        tensor = stored[wrong[0]]
        raise ConfigError(
            f"{tensor.file}: the tensor {wrong[0]!r} is of type {tensor.dtype}{_and_more(wrong)}, "
            "which are no weights that the native engine can read; pass the float32, bfloat16 or "
            "float16 checkpoint"
        )


def _log_unused_layers(spec: ModelSpec, stored: Mapping[str, StoredTensor]) -> None:
    """Warn of a config.json with fewer layers than the weights: the text would be of a part."""
    numbers = {int(match[1]) for name in stored if (match := _LAYER.match(name))}
    unused = sorted(number for number in numbers if number >= spec.num_layers)
    if unused:
        name = next(name for name in stored if name.startswith(f"model.layers.{unused[0]}."))
        logger.warning(
            "%s has %d layers more than config.json asks for (num_hidden_layers is %d), which are "
            "not used; unless that is meant, download config.json again",
            stored[name].file,
            len(unused),
            spec.num_layers,
        )


def _place(folder: Path, name: str) -> Path:
    """Return where a tensor should be: in the only file, in that of the index, or in the folder."""
    files = weight_files(folder)
    if len(files) == 1:
        return files[0]
    return next((f for f in files if f.name == indexed_files(folder).get(name)), folder)


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
