"""The weights of a model in the form that the decoder uses.

Queries, keys and values are one matrix, gate and up are one, experts are stacked, and the rows of
queries and keys are reordered for `raybatch.kernels.rotary`. On a CPU this layout is written once
into a safetensors file that every replica of the host maps, so that they share one copy.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from raybatch.config import cache_dir
from raybatch.engine.checkpoint import Checkpoint, stat_key
from raybatch.engine.model_config import ModelSpec
from raybatch.engine.model_source import model_fingerprint
from raybatch.engine.tensor_file import advise_huge_pages, exclusive, write_tensors
from raybatch.engine.weight_layout import Recipe, lay_out, view_of
from raybatch.kernels.linear import Linear
from raybatch.kernels.rotary import interleave_order

logger = logging.getLogger(__name__)

# raise it whenever the layout of the prepared file changes
_FORMAT_VERSION = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerWeights:
    """One layer; a dense one has `gate_up` and `down`, a sparse one has the three of the experts.

    Dense linears are qkv of (H + 2G) * D outputs and M inputs, o of M and H * D, gate_up of 2F and
    M, and down of M and F. Those of the experts are views of shape [out, in], whichever way they
    lie in memory: router [E, M], experts_gate_up [E, 2F, M], experts_down [E, M, F]; on a CPU the
    latter two may be in panels of P outputs instead (`raybatch.kernels.panels`):
    [E, 2F / P, M, P] and [E, M / P, F, P]. The norms of queries and keys are qk_norm [H + G, D].
    """

    attention_norm: torch.Tensor
    qkv: Linear
    o: Linear
    ffn_norm: torch.Tensor
    qk_norm: torch.Tensor | None = None
    gate_up: Linear | None = None
    down: Linear | None = None
    router: torch.Tensor | None = None
    experts_gate_up: torch.Tensor | None = None
    experts_down: torch.Tensor | None = None

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield every tensor of the layer."""
        for field in fields(self):
            part = getattr(self, field.name)
            if isinstance(part, Linear):
                yield from part.tensors()
            elif part is not None:
                yield part


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelWeights:
    """All weights: embed [V, M], norm [M], and the head of V outputs.

    Where both are tied, they are one tensor, and embed may be in the head's panels.
    """

    embed: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    head: Linear


def load_weights(
    model_path: Path,
    spec: ModelSpec,
    *,
    dtype: torch.dtype,
    device: torch.device,
    panel_width: int | None = None,
) -> ModelWeights:
    """Load the checkpoint; on a CPU mapped from the prepared file, where one can be written.

    Args:
        model_path: folder of the checkpoint.
        spec: what the model is.
        dtype: of the weights.
        device: where they go.
        panel_width: of dense linears on a CPU; None lays them out for torch.
    """
    if device.type == "cpu":
        try:
            path = prepare_weights(model_path, spec, dtype, panel_width=panel_width)
            return _map_prepared(path, spec)
        except OSError as error:
            logger.warning(
                "weights are loaded privately, as no prepared copy could be kept: %s", error
            )
    with Checkpoint(model_path) as checkpoint:
        recipe = _recipe(checkpoint, spec)
        tensors = {name: build().to(device, dtype) for name, (_, build) in recipe.items()}
    return _assemble(tensors, spec)


def prepare_weights(
    model_path: Path, spec: ModelSpec, dtype: torch.dtype, *, panel_width: int | None = None
) -> Path:
    """Write the prepared file unless it exists, and return its path.

    Processes that ask at the same time write it once. For the arguments see `load_weights`.

    Raises:
        OSError: the cache folder cannot be written.
    """
    layout = f"{_FORMAT_VERSION}-{panel_width}"
    key = stat_key(model_path, model_fingerprint(model_path), str(dtype), layout)
    target = cache_dir() / "weights" / f"{key}.safetensors"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with exclusive(target.with_suffix(".lock")), Checkpoint(model_path) as checkpoint:
        if not target.exists():
            parts = _recipe(checkpoint, spec).items()
            laid_out = dict(lay_out(*part, dtype, panel_width=panel_width) for part in parts)
            write_tensors(target, laid_out, dtype)
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
        layers.append(_assemble_layer(own, spec))
    embed, head = (views[name] for name in (("table",) * 2 if spec.is_tied else ("embed", "head")))
    return ModelWeights(
        embed=embed,
        layers=tuple(layers),
        norm=views["norm"],
        head=Linear(head, spec.vocab_size),
    )


def _assemble_layer(tensors: Mapping[str, torch.Tensor], spec: ModelSpec) -> LayerWeights:
    num_outputs = {
        "qkv": (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim,
        "o": spec.model_dim,
        "gate_up": 2 * spec.ffn_dim,
        "down": spec.model_dim,
    }
    parts: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if name in num_outputs:
            parts[name] = Linear(tensor, num_outputs[name], tensors.get(f"{name}_bias"))
        elif name.removesuffix("_bias") not in num_outputs:
            parts[name] = tensor
    return LayerWeights(**parts)


def _recipe(checkpoint: Checkpoint, spec: ModelSpec) -> dict[str, Recipe]:
    """Return for each prepared tensor its shape and how to build it."""
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
