"""A compact Qwen3-MoE for training on a CPU: the same function as the exported checkpoint."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast

# tokens in a block of question-and-answer pairs
BLOCK = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of the model; names follow the Hugging Face config."""

    vocab_size: int = 1984
    hidden_size: int = 192
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    num_experts: int = 8
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 128
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `x`."""
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention with per-head norms and rotary positions.

    A row is a document part followed by blocks of `BLOCK` tokens; a token of a block sees the
    document part and its own block, both through masks.
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        q_size = shape.num_attention_heads * shape.head_dim
        kv_size = shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, q_size, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, shape.hidden_size, bias=False)
        self.q_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)
        self.k_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], masks: "Masks") -> Tensor:
        """Attend within `masks`; `x` is [rows, tokens, hidden]."""
        rows, tokens, _ = x.shape
        kv_heads, head_dim = self.shape.num_key_value_heads, self.shape.head_dim
        heads = (rows, tokens, kv_heads, -1, head_dim)
        scale = head_dim**-0.5
        v = self.v_proj(x).view(heads)
        q = _rotate(self.q_norm(self.q_proj(x).view(heads)) * scale, rope).to(v.dtype)
        k = _rotate(self.k_norm(self.k_proj(x).view(heads)), rope).to(v.dtype)
        q = q.permute(0, 2, 1, 3, 4)  # [rows, kv, tokens, group, dim]
        k, v = k[..., 0, :].transpose(1, 2), v[..., 0, :].transpose(1, 2)  # [rows, kv, tokens, dim]
        out = _attend(q, k, v, masks)
        return self.o_proj(out)


class Masks(NamedTuple):
    """Additive masks: -inf where a query must not attend."""

    document: Tensor  # [rows, document tokens], hides the padding from the blocks
    own: Tensor  # [rows, blocks, BLOCK, BLOCK], causal within each pair


def _attend(q: Tensor, k: Tensor, v: Tensor, masks: Masks) -> Tensor:
    """Attend causally within the document; join document and own block under one softmax."""
    doc_len, group = masks.document.shape[-1], q.shape[3]
    k_doc, v_doc = k[:, :, :doc_len], v[:, :, :doc_len]
    causal = q.new_full((doc_len, doc_len), -torch.inf).triu(1)[:, None]
    q_doc = q[:, :, :doc_len].flatten(2, 3)
    scores = (q_doc @ k_doc.mT).unflatten(2, (doc_len, group)).float() + causal
    out_doc = scores.softmax(-1).to(v.dtype).flatten(2, 3) @ v_doc

    def to_blocks(x: Tensor) -> Tensor:
        return x[:, :, doc_len:].unflatten(2, (-1, BLOCK))

    q_own, k_own, v_own = to_blocks(q).flatten(3, 4), to_blocks(k), to_blocks(v)
    to_doc = (q[:, :, doc_len:].flatten(2, 3) @ k_doc.mT).unflatten(2, (-1, BLOCK * group))
    to_doc = to_doc.float() + masks.document[:, None, None, None]
    own = masks.own[:, None].repeat_interleave(group, dim=3)
    to_own = (q_own @ k_own.mT).float() + own
    peak = torch.maximum(to_doc.amax(-1, keepdim=True), to_own.amax(-1, keepdim=True)).detach()
    to_doc, to_own = (to_doc - peak).exp(), (to_own - peak).exp()
    total = to_doc.sum(-1, keepdim=True) + to_own.sum(-1, keepdim=True)
    from_doc = to_doc.to(v.dtype).flatten(2, 3) @ v_doc
    from_own = to_own.to(v.dtype) @ v_own
    out_own = (from_doc + from_own.flatten(2, 3)) / total.to(v.dtype).flatten(2, 3)
    parts = [out.unflatten(2, (-1, group)) for out in (out_doc, out_own)]
    return torch.cat(parts, dim=2).transpose(1, 2).flatten(2)


class Experts(nn.Module):
    """Top-k routed SwiGLU experts; tokens are sorted by expert, one GEMM chain per expert."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.top_k, num = shape.num_experts_per_tok, shape.num_experts
        hidden, inner = shape.hidden_size, shape.moe_intermediate_size
        self.gate = nn.Linear(hidden, num, bias=False)
        self.gate_up_proj = nn.ParameterList(torch.empty(2 * inner, hidden) for _ in range(num))
        self.down_proj = nn.ParameterList(torch.empty(hidden, inner) for _ in range(num))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Route `x` [tokens, hidden]; returns the output and the load-balancing loss."""
        num_experts = len(self.down_proj)
        with torch.autocast("cpu", enabled=False):
            probs = F.linear(x.float(), self.gate.weight).softmax(-1)
        weights, chosen = probs.topk(self.top_k, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        flat = chosen.flatten()
        counts = flat.bincount(minlength=num_experts)
        order = flat.argsort(stable=True)
        tokens = order // self.top_k
        parts = []
        for i, part in enumerate(x[tokens].split(counts.tolist())):
            gate, up = F.linear(part, self.gate_up_proj[i]).chunk(2, dim=-1)
            parts.append(F.linear(F.silu(gate) * up, self.down_proj[i]))
        out = torch.cat(parts) * weights.flatten()[order, None].to(parts[0].dtype)
        out = torch.zeros_like(x, dtype=out.dtype).index_add(0, tokens, out)
        balance = num_experts * (probs.mean(0) * (counts / flat.numel())).sum()
        return out, balance


class Layer(nn.Module):
    """One pre-norm decoder layer."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = Experts(shape)

    def attend(self, x: Tensor, rope: tuple[Tensor, Tensor], masks: Masks) -> Tensor:
        """Run the attention half of the layer, with its residual."""
        return x + self.self_attn(self.input_layernorm(x), rope, masks)


class DemoModel(nn.Module):
    """The decoder with tied embeddings; returns logits at chosen positions only."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        out_std = 0.02 / (2 * shape.num_hidden_layers) ** 0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                is_out = "o_proj" in name or "down_proj" in name
                nn.init.normal_(parameter, std=out_std if is_out else 0.02)

    def init_embeddings(self, tokenizer: PreTrainedTokenizerFast) -> None:
        """Start the forms of a word (leading space, capital) close to each other."""
        words = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
        stems: dict[str, int] = {}
        rows = [stems.setdefault(word.lstrip("Ġ").lower(), i) for i, word in enumerate(words)]
        spaced = torch.tensor([word.startswith("Ġ") for word in words])
        with torch.no_grad():
            weight = self.embed_tokens.weight
            table = weight[rows] + 0.3 * weight[: len(words)]
            table[spaced] += 0.02 * torch.randn(weight.shape[1])
            weight[: len(words)] = table

    def forward(
        self, ids: Tensor, positions: Tensor, masks: Masks, chosen: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute next-token logits where the loss needs them.

        Args:
            ids: Token ids [rows, tokens].
            positions: Position of each token in its own prompt [rows, tokens].
            masks: Which tokens each token attends to.
            chosen: Flat indices of the tokens whose logits are wanted [n].

        Returns:
            Logits [n, vocab] and the mean load-balancing loss of the layers.
        """
        rope = _rope(positions, self.shape)
        x = self.embed_tokens(ids)
        balance = x.new_zeros(())
        for i, layer in enumerate(self.layers):
            x = layer.attend(x, rope, masks)
            if i == len(self.layers) - 1:
                x = x.flatten(0, 1)[chosen]
            flat = layer.post_attention_layernorm(x).reshape(-1, x.shape[-1])
            out, layer_balance = layer.mlp(flat)
            x = x + out.view(x.shape)
            balance = balance + layer_balance / len(self.layers)
        return F.linear(self.norm(x), self.embed_tokens.weight), balance


def _rope(positions: Tensor, shape: ModelShape) -> tuple[Tensor, Tensor]:
    half = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    angles = positions[..., None, None, None].float() * shape.rope_theta**-half
    return angles.cos(), angles.sin()


def _rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = rope
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
