"""Loads a checkpoint and builds the weights in the form that the decoder uses.

Queries, keys and values are fused into one matrix, gate and up into another, experts are stacked,
and the rows of queries and keys are reordered for `raybatch.kernels.small_ops`. On a CPU the result
is cached in a safetensors file that all replicas of the host map, so that they share one copy.
"""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from raybatch.config import cache_dir
from raybatch.engine.memory.pinned import DeviceQueue, PinnedBufferPool, allocate_memory
from raybatch.engine.weights.layout import (
    DENSE_LINEARS,
    LAYER_LINEARS,
    AttentionWeights,
    FfnShard,
    FfnWeights,
    LayerWeights,
    ModelWeights,
    Part,
    WeightForm,
    advise_huge_pages,
    exclusive,
    lay_out,
    piece_bytes,
    placeholder,
    view_of,
    write_tensors,
)
from raybatch.kernels.byte_numbers import quantise_weight, weight_scales
from raybatch.kernels.linear import Linear
from raybatch.kernels.small_ops import interleave_order
from raybatch.models.checkpoint import Checkpoint, model_fingerprint, stat_key
from raybatch.models.config import ModelSpec
from raybatch.policy.memory_budget import WeightSizes

logger = logging.getLogger(__name__)

# increase it when the layout of the prepared file changes
_FORMAT_VERSION = 6
_SCALES = "_scales"
# prefixes of fields of `FfnShard`
_SHARD_FIELDS = ("gate_up", "down", "experts_")
# one thread reads and rearranges tensors at a fraction of the PCIe bandwidth
_MAX_THREADS = 8
# bytes of one copy; each thread has two pinned buffers
_PIECE_BYTES = 16 << 20


def load_weights(
    model_path: Path,
    spec: ModelSpec,
    form: WeightForm,
    *,
    device: torch.device,
    streamed: Collection[int] = (),
    has_shards: bool = True,
) -> ModelWeights:
    """Load the weights of a checkpoint onto `device`.

    On a CPU, weights in the final layout are written to a file in the cache once, and mapped from
    there; if it cannot be written, they are loaded into memory. On a GPU the feed-forward blocks of
    `streamed` layers stay in pinned host memory. Without `has_shards`, all feed-forward blocks are
    placeholders without data.
    """
    if device.type == "cpu":
        try:
            weights = _prepared_weights(model_path, spec, form)
            return weights if has_shards else _without_shards(weights)
        except OSError as error:
            logger.warning(
                "loading the weights into memory that processes do not share, because the cache "
                "file for them could not be written: %s",
                error,
            )
    with Checkpoint(model_path) as checkpoint:
        parts = _laid_out(checkpoint, spec, form, device)
        tensors = dict[str, torch.Tensor]()
        if not has_shards:
            tensors = {
                name: torch.empty(shape, dtype=dtype, device="meta")
                for name, (shape, dtype, _) in parts.items()
                if _shard_of(name) is not None
            }
            parts = {name: part for name, part in parts.items() if name not in tensors}
        if device.type == "cpu":
            tensors |= {name: build().to(dtype) for name, (_, dtype, build) in parts.items()}
        else:
            tensors |= load_onto(
                device, _units(parts), stays_on_host=lambda name: _shard_of(name) in streamed
            )
    return _assemble(tensors, spec)


def load_onto(
    device: torch.device,
    units: Mapping[str, Mapping[str, Part]],
    *,
    stays_on_host: Callable[[str], bool] = lambda _: False,
    queue: DeviceQueue | None = None,
    piece_bytes: int = _PIECE_BYTES,
    num_threads: int | None = None,
) -> dict[str, torch.Tensor]:
    """Return the tensors of all units, by name, on `device`; copies may still be in flight.

    A unit is a group of tensors that one thread builds in order; units are built concurrently.
    Tensors whose name `stays_on_host` accepts stay in pinned host memory. `queue` is the queue of
    the device for the copies; None makes one. Raises the error of the first failing unit in order.
    """
    queue = queue or DeviceQueue(device)
    if num_threads is None:
        num_threads = min(_MAX_THREADS, torch.get_num_threads())

    def load(parts: Mapping[str, Part]) -> dict[str, torch.Tensor]:
        staging = PinnedBufferPool(queue, 2, least_bytes=piece_bytes)
        made = {}
        for name, (_, dtype, build) in parts.items():
            source = build().to(dtype)
            if stays_on_host(name):
                made[name] = allocate_memory(tuple(source.shape), dtype, device).copy_(source)
            else:
                made[name] = torch.empty_like(
                    source, device=queue.device, memory_format=torch.contiguous_format
                )
                _copy(source, made[name], queue, staging, piece_bytes)
        staging.finish()
        return made

    with ThreadPoolExecutor(num_threads) as threads:
        futures = [threads.submit(partial(load, parts)) for parts in units.values()]
        try:
            return {name: made for future in futures for name, made in future.result().items()}
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            raise


def _copy(
    source: torch.Tensor,
    target: torch.Tensor,
    queue: DeviceQueue,
    staging: PinnedBufferPool,
    size: int,
) -> None:
    from_bytes, to_bytes = (
        torch.split(x.contiguous().view(-1).view(torch.uint8), size) for x in (source, target)
    )
    for piece, place in zip(from_bytes, to_bytes, strict=True):
        staged = staging.take(len(piece))[: len(piece)]
        staged.copy_(piece)
        queue.copy(place, staged)
        staging.mark()


def _without_shards(weights: ModelWeights) -> ModelWeights:
    layers = (
        replace(layer, ffn=replace(layer.ffn, shard=placeholder(layer.ffn.shard)))
        for layer in weights.layers
    )
    return replace(weights, layers=tuple(layers))


@contextmanager
def open_blocks(
    model_path: Path, spec: ModelSpec, form: WeightForm, *, device: torch.device
) -> Iterator[Callable[[int], FfnShard]]:
    """Yield a function that returns the feed-forward block of a layer, read into host memory.

    It takes the index of the layer. The block has the layout for `device`.
    """
    if device.type == "cpu":
        layers = load_weights(model_path, spec, form, device=device).layers
        yield lambda layer: layers[layer].ffn.shard
        return
    with Checkpoint(model_path) as checkpoint:
        parts = _laid_out(checkpoint, spec, form, device)

        def block_of(layer: int) -> FfnShard:
            some = {name: part for name, part in parts.items() if _shard_of(name) == layer}
            made = {name: build().to(dtype) for name, (_, dtype, build) in some.items()}
            return _shard_in({name.partition(".")[2]: x for name, x in made.items()}, spec)

        yield block_of


def _units(parts: Mapping[str, Part]) -> dict[str, dict[str, Part]]:
    """Group the parts by name, each with the scales that are built with it."""
    units: dict[str, dict[str, Part]] = {}
    for name, part in parts.items():
        units.setdefault(name.removesuffix(_SCALES), {})[name] = part
    return units


def _prepared_weights(model_path: Path, spec: ModelSpec, form: WeightForm) -> ModelWeights:
    with Checkpoint(model_path) as checkpoint:
        parts = _laid_out(checkpoint, spec, form, torch.device("cpu"))
    path = prepare_weights(model_path, spec, form)
    try:
        return _assemble(_map_prepared(path, parts), spec)
    except SafetensorError as error:
        logger.warning("rebuilding the damaged file %s: %s", path, error)
        path.unlink(missing_ok=True)
        return _assemble(_map_prepared(prepare_weights(model_path, spec, form), parts), spec)


def weight_sizes(
    model_path: Path, spec: ModelSpec, form: WeightForm, *, device: torch.device
) -> WeightSizes:
    """Return the bytes of the weights in the layout for `device`, without loading them."""
    with Checkpoint(model_path) as checkpoint:
        parts = _laid_out(checkpoint, spec, form, device)
    other_bytes, ffn_bytes = 0, [0] * spec.num_layers
    for name, (shape, dtype, _) in parts.items():
        layer, num_bytes = _shard_of(name), piece_bytes(torch.Size(shape).numel(), dtype)
        if layer is None:
            other_bytes += num_bytes
        else:
            ffn_bytes[layer] += num_bytes
    return WeightSizes(other_bytes=other_bytes, ffn_bytes=tuple(ffn_bytes))


def dense_shapes(model_path: Path, spec: ModelSpec) -> set[tuple[int, int]]:
    """Return the shapes [out, in] of the model's dense linears, including the head."""
    with Checkpoint(model_path) as checkpoint:
        recipes = recipes_of(checkpoint, spec)
    fields = {name: name.rpartition(".")[2] for name in recipes}
    shapes = (shape for name, (shape, _) in recipes.items() if fields[name] in DENSE_LINEARS)
    return {(num_outputs, num_inputs) for num_outputs, num_inputs in shapes}


def _shard_of(name: str) -> int | None:
    """Return the layer whose `FfnShard` a tensor belongs to; None if it belongs to none."""
    layer, dot, field = name.partition(".")
    is_shard = dot and layer.isdecimal() and field.startswith(_SHARD_FIELDS)
    return int(layer) if is_shard else None


def prepare_weights(model_path: Path, spec: ModelSpec, form: WeightForm) -> Path:
    """Return the path of the file with the weights in the layout for a CPU; write it if missing.

    Safe to call from concurrent processes. Raises OSError: the cache folder is not writable.
    """
    key = stat_key(model_path, model_fingerprint(model_path), str(form), str(_FORMAT_VERSION))
    target = cache_dir() / "weights" / f"{key}.safetensors"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with exclusive(target.with_suffix(".lock")), Checkpoint(model_path) as checkpoint:
        if not target.exists():
            write_tensors(target, _laid_out(checkpoint, spec, form, torch.device("cpu")))
            logger.info("wrote prepared weights to %s", target)
    return target


def _map_prepared(path: Path, parts: Mapping[str, Part]) -> dict[str, torch.Tensor]:
    """Map the tensors of a prepared file; their values are not checked.

    Raises SafetensorError: it is truncated, or its header does not match `parts`.
    """
    with safe_open(path, framework="pt", device="cpu") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    expected = {name: (shape, dtype) for name, (shape, dtype, _) in parts.items()}
    if expected != {name: (tuple(part.shape), part.dtype) for name, part in tensors.items()}:
        raise SafetensorError(
            "the names, shapes or dtypes in its header are not those of the model"
        )
    advise_huge_pages(tensors.values())
    return tensors


def _assemble(tensors: Mapping[str, torch.Tensor], spec: ModelSpec) -> ModelWeights:
    views = dict(view_of(name, tensor) for name, tensor in tensors.items())
    layers = []
    for i in range(spec.num_layers):
        prefix = f"{i}."
        parts: dict[str, Any] = {
            n.removeprefix(prefix): t for n, t in views.items() if n.startswith(prefix)
        }
        norm, router = parts.pop("ffn_norm"), parts.pop("router", None)
        shard = _shard_in(
            {n: parts.pop(n) for n in list(parts) if n.startswith(_SHARD_FIELDS)}, spec
        )
        ffn = FfnWeights(norm=norm, router=router, shard=shard)
        parts["norm"] = parts.pop("attention_norm")
        attention = AttentionWeights(**_with_linears(parts, spec))
        layers.append(LayerWeights(attention=attention, ffn=ffn))
    embed, head = (views[name] for name in (("table",) * 2 if spec.is_tied else ("embed", "head")))
    return ModelWeights(
        embed=embed, layers=tuple(layers), norm=views["norm"], head=Linear(head, spec.vocab_size)
    )


def _shard_in(tensors: Mapping[str, torch.Tensor], spec: ModelSpec) -> FfnShard:
    """Return the block of these tensors, by field."""
    return FfnShard(**_with_linears(dict(tensors), spec))


def _with_linears(parts: dict[str, Any], spec: ModelSpec) -> dict[str, Any]:
    """Combine each dense linear of a layer with its bias and scales."""
    num_outputs = {
        "qkv": (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim,
        "o": spec.model_dim,
        "gate_up": 2 * spec.ffn_dim,
        "down": spec.model_dim,
    }
    for name in num_outputs.keys() & parts.keys():
        bias, scales = (parts.pop(f"{name}{suffix}", None) for suffix in ("_bias", _SCALES))
        parts[name] = Linear(parts[name], num_outputs[name], bias, scales)
    return parts


def _laid_out(
    checkpoint: Checkpoint, spec: ModelSpec, form: WeightForm, device: torch.device
) -> dict[str, Part]:
    """Return every tensor in its memory layout; a quantized one is followed by its scales."""
    parts: dict[str, Part] = {}
    for name, (shape, build) in recipes_of(checkpoint, spec).items():
        if form.byte_dtype is None or name.rpartition(".")[2] not in LAYER_LINEARS:
            parts[name] = shape, form.dtype, build
            continue
        values, scales = _quantised(build, form.byte_dtype)
        parts[name] = shape, form.byte_dtype, values
        parts[f"{name}{_SCALES}"] = shape[:-1], torch.float32, scales
    if device.type != "cpu":
        return parts
    return dict(lay_out(*part, form.panel_width, form.for_torch) for part in parts.items())


def _quantised(
    build: Callable[[], torch.Tensor], dtype: torch.dtype
) -> tuple[Callable[[], torch.Tensor], Callable[[], torch.Tensor]]:
    """Return the builders of a quantized weight and of its scales.

    The source is built once if the weight is built before the scales.
    """
    made: list[torch.Tensor] = []

    def values() -> torch.Tensor:
        weight = build()
        made[:] = [weight_scales(weight, dtype)]
        return quantise_weight(weight, made[0], dtype)

    return values, lambda: made.pop() if made else weight_scales(build(), dtype)


# a shape and the function that builds the tensor
Recipe = tuple[tuple[int, ...], Callable[[], torch.Tensor]]


def recipes_of(checkpoint: Checkpoint, spec: ModelSpec) -> dict[str, Recipe]:
    get = checkpoint.get
    recipe: dict[str, Recipe] = {
        "table" if spec.is_tied else "embed": (
            (spec.vocab_size, spec.model_dim),
            lambda: get("model.embed_tokens.weight"),
        ),
        "norm": ((spec.model_dim,), lambda: get("model.norm.weight")),
    }
    if not spec.is_tied:
        recipe["head"] = ((spec.vocab_size, spec.model_dim), lambda: get("lm_head.weight"))
    for i in range(spec.num_layers):
        layer = _Layer(checkpoint, spec, f"model.layers.{i}.")
        parts = layer.attention() | (layer.sparse() if spec.is_sparse(i) else layer.dense())
        recipe |= {f"{i}.{name}": part for name, part in parts.items()}
    return recipe


@dataclass(frozen=True, slots=True)
class _Layer:
    checkpoint: Checkpoint
    spec: ModelSpec
    prefix: str

    def get(self, name: str) -> torch.Tensor:
        return self.checkpoint.get(self.prefix + name)

    def _part(self, name: str, *shape: int) -> Recipe:
        return shape, lambda: self.get(name)

    def attention(self) -> dict[str, Recipe]:
        spec = self.spec
        num_heads, num_kv_heads, head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        qkv_dim = (num_heads + 2 * num_kv_heads) * head_dim
        part = self._part
        parts: dict[str, Recipe] = {
            "attention_norm": part("input_layernorm.weight", spec.model_dim),
            "qkv": ((qkv_dim, spec.model_dim), lambda: self._qkv("weight")),
            "o": part("self_attn.o_proj.weight", spec.model_dim, num_heads * head_dim),
            "ffn_norm": part("post_attention_layernorm.weight", spec.model_dim),
        }
        if spec.has_qkv_bias:
            parts["qkv_bias"] = ((qkv_dim,), lambda: self._qkv("bias"))
        if spec.has_o_bias:
            parts["o_bias"] = part("self_attn.o_proj.bias", spec.model_dim)
        if spec.has_qk_norm:
            parts["qk_norm"] = ((num_heads + num_kv_heads, head_dim), self._qk_norm)
        return parts

    def _qkv(self, kind: str) -> torch.Tensor:
        order = interleave_order(self.spec.head_dim)
        queries, keys = (
            heads.view(-1, self.spec.head_dim, *heads.shape[1:])
            .index_select(1, order)
            .flatten(0, 1)
            for heads in (self.get(f"self_attn.{name}_proj.{kind}") for name in ("q", "k"))
        )
        return torch.cat((queries, keys, self.get(f"self_attn.v_proj.{kind}")))

    def _qk_norm(self) -> torch.Tensor:
        order = interleave_order(self.spec.head_dim)
        return torch.cat(
            [
                self.get(f"self_attn.{name}_norm.weight")[order].expand(count, -1)
                for name, count in (("q", self.spec.num_heads), ("k", self.spec.num_kv_heads))
            ]
        )

    def dense(self) -> dict[str, Recipe]:
        model_dim, ffn_dim = self.spec.model_dim, self.spec.ffn_dim
        parts: dict[str, Recipe] = {
            "gate_up": ((2 * ffn_dim, model_dim), lambda: self._gate_up("mlp.", "weight")),
            "down": self._part("mlp.down_proj.weight", model_dim, ffn_dim),
        }
        if self.spec.has_mlp_bias:
            parts["gate_up_bias"] = ((2 * ffn_dim,), lambda: self._gate_up("mlp.", "bias"))
            parts["down_bias"] = self._part("mlp.down_proj.bias", model_dim)
        return parts

    def _gate_up(self, prefix: str, kind: str) -> torch.Tensor:
        names = (f"{prefix}gate_proj.{kind}", f"{prefix}up_proj.{kind}")
        return torch.cat([self.get(name) for name in names])

    def sparse(self) -> dict[str, Recipe]:
        moe = self.spec.moe
        assert moe is not None, "a sparse layer needs the model's MoeSpec"
        model_dim, ffn_dim, num_experts = self.spec.model_dim, moe.ffn_dim, moe.num_experts
        block = "block_sparse_moe." if self._has("block_sparse_moe.gate.weight") else "mlp."
        return {
            "router": self._part(f"{block}gate.weight", num_experts, model_dim),
            "experts_gate_up": (
                (num_experts, 2 * ffn_dim, model_dim),
                # Mixtral: w1 is gate, w3 is up, w2 is down
                lambda: self._stack(
                    f"{block}experts.gate_up_proj", ("gate_proj", "up_proj"), ("w1", "w3")
                ),
            ),
            "experts_down": (
                (num_experts, model_dim, ffn_dim),
                lambda: self._stack(f"{block}experts.down_proj", ("down_proj",), ("w2",)),
            ),
        }

    def _has(self, name: str) -> bool:
        return self.prefix + name in self.checkpoint

    def _stack(self, fused: str, names: Sequence[str], of_mixtral: Sequence[str]) -> torch.Tensor:
        """Return a linear of all experts, with those of several names interleaved per expert."""
        assert self.spec.moe is not None, "a sparse layer needs the model's MoeSpec"
        if self._has(fused):
            return self.get(fused)
        experts = fused.rpartition(".")[0]
        if self._has(f"{experts}.0.{of_mixtral[0]}.weight"):
            names = of_mixtral
        of_experts = []
        for e in range(self.spec.moe.num_experts):
            parts = [self.get(f"{experts}.{e}.{name}.weight") for name in names]
            of_experts.append(parts[0] if len(parts) == 1 else torch.cat(parts))
        return torch.stack(of_experts)
