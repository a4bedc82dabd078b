"""Loads the feed-forward shards that a rank owns, and maps those of its peers.

```
rank          loads its shards into a segment   maps the peers' segments     sizes its KV
              `exchange` of offers -----------> all have loaded
                                                `exchange` of "open" ------> all have mapped
```
"""

import json
import logging
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self, TypeVar

import torch

from raybatch.engine.memory.kv_cache import free_memory_bytes
from raybatch.engine.weights.layer_store import ShardBufferPool
from raybatch.engine.weights.layout import (
    FfnShard,
    ModelWeights,
    WeightForm,
    packed_bytes,
    placeholder,
    tensors_of,
)
from raybatch.engine.weights.loading import open_blocks
from raybatch.errors import ConfigError
from raybatch.models.checkpoint import model_fingerprint
from raybatch.models.config import ModelSpec
from raybatch.records.share import ShareLink, Unit
from raybatch_extensions.sharing.layers import SharedLayers, placed, shard_of
from raybatch_extensions.sharing.ownership import (
    Ownership,
    default_share_by,
    max_shards,
    why_not_sharded,
)
from raybatch_extensions.sharing.segments import Segment, make_segment, open_segment

# elements of each tensor in the checksum
_CHECKED_NUMBERS = 1 << 14
_Shard = TypeVar("_Shard")

_logger = logging.getLogger("raybatch.extensions.sharing.weights")


@dataclass(frozen=True, kw_only=True, slots=True)
class ShareMember:
    """Loads the weights of one rank of a weight-sharing group.

    Args:
        exchange: all-gather of a text, by rank; blocks until all ranks call it. Raises RankError
            if a rank has ended.
        num_slots: slots for shards of peers; None takes as many as hide the weight fetch.
    """

    ownership: Ownership
    rank: int
    exchange: Callable[[str], list[str]]
    num_slots: int | None = None

    @classmethod
    def of(cls, link: ShareLink, spec: ModelSpec, *, num_slots: int | None) -> Self:
        """Return the member for this rank; it shares by shard if that needs smaller slots."""
        size = link.share_rank.size
        return cls(
            ownership=Ownership(
                size=size, num_layers=spec.num_layers, by=default_share_by(max_shards(spec), size)
            ),
            rank=link.share_rank.rank,
            exchange=link.exchange,
            num_slots=num_slots,
        )

    def place(
        self,
        path: Path,
        spec: ModelSpec,
        form: WeightForm,
        weights: ModelWeights,
        device: torch.device,
    ) -> tuple[ModelWeights, SharedLayers]:
        """Load the owned shards and map those of the peers; return (model weights, their layers).

        In the model weights, shards of peers are placeholders without data.

        Args:
            weights: all weights; the feed-forward blocks are placeholders.

        Raises ConfigError: the blocks cannot be split, or the ranks differ. Raises RankError: a
        rank has ended.
        """
        if device.type == "cpu" and not self.rank:
            _logger.warning(
                "engine.weights='shared' saves no memory on a CPU, where all replicas of a host "
                "map one weight file, and it adds copies; use it on GPUs or for tests"
            )
        # all ranks allocate at the same time
        free_bytes = free_memory_bytes(torch.device("cpu")) // self.ownership.size
        ownership, rank = self.ownership, self.rank
        if reason := why_not_sharded(max_shards(spec), ownership.num_shards):
            raise ConfigError(f"engine.weights='shared': cannot share by shard: {reason}")
        num_slots = self.num_slots or ownership.default_slots
        ownership.check_slots(num_slots)
        forms = _forms(weights, ownership)
        owned_forms = {unit: forms[unit] for unit in ownership.owned_by(rank)}
        own = make_segment(
            sum(map(packed_bytes, owned_forms.values())), device, free_bytes=free_bytes
        )
        owned = placed(owned_forms, own.memory)
        with open_blocks(path, spec, form, device=device) as block_of:
            _fill(owned, block_of, ownership.num_shards)
        fingerprint = model_fingerprint(path)
        sources = reach_others(self, forms, owned, own, fingerprint=fingerprint)
        layers = list(weights.layers)
        for unit, shard in owned.items():
            layer = layers[unit.layer]
            layers[unit.layer] = replace(layer, ffn=replace(layer.ffn, shard=shard))
        shared = SharedLayers(
            layers, ownership, rank, owned, sources, device, num_slots=num_slots, segment=own
        )
        log_holding(ownership, len(owned), own, shared.buffers)
        return replace(weights, layers=tuple(layers)), shared


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """What a rank tells its peers about its segment.

    Args:
        handle: see `Segment`.
        form: must be equal on all ranks: model, dtypes, layouts and ownership.
        checksum: of samples of the owned shards.
    """

    handle: str
    form: str
    checksum: int

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Self:
        return cls(**json.loads(text))


def log_holding(
    ownership: Ownership, num_owned: int, own: Segment, buffers: ShardBufferPool[_Shard]
) -> None:
    """Log the owned shards and the slots for those of peers."""
    num_units = ownership.num_layers * ownership.num_shards
    _logger.info(
        "this replica owns %d of %d feed-forward %ss, %.1f MB; %d slots of %.1f MB hold %s of the "
        "others (pool.share_group %d)",
        num_owned,
        num_units,
        ownership.by,
        own.memory.nbytes / 1e6,
        buffers.num_slots,
        buffers.num_bytes / max(1, buffers.num_slots) / 1e6,
        "all" if buffers.num_slots == num_units - num_owned else "some",
        ownership.size,
    )


def reach_others(
    member: ShareMember,
    forms: Mapping[Unit, _Shard],
    owned: Mapping[Unit, _Shard],
    own: Segment,
    *,
    fingerprint: str,
) -> dict[Unit, _Shard]:
    """Map the shards of all peers and return them; blocks until every rank has loaded its own.

    Shards may have any form that `raybatch.engine.weights.layout` supports. Raises ConfigError: the
    ranks differ. Raises RankError: a rank has ended.

    Args:
        forms: placeholders of all shards.
        owned: shards of this rank, in the segment in the order of their units.
        own: the segment of this rank; must live as long as peers use it.
    """
    ownership, rank = member.ownership, member.rank
    key = _form_key(forms, ownership, fingerprint)
    offer = Offer(handle=own.handle, form=key, checksum=_checksum(owned.values()))
    offers = [Offer.from_text(text) for text in member.exchange(offer.to_text())]
    sources = dict[Unit, _Shard]()
    for number, other in enumerate(offers):
        if other.form != key:
            raise ConfigError(
                f"replicas {rank} and {number} of a weight-sharing group differ in weights, "
                "dtypes, layouts or options; give all replicas the same model and options"
            )
        if number != rank:
            memory = open_segment(other.handle, own.memory.device)
            shards = placed({unit: forms[unit] for unit in ownership.owned_by(number)}, memory)
            if _checksum(shards.values()) != other.checksum:
                raise ConfigError(
                    f"checksum error: replica {rank} read damaged weights of replica {number}; run "
                    "the job again, or leave engine.weights out"
                )
            sources |= shards
    # no rank allocates KV before all have mapped their peers
    member.exchange("open")
    return sources


def _forms(weights: ModelWeights, ownership: Ownership) -> dict[Unit, FfnShard]:
    """Return placeholders of all shards."""
    blocks, count = [layer.ffn.shard for layer in weights.layers], ownership.num_shards
    return {u: placeholder(shard_of(blocks[u.layer], u.shard, count)) for u in ownership.units()}


def _fill(
    owned: Mapping[Unit, FfnShard], block_of: Callable[[int], FfnShard], num_shards: int
) -> None:
    for unit, target in owned.items():
        shard = shard_of(block_of(unit.layer), unit.shard, num_shards)
        for source, place in zip(tensors_of(shard), tensors_of(target), strict=True):
            place.copy_(source)


def _form_key(forms: Mapping[Unit, object], ownership: Ownership, fingerprint: str) -> str:
    shapes = [
        (
            unit.layer,
            unit.shard,
            [(tuple(x.shape), x.stride(), str(x.dtype)) for x in tensors_of(t)],
        )
        for unit, t in forms.items()
    ]
    digest = zlib.crc32(repr(shapes).encode())
    return f"{fingerprint} {ownership.by} {ownership.order} {ownership.size} {digest:08x}"


def _checksum(shards: Iterable[object]) -> int:
    """Return a checksum over the first elements of all tensors."""
    found = 0
    for tensor in (tensor for shard in shards for tensor in tensors_of(shard)):
        # in memory order
        flat = tensor.as_strided((min(tensor.numel(), _CHECKED_NUMBERS),), (1,))
        found = zlib.crc32(flat.cpu().contiguous().view(torch.uint8).numpy().data, found)
    return found
