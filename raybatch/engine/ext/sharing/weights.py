"""Loads what one rank of a group owns of the feed-forward weights, and reaches what others own.

```
rank          loads its tiles into a segment    maps the others' segments    sizes its KV
              `exchange` of offers -----------> all have loaded
                                                `exchange` of "open" ------> all have all
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

from raybatch.engine.ext.sharing.layers import SharedLayers, placed, tile_of
from raybatch.engine.ext.sharing.segments import Segment, make_segment, open_segment
from raybatch.engine.memory.kv_cache import free_memory_bytes
from raybatch.engine.weights.layout import WeightForm, packed_bytes, placeholder, tensors_of
from raybatch.engine.weights.loading import open_blocks
from raybatch.engine.weights.records import FfnTile, ModelWeights
from raybatch.engine.weights.tile_ring import TileRing
from raybatch.errors import ConfigError
from raybatch.models.checkpoint import model_fingerprint
from raybatch.models.config import ModelSpec
from raybatch.policy.ownership import Ownership, Unit, most_tiles, usual_way, why_not_tiled
from raybatch.records.share import ShareLink

# of each tensor, for the checksum
_CHECKED_NUMBERS = 1 << 14
_Tile = TypeVar("_Tile")

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShareMember:
    """One rank of a group while it loads.

    Args:
        exchange: leaves a text for the others and returns those of all ranks, in order, once they
            are there; raises TeamError where one of them has ended.
        num_slots: for the tiles of others; None takes what hides their copies.
    """

    ownership: Ownership
    rank: int
    exchange: Callable[[str], list[str]]
    num_slots: int | None = None

    @classmethod
    def of(cls, link: ShareLink, spec: ModelSpec, *, num_slots: int | None) -> Self:
        """Return the member in a seat; blocks are cut where that takes fewer bytes for slots."""
        size = link.seat.size
        return cls(
            ownership=Ownership(
                size=size, num_layers=spec.num_layers, by=usual_way(most_tiles(spec), size)
            ),
            rank=link.seat.rank,
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
        """Load the owned tiles, reach those of the others, and return the model and its layers.

        In the model, tiles of others are placeholders, which cannot be read.

        Args:
            weights: all but the tiles, of whose blocks there are placeholders.

        Raises ConfigError: it cannot be cut, or the ranks are not alike. Raises TeamError: a rank
        has ended.
        """
        if device.type == "cpu" and not self.rank:
            _logger.warning(
                "engine.weights='shared' saves no memory on a CPU, where all replicas of a host "
                "map one file of weights, and copies take time: it is for GPUs, and for tests"
            )
        # all ranks take theirs at the same time
        free_bytes = free_memory_bytes(torch.device("cpu")) // self.ownership.size
        ownership, rank = self.ownership, self.rank
        if reason := why_not_tiled(most_tiles(spec), ownership.num_tiles):
            raise ConfigError(f"weights cannot be shared by tile: {reason}")
        num_slots = self.num_slots or ownership.default_slots
        ownership.check_slots(num_slots)
        forms = _forms(weights, ownership)
        owned_forms = {unit: forms[unit] for unit in ownership.owned_by(rank)}
        own = make_segment(
            sum(map(packed_bytes, owned_forms.values())), device, free_bytes=free_bytes
        )
        owned = placed(owned_forms, own.memory)
        with open_blocks(path, spec, form, device=device) as block_of:
            _fill(owned, block_of, ownership.num_tiles)
        fingerprint = model_fingerprint(path)
        sources = reach_others(self, forms, owned, own, fingerprint=fingerprint)
        layers = list(weights.layers)
        for unit, tile in owned.items():
            layer = layers[unit.layer]
            layers[unit.layer] = replace(layer, ffn=replace(layer.ffn, tile=tile))
        shared = SharedLayers(
            layers, ownership, rank, owned, sources, device, num_slots=num_slots, segment=own
        )
        log_holding(ownership, len(owned), own, shared.ring)
        return replace(weights, layers=tuple(layers)), shared


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """What a rank tells of its segment.

    Args:
        handle: how others open it, see `Segment`.
        form: what all ranks have in common: model, dtypes, layouts and who owns what.
        checksum: of the owned tiles, by samples.
    """

    handle: str
    form: str
    checksum: int

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Self:
        return cls(**json.loads(text))


def log_holding(ownership: Ownership, num_owned: int, own: Segment, ring: TileRing[_Tile]) -> None:
    """Log what a rank owns and what passes through."""
    num_units = ownership.num_layers * ownership.num_tiles
    _logger.info(
        "this replica owns %d of %d feed-forward %ss, %.1f MB; %d slots of %.1f MB hold %s of "
        "those of others (pool.share_group %d)",
        num_owned,
        num_units,
        ownership.by,
        own.memory.nbytes / 1e6,
        ring.num_slots,
        ring.num_bytes / max(1, ring.num_slots) / 1e6,
        "all" if ring.num_slots == num_units - num_owned else "some",
        ownership.size,
    )


def reach_others(
    member: ShareMember,
    forms: Mapping[Unit, _Tile],
    owned: Mapping[Unit, _Tile],
    own: Segment,
    *,
    fingerprint: str,
) -> dict[Unit, _Tile]:
    """Return the tiles of all others where they lie, once every rank has loaded its own.

    The tiles may be of any form that `raybatch.engine.weights.layout` knows. Raises ConfigError:
    the ranks are not alike. Raises TeamError: a rank has ended.

    Args:
        forms: placeholders of all tiles.
        owned: those of this rank, which lie in the segment in the order of their units.
        own: the segment, which is to stay as long as others may use it.
    """
    ownership, rank = member.ownership, member.rank
    key = _form_key(forms, ownership, fingerprint)
    offer = Offer(handle=own.handle, form=key, checksum=_checksum(owned.values()))
    offers = [Offer.from_text(text) for text in member.exchange(offer.to_text())]
    sources = dict[Unit, _Tile]()
    for number, other in enumerate(offers):
        if other.form != key:
            raise ConfigError(
                f"replicas {rank} and {number} of a group that shares weights are not alike: they "
                "have other weights, dtypes, layouts or options"
            )
        if number != rank:
            memory = open_segment(other.handle, own.memory.device)
            tiles = placed({unit: forms[unit] for unit in ownership.owned_by(number)}, memory)
            if _checksum(tiles.values()) != other.checksum:
                raise ConfigError(f"the weights of replica {number} arrive damaged at {rank}")
            sources |= tiles
    # nobody takes memory for KV before all have opened what they read
    member.exchange("open")
    return sources


def _forms(weights: ModelWeights, ownership: Ownership) -> dict[Unit, FfnTile]:
    """Return placeholders of all tiles."""
    blocks, count = [layer.ffn.tile for layer in weights.layers], ownership.num_tiles
    return {u: placeholder(tile_of(blocks[u.layer], u.tile, count)) for u in ownership.units()}


def _fill(
    owned: Mapping[Unit, FfnTile], block_of: Callable[[int], FfnTile], num_tiles: int
) -> None:
    for unit, target in owned.items():
        tile = tile_of(block_of(unit.layer), unit.tile, num_tiles)
        for source, place in zip(tensors_of(tile), tensors_of(target), strict=True):
            place.copy_(source)


def _form_key(forms: Mapping[Unit, object], ownership: Ownership, fingerprint: str) -> str:
    shapes = [
        (unit.layer, unit.tile, [(tuple(x.shape), x.stride(), str(x.dtype)) for x in tensors_of(t)])
        for unit, t in forms.items()
    ]
    digest = zlib.crc32(repr(shapes).encode())
    return f"{fingerprint} {ownership.by} {ownership.order} {ownership.size} {digest:08x}"


def _checksum(tiles: Iterable[object]) -> int:
    """Return a sum over the first bytes of all tensors."""
    found = 0
    for tensor in (tensor for tile in tiles for tensor in tensors_of(tile)):
        # as it lies in memory
        flat = tensor.as_strided((min(tensor.numel(), _CHECKED_NUMBERS),), (1,))
        found = zlib.crc32(flat.cpu().contiguous().view(torch.uint8).numpy().data, found)
    return found
