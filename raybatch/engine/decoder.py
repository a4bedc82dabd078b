"""A decoder-only transformer: tokens of one step in, logits out. No state but its weights."""

import torch
from torch.nn import functional

from raybatch.engine.forward_batch import ForwardBatch
from raybatch.engine.kv_cache import KVCache
from raybatch.engine.model_config import ModelSpec
from raybatch.engine.rope_frequencies import inverse_frequencies
from raybatch.engine.weights import LayerWeights, ModelWeights
from raybatch.kernels.attention_plan import AttentionPlan
from raybatch.kernels.dispatch import Ops, Prepared, ops_for
from raybatch.kernels.mlp import add_linear_, add_mlp_
from raybatch.kernels.rotary import rotation_table


class Decoder:
    """Runs one model for Llama, Mistral, Qwen2, Qwen3, Mixtral and Qwen3-MoE.

    Args:
        spec: what the model is.
        weights: of that model, on one device and in one dtype.
        ops: the form of the ops; that of the weights' device by default.
    """

    def __init__(self, spec: ModelSpec, weights: ModelWeights, ops: Ops | None = None) -> None:
        self._spec = spec
        self._weights = weights
        self._num_projected = spec.num_heads + 2 * spec.num_kv_heads
        self._distinct_windows = tuple(dict.fromkeys(spec.windows))
        device = weights.embed.device
        self._ops = ops or ops_for(device)
        self._inverse_frequencies = inverse_frequencies(spec.rope, spec.head_dim).to(device)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, cache: KVCache) -> torch.Tensor:
        """Compute one step: writes the KV of its tokens and returns float32 logits [S, V]."""
        weights, spec = self._weights, self._spec
        x = functional.embedding(batch.token_ids, weights.embed)
        rotation = rotation_table(
            batch.positions, self._inverse_frequencies, spec.rope.attention_factor
        )
        prepared = self._prepare(batch, batch.attention, cache)
        last = spec.num_layers - 1
        needs_all_rows = len(batch.logits_idx) == len(batch.token_ids)
        for i, layer in enumerate(weights.layers):
            if i == last and batch.logits_attention is not None:
                attended = self._attend_last(layer, x, rotation, cache, prepared, batch)
            else:
                attended = self._attend(i, layer, x, rotation, cache, prepared)
                if i == last and not needs_all_rows:
                    attended = attended.index_select(0, batch.logits_idx)
            if i == last and not needs_all_rows:
                x = x.index_select(0, batch.logits_idx)
            add_linear_(x, attended, layer.o, layer.o_bias)
            self._add_ffn(layer, x)
        return functional.linear(
            self._ops.rms_norm(x, weights.norm, spec.rms_eps), weights.head
        ).float()

    def _prepare(
        self,
        batch: ForwardBatch,
        plan: AttentionPlan,
        cache: KVCache,
        rows: torch.Tensor | None = None,
    ) -> Prepared:
        """Prepare the plan of all rows, or of the given ones."""
        positions, slots = batch.positions, batch.slot_mapping
        if rows is not None:
            positions, slots = positions.index_select(0, rows), slots.index_select(0, rows)
        return self._ops.prepare_attention(
            plan,
            positions=positions,
            slot_mapping=slots,
            pool=cache.k[0],
            windows=self._distinct_windows,
        )

    def _attend(
        self,
        layer_idx: int,
        layer: LayerWeights,
        x: torch.Tensor,
        rotation: torch.Tensor,
        cache: KVCache,
        prepared: Prepared,
    ) -> torch.Tensor:
        spec = self._spec
        hidden = self._ops.rms_norm(x, layer.attention_norm, spec.rms_eps)
        qk, v = self._project(layer, hidden, rotation, slice(0, self._num_projected))
        q, k = qk[:, : spec.num_heads], qk[:, spec.num_heads :]
        k_pool, v_pool = cache.k[layer_idx], cache.v[layer_idx]
        self._ops.store_kv(k, v, k_pool, v_pool, prepared)
        return self._ops.attend(q, k, v, k_pool, v_pool, prepared, spec.windows[layer_idx])

    def _attend_last(
        self,
        layer: LayerWeights,
        x: torch.Tensor,
        rotation: torch.Tensor,
        cache: KVCache,
        prepared: Prepared,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        """Attend in the last layer: all rows leave their KV, those with logits have queries."""
        assert batch.logits_attention is not None, "the plan of the last layer"
        spec, rows = self._spec, batch.logits_idx
        hidden = self._ops.rms_norm(x, layer.attention_norm, spec.rms_eps)
        k, v = self._project(layer, hidden, rotation, slice(spec.num_heads, self._num_projected))
        k_pool, v_pool = cache.k[-1], cache.v[-1]
        self._ops.store_kv(k, v, k_pool, v_pool, prepared)
        q, _ = self._project(
            layer,
            hidden.index_select(0, rows),
            rotation.index_select(0, rows),
            slice(0, spec.num_heads),
        )
        plan = self._prepare(batch, batch.logits_attention, cache, rows)
        return self._ops.attend(q, k, v, k_pool, v_pool, plan, spec.windows[-1])

    def _project(
        self, layer: LayerWeights, hidden: torch.Tensor, rotation: torch.Tensor, heads: slice
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return some of a layer's heads of queries, keys and values, in that order.

        The first result holds queries and keys, normalised and turned, the second values.
        """
        spec = self._spec
        dims = slice(heads.start * spec.head_dim, heads.stop * spec.head_dim)
        bias = layer.qkv_bias[dims] if layer.qkv_bias is not None else None
        projected = functional.linear(hidden, layer.qkv[dims], bias)
        projected = projected.view(len(hidden), heads.stop - heads.start, spec.head_dim)
        num_turned = min(heads.stop, spec.num_heads + spec.num_kv_heads) - heads.start
        turned, values = projected[:, :num_turned], projected[:, num_turned:]
        if layer.qk_norm is not None:
            norms = layer.qk_norm[heads.start : heads.start + num_turned]
            turned = self._ops.rms_norm(turned, norms, spec.rms_eps)
        self._ops.rotate_(turned, rotation)
        return turned, values

    def _add_ffn(self, layer: LayerWeights, x: torch.Tensor) -> None:
        spec = self._spec
        hidden = self._ops.rms_norm(x, layer.ffn_norm, spec.rms_eps)
        if layer.gate_up is not None and layer.down is not None:
            add_mlp_(x, hidden, layer.gate_up, layer.down, layer.gate_up_bias, layer.down_bias)
            return
        assert spec.moe is not None, "a layer without gate_up is sparse"
        assert layer.router is not None, "a sparse layer has a router"
        assert layer.experts_gate_up is not None, "a sparse layer has experts"
        assert layer.experts_down is not None, "a sparse layer has experts"
        x += self._ops.moe_ffn(
            hidden,
            layer.router,
            layer.experts_gate_up,
            layer.experts_down,
            top_k=spec.moe.top_k,
            norm_topk_prob=spec.moe.norm_topk_prob,
        )
