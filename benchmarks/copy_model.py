"""Writes a Llama checkpoint that copies: it repeats the token that followed its last token earlier.

Two attention heads are set by hand: one attends to the previous token, the other to the token after
an earlier occurrence of the current token. All other weights are zeros of the usual sizes, which
take the usual time and add nothing. So answers repeat a passage of the prompt, as in extraction.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import models
import torch
from safetensors.torch import save_file

HEAD_DIM = 64
ROPE_THETA = 1e9
# parts of the hidden states: current token, previous token, token to generate, and a constant
CODE, BEFORE, NEXT, CONSTANT = slice(0, 64), slice(64, 128), slice(128, 192), 192
# pairs of rotated dimensions that turn fast enough to distinguish neighbours, and slow pairs
FAST_PAIRS, SLOW_PAIRS = range(4), range(14, 32)
SHARPNESS = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyShape:
    """Sizes of a checkpoint; at least two layers and a hidden size of 256."""

    hidden_size: int = 768
    num_layers: int = 10
    num_heads: int = 12
    num_kv_heads: int = 4
    intermediate_size: int = 2048


def write(folder: Path, shape: CopyShape) -> None:
    """Write the checkpoint."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": HEAD_DIM,
        "intermediate_size": shape.intermediate_size,
        "vocab_size": models.VOCAB_SIZE,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": ROPE_THETA,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 0,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_tensors(shape), folder / "model.safetensors")
    models.build_tokenizer().save_pretrained(folder)


def _tensors(shape: CopyShape) -> dict[str, torch.Tensor]:
    hidden, kv_dim = shape.hidden_size, shape.num_kv_heads * HEAD_DIM
    codes = torch.randn(models.VOCAB_SIZE, 64, generator=torch.Generator().manual_seed(0)).sign()
    embed, head = torch.zeros(2, models.VOCAB_SIZE, hidden)
    embed[:, CODE], embed[:, CONSTANT], head[:, NEXT] = codes, 8.0, codes
    tensors = {
        "model.embed_tokens.weight": embed.contiguous(),
        "lm_head.weight": head.contiguous(),
        "model.norm.weight": torch.ones(hidden),
    }
    sizes = {
        "self_attn.q_proj": (shape.num_heads * HEAD_DIM, hidden),
        "self_attn.k_proj": (kv_dim, hidden),
        "self_attn.v_proj": (kv_dim, hidden),
        "self_attn.o_proj": (hidden, shape.num_heads * HEAD_DIM),
        "mlp.gate_proj": (shape.intermediate_size, hidden),
        "mlp.up_proj": (shape.intermediate_size, hidden),
        "mlp.down_proj": (hidden, shape.intermediate_size),
    }
    for i in range(shape.num_layers):
        layer = {name: torch.zeros(size) for name, size in sizes.items()}
        if i < 2:
            (_look_back, _look_up)[i](layer)
        tensors |= {f"model.layers.{i}.{name}.weight": w for name, w in layer.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{i}.{norm}.weight"] = torch.ones(hidden)
    return tensors


def _look_back(layer: dict[str, torch.Tensor]) -> None:
    """Make the first head attend to the previous token, by a rotation of one position."""
    half = HEAD_DIM // 2
    for pair in FAST_PAIRS:
        angle = -(ROPE_THETA ** (-pair / half))
        layer["self_attn.q_proj"][pair, CONSTANT] = SHARPNESS * math.cos(angle)
        layer["self_attn.q_proj"][pair + half, CONSTANT] = SHARPNESS * math.sin(angle)
        layer["self_attn.k_proj"][pair, CONSTANT] = 1.0
    _move(layer, BEFORE)


def _look_up(layer: dict[str, torch.Tensor]) -> None:
    """Make the first head attend to the token after an earlier copy of the current token."""
    half = HEAD_DIM // 2
    rows = torch.tensor([*SLOW_PAIRS, *(pair + half for pair in SLOW_PAIRS)])
    dims = torch.arange(len(rows))
    layer["self_attn.q_proj"][rows, dims + CODE.start] = SHARPNESS
    layer["self_attn.k_proj"][rows, dims + BEFORE.start] = 1.0
    _move(layer, NEXT)


def _move(layer: dict[str, torch.Tensor], target: slice) -> None:
    """Make the first head write the codes that it reads to `target`."""
    dims = torch.arange(64)
    layer["self_attn.v_proj"][dims, dims + CODE.start] = 1.0
    layer["self_attn.o_proj"][dims + target.start, dims] = 1.0
