"""The models of SiDP's evaluation (arXiv text, section 5.1), by the sizes in their config.json."""

from raybatch.models.config import ModelSpec, MoeSpec, RopeSpec


def spec(num_layers, **sizes):
    usual = {
        "architecture": "LlamaForCausalLM",
        "num_heads": 64,
        "num_kv_heads": 8,
        "head_dim": 128,
        "rms_eps": 1e-5,
        "has_qkv_bias": False,
        "has_o_bias": False,
        "has_mlp_bias": False,
        "has_qk_norm": False,
        "is_tied": False,
        "rope": RopeSpec(),
        "windows": (None,) * num_layers,
        "moe": None,
        "eos_token_ids": (2,),
        "max_model_len": 32_768,
        "dtype": "bfloat16",
    }
    return ModelSpec(num_layers=num_layers, **{**usual, **sizes})


QWEN3_32B = spec(
    64,
    architecture="Qwen3ForCausalLM",
    vocab_size=151_936,
    model_dim=5120,
    ffn_dim=25_600,
    has_qk_norm=True,
)
QWEN2_5_72B = spec(
    80,
    architecture="Qwen2ForCausalLM",
    vocab_size=152_064,
    model_dim=8192,
    ffn_dim=29_568,
    has_qkv_bias=True,
)
LLAMA_3_1_70B = spec(80, vocab_size=128_256, model_dim=8192, ffn_dim=28_672)


def sparse(is_sparse=(True, True, False)):
    """Return a small model with some layers of experts."""
    moe = MoeSpec(num_experts=8, top_k=2, ffn_dim=32, norm_topk_prob=True, is_sparse=is_sparse)
    return spec(
        len(is_sparse),
        architecture="Qwen3MoeForCausalLM",
        vocab_size=100,
        model_dim=64,
        ffn_dim=96,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        has_qk_norm=True,
        is_tied=True,
        moe=moe,
    )


# sizes in its config.json
LLAMA_3_1_70B_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 131072,
}
