"""Real models as their `config.json` has them, and weights of their shapes without numbers."""

import json

import torch

from raybatch.engine.weights.records import (
    AttentionWeights,
    FfnTile,
    FfnWeights,
    LayerWeights,
    ModelWeights,
)
from raybatch.kernels.linear import Linear
from raybatch.models.config import read_model_spec

_COMMON = {
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "head_dim": 128,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
    # of no weight that is looked at
    "vocab_size": 512,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
}
CONFIGS = {
    "Qwen3-8B": _COMMON
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_key_value_heads": 8,
    },
    "Qwen3-30B-A3B": _COMMON
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
}
# fewer experts, as Mixtral and DeepSeek's small models have
for _num, _chosen in ((8, 2), (64, 6)):
    CONFIGS[f"{_num} experts"] = CONFIGS["Qwen3-30B-A3B"] | {
        "num_experts": _num,
        "num_experts_per_tok": _chosen,
    }


def spec_of(name, folder):
    """Return the spec of a model of two layers."""
    (folder / "config.json").write_text(json.dumps(CONFIGS[name]))
    return read_model_spec(folder)


def weights_of(spec, dtype=torch.bfloat16):
    """Return weights that nothing was written into, so that they take no memory."""

    def empty(*shape):
        return torch.empty(shape, dtype=dtype)

    def linear(num_outputs, num_inputs):
        return Linear(empty(num_outputs, num_inputs), num_outputs)

    dim, head_dim = spec.model_dim, spec.head_dim
    num_heads, num_kv_heads = spec.num_heads, spec.num_kv_heads
    attention = AttentionWeights(
        norm=empty(dim),
        qkv=linear((num_heads + 2 * num_kv_heads) * head_dim, dim),
        o=linear(dim, num_heads * head_dim),
        qk_norm=empty(num_heads + num_kv_heads, head_dim),
    )
    if spec.moe is None:
        router, tile = (
            None,
            FfnTile(gate_up=linear(2 * spec.ffn_dim, dim), down=linear(dim, spec.ffn_dim)),
        )
    else:
        num_experts, width = spec.moe.num_experts, spec.moe.ffn_dim
        router = empty(num_experts, dim)
        tile = FfnTile(
            experts_gate_up=empty(num_experts, 2 * width, dim),
            experts_down=empty(num_experts, dim, width),
        )
    ffn = FfnWeights(norm=empty(dim), tiles=(tile,), router=router)
    return ModelWeights(
        embed=empty(spec.vocab_size, dim),
        norm=empty(dim),
        head=linear(spec.vocab_size, dim),
        layers=(LayerWeights(attention=attention, ffn=ffn),) * spec.num_layers,
    )
