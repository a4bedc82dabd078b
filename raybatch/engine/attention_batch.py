"""One layer's attention over sequences that are alike, with KV of its own; for measurements."""

from dataclasses import dataclass

import torch
from torch.nn import functional

from raybatch.engine.kv_cache import KVCache
from raybatch.engine.model_config import ModelSpec
from raybatch.engine.rope_frequencies import inverse_frequencies
from raybatch.engine.weights import LayerWeights
from raybatch.kernels.attention import PreparedAttention, attend, prepare_attention, store_kv
from raybatch.kernels.attention_plan import AttentionPlan, ContextPart, DecodePart, PrefillPart
from raybatch.kernels.mlp import add_linear_
from raybatch.kernels.norm import rms_norm
from raybatch.kernels.rotary import rotate_, rotation_table
from raybatch.policy.layer_work import Workload

__all__ = ["AttentionBatch"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionBatch:
    """Tokens of S sequences of the same length, with all that one layer needs to attend.

    Args:
        x: hidden states [T, M].
        positions: int64 [T], in the sequence.
        slot_mapping: int64 [T], where the KV of a token goes.
        rotation: of the tokens' positions, complex64 [T, 1, D / 2].
        cache: KV of one layer, [1, N, G, B, D], filled with random numbers: pages of zeros would
            all be one page of memory.
        plan: what each token attends to.
        prepared: the plan as index tensors.
    """

    x: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    rotation: torch.Tensor
    cache: KVCache
    plan: AttentionPlan
    prepared: PreparedAttention

    @classmethod
    def build(
        cls,
        spec: ModelSpec,
        tokens: int,
        workload: Workload,
        *,
        like: torch.Tensor,
        block_size: int,
    ) -> "AttentionBatch":
        """Make a batch of `tokens` tokens; the last sequence may have fewer than the others.

        Args:
            spec: of the model.
            tokens: of the batch.
            workload: what its sequences are like.
            like: a tensor with the device and dtype of the model.
            block_size: tokens of a block of KV.
        """
        lens = _sequence_lens(tokens, workload)
        cached, device = workload.cached_tokens, like.device
        blocks_per_seq = -(-(cached + max(lens)) // block_size)
        random = torch.Generator().manual_seed(0)
        shape = (1, len(lens) * blocks_per_seq, spec.num_kv_heads, block_size, spec.head_dim)
        cache = KVCache(
            k=torch.randn(shape, generator=random).to(like),
            v=torch.randn(shape, generator=random).to(like),
        )
        positions = torch.cat([cached + torch.arange(n) for n in lens]).to(device)
        owners = torch.repeat_interleave(torch.arange(len(lens)), torch.tensor(lens)).to(device)
        slots = owners * blocks_per_seq * block_size + positions
        plan = _plan(lens, cached, blocks_per_seq, block_size, device)
        prepared = prepare_attention(
            plan,
            positions=positions,
            slot_mapping=slots,
            pool=cache.k[0],
            windows=(None,),
        )
        frequencies = inverse_frequencies(spec.rope, spec.head_dim).to(device)
        return cls(
            x=torch.randn(tokens, spec.model_dim, generator=random).to(like),
            positions=positions,
            slot_mapping=slots,
            rotation=rotation_table(positions, frequencies, spec.rope.attention_factor),
            cache=cache,
            plan=plan,
            prepared=prepared,
        )

    def run(self, spec: ModelSpec, layer: LayerWeights) -> torch.Tensor:
        """Return the hidden states [T, M] after the attention of a layer, which sees all tokens."""
        hidden = rms_norm(self.x, layer.attention_norm, spec.rms_eps)
        projected = functional.linear(hidden, layer.qkv, layer.qkv_bias)
        projected = projected.view(len(hidden), -1, spec.head_dim)
        num_turned = spec.num_heads + spec.num_kv_heads
        turned, v = projected[:, :num_turned], projected[:, num_turned:]
        if layer.qk_norm is not None:
            turned = rms_norm(turned, layer.qk_norm, spec.rms_eps)
        rotate_(turned, self.rotation)
        q, k = turned[:, : spec.num_heads], turned[:, spec.num_heads :]
        k_pool, v_pool = self.cache.k[0], self.cache.v[0]
        store_kv(k, v, k_pool, v_pool, self.prepared)
        attended = attend(q, k, v, k_pool, v_pool, self.prepared, None)
        out = self.x.clone()
        add_linear_(out, attended, layer.o, layer.o_bias)
        return out


def _sequence_lens(tokens: int, workload: Workload) -> list[int]:
    full, rest = divmod(tokens, workload.tokens_per_sequence)
    return [workload.tokens_per_sequence] * full + [rest] * (rest > 0)


def _plan(
    lens: list[int], cached: int, blocks_per_seq: int, block_size: int, device: torch.device
) -> AttentionPlan:
    """Plan one decode token for each sequence, or one chunk over what is cached."""
    num_seqs = len(lens)
    block_ids = torch.arange(num_seqs * blocks_per_seq, device=device)
    if max(lens) == 1:
        valid = torch.full((num_seqs, blocks_per_seq), block_size, device=device)
        valid[:, -1] = cached + 1 - (blocks_per_seq - 1) * block_size
        decode = DecodePart(
            block_ids=block_ids,
            owners=block_ids // blocks_per_seq,
            num_valid=valid.view(-1),
            is_contiguous=True,
        )
        return AttentionPlan(num_decode=num_seqs, decode=decode, prefill=None, contexts=())
    starts = [sum(lens[:i]) for i in range(num_seqs)]
    contexts = [
        ContextPart(
            query_idx=torch.arange(start, start + length, device=device),
            block_ids=block_ids[i * blocks_per_seq :][: -(-cached // block_size)],
            num_tokens=cached,
        )
        for i, (start, length) in enumerate(zip(starts, lens, strict=True))
        if cached
    ]
    return AttentionPlan(
        num_decode=0,
        decode=None,
        prefill=PrefillPart(starts=tuple(starts), lens=tuple(lens)),
        contexts=tuple(contexts),
    )
