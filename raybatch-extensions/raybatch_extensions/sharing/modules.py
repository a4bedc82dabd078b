"""Shares the weights of torch feed-forward modules of another engine (vLLM) in a group of replicas.

```
layer   attention and all else    unchanged
        feed-forward module       its matrices are one shard, `Unit(layer)`
                                  owned       in this rank's segment
                                  of peers    placeholders without data; while the module runs,
                                              the contents of a slot
```

Slots, orders and owners follow the native engine, by layer.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import nn

from raybatch.engine.memory.kv_cache import free_memory_bytes
from raybatch.engine.weights.layer_store import ShardBufferPool
from raybatch.engine.weights.layout import packed_bytes, placeholder
from raybatch.engine.weights.weight_copies import CopyPairs, HostCopies
from raybatch.errors import ConfigError
from raybatch.records.share import ShareLink, Unit
from raybatch_extensions.sharing.layers import peer_buffers, placed
from raybatch_extensions.sharing.ownership import Ownership
from raybatch_extensions.sharing.segments import make_segment
from raybatch_extensions.sharing.weights import ShareMember, log_holding, reach_others

# attribute names of a layer's feed-forward module
_FFN_NAMES = ("mlp", "feed_forward", "block_sparse_moe", "ffn")
# small, and read by kernels that are built before peers' weights arrive
_NOT_SHARED = ("bias",)

# matrices by their name in the module
Matrices = Mapping[str, torch.Tensor]


class _Place(NamedTuple):
    """Module and attribute that hold a parameter of a block."""

    module: nn.Module
    name: str

    @property
    def parameter(self) -> object:
        return getattr(self.module, self.name, None)


@dataclass(frozen=True, slots=True, eq=False)
class _Block:
    """The feed-forward module of a layer.

    Args:
        form: matrices without data.
        places: where the module holds each matrix.
    """

    module: nn.Module
    form: dict[str, torch.Tensor]
    places: dict[str, _Place]
    device: torch.device

    def put(self, matrices: Matrices) -> None:
        """Set these matrices, which are parameters, in the module."""
        for name, matrix in matrices.items():
            setattr(*self.places[name], matrix)

    def as_parameters(self, matrices: Matrices) -> dict[str, nn.Parameter]:
        """Return matrices as parameters, with the weight loaders of the current parameters."""
        return {
            name: _parameter_like(self.places[name].parameter, matrix)
            for name, matrix in matrices.items()
        }

    @property
    def matrices(self) -> dict[str, object]:
        return {name: place.parameter for name, place in self.places.items()}


class SharedModules:
    """Builds the layers of one rank with memory for its owned matrices only.

    Each layer frees its matrices before the next one is built. Matrices owned by peers accept
    what a loader copies into them and drop it. Call `finish` when the weights are loaded.

    Args:
        layers: all layers, built lazily.
        num_slots: slots for modules of peers; None takes as many as hide the weight fetch.

    Raises ConfigError: a layer has no known feed-forward module, or the slots are too few.
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
        ownership = Ownership(size=link.share_rank.size, num_layers=len(self.layers))
        rank = link.share_rank.rank
        self._num_slots = num_slots or ownership.default_slots
        ownership.check_slots(self._num_slots)
        self._member = ShareMember(ownership=ownership, rank=rank, exchange=link.exchange)
        self._forms = {Unit(number): block.form for number, block in enumerate(self._blocks)}
        forms = {unit: self._forms[unit] for unit in ownership.owned_by(rank)}
        self._device = self._blocks[0].device
        # kept alive for the peers
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
        """Feed-forward modules, by layer."""
        return [block.module for block in self._blocks]

    def finish(
        self, fingerprint: str, make_copier: Callable[[CopyPairs], HostCopies] | None = None
    ) -> ShardBufferPool[dict[str, torch.Tensor]]:
        """Open the matrices of the peers, make the layers usable and return the buffer pool.

        Args:
            fingerprint: of the model, to compare between the ranks.
            make_copier: makes what copies from peers; None takes the default of the device.

        Raises ConfigError: the engine moved matrices after loading, or the ranks differ. Raises
        RankError: a rank has ended.
        """
        self._check_unmoved()
        member = self._member
        sources = reach_others(
            member, self._forms, self._owned, self.segment, fingerprint=fingerprint
        )
        buffers = peer_buffers(
            sources,
            member.ownership,
            member.rank,
            self._num_slots,
            self._device,
            make_copier=make_copier,
        )
        for unit in sources:
            block = self._blocks[unit.layer]
            slots = range(buffers.num_slots)
            views = [block.as_parameters(buffers.slots.view(unit, slot)) for slot in slots]
            _lend_to(block, unit, buffers, views)
        log_holding(member.ownership, len(self._owned), self.segment, buffers)
        return buffers

    def _check_unmoved(self) -> None:
        for unit, form in self._forms.items():
            expected = self._owned.get(unit, form)
            for name, found in self._blocks[unit.layer].matrices.items():
                if not _is_same(found, expected[name]):
                    raise ConfigError(
                        f"engine.weights='shared': the engine moved {name} of the feed-forward "
                        f"block of layer {unit.layer} to another layout for its kernels, and "
                        "shared weights must stay where they were loaded; choose kernels that use "
                        "the loaded layout, or leave engine.weights out"
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
            f"known feed-forward module ({', '.join(_FFN_NAMES)}); leave engine.weights out"
        )
    places = {}
    for name in shared:
        inner, _, leaf = name.rpartition(".")
        places[name] = _Place(module.get_submodule(inner), leaf)
    device = next(iter(shared.values())).device
    return _Block(module, placeholder({n: p.data for n, p in shared.items()}), places, device)


def _parameter_like(given: object, data: torch.Tensor) -> nn.Parameter:
    """Return a parameter with new data and the class and attributes of `given`."""
    assert isinstance(given, nn.Parameter), "a matrix must be a parameter"
    made = nn.Parameter(data, requires_grad=False)
    made.__class__ = type(given)
    made.__dict__.update(given.__dict__)
    return made


def _is_same(found: object, expected: torch.Tensor) -> bool:
    """Return whether a parameter still has the memory that was set; true if both have none."""
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
    buffers: ShardBufferPool[dict[str, torch.Tensor]],
    views: list[dict[str, nn.Parameter]],
) -> None:
    """Wrap a module so that it borrows its matrices from the buffer pool during each call.

    A call raises RuntimeError if the weights could not be fetched.
    """
    compute = block.module.forward
    # empty: some kernels return garbage for a matrix of the right shape without data
    nothing = {n: torch.empty(0, dtype=x.dtype, device=block.device) for n, x in block.form.items()}
    placeholders = block.as_parameters(nothing)

    @wraps(compute)
    def forward(*args: Any, **options: Any) -> Any:  # noqa: ANN401 - of the module
        with buffers.use(unit) as slot:
            block.put(views[slot])
            try:
                return compute(*args, **options)
            finally:
                block.put(placeholders)

    block.put(placeholders)
    block.module.forward = forward
