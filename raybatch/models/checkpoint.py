"""Reads tensors of a Hugging Face checkpoint folder, one file or sharded, one by one.

Also checks that a checkpoint has the tensors that its config.json requires, without torch.
"""

import hashlib
import logging
import re
from collections.abc import Collection, Container, Iterator, Sized
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from safetensors import SafetensorError, safe_open

from raybatch.errors import ConfigError
from raybatch.models.config import ModelSpec
from raybatch.models.json_files import read_json

if TYPE_CHECKING:
    import torch  # feeders read checkpoints' headers, and load no torch for it

Shape = tuple[int, ...]
_Named = tuple[str, Shape]

_logger = logging.getLogger(__name__)
_INDEX = "model.safetensors.index.json"
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")
# models up to this size are hashed in full, larger ones by samples
_FULL_HASH_BYTES = 64 << 20
_SAMPLES, _SAMPLE_BYTES = 1024, 4096
# dtypes as named in files; without integers, as quantized weights need separate scales
_FLOATS = frozenset(("F64", "F32", "BF16", "F16", "F8_E4M3", "F8_E5M2"))
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_WAY_OUT = (
    "the weights are incomplete, or config.json belongs to another model: download the checkpoint "
    "again"
)


def weight_files(path: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint, by name.

    Raises:
        ConfigError: there are none, or the index names a missing one.
    """
    return [path / name for name in weight_names(path, [file.name for file in path.iterdir()])]


def weight_names(path: Path, names: Collection[str], *, where: str = "") -> list[str]:
    """Return which of `names`, the files of a checkpoint, are its weights; sorted.

    Raises as `weight_files` does. `path` is a local folder with the index of the weights, if there
    is one; the other files may be elsewhere, at `where`, which messages name.
    """
    where = where or str(path)
    if indexed := sorted(set(_indexed_files(path).values())):
        if missing := [name for name in indexed if name not in names]:
            raise ConfigError(
                f"{where.rstrip('/')}/{_INDEX} refers to {missing[0]}, which is missing; download "
                "that file too"
            )
        return indexed
    if "model.safetensors" in names:
        # some folders have a second copy of the weights in another layout
        return ["model.safetensors"]
    if found := sorted(name for name in names if name.endswith(".safetensors")):
        return found
    if any(name.endswith(WEIGHT_SUFFIXES) for name in names):
        raise ConfigError(
            f"{where} has only pickled weights, which may execute code when loaded; convert them "
            "with transformers: from_pretrained(...).save_pretrained(..., safe_serialization=True)"
        )
    if "config.json" not in names:
        raise ConfigError(
            f"{where} has no config.json; pass a checkpoint folder (a host that only plans needs "
            "config.json and the tokenizer)"
        )
    raise ConfigError(
        f"{where} has no *.safetensors file; pass the folder with the weights of the model"
    )


def is_without_weights(path: Path) -> bool:
    """Return whether a checkpoint folder has its config.json and no weights in any format."""
    names = [file.name for file in path.iterdir()]
    return "config.json" in names and not any(name.endswith(WEIGHT_SUFFIXES) for name in names)


def _indexed_files(path: Path) -> dict[str, str]:
    """Return the file of each tensor by name, from the index of a checkpoint; {} without one.

    Raises:
        ConfigError: the index is invalid.
    """
    index = path / _INDEX
    raw = read_json(index)
    if raw is None:
        return {}
    weight_map: Any = raw.get("weight_map")
    names = weight_map.values() if isinstance(weight_map, dict) else ()
    if not names or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{index} is not a valid weight index; download the checkpoint again")
    return dict(weight_map)


class Checkpoint:
    """Opens the safetensors files of the checkpoint at `path`; use as a context manager."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stack = ExitStack()
        self._file_of: dict[str, Any] = {}
        for file_path in weight_files(path):
            try:
                file = self._stack.enter_context(safe_open(file_path, framework="pt", device="cpu"))
            except SafetensorError as error:
                raise ConfigError(
                    f"{file_path} is not a valid safetensors file: {error}"
                ) from error
            for name in file.keys():  # noqa: SIM118
                self._file_of[name] = file, file_path

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._file_of.clear()

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def get(self, name: str) -> "torch.Tensor":
        """Return the tensor `name`, memory-mapped from its file.

        Raises:
            ConfigError: the tensor is missing, or its file is unreadable.
        """
        file, path = self._file_of.get(name, (None, self._path))
        if file is None:
            raise ConfigError(f"{path}: the checkpoint has no tensor {name!r}")
        try:
            tensor: torch.Tensor = file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{path}: could not read tensor {name!r}: {error}") from error
        return tensor


def stat_key(path: Path, *parts: str) -> str:
    """Return a cache key for data derived from `parts` and the checkpoint at this path.

    It depends on paths, sizes and modification times of the weight files, not on their content.
    """
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode() + b"\0")
    for file in weight_files(path):
        status = file.stat()
        digest.update(f"{file.resolve()}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    return digest.hexdigest()[:32]


def model_fingerprint(path: Path) -> str:
    """Return a fingerprint of the model's content, independent of host and path.

    It covers config.json and the weights: all bytes of a small model; of a large one the list of
    tensors, the sizes, and 1,024 evenly spread pieces per file.
    """
    digest = hashlib.sha256((path / "config.json").read_bytes())
    files = weight_files(path)
    is_small = sum(file.stat().st_size for file in files) <= _FULL_HASH_BYTES
    for weights in files:
        size = weights.stat().st_size
        digest.update(f"\0{weights.name}\0{size}\0".encode())
        with weights.open("rb") as file:
            if is_small:
                digest.update(file.read())
                continue
            header_bytes = int.from_bytes(file.read(8), "little")
            digest.update(file.read(min(header_bytes, size)))
            for i in range(_SAMPLES):
                file.seek(i * max(size - _SAMPLE_BYTES, 0) // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:32]


def needed_tensors(spec: ModelSpec, stored: Container[str]) -> dict[str, Shape]:
    """Return the shapes of the tensors that a model requires, by name in the checkpoint.

    `stored` are the names in its checkpoint: they show if experts are separate tensors or stacked.
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


def _linear(name: str, num_outputs: int, num_inputs: int, *, has_bias: bool) -> Iterator[_Named]:
    yield f"{name}_proj.weight", (num_outputs, num_inputs)
    if has_bias:
        yield f"{name}_proj.bias", (num_outputs,)


def _attention(spec: ModelSpec) -> Iterator[_Named]:
    query_dim, kv_dim = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    yield "input_layernorm.weight", (spec.model_dim,)
    for name, size in (("q", query_dim), ("k", kv_dim), ("v", kv_dim)):
        yield from _linear(f"self_attn.{name}", size, spec.model_dim, has_bias=spec.has_qkv_bias)
    yield from _linear("self_attn.o", spec.model_dim, query_dim, has_bias=spec.has_o_bias)
    for name in "qk" if spec.has_qk_norm else "":
        yield f"self_attn.{name}_norm.weight", (spec.head_dim,)
    yield "post_attention_layernorm.weight", (spec.model_dim,)


def _dense(spec: ModelSpec) -> Iterator[_Named]:
    for name in ("gate", "up"):
        yield from _linear(f"mlp.{name}", spec.ffn_dim, spec.model_dim, has_bias=spec.has_mlp_bias)
    yield from _linear("mlp.down", spec.model_dim, spec.ffn_dim, has_bias=spec.has_mlp_bias)


def _sparse(spec: ModelSpec, prefix: str, stored: Container[str]) -> Iterator[_Named]:
    moe = spec.moe
    assert moe is not None, "a sparse layer needs the model's MoeSpec"
    block = "block_sparse_moe." if f"{prefix}block_sparse_moe.gate.weight" in stored else "mlp."
    experts = f"{block}experts."
    yield f"{block}gate.weight", (moe.num_experts, spec.model_dim)
    wide, narrow = (moe.ffn_dim, spec.model_dim), (spec.model_dim, moe.ffn_dim)
    if f"{prefix}{experts}gate_up_proj" in stored:
        yield f"{experts}gate_up_proj", (moe.num_experts, 2 * moe.ffn_dim, spec.model_dim)
    else:
        # Mixtral: w1 is gate, w3 is up, w2 is down
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
    """File, dtype and shape of one tensor, from the header of its file; a dtype is like "BF16"."""

    file: Path
    dtype: str
    shape: Shape


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a checkpoint by name.

    Raises:
        ConfigError: a file is missing, truncated, or not in safetensors format.
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
                f"{path} is not a complete safetensors file ({error}); download it again, or run "
                "`git lfs pull` in a clone"
            ) from error
    return tensors


def check_tensors(folder: Path, spec: ModelSpec, *, is_native: bool = True) -> None:
    """Check that a checkpoint has all tensors of its model, with the right shapes and dtypes.

    Further tensors are ignored, as in transformers; whole layers beyond those of config.json give a
    warning. For other engines than the native one (not `is_native`) dtypes are not checked, and it
    is no error if all names differ.

    Raises:
        ConfigError: a tensor is missing or wrong; the message names the first one, its file, and
            the number of wrong ones.
    """
    stored = stored_tensors(folder)
    needed = needed_tensors(spec, stored)
    missing = [name for name in needed if name not in stored]
    if missing and (is_native or len(missing) < len(needed)):
        name = missing[0]
        is_untied = name == "lm_head.weight"
        why = " because tie_word_embeddings is not true there" if is_untied else ""
        # the only file, that of the index, or the folder
        files, indexed = weight_files(folder), _indexed_files(folder).get(name)
        place = next((file for file in files if len(files) == 1 or file.name == indexed), folder)
        raise ConfigError(
            f"{place} has no tensor {name!r} of shape {list(needed[name])}, which config.json "
            f"requires{why}{_and_more(missing)}; {_WAY_OUT}"
        )
    known = [(name, stored[name]) for name in needed if name in stored]
    other = [(name, tensor) for name, tensor in known if tensor.dtype not in _FLOATS]
    if is_native and other:
        name, tensor = other[0]
        raise ConfigError(
            f"{tensor.file}: tensor {name!r} has dtype {tensor.dtype}{_and_more(other)}, which the "
            "native engine does not support; pass the float32, bfloat16 or float16 checkpoint"
        )
    if wrong := [(name, tensor) for name, tensor in known if tensor.shape != needed[name]]:
        name, tensor = wrong[0]
        raise ConfigError(
            f"{tensor.file}: tensor {name!r} has shape {list(tensor.shape)}, but config.json "
            f"requires {list(needed[name])}{_and_more(wrong)}; {_WAY_OUT}"
        )
    _log_unused_layers(spec, stored)


def _log_unused_layers(spec: ModelSpec, stored: dict[str, StoredTensor]) -> None:
    """Warn if config.json has fewer layers than the weights: only a part would be used."""
    numbers = {int(match[1]): name for name in stored if (match := _LAYER.match(name))}
    if unused := sorted(number for number in numbers if number >= spec.num_layers):
        _logger.warning(
            "%s has %d unused layers beyond num_hidden_layers=%d of config.json; unless that is "
            "intended, download config.json again",
            stored[numbers[unused[0]]].file,
            len(unused),
            spec.num_layers,
        )


def _and_more(names: Sized) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
