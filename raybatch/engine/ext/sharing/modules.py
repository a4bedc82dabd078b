"""Feed-forward modules of another engine, of torch, whose weights a group of replicas shares.

```
layer   attention and all else    as the engine made it
        feed-forward module       its matrices are one tile, that of `Unit(layer)`
                                  owned       lie in this rank's segment
                                  of others   are placeholders, which cannot be read; while the
                                              module runs, what a slot has in their place
```

Slots, orders and owners are those of the native engine, by layer.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import nn

from raybatch.engine.ext.sharing.layers import placed, ring_of_others
from raybatch.engine.ext.sharing.segments import make_segment
from raybatch.engine.ext.sharing.weights import ShareMember, log_holding, reach_others
from raybatch.engine.memory.kv_cache import free_memory_bytes
from raybatch.engine.weights.layout import packed_bytes, placeholder
from raybatch.engine.weights.tile_ring import TileRing
from raybatch.engine.weights.weight_copies import CopyPairs, HostCopies
from raybatch.errors import ConfigError
from raybatch.policy.ownership import Ownership, Unit
from raybatch.records.share import ShareLink

# what models call the feed-forward module of a layer
_FFN_NAMES = ("mlp", "feed_forward", "block_sparse_moe", "ffn")
# small, and read by kernels that are built before the weights of others are there
_NOT_SHARED = ("bias",)

# matrices by their name in the module
Matrices = Mapping[str, torch.Tensor]


class _Place(NamedTuple):
    """Where a module of a block has a parameter."""

    module: nn.Module
    name: str

    @property
    def parameter(self) -> object:
        return getattr(self.module, self.name, None)


@dataclass(frozen=True, slots=True, eq=False)
class _Block:
    """The feed-forward module of a layer.

    Args:
        form: its matrices, without data.
        places: of each.
    """

    module: nn.Module
    form: dict[str, torch.Tensor]
    places: dict[str, _Place]
    device: torch.device

    def put(self, matrices: Matrices) -> None:
        """Let the module compute with these matrices, which are parameters."""
        for name, matrix in matrices.items():
            setattr(*self.places[name], matrix)

    def as_parameters(self, matrices: Matrices) -> dict[str, nn.Parameter]:
        """Return matrices as parameters that are loaded as those that are there now."""
        return {
            name: _parameter_like(self.places[name].parameter, matrix)
            for name, matrix in matrices.items()
        }

    @property
    def matrices(self) -> dict[str, object]:
        return {name: place.parameter for name, place in self.places.items()}


class SharedModules:
    """The layers of one rank, with no more memory for matrices than it owns.

    A layer that is made after another one finds that one's memory free. Matrices of others take
    what a loader copies into them, and keep nothing. When the weights are loaded, `finish` is
    called.

    Args:
        layers: all there are, which are made as they are asked for.
        num_slots: for the modules of others; None takes what hides their copies.

    Raises ConfigError: a layer has no feed-forward module that is known, or the slots are too few.
    """

    def __init__(
        self, link: ShareLink, layers: Iterable[nn.Module], *, num_slots: int | None = None
    ) -> None:
        self.layers: list[nn.Module] = []
        self._blocks: list[_Block] = []
        for number, layer in enumerate(layers):
            block = _block_of(number, layer)
            block.put(block.as_parameters(block.form))
            self._blocks.append(block)
            self.layers.append(layer)
        ownership = Ownership(size=link.seat.size, num_layers=len(self.layers))
        rank = link.seat.rank
        self._num_slots = num_slots or ownership.default_slots
        ownership.check_slots(self._num_slots)
        self._member = ShareMember(ownership=ownership, rank=rank, exchange=link.exchange)
        self._forms = {Unit(number): block.form for number, block in enumerate(self._blocks)}
        forms = {unit: self._forms[unit] for unit in ownership.owned_by(rank)}
        self._device = self._blocks[0].device
        # kept for those who open it
        self.segment = make_segment(
            sum(map(packed_bytes, forms.values())),
            self._device,
            free_bytes=free_memory_bytes(torch.device("cpu")) // ownership.size,
        )
        self._owned = placed(forms, self.segment.memory)
        for unit, matrices in self._owned.items():
            block = self._blocks[unit.layer]
            block.put(block.as_parameters(matrices))

    @property
    def blocks(self) -> list[nn.Module]:
        """The feed-forward modules, by layer."""
        return [block.module for block in self._blocks]

    def finish(
        self, fingerprint: str, make_copier: Callable[[CopyPairs], HostCopies] | None = None
    ) -> TileRing[dict[str, torch.Tensor]]:
        """Reach the matrices of the others, and return their ring; from here on layers compute.

        Args:
            fingerprint: of the model.

        Raises ConfigError: what the engine did after loading has moved matrices elsewhere, or the
        ranks are not alike. Raises TeamError: a rank has ended.
        """
        self._check_unmoved()
        member = self._member
        sources = reach_others(
            member, self._forms, self._owned, self.segment, fingerprint=fingerprint
        )
        ring = ring_of_others(
            sources,
            member.ownership,
            member.rank,
            self._num_slots,
            self._device,
            make_copier=make_copier,
        )
        for unit in sources:
            block = self._blocks[unit.layer]
            slots = range(ring.num_slots)
            views = [block.as_parameters(ring.slots.view(unit, slot)) for slot in slots]
            _lend_to(block, unit, ring, views)
        log_holding(member.ownership, len(self._owned), self.segment, ring)
        return ring

    def _check_unmoved(self) -> None:
        for unit, form in self._forms.items():
            expected = self._owned.get(unit, form)
            for name, found in self._blocks[unit.layer].matrices.items():
                if not _is_same(found, expected[name]):
                    raise ConfigError(
                        f"engine.weights='shared': the engine has laid out {name} of the "
                        f"feed-forward block of layer {unit.layer} anew for its kernels, and "
                        "weights that are shared stay where they were loaded; choose kernels that "
                        "take them as they are, or leave engine.weights out"
                    )


def _block_of(number: int, layer: nn.Module) -> _Block:
    """Return the feed-forward module of a layer."""
    named = (getattr(layer, name, None) for name in _FFN_NAMES)
    module = next((each for each in named if isinstance(each, nn.Module)), None)
    found = {} if module is None else dict(module.named_parameters())
    shared = {n: p for n, p in found.items() if p.ndim > 1 and not n.endswith(_NOT_SHARED)}
    if module is None or not shared:
        raise ConfigError(
            f"engine.weights='shared': layer {number}, a {type(layer).__name__}, has no "
            f"feed-forward module that is known ({', '.join(_FFN_NAMES)}); leave engine.weights out"
        )
    places = {}
    for name in shared:
        inner, _, leaf = name.rpartition(".")
        places[name] = _Place(module.get_submodule(inner), leaf)
    device = next(iter(shared.values())).device
    return _Block(module, placeholder({n: p.data for n, p in shared.items()}), places, device)


def _parameter_like(given: object, data: torch.Tensor) -> nn.Parameter:
    """Return a parameter of other data, with the class and the attributes of a given one."""
    assert isinstance(given, nn.Parameter), "a matrix is a parameter"
    made = nn.Parameter(data, requires_grad=False)
    made.__class__ = type(given)
    made.__dict__.update(given.__dict__)
    return made


def _is_same(found: object, expected: torch.Tensor) -> bool:
    """Return whether a parameter is what was given to a module: the same memory, or none."""
    return (
        isinstance(found, nn.Parameter)
        and found.device == expected.device
        and (found.shape, found.stride(), found.dtype)
        == (expected.shape, expected.stride(), expected.dtype)
        and (expected.is_meta or found.data_ptr() == expected.data_ptr())
    )


def _lend_to(
    block: _Block,
    unit: Unit,
    ring: TileRing[dict[str, torch.Tensor]],
    views: list[dict[str, nn.Parameter]],
) -> None:
    """Have a module compute with what the ring lends, and forget it after that.

    A call raises RuntimeError where the weights could not be copied.
    """
    compute = block.module.forward
    # products of some kernels with a matrix of the right shape and no data are whatever there was
    nothing = {n: torch.empty(0, dtype=x.dtype, device=block.device) for n, x in block.form.items()}
    placeholders = block.as_parameters(nothing)

    @wraps(compute)
    def forward(*args: Any, **options: Any) -> Any:  # noqa: ANN401 - of the module
        with ring.use(unit) as slot:
            block.put(views[slot])
            try:
                return compute(*args, **options)
            finally:
                block.put(placeholders)

    block.put(placeholders)
    block.module.forward = forward
