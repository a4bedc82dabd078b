"""Plans GPU memory with replicated weights and with weights shared in a group of replicas.

```
replicated   attention, embeddings | feed-forward weights of all layers        | KV
shared       attention, embeddings | owned feed-forward weights | slots | KV ...
```

KV memory limits the batch, so sharing weights gives larger batches (SiDP, sections 1, 3.1 and 4.4).
Plans count bytes; `pass_costs` and the simulator forecast time.
"""

import math
from dataclasses import dataclass, replace
from typing import Self

from raybatch.errors import ConfigError
from raybatch.models.config import ModelSpec
from raybatch_extensions.sharing.decode_times import DecodeCurve
from raybatch_extensions.sharing.ownership import (
    Ownership,
    ShareBy,
    default_share_by,
    max_shards,
    why_not_sharded,
)
from raybatch_lab.sharing.pass_costs import check_split

# share of a pass that is proportional to rows at saturation
_SATURATED = 0.5
# minimum gain in job time to share weights
_GAIN_FRACTION = 0.05
DEFAULT_UTILISATION, DEFAULT_RESERVE_BYTES = 0.9, 6_000_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelBytes:
    """Bytes of a model, before it is split over the GPUs of a replica.

    Args:
        attention_bytes: by layer: all weights but feed-forward ones, so norms and routers too.
        ffn_bytes: by layer: feed-forward weights, including all experts.
        other_bytes: embeddings, head and the last norm.
        num_heads, num_kv_heads: TP divides the former, and the latter down to one per GPU.
        max_shards: most shards of a feed-forward block.
    """

    attention_bytes: tuple[int, ...]
    ffn_bytes: tuple[int, ...]
    other_bytes: int
    kv_bytes_per_token: int
    num_heads: int
    num_kv_heads: int
    ffn_dim: int
    max_shards: int

    def __post_init__(self) -> None:
        if not self.ffn_bytes or len(self.attention_bytes) != len(self.ffn_bytes):
            raise ConfigError(
                f"attention_bytes and ffn_bytes need one number per layer, got "
                f"{len(self.attention_bytes)} and {len(self.ffn_bytes)}"
            )
        if self.kv_bytes_per_token < 1:
            raise ConfigError(
                f"kv_bytes_per_token must be at least 1, got {self.kv_bytes_per_token}"
            )

    @classmethod
    def of(cls, spec: ModelSpec, *, element_bytes: int = 2, kv_element_bytes: int = 2) -> Self:
        """Return the bytes of a model whose weights all have one dtype."""
        dim, head_dim = spec.model_dim, spec.head_dim
        query_dim, kv_dim = spec.num_heads * head_dim, spec.num_kv_heads * head_dim
        attention = 2 * dim + dim * 2 * (query_dim + kv_dim)
        attention += (query_dim + 2 * kv_dim) * spec.has_qkv_bias
        attention += dim * spec.has_o_bias + 2 * head_dim * spec.has_qk_norm
        dense = 3 * spec.ffn_dim * dim + (2 * spec.ffn_dim + dim) * spec.has_mlp_bias
        moe, layers = spec.moe, range(spec.num_layers)
        router = 0 if moe is None else moe.num_experts * dim
        experts = 0 if moe is None else 3 * moe.num_experts * moe.ffn_dim * dim
        is_sparse = [spec.is_sparse(layer) for layer in layers]
        tables = (1 if spec.is_tied else 2) * spec.vocab_size * dim
        return cls(
            attention_bytes=tuple(
                element_bytes * (attention + router * sparse) for sparse in is_sparse
            ),
            ffn_bytes=tuple(element_bytes * (experts if sparse else dense) for sparse in is_sparse),
            other_bytes=element_bytes * (tables + dim),
            kv_bytes_per_token=2 * kv_dim * spec.num_layers * kv_element_bytes,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            ffn_dim=spec.ffn_dim if moe is None else moe.ffn_dim,
            max_shards=max_shards(spec),
        )

    @property
    def num_layers(self) -> int:
        return len(self.ffn_bytes)

    @property
    def weight_bytes(self) -> int:
        return sum(self.attention_bytes) + sum(self.ffn_bytes) + self.other_bytes

    def kv_token_bytes(self, tp: int) -> int:
        """Return the KV bytes of a token on each of `tp` GPUs; KV heads may be replicated."""
        return _part(self.kv_bytes_per_token, min(tp, self.num_kv_heads))


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuBudget:
    """Memory of one GPU for weights and KV.

    Args:
        utilisation: share of the memory for an engine, as vLLM's `gpu_memory_utilization`.
        reserve_bytes: of that, for activations, graphs, libraries, and the CUDA contexts of peers
            that share weights.
    """

    gpu_bytes: int
    utilisation: float = DEFAULT_UTILISATION
    reserve_bytes: int = DEFAULT_RESERVE_BYTES

    def __post_init__(self) -> None:
        if not 1 <= self.gpu_bytes < math.inf:
            raise ConfigError(f"gpu_bytes must be at least 1, got {self.gpu_bytes}")
        if not 0 < self.utilisation <= 1:
            raise ConfigError(f"utilisation must be above 0 and at most 1, got {self.utilisation}")
        if self.reserve_bytes < 0:
            raise ConfigError(f"reserve_bytes must be at least 0, got {self.reserve_bytes}")

    @property
    def usable_bytes(self) -> int:
        """Return the bytes for weights, slots (buffers for fetched weights) and KV."""
        return max(0, int(self.utilisation * self.gpu_bytes) - self.reserve_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Holding:
    """Memory of one GPU if weights are replicated, or shared by layer or by shard.

    In a group it is that of the rank that owns the most weights.

    Args:
        by: unit of sharing of feed-forward weights; None if replicated.
        num_slots: buffers for weights fetched from other ranks.
        weight_bytes: resident weights: attention, embeddings, and owned feed-forward weights.
        slot_bytes: bytes of all slots.
        kv_tokens: tokens whose KV a replica holds on all its GPUs; 0 if weights do not fit.
        problem: why the layout is not possible; "" if it is.
    """

    by: ShareBy | None
    num_slots: int
    weight_bytes: int
    slot_bytes: int
    kv_tokens: int
    problem: str = ""

    @property
    def device_bytes(self) -> int:
        """Return the bytes of resident weights and slots."""
        return self.weight_bytes + self.slot_bytes

    def rows(self, sequence_tokens: int) -> int:
        """Return the largest batch of a replica, for sequences of `sequence_tokens`."""
        return self.kv_tokens // sequence_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """Memory of replicas alone and in a group; `shared` is `by_layer` or `by_shard`, as used."""

    tp: int
    size: int
    replicated: Holding
    by_layer: Holding
    by_shard: Holding
    shared: Holding
    reason: str

    @property
    def kv_ratio(self) -> float | None:
        """Return KV tokens of a replica in a group relative to one alone; None if that has none."""
        if not self.replicated.kv_tokens:
            return None
        return self.shared.kv_tokens / self.replicated.kv_tokens


def plan_memory(
    model: ModelBytes,
    budget: GpuBudget,
    *,
    tp: int,
    size: int,
    num_slots: int | None = None,
    shares_shards: bool = True,
) -> MemoryPlan:
    """Plan the memory of `size` replicas of `tp` GPUs, alone and as a group.

    Args:
        num_slots: slots per rank, by layer and by shard; None takes the default of each.
        shares_shards: whether engines support shards; decides `shared`, see `default_share_by`.

    Raises:
        ConfigError: the model cannot be split, or the group has one member.
    """
    check_split(
        tp, num_heads=model.num_heads, num_kv_heads=model.num_kv_heads, ffn_dim=model.ffn_dim
    )
    layers = Ownership(size=size, num_layers=model.num_layers)
    shards = Ownership(size=size, num_layers=model.num_layers, by="shard")
    by_layer, by_shard = (
        _shared(model, budget, tp, ownership, num_slots) for ownership in (layers, shards)
    )
    if problem := why_not_sharded(model.max_shards, size):
        by_shard = replace(by_shard, kv_tokens=0, problem=problem)
    by = default_share_by(model.max_shards, size, shares_shards=shares_shards)
    shared, other = (by_layer, by_shard) if by == "layer" else (by_shard, by_layer)
    return MemoryPlan(
        tp=tp,
        size=size,
        replicated=replicated(model, budget, tp=tp),
        by_layer=by_layer,
        by_shard=by_shard,
        shared=shared,
        reason=_reason(shared, other),
    )


def replicated(model: ModelBytes, budget: GpuBudget, *, tp: int) -> Holding:
    """Return the memory of each GPU of a replica that holds all weights itself."""
    return _holding(model, budget, tp, None, _part(model.weight_bytes, tp), 0, 0)


def copied_bytes(model: ModelBytes, *, tp: int, size: int) -> int:
    """Return the bytes that a GPU fetches per pass, for the rank that owns the least.

    A group has `size` ranks that share by layer; by shard a GPU fetches no more. SiDP estimates all
    feed-forward weights, instead of (size - 1) / size of them.
    """
    owned = owned_bytes(model, Ownership(size=size, num_layers=model.num_layers), tp=tp)
    return _part(sum(model.ffn_bytes), tp) - min(owned)


def owned_bytes(model: ModelBytes, ownership: Ownership, *, tp: int) -> list[int]:
    """Return for each rank the bytes of feed-forward weights that it owns, on each of its GPUs."""
    shards, owned = ownership.num_shards, [0] * ownership.size
    for unit in ownership.units():
        owned[ownership.owner(unit)] += _part(model.ffn_bytes[unit.layer], tp * shards)
    return owned


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchBounds:
    """Range of batch sizes for which sharing weights is useful.

    Args:
        saturation_rows: batch size beyond which more rows gain little (B_e); None if none.
        hiding_rows: batch size below which passes wait for weights (B_th); None if all wait.
        fetch_s: seconds to fetch the weights of one pass over an idle link.
    """

    saturation_rows: float | None
    hiding_rows: int | None
    fetch_s: float


def saturation_rows(curve: DecodeCurve) -> float | None:
    """Return the batch size from which at least half of a pass is proportional to rows (B_e).

    It is the corner of a curve that is flat and then a line through 0, and `a / b` of the line
    `a + b * rows`. None if there is no such size. Requires a convex curve.
    """
    spans = zip(curve.rows, curve.rows[1:], curve.seconds, curve.seconds[1:], strict=False)
    for r0, r1, s0, s1 in spans:
        slope = (s1 - s0) / (r1 - r0)
        fixed = s0 - slope * r0
        if slope * r0 >= _SATURATED * s0:
            return r0
        if slope * r1 >= _SATURATED * s1:
            return fixed / slope * _SATURATED / (1 - _SATURATED)
    return None


def batch_bounds(curve: DecodeCurve, pass_bytes: float, link_bytes_per_s: float) -> BatchBounds:
    """Return the bounds for passes with this curve that fetch `pass_bytes` bytes each."""
    if not link_bytes_per_s > 0:
        raise ConfigError(f"link_bytes_per_s must be above 0, got {link_bytes_per_s}")
    fetch_s = pass_bytes / link_bytes_per_s
    return BatchBounds(
        saturation_rows=saturation_rows(curve),
        hiding_rows=curve.hiding_rows(fetch_s),
        fetch_s=fetch_s,
    )


def pays(replicated_s: float | None, shared_s: float) -> bool:
    """Return whether sharing weights shortens a job enough, given its seconds with and without.

    `replicated_s` of None means that a replica does not hold all weights.
    """
    return replicated_s is None or replicated_s >= (1 + _GAIN_FRACTION) * shared_s


def _shared(
    model: ModelBytes, budget: GpuBudget, tp: int, ownership: Ownership, num_slots: int | None
) -> Holding:
    slots = ownership.default_slots if num_slots is None else num_slots
    resident = _part(sum(model.attention_bytes) + model.other_bytes, tp)
    weight_bytes = resident + max(owned_bytes(model, ownership, tp=tp))
    unit_bytes = _part(max(model.ffn_bytes), tp * ownership.num_shards)
    holding = _holding(model, budget, tp, ownership.by, weight_bytes, slots, slots * unit_bytes)
    if slots >= ownership.least_slots:
        return holding
    problem = f"by {ownership.by} a rank needs at least {ownership.least_slots} slots, got {slots}"
    return replace(holding, kv_tokens=0, problem=problem)


def _holding(
    model: ModelBytes,
    budget: GpuBudget,
    tp: int,
    by: ShareBy | None,
    weight_bytes: int,
    num_slots: int,
    slot_bytes: int,
) -> Holding:
    left = budget.usable_bytes - weight_bytes - slot_bytes
    kv_tokens = max(0, left // model.kv_token_bytes(tp))
    slots = f" and {num_slots} slots {slot_bytes / 1e9:.1f} GB" if num_slots else ""
    problem = (
        f"weights need {weight_bytes / 1e9:.1f} GB{slots} of {budget.usable_bytes / 1e9:.1f} GB "
        f"usable on a GPU, which leaves no memory for KV"
    )
    return Holding(
        by=by,
        num_slots=num_slots,
        weight_bytes=weight_bytes,
        slot_bytes=slot_bytes,
        kv_tokens=kv_tokens,
        problem="" if kv_tokens else problem,
    )


def _reason(shared: Holding, other: Holding) -> str:
    """Return the advantage of one ownership over another."""
    if shared.problem:
        return shared.problem
    if other.problem:
        return f"not possible by {other.by}: {other.problem}"
    gigabytes = abs(other.device_bytes - shared.device_bytes) / 1e9
    if not gigabytes:
        return "both ownerships need equal bytes, and whole layers are fewer pieces"
    more = "more" if other.device_bytes > shared.device_bytes else "less"
    return f"by {other.by} weights and slots need {gigabytes:.2f} GB {more}"


def _part(num_bytes: int, parts: int) -> int:
    return -(-num_bytes // parts)
