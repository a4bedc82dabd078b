"""The weights of a model in the form that the decoder uses.

Queries, keys and values are one matrix, gate and up are one, experts are stacked, and the rows of
queries and keys are reordered for `raybatch.kernels.rotary`. On a CPU this layout is written once
into a safetensors file that every replica of the host maps, so that they share one copy.
"""

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from raybatch.config import cache_dir
from raybatch.engine.checkpoint import Checkpoint, stat_key
from raybatch.engine.layer_tensors import piece_bytes
from raybatch.engine.model_config import ModelSpec
from raybatch.engine.model_source import model_fingerprint
from raybatch.engine.tensor_file import advise_huge_pages, exclusive, write_tensors
from raybatch.engine.weight_layout import Recipe, lay_out, view_of
from raybatch.kernels.rotary import interleave_order
from raybatch.policy.residence import WeightSizes

logger = logging.getLogger(__name__)

# raise it whenever the layout of the prepared file changes
_FORMAT_VERSION = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerWeights:
    """One layer; a dense one has `gate_up` and `down`, a sparse one has the three of the experts.

    Linears are views of shape [out, in], whichever way they lie in memory: qkv [(H + 2G) * D, M],
    o [M, H * D], gate_up [2F, M], down [M, F], router [E, M], experts_gate_up [E, 2F, M],
    experts_down [E, M, F]. On a CPU, gate_up and the two of the experts may be in panels of P
    outputs instead (`raybatch.kernels.panels`): [2F / P, M, P], [E, 2F / P, M, P] and
    [E, M / P, F, P]. The norms of queries and keys are qk_norm [H + G, D].
    """

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    o: torch.Tensor
    ffn_norm: torch.Tensor
    qkv_bias: torch.Tensor | None = None
    qk_norm: torch.Tensor | None = None
    o_bias: torch.Tensor | None = None
    gate_up: torch.Tensor | None = None
    gate_up_bias: torch.Tensor | None = None
    down: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    router: torch.Tensor | None = None
    experts_gate_up: torch.Tensor | None = None
    experts_down: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelWeights:
    """All weights: embed [V, M], head [V, M] (the same tensor where they are tied), norm [M]."""

    embed: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    head: torch.Tensor


def load_weights(
    model_path: Path,
    spec: ModelSpec,
    *,
    dtype: torch.dtype,
    device: torch.device,
    streamed: Collection[int] = (),
) -> ModelWeights:
    """Load the checkpoint; on a CPU mapped from the prepared file, where one can be written.

    Args:
        model_path: folder of the checkpoint.
        spec: of the model.
        dtype: of all weights.
        device: where they go.
        streamed: layers that stay in host memory, pinned where the device is a GPU.
    """
    if device.type == "cpu":
        try:
            return _map_prepared(prepare_weights(model_path, spec, dtype), spec)
        except OSError as error:
            logger.warning(
                "weights are loaded privately, as no prepared copy could be kept: %s", error
            )
    with Checkpoint(model_path) as checkpoint:
        recipe = _recipe(checkpoint, spec)
        tensors = {}
        for name, (_, build) in recipe.items():
            if device.type == "cuda" and _layer_of(name) in streamed:
                tensors[name] = build().to(dtype).pin_memory()
            else:
                tensors[name] = build().to(device, dtype)
    return _assemble(tensors, spec)


def weight_sizes(
    model_path: Path, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device
) -> WeightSizes:
    """Return the bytes that the weights will take, without loading any."""
    with Checkpoint(model_path) as checkpoint:
        recipe = _recipe(checkpoint, spec)
        if device.type == "cpu":
            recipe = dict(lay_out(*part, dtype) for part in recipe.items())
    other_bytes, layer_bytes = 0, [0] * spec.num_layers
    for name, (shape, _) in recipe.items():
        layer, num_bytes = _layer_of(name), piece_bytes(torch.Size(shape).numel(), dtype)
        if layer is None:
            other_bytes += num_bytes
        else:
            layer_bytes[layer] += num_bytes
    return WeightSizes(other_bytes=other_bytes, layer_bytes=tuple(layer_bytes))


def _layer_of(name: str) -> int | None:
    """Return the layer of a prepared tensor; None for what belongs to none."""
    layer, dot, _ = name.partition(".")
    return int(layer) if dot and layer.isdecimal() else None


def prepare_weights(model_path: Path, spec: ModelSpec, dtype: torch.dtype) -> Path:
    """Write the prepared file unless it exists, and return its path.

    Processes that ask at the same time write it once.

    Raises:
        OSError: the cache folder cannot be written.
    """
    key = stat_key(model_path, model_fingerprint(model_path), str(dtype), str(_FORMAT_VERSION))
    target = cache_dir() / "weights" / f"{key}.safetensors"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with exclusive(target.with_suffix(".lock")), Checkpoint(model_path) as checkpoint:
        if not target.exists():
            recipe = _recipe(checkpoint, spec)
            write_tensors(target, dict(lay_out(*part, dtype) for part in recipe.items()), dtype)
            logger.info("prepared weights written to %s", target)
    return target


def _map_prepared(path: Path, spec: ModelSpec) -> ModelWeights:
    with safe_open(path, framework="pt", device="cpu") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    advise_huge_pages(tensors.values())
    return _assemble(tensors, spec)


def _assemble(tensors: Mapping[str, torch.Tensor], spec: ModelSpec) -> ModelWeights:
    views = dict(view_of(name, tensor) for name, tensor in tensors.items())
    layers = []
    for i in range(spec.num_layers):
        prefix = f"{i}."
        own = {n.removeprefix(prefix): t for n, t in views.items() if n.startswith(prefix)}
        layers.append(LayerWeights(**own))
    return ModelWeights(
        embed=views["embed"],
        layers=tuple(layers),
        norm=views["norm"],
        head=views["embed"] if spec.is_tied else views["head"],
    )


def _recipe(checkpoint: Checkpoint, spec: ModelSpec) -> dict[str, Recipe]:
    """Return for each prepared tensor its shape and how to build it."""
    get = checkpoint.get
    recipe: dict[str, Recipe] = {
        "embed": ((spec.vocab_size, spec.model_dim), lambda: get("model.embed_tokens.weight")),
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
    """Builds the prepared tensors of one layer from those of the checkpoint."""

    checkpoint: Checkpoint
    spec: ModelSpec
    prefix: str

    def get(self, name: str) -> torch.Tensor:
        return self.checkpoint.get(self.prefix + name)

    def attention(self) -> dict[str, Recipe]:
        spec = self.spec
        num_heads, num_kv_heads, head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        qkv_dim = (num_heads + 2 * num_kv_heads) * head_dim
        parts: dict[str, Recipe] = {
            "attention_norm": ((spec.model_dim,), lambda: self.get("input_layernorm.weight")),
            "qkv": ((qkv_dim, spec.model_dim), lambda: self._qkv("weight")),
            "o": (
                (spec.model_dim, num_heads * head_dim),
                lambda: self.get("self_attn.o_proj.weight"),
            ),
            "ffn_norm": ((spec.model_dim,), lambda: self.get("post_attention_layernorm.weight")),
        }
        if spec.has_qkv_bias:
            parts["qkv_bias"] = ((qkv_dim,), lambda: self._qkv("bias"))
        if spec.has_o_bias:
            parts["o_bias"] = ((spec.model_dim,), lambda: self.get("self_attn.o_proj.bias"))
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
            "down": ((model_dim, ffn_dim), lambda: self.get("mlp.down_proj.weight")),
        }
        if self.spec.has_mlp_bias:
            parts["gate_up_bias"] = ((2 * ffn_dim,), lambda: self._gate_up("mlp.", "bias"))
            parts["down_bias"] = ((model_dim,), lambda: self.get("mlp.down_proj.bias"))
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
            "router": ((num_experts, model_dim), lambda: self.get(f"{block}gate.weight")),
            "experts_gate_up": (
                (num_experts, 2 * ffn_dim, model_dim),
                lambda: self._stack_gate_up(f"{block}experts."),
            ),
            "experts_down": (
                (num_experts, model_dim, ffn_dim),
                lambda: self._stack_down(f"{block}experts."),
            ),
        }

    def _has(self, name: str) -> bool:
        return self.prefix + name in self.checkpoint

    def _stack_gate_up(self, experts: str) -> torch.Tensor:
        assert self.spec.moe is not None, "a sparse layer needs the model's MoeSpec"
        if self._has(f"{experts}gate_up_proj"):
            return self.get(f"{experts}gate_up_proj")
        # Mixtral's w1 is the gate, w3 goes up and w2 down
        names = ("w1", "w3") if self._has(f"{experts}0.w1.weight") else ("gate_proj", "up_proj")
        return torch.stack(
            [
                torch.cat([self.get(f"{experts}{e}.{name}.weight") for name in names])
                for e in range(self.spec.moe.num_experts)
            ]
        )

    def _stack_down(self, experts: str) -> torch.Tensor:
        assert self.spec.moe is not None, "a sparse layer needs the model's MoeSpec"
        if self._has(f"{experts}down_proj"):
            return self.get(f"{experts}down_proj")
        name = "w2" if self._has(f"{experts}0.w2.weight") else "down_proj"
        return torch.stack(
            [self.get(f"{experts}{e}.{name}.weight") for e in range(self.spec.moe.num_experts)]
        )
