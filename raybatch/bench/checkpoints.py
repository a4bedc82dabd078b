"""Random checkpoints in the shapes of known models, with few layers, for measurements."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Sizes of a Qwen3 model; with `num_experts`, of Qwen3-MoE."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    num_experts: int = 0
    experts_per_token: int = 0
    vocab_size: int = 151_936
    max_len: int = 32_768


# a few layers of the named models, with a proportionally smaller vocabulary: otherwise the LM head
# would dominate a step
ON_GPU: Mapping[str, Shape] = {
    "8 layers of Qwen3-8B": Shape(
        hidden_size=4096,
        num_layers=8,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        ffn_size=12288,
        vocab_size=33_792,
    ),
    "4 layers of Qwen3-30B-A3B": Shape(
        hidden_size=2048,
        num_layers=4,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        ffn_size=768,
        num_experts=128,
        experts_per_token=8,
        vocab_size=12_672,
    ),
}
# as small as is still meaningful
_small = partial(Shape, hidden_size=256, num_heads=8, num_kv_heads=4, head_dim=64, vocab_size=1024)
ON_CPU: Mapping[str, Shape] = {
    "dense, 4 layers of 256": _small(num_layers=4, ffn_size=512),
    "MoE, 2 layers of 256": _small(num_layers=2, ffn_size=128, num_experts=8, experts_per_token=2),
}


def write_checkpoint(
    shape: Shape,
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
    tokenizer: Any = None,  # noqa: ANN401 - of transformers
) -> int:
    """Write a random model with a tokenizer; return its number of parameters.

    Weights depend only on shape, dtype, kind of device and seed. Their scale makes greedy outputs
    vary instead of repeating one token, with few near ties. They are generated on `device`, which
    is faster for large models.

    Args:
        tokenizer: with end and padding tokens; None makes one with a word per id.
    """
    from transformers.utils import logging

    tokenizer = tokenizer or _tokenizer(shape.vocab_size)
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("eos", "pad")}
    with torch.device("meta"):
        model = _model(shape, {"bos_token_id": None, **ids, "dtype": dtype})
    model.to(dtype).to_empty(device=device)
    generator = torch.Generator(device).manual_seed(seed)
    for name, weight in model.named_parameters():
        if "norm" in name:
            # sharper attention than with 1.0, so that outputs depend on the whole context
            weight.data.fill_(1.5 if "q_norm" in name or "k_norm" in name else 1.0)
        else:
            std = 1.0 if "embed_tokens" in name else weight.shape[-1] ** -0.5
            weight.data.normal_(0.0, std, generator=generator)
    logging.disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(weight.numel() for weight in model.parameters())


def _model(shape: Shape, options: Mapping[str, Any]) -> Any:  # noqa: ANN401
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    common: dict[str, Any] = {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.ffn_size,
        "max_position_embeddings": shape.max_len,
        "tie_word_embeddings": False,
        **options,
    }
    if not shape.num_experts:
        return Qwen3ForCausalLM(Qwen3Config(**common))
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **common,
            num_experts=shape.num_experts,
            num_experts_per_tok=shape.experts_per_token,
            moe_intermediate_size=shape.ffn_size,
            norm_topk_prob=True,
        )
    )


def _tokenizer(num_words: int) -> Any:  # noqa: ANN401
    """Return a tokenizer with one word per id."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<eos>": 0} | {f"w{i}": i for i in range(1, num_words)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>", unk_token="<eos>"
    )
