"""Names and shapes of the tensors that a model needs of its checkpoint; no torch.

`raybatch.engine.weights.recipes` builds the tensors of the decoder from these.
"""

from collections.abc import Container, Iterator

from raybatch.models.config import ModelSpec

Shape = tuple[int, ...]


def needed_tensors(spec: ModelSpec, stored: Container[str]) -> dict[str, Shape]:
    """Return the tensors that a model needs, by name in the checkpoint.

    Args:
        spec: of the model.
        stored: names in its checkpoint, which say how it keeps its experts: each for itself, or
            stacked.
    """
    table = (spec.vocab_size, spec.model_dim)
    found: dict[str, Shape] = {"model.embed_tokens.weight": table}
    for i in range(spec.num_layers):
        prefix = f"model.layers.{i}."
        found |= {prefix + name: shape for name, shape in _attention(spec)}
        parts = _sparse(spec, prefix, stored) if spec.is_sparse(i) else _dense(spec)
        found |= {prefix + name: shape for name, shape in parts}
    found["model.norm.weight"] = (spec.model_dim,)
    if not spec.is_tied:
        found["lm_head.weight"] = table
    return found


def _attention(spec: ModelSpec) -> Iterator[tuple[str, Shape]]:
    query_dim, kv_dim = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    yield "input_layernorm.weight", (spec.model_dim,)
    for name, num_outputs in (("q", query_dim), ("k", kv_dim), ("v", kv_dim)):
        yield f"self_attn.{name}_proj.weight", (num_outputs, spec.model_dim)
        if spec.has_qkv_bias:
            yield f"self_attn.{name}_proj.bias", (num_outputs,)
    yield "self_attn.o_proj.weight", (spec.model_dim, query_dim)
    if spec.has_o_bias:
        yield "self_attn.o_proj.bias", (spec.model_dim,)
    if spec.has_qk_norm:
        yield "self_attn.q_norm.weight", (spec.head_dim,)
        yield "self_attn.k_norm.weight", (spec.head_dim,)
    yield "post_attention_layernorm.weight", (spec.model_dim,)


def _dense(spec: ModelSpec) -> Iterator[tuple[str, Shape]]:
    wide, narrow = (spec.ffn_dim, spec.model_dim), (spec.model_dim, spec.ffn_dim)
    for name, shape in (("gate", wide), ("up", wide), ("down", narrow)):
        yield f"mlp.{name}_proj.weight", shape
        if spec.has_mlp_bias:
            yield f"mlp.{name}_proj.bias", shape[:1]


def _sparse(spec: ModelSpec, prefix: str, stored: Container[str]) -> Iterator[tuple[str, Shape]]:
    moe = spec.moe
    assert moe is not None, "a sparse layer needs the model's MoeSpec"
    block = "block_sparse_moe." if f"{prefix}block_sparse_moe.gate.weight" in stored else "mlp."
    experts = f"{block}experts."
    yield f"{block}gate.weight", (moe.num_experts, spec.model_dim)
    wide, narrow = (moe.ffn_dim, spec.model_dim), (spec.model_dim, moe.ffn_dim)
    if f"{prefix}{experts}gate_up_proj" in stored:
        yield f"{experts}gate_up_proj", (moe.num_experts, 2 * moe.ffn_dim, spec.model_dim)
    else:
        # Mixtral's w1 is the gate, w3 goes up and w2 down
        is_short = f"{prefix}{experts}0.w1.weight" in stored
        for name in ("w1", "w3") if is_short else ("gate_proj", "up_proj"):
            for e in range(moe.num_experts):
                yield f"{experts}{e}.{name}.weight", wide
    if f"{prefix}{experts}down_proj" in stored:
        yield f"{experts}down_proj", (moe.num_experts, *narrow)
    else:
        name = "w2" if f"{prefix}{experts}0.w2.weight" in stored else "down_proj"
        for e in range(moe.num_experts):
            yield f"{experts}{e}.{name}.weight", narrow
