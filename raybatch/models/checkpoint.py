"""The tensors of a Hugging Face checkpoint folder, one file or sharded, read one by one.

What a checkpoint must have follows from its config.json; comparing them loads no torch.
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
# models up to this size are hashed in full, of larger ones a sample is
_FULL_HASH_BYTES = 64 << 20
_SAMPLES, _SAMPLE_BYTES = 1024, 4096
# as files name them; integers would be taken for weights as they are, and quantised types lack
# the scales that are kept beside them
_FLOATS = frozenset(("F64", "F32", "BF16", "F16", "F8_E4M3", "F8_E5M2"))
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_WAY_OUT = (
    "the weights are incomplete, or the config.json is that of another model: download the "
    "checkpoint again"
)


def weight_files(path: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint, by name.

    Raises:
        ConfigError: there are none; the message says so where only pickled weights exist.
    """
    return [path / name for name in weight_names(path, [file.name for file in path.iterdir()])]


def weight_names(path: Path, names: Collection[str], *, where: str = "") -> list[str]:
    """Return which of the files of a checkpoint have its weights; raises what `weight_files` does.

    The folder at `path` has its index, if it has one; the files may lie at `where`.
    """
    where = where or str(path)
    if indexed := sorted(set(_indexed_files(path).values())):
        if missing := [name for name in indexed if name not in names]:
            raise ConfigError(
                f"{where.rstrip('/')}/{_INDEX} names {missing[0]}, which is not in the folder; "
                "download it too"
            )
        return indexed
    if "model.safetensors" in names:
        # some folders hold a second copy of the weights in another layout
        return ["model.safetensors"]
    if found := sorted(name for name in names if name.endswith(".safetensors")):
        return found
    if any(name.endswith(WEIGHT_SUFFIXES) for name in names):
        raise ConfigError(
            f"{where} has only pickled weights, which can run any code when loaded; convert them "
            "with transformers: from_pretrained(...).save_pretrained(..., safe_serialization=True)"
        )
    if "config.json" not in names:
        raise ConfigError(
            f"{where} has no config.json; pass the folder of a checkpoint, of which hosts that "
            "only plan need config.json and tokenizer"
        )
    raise ConfigError(
        f"{where} has no *.safetensors file; pass the folder that holds the weights of the model"
    )


def is_without_weights(path: Path) -> bool:
    """Return whether a checkpoint folder has its config.json and no weights in any format."""
    names = [file.name for file in path.iterdir()]
    return "config.json" in names and not any(name.endswith(WEIGHT_SUFFIXES) for name in names)


def _indexed_files(path: Path) -> dict[str, str]:
    """Return the file of each tensor, by name, as the index of a checkpoint has it.

    Empty where there is no index.

    Raises:
        ConfigError: it is no index.
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
    """Open safetensors files; a context manager."""

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
        """Return a tensor, mapped from its file.

        Raises:
            ConfigError: the checkpoint does not have it, or its file cannot be read.
        """
        file, path = self._file_of.get(name, (None, self._path))
        if file is None:
            raise ConfigError(f"{path}: the checkpoint has no tensor {name!r}")
        try:
            tensor: torch.Tensor = file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{path}: tensor {name!r} cannot be read: {error}") from error
        return tensor


def stat_key(path: Path, *parts: str) -> str:
    """Return a file name for data derived from the checkpoint at this place.

    Times of change are part of it as well as the fingerprint, which only samples large files.
    """
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode() + b"\0")
    for file in weight_files(path):
        status = file.stat()
        digest.update(f"{file.resolve()}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    return digest.hexdigest()[:32]


def model_fingerprint(path: Path) -> str:
    """Return a name of the model's content that is the same on every host and path.

    It covers config.json in full and the weights: all bytes of a small model; of a large one the
    list of tensors, the sizes, and 1,024 pieces per file spread evenly.
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
    """What the header of a file has about one tensor; types are named as "BF16"."""

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


def check_tensors(folder: Path, spec: ModelSpec, *, is_native: bool = True) -> None:
    """Refuse a checkpoint that lacks a tensor of its model, or has one that is not of it.

    Tensors that the model does not need are none of its concern, as in transformers; whole layers
    beyond those that config.json asks for are logged as a warning. Where another engine reads it
    (not `is_native`), types are of no matter, and it may have other names altogether.

    Raises:
        ConfigError: names the first of them with its file, and says how many there are.
    """
    stored = stored_tensors(folder)
    needed = needed_tensors(spec, stored)
    missing = [name for name in needed if name not in stored]
    if missing and (is_native or len(missing) < len(needed)):
        name = missing[0]
        is_untied = name == "lm_head.weight"
        why = " because tie_word_embeddings is not true there" if is_untied else ""
        # in the only file, in that of the index, or in the folder
        files, indexed = weight_files(folder), _indexed_files(folder).get(name)
        place = next((file for file in files if len(files) == 1 or file.name == indexed), folder)
        raise ConfigError(
            f"{place} has no tensor {name!r}, of shape {list(needed[name])}, "
            f"which config.json asks for{why}{_and_more(missing)}; {_WAY_OUT}"
        )
    known = [(name, stored[name]) for name in needed if name in stored]
    other = [(name, tensor) for name, tensor in known if tensor.dtype not in _FLOATS]
    if is_native and other:
        name, tensor = other[0]
        raise ConfigError(
            f"{tensor.file}: the tensor {name!r} is of type {tensor.dtype}{_and_more(other)}, "
            "which are no weights that the native engine can read; pass the float32, bfloat16 or "
            "float16 checkpoint"
        )
    if wrong := [(name, tensor) for name, tensor in known if tensor.shape != needed[name]]:
        name, tensor = wrong[0]
        raise ConfigError(
            f"{tensor.file}: the tensor {name!r} is of shape {list(tensor.shape)}, and config.json "
            f"asks for {list(needed[name])}{_and_more(wrong)}; {_WAY_OUT}"
        )
    _log_unused_layers(spec, stored)


def _log_unused_layers(spec: ModelSpec, stored: dict[str, StoredTensor]) -> None:
    """Warn of a config.json with fewer layers than the weights: the text would be of a part."""
    numbers = {int(match[1]): name for name in stored if (match := _LAYER.match(name))}
    if unused := sorted(number for number in numbers if number >= spec.num_layers):
        _logger.warning(
            "%s has %d layers more than config.json asks for (num_hidden_layers is %d), which are "
            "not used; unless that is meant, download config.json again",
            stored[numbers[unused[0]]].file,
            len(unused),
            spec.num_layers,
        )


def _and_more(names: Sized) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
