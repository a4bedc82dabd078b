"""Shapes of the models that the call runs, their specs, and random weights for them."""

from collections.abc import Callable
from dataclasses import replace

import torch

from raybatch.bench.checkpoints import ON_CPU, ON_GPU, Shape
from raybatch.engine.weights.layout import (
    AttentionWeights,
    FfnShard,
    FfnWeights,
    LayerWeights,
    ModelWeights,
)
from raybatch.kernels.byte_numbers import quantise_weight, weight_scales
from raybatch.kernels.linear import Linear
from raybatch.models.config import ModelSpec, MoeSpec, RopeSpec

DENSE = ON_GPU["8 layers of Qwen3-8B"]
SPARSE = ON_GPU["4 layers of Qwen3-30B-A3B"]
# vocabulary of the whole models
VOCAB_SIZE = 151_936
TOY = ON_CPU["dense, 4 layers of 256"]
# the same kinds of models, small enough for Triton's interpreter
_SMALL = Shape(
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    ffn_size=64,
    vocab_size=256,
    max_len=512,
)
_SMALL_SPARSE = replace(_SMALL, ffn_size=32, num_experts=4, experts_per_token=2)

Make = Callable[[tuple[int, ...]], torch.Tensor]


def shapes(*, is_gpu: bool) -> dict[str, Shape]:
    """Return the shapes of the two models; small ones without a GPU."""
    if is_gpu:
        return {"8B": DENSE, "30B-A3B": SPARSE}
    return {"8B": _SMALL, "30B-A3B": _SMALL_SPARSE}


def spec_of(shape: Shape, *, num_layers: int | None = None) -> ModelSpec:
    """Return the spec of a Qwen3 model with this shape."""
    layers = num_layers or shape.num_layers
    moe = None
    if shape.num_experts:
        moe = MoeSpec(
            num_experts=shape.num_experts,
            top_k=shape.experts_per_token,
            ffn_dim=shape.ffn_size,
            norm_topk_prob=True,
            is_sparse=(True,) * layers,
        )
    return ModelSpec(
        architecture="Qwen3MoeForCausalLM" if moe else "Qwen3ForCausalLM",
        vocab_size=shape.vocab_size,
        model_dim=shape.hidden_size,
        num_layers=layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        ffn_dim=shape.ffn_size,
        rms_eps=1e-6,
        has_qkv_bias=False,
        has_o_bias=False,
        has_mlp_bias=False,
        has_qk_norm=True,
        is_tied=False,
        rope=RopeSpec(theta=1e6),
        windows=(None,) * layers,
        moe=moe,
        eos_token_ids=(),
        max_model_len=shape.max_len,
        dtype="bfloat16",
    )


def random_weights(
    spec: ModelSpec, device: torch.device, dtype: torch.dtype, byte_dtype: torch.dtype | None = None
) -> ModelWeights:
    """Return random weights that keep the scale of activations; on "meta", without data."""
    generator = None if device.type == "meta" else torch.Generator(device).manual_seed(0)

    def make(shape: tuple[int, ...]) -> torch.Tensor:
        made = torch.empty(shape, dtype=dtype, device=device)
        return (
            made if generator is None else made.normal_(0, shape[-1] ** -0.5, generator=generator)
        )

    weights = weights_of(spec, make, byte_dtype)
    if generator is not None:
        weights.embed.normal_(generator=generator)
    return weights


def weights_of(spec: ModelSpec, make: Make, byte_dtype: torch.dtype | None = None) -> ModelWeights:
    """Return weights whose matrices `make` creates from their shapes."""
    return ModelWeights(
        embed=make((spec.vocab_size, spec.model_dim)),
        layers=tuple(_layer(spec, make, byte_dtype) for _ in range(spec.num_layers)),
        norm=torch.ones_like(make((spec.model_dim,))),
        head=Linear(make((spec.vocab_size, spec.model_dim)), spec.vocab_size),
    )


def _layer(spec: ModelSpec, make: Make, byte_dtype: torch.dtype | None) -> LayerWeights:
    dim, turned = spec.model_dim, spec.num_heads + spec.num_kv_heads

    def ones(*shape: int) -> torch.Tensor:
        return torch.ones_like(make(shape))

    def linear(outputs: int, inputs: int) -> Linear:
        weight, scales = _in_bytes(make((outputs, inputs)), byte_dtype)
        return Linear(weight, outputs, None, scales)

    attention = AttentionWeights(
        norm=ones(dim),
        qkv=linear((turned + spec.num_kv_heads) * spec.head_dim, dim),
        o=linear(dim, spec.num_heads * spec.head_dim),
        qk_norm=ones(turned, spec.head_dim),
    )
    router = None
    if spec.moe is None:
        shard = FfnShard(gate_up=linear(2 * spec.ffn_dim, dim), down=linear(dim, spec.ffn_dim))
    else:
        experts, ffn = spec.moe.num_experts, spec.moe.ffn_dim
        gate_up, gate_up_scales = _in_bytes(make((experts, 2 * ffn, dim)), byte_dtype)
        down, down_scales = _in_bytes(make((experts, dim, ffn)), byte_dtype)
        router = make((experts, dim))
        shard = FfnShard(
            experts_gate_up=gate_up,
            experts_down=down,
            experts_gate_up_scales=gate_up_scales,
            experts_down_scales=down_scales,
        )
    ffn_weights = FfnWeights(norm=ones(dim), router=router, shard=shard)
    return LayerWeights(attention=attention, ffn=ffn_weights)


def _in_bytes(
    weight: torch.Tensor, dtype: torch.dtype | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if dtype is None:
        return weight, None
    scales = weight_scales(weight, dtype)
    return quantise_weight(weight, scales, dtype), scales
