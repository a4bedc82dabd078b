"""What a GPU holds where replicas copy a model's weights, and where a group of them shares them.

```
replicated   attention, embeddings | feed-forward weights of all layers        | KV
shared       attention, embeddings | those that the rank owns | slots | KV ...
```

Sequences of a replica are as long as it has KV for, so weights that are held once in a group are
rows in a batch (SiDP, sections 1, 3.1 and 4.4). Plans count bytes; what passes take is asked of
`decode_times` and of the simulator.
"""

import math
from dataclasses import dataclass, replace
from typing import Self

from raybatch.errors import ConfigError
from raybatch.models.config import ModelSpec
from raybatch.policy.decode_times import DecodeCurve, check_split
from raybatch.policy.ownership import Ownership, ShareBy, most_tiles, usual_way, why_not_tiled

# by which a job has to be quicker where weights are shared
_GAIN_FRACTION = 0.05
DEFAULT_UTILISATION, DEFAULT_RESERVE_BYTES = 0.9, 6_000_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelBytes:
    """Bytes of a model, before it is split over the GPUs of a replica.

    Args:
        attention_bytes: by layer, of all that is no feed-forward weight: norms and routers too.
        ffn_bytes: by layer, of all experts where it has some.
        other_bytes: embeddings, head and the last norm.
        num_heads, num_kv_heads: a split divides the first, and the second as far as it goes.
        most_tiles: that each feed-forward block can be cut into.
    """

    attention_bytes: tuple[int, ...]
    ffn_bytes: tuple[int, ...]
    other_bytes: int
    kv_bytes_per_token: int
    num_heads: int
    num_kv_heads: int
    ffn_dim: int
    most_tiles: int

    def __post_init__(self) -> None:
        if not self.ffn_bytes or len(self.attention_bytes) != len(self.ffn_bytes):
            raise ConfigError(
                f"a model needs bytes of attention and of feed-forward blocks for each layer, got "
                f"{len(self.attention_bytes)} and {len(self.ffn_bytes)} layers"
            )
        if self.kv_bytes_per_token < 1:
            raise ConfigError(f"KV takes {self.kv_bytes_per_token} bytes a token; at least 1")

    @classmethod
    def of(cls, spec: ModelSpec, *, element_bytes: int = 2, kv_element_bytes: int = 2) -> Self:
        """Return the bytes of a model whose weights are all of one type."""
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
            most_tiles=most_tiles(spec),
        )

    @property
    def num_layers(self) -> int:
        return len(self.ffn_bytes)

    @property
    def weight_bytes(self) -> int:
        return sum(self.attention_bytes) + sum(self.ffn_bytes) + self.other_bytes

    def kv_token_bytes(self, tp: int) -> int:
        """Return the bytes of a token on each of `tp` GPUs; a KV head is not split, but copied."""
        return _part(self.kv_bytes_per_token, min(tp, self.num_kv_heads))


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuBudget:
    """What weights and KV may take of one GPU.

    Args:
        utilisation: the share of its memory that an engine takes, as vLLM's option of that name.
        reserve_bytes: of that, what activations, graphs and libraries take, and the contexts that
            replicas which share weights have on each other's GPUs.
    """

    gpu_bytes: int
    utilisation: float = DEFAULT_UTILISATION
    reserve_bytes: int = DEFAULT_RESERVE_BYTES

    def __post_init__(self) -> None:
        if not 1 <= self.gpu_bytes < math.inf:
            raise ConfigError(f"gpu_bytes is {self.gpu_bytes}; a GPU has at least 1")
        if not 0 < self.utilisation <= 1:
            raise ConfigError(f"utilisation is {self.utilisation}; it must be above 0, at most 1")
        if self.reserve_bytes < 0:
            raise ConfigError(f"reserve_bytes is {self.reserve_bytes}; it must be at least 0")

    @property
    def usable_bytes(self) -> int:
        """Return the bytes for weights, slots and KV."""
        return max(0, int(self.utilisation * self.gpu_bytes) - self.reserve_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Holding:
    """What each GPU holds in one way; the rank of a group that owns most decides.

    Args:
        by: how feed-forward weights are shared; None where each replica has all.
        weight_bytes: that stay: attention, embeddings, and the feed-forward weights it owns.
        slot_bytes: of all slots together.
        kv_tokens: of a replica, over all its GPUs; 0 where its weights do not fit.
        problem: why it cannot be, "" where it can.
    """

    by: ShareBy | None
    num_slots: int
    weight_bytes: int
    slot_bytes: int
    kv_tokens: int
    problem: str = ""

    @property
    def device_bytes(self) -> int:
        """Return what weights and slots take."""
        return self.weight_bytes + self.slot_bytes

    def rows(self, sequence_tokens: int) -> int:
        """Return the largest batch of a replica, of sequences of so many tokens."""
        return self.kv_tokens // sequence_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """What replicas hold alone and in a group; `shared` is by the ownership that engines have."""

    tp: int
    size: int
    replicated: Holding
    by_layer: Holding
    by_tile: Holding
    shared: Holding
    reason: str

    @property
    def kv_ratio(self) -> float | None:
        """Return KV tokens shared for one replicated; None where replicas cannot be."""
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
    shares_tiles: bool = True,
) -> MemoryPlan:
    """Return what `size` replicas of `tp` GPUs hold, each for itself and as a group.

    Args:
        num_slots: of each rank, for both ownerships; None takes the default of each.
        shares_tiles: whether engines know tiles; `shared` is what they take, see `usual_way`.

    Raises:
        ConfigError: the model cannot be split so, or a group of one.
    """
    check_split(
        tp, num_heads=model.num_heads, num_kv_heads=model.num_kv_heads, ffn_dim=model.ffn_dim
    )
    layers = Ownership(size=size, num_layers=model.num_layers)
    tiles = Ownership(size=size, num_layers=model.num_layers, by="tile")
    by_layer, by_tile = (
        _shared(model, budget, tp, ownership, num_slots) for ownership in (layers, tiles)
    )
    if problem := why_not_tiled(model.most_tiles, size):
        by_tile = replace(by_tile, kv_tokens=0, problem=problem)
    by = usual_way(model.most_tiles, size, shares_tiles=shares_tiles)
    shared, other = (by_layer, by_tile) if by == "layer" else (by_tile, by_layer)
    return MemoryPlan(
        tp=tp,
        size=size,
        replicated=replicated(model, budget, tp=tp),
        by_layer=by_layer,
        by_tile=by_tile,
        shared=shared,
        reason=_reason(shared, other),
    )


def replicated(model: ModelBytes, budget: GpuBudget, *, tp: int) -> Holding:
    """Return what a replica holds that has all weights."""
    return _holding(model, budget, tp, None, _part(model.weight_bytes, tp), 0, 0)


def copied_bytes(model: ModelBytes, *, tp: int, size: int) -> int:
    """Return the bytes that each GPU reads of others in a pass; the rank that owns least decides.

    By layer; by tile it is never more.

    SiDP's more careful estimate takes all feed-forward weights in place of (size - 1) / size.
    """
    owned = owned_bytes(model, Ownership(size=size, num_layers=model.num_layers), tp=tp)
    return _part(sum(model.ffn_bytes), tp) - min(owned)


def owned_bytes(model: ModelBytes, ownership: Ownership, *, tp: int) -> list[int]:
    """Return by rank the feed-forward bytes that it owns, on each of its GPUs."""
    tiles, owned = ownership.num_tiles, [0] * ownership.size
    for unit in ownership.units():
        owned[ownership.owner(unit)] += _part(model.ffn_bytes[unit.layer], tp * tiles)
    return owned


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchBounds:
    """Between which batches of a replica shared weights are for.

    Args:
        saturation_rows: more rows than these gain little (B_e); None where the curve has no such.
        hiding_rows: fewer rows than these wait for copies (B_th); None where all do.
        copies_s: of one pass, over an idle link.
    """

    saturation_rows: float | None
    hiding_rows: int | None
    copies_s: float


def batch_bounds(curve: DecodeCurve, pass_bytes: float, link_bytes_per_s: float) -> BatchBounds:
    """Return the bounds for passes of a curve, each of which copies so many bytes to a GPU."""
    if not link_bytes_per_s > 0:
        raise ConfigError(f"link_bytes_per_s is {link_bytes_per_s}; it must be above 0")
    copies_s = pass_bytes / link_bytes_per_s
    return BatchBounds(
        saturation_rows=curve.saturation_rows(),
        hiding_rows=curve.hiding_rows(copies_s),
        copies_s=copies_s,
    )


def pays(replicated_s: float | None, shared_s: float) -> bool:
    """Return whether a job ends so much sooner where weights are shared that they should be.

    `replicated_s` of None is where replicas cannot be.
    """
    return replicated_s is None or replicated_s >= (1 + _GAIN_FRACTION) * shared_s


def _shared(
    model: ModelBytes, budget: GpuBudget, tp: int, ownership: Ownership, num_slots: int | None
) -> Holding:
    slots = ownership.default_slots if num_slots is None else num_slots
    resident = _part(sum(model.attention_bytes) + model.other_bytes, tp)
    weight_bytes = resident + max(owned_bytes(model, ownership, tp=tp))
    unit_bytes = _part(max(model.ffn_bytes), tp * ownership.num_tiles)
    holding = _holding(model, budget, tp, ownership.by, weight_bytes, slots, slots * unit_bytes)
    if slots >= ownership.least_slots:
        return holding
    problem = f"by {ownership.by} a rank needs {ownership.least_slots} slots at least, not {slots}"
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
        f"weights take {weight_bytes / 1e9:.1f} GB{slots} of the {budget.usable_bytes / 1e9:.1f} "
        f"GB of a GPU that are usable, which leaves no KV for a token"
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
    """Return what one ownership has over another."""
    if shared.problem:
        return shared.problem
    if other.problem:
        return f"by {other.by} it cannot be: {other.problem}"
    gigabytes = abs(other.device_bytes - shared.device_bytes) / 1e9
    if not gigabytes:
        return "both ownerships take as many bytes, and whole layers are fewer pieces"
    more = "more" if other.device_bytes > shared.device_bytes else "less"
    return f"by {other.by} weights and slots take {gigabytes:.2f} GB {more}"


def _part(num_bytes: int, parts: int) -> int:
    return -(-num_bytes // parts)
