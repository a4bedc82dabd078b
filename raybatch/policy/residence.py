"""Which feed-forward blocks stay on the device, and which are copied there in every pass.

Residence is planned and not fixed (BatchGen, arXiv:2606.21712, section 5.2): as many whole blocks
stay as the budget holds next to a ring of buffers, through which the weights of the others pass.
"""

from dataclasses import dataclass

import numpy as np

from raybatch.errors import ConfigError
from raybatch.policy.layer_plan import ModuleCosts
from raybatch.records.arrays import Floats

# buffers of a ring where nothing is said
USUAL_BUFFERS = 2
# where their KV fits beside all weights, nothing is streamed for more of them
_FEW_ROWS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightSizes:
    """Bytes of a model's weights: feed-forward blocks by layer, and all that is always there.

    The latter are embeddings, head, attention, norms and routers.
    """

    other_bytes: int
    ffn_bytes: tuple[int, ...]

    @property
    def total_bytes(self) -> int:
        return self.other_bytes + sum(self.ffn_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Residence:
    is_resident: tuple[bool, ...]  # by layer, whether its feed-forward block stays on the device
    num_buffers: int  # blocks of the ring; 0 where all are resident
    buffer_bytes: int  # of one of them: the largest block that passes through
    device_bytes: int  # that all of this takes on the device
    pass_bytes: int  # that one pass through the layers copies to the device

    @property
    def streamed(self) -> tuple[int, ...]:
        """Layers that pass through the ring, in order."""
        return tuple(idx for idx, stays in enumerate(self.is_resident) if not stays)


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightMemory:
    """Weights, and the memory that they have in common with KV and the largest step.

    KV takes `kv_bytes`; None takes `kv_share` of what weights leave, less the bytes of the step.
    """

    sizes: WeightSizes
    weight_buffers: int
    device_bytes: int
    host_bytes: int
    step_bytes: int
    kv_share: float
    kv_bytes: int | None = None

    def left_for_kv(self, weight_bytes: int) -> int:
        """Return the bytes of KV on the device beside weights; 0 where they do not fit."""
        free = self.device_bytes - weight_bytes
        if self.kv_bytes is None:
            return max(0, int(self.kv_share * free) - self.step_bytes)
        return self.kv_bytes if self.kv_bytes + self.step_bytes <= free else 0

    def holds_all(self, row_bytes: int) -> bool:
        """Return whether all layers stay, as the KV of a few such rows fits beside them."""
        wanted = _FEW_ROWS * row_bytes if self.kv_bytes is None else 1
        return self.left_for_kv(self.sizes.total_bytes) >= wanted


def plan_residence(
    sizes: WeightSizes, *, device_weight_bytes: int | None, weight_buffers: int
) -> Residence:
    """Return the residence with the most resident layers that the budget holds; None keeps all.

    Streamed layers are spread over the model, so that a copy has the time of the resident layers
    before it, and the last one is the last layer, so that the first has the time between steps.

    Raises:
        ConfigError: the budget does not hold the ring and what always stays.
    """
    tried = residences(sizes, weight_buffers)
    for residence in tried:
        if device_weight_bytes is None or residence.device_bytes <= device_weight_bytes:
            return residence
    least = min(residence.device_bytes for residence in tried)
    fewer = "take fewer buffers, " if weight_buffers > 1 else ""
    raise ConfigError(
        f"engine.device_weight_bytes is {device_weight_bytes}, but attention, embeddings and head "
        f"take {sizes.other_bytes} and a ring of {weight_buffers} feed-forward blocks "
        f"(engine.weight_buffers) up to {weight_buffers * max(sizes.ffn_bytes)}: {least} at least; "
        f"raise it, {fewer}"
        f"or leave it out to keep all {sizes.total_bytes} bytes of weights on the device"
    )


def residences(sizes: WeightSizes, weight_buffers: int) -> list[Residence]:
    """Return one residence for each number of resident layers, the most first."""
    counts = range(len(sizes.ffn_bytes), -1, -1)
    return [_residence(sizes, count, weight_buffers) for count in counts]


def pass_seconds(
    residence: Residence, layers_s: Floats, costs: ModuleCosts, link_s: Floats | float = 0.0
) -> Floats:
    """Return the seconds of passes [S] through all layers, once passes follow each other.

    `layers_s` are those of their computations. Copies overlap with them on a GPU: a layer waits for
    its copy, a copy for the layer that had its buffer, and for other copies, which keep the link
    busy for `link_s`. On a CPU they take turns.
    """
    num_streamed = len(residence.streamed)
    if not num_streamed:
        return layers_s
    copies_s = num_streamed * costs.to_device.copy_s(residence.pass_bytes / num_streamed)
    if not costs.copies_overlap:
        return layers_s + copies_s
    share = num_streamed / len(residence.is_resident)
    # a buffer is filled and then used, again and again
    ring_s = (copies_s + share * layers_s) / residence.num_buffers
    seconds: Floats = np.maximum(np.maximum(layers_s, ring_s), copies_s + link_s)
    return seconds


def _residence(sizes: WeightSizes, num_resident: int, weight_buffers: int) -> Residence:
    num_layers = len(sizes.ffn_bytes)
    num_streamed = num_layers - num_resident
    is_resident = tuple(
        (idx + 1) * num_streamed // num_layers == idx * num_streamed // num_layers
        for idx in range(num_layers)
    )
    by_layer = zip(sizes.ffn_bytes, is_resident, strict=True)
    passing = [size for size, stays in by_layer if not stays]
    num_buffers, buffer_bytes = min(weight_buffers, num_streamed), max(passing, default=0)
    return Residence(
        is_resident=is_resident,
        num_buffers=num_buffers,
        buffer_bytes=buffer_bytes,
        device_bytes=sizes.total_bytes - sum(passing) + num_buffers * buffer_bytes,
        pass_bytes=sum(passing),
    )
