"""How the tensors that the decoder uses are built from those of a checkpoint.

Queries, keys and values become one matrix, gate and up one, experts are stacked, and the rows of
queries and keys are reordered for `raybatch.kernels.small_ops`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from raybatch.kernels.small_ops import interleave_order
from raybatch.models.checkpoint import Checkpoint
from raybatch.models.config import ModelSpec

# a shape and the function that builds the tensor
Recipe = tuple[tuple[int, ...], Callable[[], torch.Tensor]]


def recipes_of(checkpoint: Checkpoint, spec: ModelSpec) -> dict[str, Recipe]:
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
