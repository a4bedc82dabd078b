"""Which layers keep their weights on the device, and which are copied there in every pass.

Residence is planned and not fixed (BatchGen, arXiv:2606.21712, section 5.2): as many whole layers
stay as the budget holds next to a ring of buffers, through which the weights of the others pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from raybatch.errors import ConfigError

# passes that are laid out; what the last ones take is no longer that of a ring that fills
_NUM_PASSES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightSizes:
    """Bytes of a model's weights; others belong to no layer: embeddings, head, the last norm."""

    other_bytes: int
    layer_bytes: tuple[int, ...]

    @property
    def total_bytes(self) -> int:
        return self.other_bytes + sum(self.layer_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Residence:
    is_resident: tuple[bool, ...]  # by layer, whether its weights stay on the device
    num_buffers: int  # layers of the ring; 0 where all are resident
    buffer_bytes: int  # of one of them: the largest layer that passes through
    device_bytes: int  # that all of this takes on the device
    pass_bytes: int  # that one pass through the layers copies to the device

    @property
    def streamed(self) -> tuple[int, ...]:
        """Layers that pass through the ring, in order."""
        return tuple(idx for idx, stays in enumerate(self.is_resident) if not stays)


def plan_residence(
    sizes: WeightSizes, *, device_weight_bytes: int | None, weight_buffers: int
) -> Residence:
    """Return the residence with the most resident layers that the budget holds; None keeps all.

    Streamed layers are spread over the model, so that a copy has the time of the resident layers
    before it, and the last one is the last layer, so that the first has the time between steps.

    Raises:
        ConfigError: the budget does not hold the ring and what always stays.
    """
    num_layers = len(sizes.layer_bytes)
    tried = [_residence(sizes, count, weight_buffers) for count in range(num_layers, -1, -1)]
    for residence in tried:
        if device_weight_bytes is None or residence.device_bytes <= device_weight_bytes:
            return residence
    least = min(residence.device_bytes for residence in tried)
    fewer = "take fewer buffers, " if weight_buffers > 1 else ""
    raise ConfigError(
        f"engine.device_weight_bytes is {device_weight_bytes}, but embeddings and head take "
        f"{sizes.other_bytes} and a ring of {weight_buffers} layers (engine.weight_buffers) up to "
        f"{weight_buffers * max(sizes.layer_bytes)}: {least} at least; raise it, {fewer}"
        f"or leave it out to keep all {sizes.total_bytes} bytes of weights on the device"
    )


def pass_time(
    residence: Residence,
    sizes: WeightSizes,
    *,
    layer_s: Sequence[float],
    bytes_per_s: float,
    copies_overlap: bool,
) -> float:
    """Return the seconds of one pass through the layers, once passes follow each other.

    A layer waits for its copy, and a copy for the layer that had its buffer. What the copies add is
    this less the sum of `layer_s`. Copies overlap with computations on a GPU; on a CPU they take
    turns.
    """
    computed_s = copied_s = 0.0
    used_s, ends_s = list[float](), list[float]()
    for _ in range(_NUM_PASSES):
        for idx, stays in enumerate(residence.is_resident):
            if not stays:
                # the layer that had the buffer before
                is_full = len(used_s) >= residence.num_buffers
                freed_s = used_s[-residence.num_buffers] if is_full else 0.0
                begin_s = max(freed_s, copied_s if copies_overlap else computed_s)
                copied_s = begin_s + sizes.layer_bytes[idx] / bytes_per_s
                computed_s = max(computed_s, copied_s)
            computed_s += layer_s[idx]
            if not stays:
                used_s.append(computed_s)
        ends_s.append(computed_s)
    half = _NUM_PASSES // 2
    return (ends_s[-1] - ends_s[half - 1]) / (_NUM_PASSES - half)


def _residence(sizes: WeightSizes, num_resident: int, weight_buffers: int) -> Residence:
    num_layers = len(sizes.layer_bytes)
    num_streamed = num_layers - num_resident
    is_resident = tuple(
        (idx + 1) * num_streamed // num_layers == idx * num_streamed // num_layers
        for idx in range(num_layers)
    )
    by_layer = zip(sizes.layer_bytes, is_resident, strict=True)
    passing = [size for size, stays in by_layer if not stays]
    num_buffers, buffer_bytes = min(weight_buffers, num_streamed), max(passing, default=0)
    return Residence(
        is_resident=is_resident,
        num_buffers=num_buffers,
        buffer_bytes=buffer_bytes,
        device_bytes=sizes.total_bytes - sum(passing) + num_buffers * buffer_bytes,
        pass_bytes=sum(passing),
    )
