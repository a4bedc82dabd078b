"""Which layers keep their weights on the device, and which are copied there in every pass.

Residence is planned and not fixed (BatchGen, arXiv:2606.21712, section 5.2): as many whole layers
stay as the budget holds next to a ring of buffers, through which the weights of the others pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from raybatch.errors import ConfigError
from raybatch.policy.batches.layer_dag import DagNode, critical_path

# passes that are laid out; what the last ones take is no longer that of a ring that fills
_NUM_PASSES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightSizes:
    """Bytes of a model's weights, as they lie in memory.

    Args:
        other_bytes: of what belongs to no layer (embeddings, head, the last norm); always there.
    """

    other_bytes: int
    layer_bytes: tuple[int, ...]

    @property
    def total_bytes(self) -> int:
        return self.other_bytes + sum(self.layer_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Residence:
    """Where the weights of each layer are.

    Args:
        is_resident: by layer, whether its weights stay on the device.
        num_buffers: layers of the ring; 0 where all are resident.
        buffer_bytes: of one of them: the largest layer that passes through.
        device_bytes: that all of this takes on the device.
        pass_bytes: that one pass through the layers copies to the device.
    """

    is_resident: tuple[bool, ...]
    num_buffers: int
    buffer_bytes: int
    device_bytes: int
    pass_bytes: int

    @property
    def streamed(self) -> tuple[int, ...]:
        """Layers that pass through the ring, in order."""
        return tuple(idx for idx, stays in enumerate(self.is_resident) if not stays)


def plan_residence(
    sizes: WeightSizes, *, device_weight_bytes: int | None, weight_buffers: int
) -> Residence:
    """Return the residence with the most resident layers that the budget holds.

    Streamed layers are spread over the model, so that a copy has the time of the resident layers
    before it, and the last one is the last layer, so that the first has the time between steps.

    Args:
        device_weight_bytes: of the device for weights and ring; None keeps everything there.

    Raises:
        ConfigError: the budget does not hold the ring and what always stays.
    """
    num_layers = len(sizes.layer_bytes)
    if device_weight_bytes is None:
        return _residence(sizes, num_layers, weight_buffers)
    for num_resident in range(num_layers, -1, -1):
        residence = _residence(sizes, num_resident, weight_buffers)
        if residence.device_bytes <= device_weight_bytes:
            return residence
    least = min(
        _residence(sizes, count, weight_buffers).device_bytes for count in range(num_layers + 1)
    )
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

    It is the critical path of computations and copies: a layer waits for its copy, and a copy for
    the layer that had its buffer. What the copies add is this less the sum of `layer_s`.

    Args:
        copies_overlap: copies run during computations, as on a GPU; on a CPU they take turns.
    """
    nodes, users, ends = list[DagNode](), list[str](), list[int]()
    link = "to_device" if copies_overlap else "compute"
    for number in range(_NUM_PASSES):
        for idx, stays in enumerate(residence.is_resident):
            name, after = f"{number}.{idx}", tuple[str, ...]()
            if not stays:
                copy = f"{name}.load"
                # the one that had the buffer before
                before = users[-residence.num_buffers :][:1]
                freed = tuple(before) if len(users) >= residence.num_buffers else ()
                copy_s = sizes.layer_bytes[idx] / bytes_per_s
                nodes.append(
                    DagNode(name=copy, kind="transfer", resource=link, seconds=copy_s, after=freed)
                )
                users.append(name)
                after = (copy,)
            nodes.append(
                DagNode(
                    name=name, kind="compute", resource="compute", seconds=layer_s[idx], after=after
                )
            )
        ends.append(len(nodes) - 1)
    finish = critical_path(nodes).finish_s
    half = _NUM_PASSES // 2
    return (finish[ends[-1]] - finish[ends[half - 1]]) / (_NUM_PASSES - half)


def _residence(sizes: WeightSizes, num_resident: int, weight_buffers: int) -> Residence:
    num_layers = len(sizes.layer_bytes)
    num_streamed = num_layers - num_resident
    is_resident = tuple(
        (idx + 1) * num_streamed // num_layers == idx * num_streamed // num_layers
        for idx in range(num_layers)
    )
    staying, passing = (
        [size for size, stays in zip(sizes.layer_bytes, is_resident, strict=True) if stays is kind]
        for kind in (True, False)
    )
    num_buffers = min(weight_buffers, num_streamed)
    buffer_bytes = max(passing, default=0)
    return Residence(
        is_resident=is_resident,
        num_buffers=num_buffers,
        buffer_bytes=buffer_bytes,
        device_bytes=sizes.other_bytes + sum(staying) + num_buffers * buffer_bytes,
        pass_bytes=sum(passing),
    )
