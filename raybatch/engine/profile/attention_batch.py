"""Sequences that are alike, with KV of their own, for one layer's attention; for measurements."""

from dataclasses import dataclass

import torch

from raybatch.config import KVCacheDType
from raybatch.engine.batch.forward_batch import ForwardBatch
from raybatch.engine.forward.decoder import Decoder, PreparedBatch
from raybatch.engine.memory.kv_cache import KVCache, pick_kv_dtype
from raybatch.kernels.attention_plan import AttentionPlan, ContextPart, DecodePart, PrefillPart
from raybatch.kernels.kv_rows import is_quantised, quantise
from raybatch.models.config import ModelSpec
from raybatch.policy.batches.layer_plan import Workload


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionBatch:
    """Tokens of S sequences of the same length, with all that a layer needs to attend.

    Args:
        x: hidden states [T, M].
        prepared: the forward batch as the decoder prepares it once per step; all rows have logits,
            so that the last layer keeps them.
        cache: KV [L, N, G, B, R]. All layers lie in the memory of one, filled with random numbers:
            pages of zeros would all be one page of memory.
    """

    x: torch.Tensor
    prepared: PreparedBatch
    cache: KVCache

    @classmethod
    def build(
        cls,
        decoder: Decoder,
        spec: ModelSpec,
        tokens: int,
        workload: Workload,
        *,
        like: torch.Tensor,
        block_size: int,
        kv_cache_dtype: KVCacheDType = "auto",
    ) -> "AttentionBatch":
        """Make a batch of `tokens` tokens; the last sequence may have fewer than the others.

        Args:
            decoder: that will attend.
            spec: of its model.
            tokens: of the batch.
            workload: what its sequences are like.
            like: a tensor with the device and dtype of the model.
            block_size: tokens of a block of KV.
            kv_cache_dtype: of the pool, as `EngineConfig` has it.
        """
        lens = _sequence_lens(tokens, workload)
        cached, device = workload.cached_tokens, like.device
        blocks_per_seq = -(-(cached + max(lens)) // block_size)
        random = torch.Generator().manual_seed(0)
        shape = (1, len(lens) * blocks_per_seq, spec.num_kv_heads, block_size, spec.head_dim)
        copies = (decoder.num_layers, -1, -1, -1, -1)
        dtype = pick_kv_dtype(kv_cache_dtype, like.dtype)
        cache = KVCache(
            k=_rows(torch.randn(shape, generator=random).to(like), dtype).expand(copies),
            v=_rows(torch.randn(shape, generator=random).to(like), dtype).expand(copies),
        )
        positions = torch.cat([cached + torch.arange(n) for n in lens]).to(device)
        owners = torch.repeat_interleave(torch.arange(len(lens)), torch.tensor(lens)).to(device)
        batch = ForwardBatch(
            token_ids=torch.zeros(tokens, dtype=torch.int64, device=device),
            positions=positions,
            slot_mapping=owners * blocks_per_seq * block_size + positions,
            logits_idx=torch.arange(tokens, device=device),
            attention=_plan(lens, cached, blocks_per_seq, block_size, device),
        )
        return cls(
            x=torch.randn(tokens, spec.model_dim, generator=random).to(like),
            prepared=decoder.prepare(batch, cache),
            cache=cache,
        )

    def run(self, decoder: Decoder, layer_idx: int) -> torch.Tensor:
        """Return the hidden states [T, M] after the attention of a layer."""
        return decoder.attention(layer_idx, self.x.clone(), self.prepared, self.cache)


def _rows(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return rows [..., D] as a pool of `dtype` holds them, [..., R]."""
    return quantise(x, dtype) if is_quantised(dtype) else x


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
