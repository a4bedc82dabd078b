"""A decoder-only transformer: tokens of one step in, logits out.

Stateless except for its weights. `forward` runs a whole step; its parts are methods too, for
coroutines that pause between modules.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from raybatch.engine.batch.forward_batch import ForwardBatch
from raybatch.engine.memory.kv_cache import KVCache
from raybatch.engine.weights.layer_store import LayerStore, ResidentLayers
from raybatch.engine.weights.layout import AttentionWeights, FfnShard, FfnWeights, ModelWeights
from raybatch.kernels.attention_plan import AttentionPlan
from raybatch.kernels.dispatch import REFERENCE, Ops, Prepared, Upload
from raybatch.kernels.linear import embed_tokens
from raybatch.kernels.moe import Chosen
from raybatch.kernels.native.linears import PANEL_WIDTH, compiled_linears
from raybatch.kernels.small_ops import rotation_table
from raybatch.kernels.step_index import StepSize
from raybatch.models.config import ModelSpec, RopeSpec

# arguments: layer, hidden states x [T, M], normalised hidden states [T, M]; adds the feed-forward
# output of the layer, which may be computed elsewhere, to x in place
FfnService = Callable[[int, torch.Tensor, torch.Tensor], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedBatch:
    """A forward batch with the data that all layers share."""

    batch: ForwardBatch
    rotation: torch.Tensor  # of its positions, complex64 [T, 1, D / 2]
    attention: Prepared


class LastRows(NamedTuple):
    """Hidden states before the last layer [T, M], and the output of that layer's attention.

    Rows without logits are not computed further.
    """

    x: torch.Tensor
    attended: torch.Tensor  # [T, H * D]


class Decoder:
    """Runs the forward pass of one Llama, Mistral, Qwen2, Qwen3, Mixtral or Qwen3-MoE model.

    Args:
        weights: of the model, on one device and in one dtype.
        layers: lends the weights of layers; None takes those of `weights`, all on the device.
        ops: implementation of the ops.
        upload: copies the index of a step to the device; None copies synchronously.

    Attributes:
        ffn_service: if set, computes feed-forward blocks in place of this decoder.
    """

    ffn_service: FfnService | None = None

    def __init__(
        self,
        spec: ModelSpec,
        weights: ModelWeights,
        *,
        layers: LayerStore | None = None,
        ops: Ops = REFERENCE,
        upload: Upload | None = None,
    ) -> None:
        self.spec = spec
        self._weights, self.dtype = weights, weights.norm.dtype
        self.num_layers, self.vocab_size = spec.num_layers, spec.vocab_size
        self.layers = layers or ResidentLayers(weights.layers)
        self.ops = ops
        self._upload = upload
        self._num_projected = spec.num_heads + 2 * spec.num_kv_heads
        self._distinct_windows = tuple(dict.fromkeys(spec.windows))
        device = weights.embed.device
        self._inverse_frequencies = inverse_frequencies(spec.rope, spec.head_dim).to(device)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, cache: KVCache) -> torch.Tensor:
        """Compute one step: write the KV of its tokens and return float32 logits [S, V]."""
        return self.logits(self._run_layers(self.prepare(batch, cache), cache, self.num_layers))

    @torch.inference_mode()
    def forward_fixed(
        self,
        token_ids: torch.Tensor,  # int [T]
        positions: torch.Tensor,  # int [T]
        slot_mapping: torch.Tensor,  # int [T]
        size: StepSize,
        index: torch.Tensor,  # int32 [size.num_index]
        cache: KVCache,
        out: torch.Tensor | LastRows,
    ) -> None:
        """Compute a step so that a CUDA graph can replay it.

        All varying data is read from device tensors; requires ops of fixed shapes
        (`Ops.is_fixed`). Writes float32 logits [T, V] of all rows to `out`, or the inputs of
        `finish`.
        """
        assert self.ops.prepare_fixed is not None, "needs ops of fixed shapes"
        num_rows = len(token_ids)
        batch = ForwardBatch(
            token_ids=token_ids,
            positions=positions,
            slot_mapping=slot_mapping,
            logits_idx=token_ids,
            attention=AttentionPlan(num_decode=num_rows, decode=None, prefill=None, segments=()),
        )
        prepared = PreparedBatch(
            batch=batch,
            rotation=self._rotation(positions),
            attention=self.ops.prepare_fixed(
                size, index, positions=positions, slot_mapping=slot_mapping
            ),
        )
        if not isinstance(out, LastRows):
            self.logits(self._run_layers(prepared, cache, self.num_layers), out=out)
            return
        last = self.num_layers - 1
        x = self._run_layers(prepared, cache, last)
        attended = self._attend(last, self.layers.attention(last), x, prepared, cache)
        out.x.copy_(x)
        out.attended.copy_(attended)

    @torch.inference_mode()
    def finish(self, rows: LastRows, logits_idx: torch.Tensor) -> torch.Tensor:
        """Return float32 logits [S, V] of the rows `logits_idx` of a step of `forward_fixed`.

        `rows` are what that wrote to its `out`.
        """
        last = self.num_layers - 1
        x, attended = (x.index_select(0, logits_idx) for x in rows)
        self._add_attended_(last, x, attended)
        self.ffn_(last, x)
        return self.logits(x)

    def _run_layers(self, prepared: PreparedBatch, cache: KVCache, num_layers: int) -> torch.Tensor:
        x = self.embed(prepared.batch)
        for layer_idx in range(num_layers):
            x = self.attention(layer_idx, x, prepared, cache)
            self.ffn_(layer_idx, x)
        return x

    @torch.inference_mode()
    def prepare(self, batch: ForwardBatch, cache: KVCache) -> PreparedBatch:
        """Return a batch with the data that all layers share, computed once per step."""
        last = batch.logits_attention
        return PreparedBatch(
            batch=batch,
            rotation=self._rotation(batch.positions),
            attention=self._prepare(
                batch,
                batch.attention,
                cache,
                last=None if last is None else (last, batch.logits_idx),
            ),
        )

    @torch.inference_mode()
    def embed(self, batch: ForwardBatch) -> torch.Tensor:
        """Return the hidden states of a batch before its first layer, [T, M]."""
        return embed_tokens(batch.token_ids, self._weights.embed)

    @torch.inference_mode()
    def attention(
        self,
        layer_idx: int,
        x: torch.Tensor,  # [T, M], modified in place
        prepared: PreparedBatch,
        cache: KVCache,
    ) -> torch.Tensor:
        """Write the KV of a batch in one layer and return its hidden states after attention.

        Modifies and returns `x`; the last layer returns only the rows with logits, [S, M].
        """
        batch = prepared.batch
        is_last = layer_idx == self.spec.num_layers - 1
        drops_rows = is_last and len(batch.logits_idx) < len(batch.token_ids)
        layer = self.layers.attention(layer_idx)
        last = batch.logits_attention if is_last else None
        # needs a linear that can compute keys and values without queries
        if not layer.qkv.can_start_at(self.spec.num_heads * self.spec.head_dim):
            last = None
        attended = self._attend(layer_idx, layer, x, prepared, cache, last)
        if drops_rows:
            attended = attended.index_select(0, batch.logits_idx) if last is None else attended
            x = x.index_select(0, batch.logits_idx)
        self._add_attended_(layer_idx, x, attended)
        return x

    def _add_attended_(self, layer_idx: int, x: torch.Tensor, attended: torch.Tensor) -> None:
        self.ops.add_linear_(x, attended, self.layers.attention(layer_idx).o)

    @torch.inference_mode()
    def ffn_(
        self,
        layer_idx: int,
        x: torch.Tensor,  # [T, M], modified in place
    ) -> None:
        """Add the feed-forward output of one layer; rows may come from several batches."""
        ffn = self.layers.ffn(layer_idx)
        hidden = self.ops.rms_norm(x, ffn.norm, self.spec.rms_eps)
        if self.ffn_service is not None:
            self.ffn_service(layer_idx, x, hidden)
            return
        with self.layers.shard(layer_idx) as shard:
            self.add_shard_(x, hidden, ffn, shard)

    def add_shard_(
        self,
        x: torch.Tensor,
        hidden: torch.Tensor,
        ffn: FfnWeights,
        shard: FfnShard,
        chosen: Chosen | None = None,
    ) -> None:
        """Add the output of a block or shard for normalised rows [T, M] to `x`.

        `chosen` are the experts of these rows, if already routed.
        """
        if shard.gate_up is not None and shard.down is not None:
            self.ops.add_mlp_(x, hidden, shard.gate_up, shard.down)
            return
        moe = self.spec.moe
        assert moe is not None, "a sparse layer needs a MoeSpec"
        assert ffn.router is not None, "a sparse layer has a router"
        assert shard.experts_gate_up is not None, "a sparse layer has experts"
        assert shard.experts_down is not None, "a sparse layer has experts"
        x += self.ops.moe_ffn(
            hidden,
            ffn.router,
            shard.experts_gate_up,
            shard.experts_down,
            top_k=moe.top_k,
            norm_topk_prob=moe.norm_topk_prob,
            gate_up_scales=shard.experts_gate_up_scales,
            down_scales=shard.experts_down_scales,
            experts=shard.experts,
            chosen=chosen,
        )

    @torch.inference_mode()
    def logits(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return float32 logits [S, V] of hidden states [S, M] after the last layer.

        Written to `out` if given.
        """
        weights = self._weights
        normed = self.ops.rms_norm(x, weights.norm, self.spec.rms_eps)
        logits = self.ops.linear(normed, weights.head)
        return logits.float() if out is None else out.copy_(logits)

    def _rotation(self, positions: torch.Tensor) -> torch.Tensor:
        return rotation_table(positions, self._inverse_frequencies, self.spec.rope.attention_factor)

    def _prepare(
        self,
        batch: ForwardBatch,
        plan: AttentionPlan,
        cache: KVCache,
        rows: torch.Tensor | None = None,
        last: tuple[AttentionPlan, torch.Tensor] | None = None,
    ) -> Prepared:
        positions, slots = batch.positions, batch.slot_mapping
        if rows is not None:
            positions, slots = positions.index_select(0, rows), slots.index_select(0, rows)
        return self.ops.prepare_attention(
            plan,
            positions=positions,
            slot_mapping=slots,
            pool=cache.k[0],
            windows=self._distinct_windows,
            upload=self._upload,
            last=last,
        )

    def _attend(
        self,
        layer_idx: int,
        layer: AttentionWeights,
        x: torch.Tensor,
        prepared: PreparedBatch,
        cache: KVCache,
        last: AttentionPlan | None = None,
    ) -> torch.Tensor:
        """Write the KV of all rows and attend; with the plan `last`, only rows with logits do."""
        spec, ops, plan = self.spec, self.ops, prepared.attention
        pools = cache.k[layer_idx], cache.v[layer_idx]
        hidden = ops.rms_norm(x, layer.norm, spec.rms_eps)
        num_queries = spec.num_heads if last is None else 0
        heads = slice(spec.num_heads - num_queries, self._num_projected)
        q, k, v = self._project(layer, hidden, heads, (prepared.rotation, *pools, plan))
        if last is not None:
            rows = prepared.batch.logits_idx
            hidden, turns = hidden.index_select(0, rows), prepared.rotation.index_select(0, rows)
            heads = slice(0, spec.num_heads)
            q, _, _ = self._project(layer, hidden, heads, (turns, *pools, None))
            plan = plan.last or self._prepare(prepared.batch, last, cache, rows)
        return ops.attend(q, k, v, *pools, plan, spec.windows[layer_idx])

    def _project(
        self,
        layer: AttentionWeights,
        hidden: torch.Tensor,
        heads: slice,
        rest: tuple[torch.Tensor, torch.Tensor, torch.Tensor, Prepared | None],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return some of a layer's heads of queries, keys and values, in that order.

        `rest` are further arguments of `Ops.finish_heads`: rotation, pools and plan.
        """
        spec = self.spec
        dims = slice(heads.start * spec.head_dim, heads.stop * spec.head_dim)
        projected = self.ops.linear(hidden, layer.qkv.take(dims))
        projected = projected.view(len(hidden), heads.stop - heads.start, spec.head_dim)
        norms = layer.qk_norm
        if norms is not None:
            norms = norms[heads.start : min(heads.stop, spec.num_heads + spec.num_kv_heads)]
        num_queries = max(0, spec.num_heads - heads.start)
        return self.ops.finish_heads(projected, num_queries, norms, spec.rms_eps, *rest)


def dense_panel_width(
    dtype: torch.dtype, device: torch.device, *, may_compile: bool, byte_dtype: torch.dtype | None
) -> int | None:
    """Return the panel width of dense linears for compiled ops; None for torch's layout.

    Compiles the ops for it, once per process.
    """
    if not (may_compile and dtype == torch.float32 and device.type == "cpu"):
        return None
    return None if compiled_linears(byte_dtype) is None else PANEL_WIDTH


def byte_dtype_of(weights: ModelWeights) -> torch.dtype | None:
    """Return the dtype of quantized weights; None if there are none."""
    linear = weights.layers[0].attention.qkv
    return None if linear.scales is None else linear.weight.dtype


def inverse_frequencies(spec: RopeSpec, head_dim: int) -> torch.Tensor:
    """Return the angle per position of each pair of dimensions, float32 [D / 2].

    Source: the definitions of YaRN (arXiv:2309.00071) and of Llama 3.1, with the constants that
    transformers uses.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    periods = spec.theta**exponents
    plain = 1.0 / periods
    if spec.kind == "linear":
        return plain / spec.factor
    if spec.kind == "llama3":
        turns = spec.original_max_positions * plain / (2 * math.pi)
        smooth = (turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
        smooth = smooth.clamp(0, 1)
        return (1 - smooth) * plain / spec.factor + smooth * plain
    if spec.kind == "yarn":
        ramp = _yarn_ramp(spec, head_dim)
        return 1.0 / (spec.factor * periods) * ramp + plain * (1 - ramp)
    return plain


def _yarn_ramp(spec: RopeSpec, head_dim: int) -> torch.Tensor:
    """Return the interpolation weight of each pair: 0 for high frequencies, 1 for low ones."""

    def dimension_of(turns: float) -> float:
        ratio = spec.original_max_positions / (turns * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(spec.theta))

    low, high = dimension_of(spec.beta_fast), dimension_of(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)
    return ramp.clamp(0, 1)
