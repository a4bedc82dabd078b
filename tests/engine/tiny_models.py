"""Tiny random checkpoints of every supported architecture, written by transformers."""

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from tests import tolerances

SHAPE = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
# of logits and KV in float32, relative to their size
TOLERANCE = tolerances.of_layers(
    torch.float32, SHAPE["num_hidden_layers"], SHAPE["intermediate_size"]
)
MOE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}


def rope(kind: str, **options: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 5000.0, **options}}


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-biases-tied": (
        "Llama",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "llama-rope-llama3": (
        "Llama",
        rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
    ),
    "llama-rope-linear": ("Llama", rope("linear", factor=2.5)),
    "llama-multi-query": ("Llama", {"num_key_value_heads": 1}),
    "mistral-window": ("Mistral", {"sliding_window": 11, "head_dim": 16}),
    "mistral-no-window": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen2-window-in-upper-layers": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3-tied-attention-bias": (
        "Qwen3",
        {"head_dim": 16, "tie_word_embeddings": True, "attention_bias": True},
    ),
    "qwen3-rope-yarn": (
        "Qwen3",
        {"head_dim": 32, **rope("yarn", factor=4.0, original_max_position_embeddings=32)},
    ),
    "qwen3-rope-yarn-attention-factor": (
        "Qwen3",
        {
            "head_dim": 32,
            **rope("yarn", factor=4.0, original_max_position_embeddings=32, attention_factor=0.8),
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "mixtral-window": (
        "Mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 7},
    ),
    "qwen3-moe": ("Qwen3Moe", {**MOE, "head_dim": 16, "norm_topk_prob": True}),
    "qwen3-moe-plain-probabilities": ("Qwen3Moe", {**MOE, "norm_topk_prob": False}),
    "qwen3-moe-sparse-step": ("Qwen3Moe", {**MOE, "decoder_sparse_step": 2}),
    "qwen3-moe-mlp-only-layers": (
        "Qwen3Moe",
        {**MOE, "mlp_only_layers": [1], "norm_topk_prob": True},
    ),
}


def build(variant: str, **overrides: Any) -> PreTrainedModel:
    """Build the model of `variant` with random weights, biases and norms included."""
    family, options = VARIANTS[variant]
    config = getattr(transformers, f"{family}Config")(**{**SHAPE, **options, **overrides})
    torch.manual_seed(7)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.3)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return model


def save(
    variant: str, path: Path, *, dtype: torch.dtype = torch.float32, **options: Any
) -> PreTrainedModel:
    """Write the checkpoint of `variant` and return what transformers loads from it in float32."""
    build(variant).to(dtype).save_pretrained(path, **options)
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
