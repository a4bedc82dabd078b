"""Which layers keep their weights on the device, and which are copied there in every pass.

Residence is planned and not fixed (BatchGen, arXiv:2606.21712, section 5.2): as many whole layers
stay as the budget holds next to a ring of buffers, through which the weights of the others pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from raybatch.errors import ConfigError
from raybatch.policy.batches.forward_dag import DagNode, ForwardTime, critical_path
from raybatch.policy.batches.layer_plan import ModuleCosts

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
    layer_bytes: tuple[int, ...]
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
    tried = residences(sizes, weight_buffers)
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


def residences(sizes: WeightSizes, weight_buffers: int) -> list[Residence]:
    """Return one residence for each number of resident layers, the most first."""
    counts = range(len(sizes.layer_bytes), -1, -1)
    return [_residence(sizes, count, weight_buffers) for count in counts]


def pass_time(
    residence: Residence, *, layer_s: Sequence[float], bytes_per_s: float, copies_overlap: bool
) -> float:
    """Return the seconds of one pass through the layers, once passes follow each other.

    It is the critical path of computations and copies: a layer waits for its copy, and a copy for
    the layer that had its buffer. What the copies add is this less the sum of `layer_s`. Copies
    overlap with computations on a GPU; on a CPU they take turns.
    """
    nodes, users, ends = list[DagNode](), list[str](), list[int]()
    link = "to_device" if copies_overlap else "compute"
    for number in range(_NUM_PASSES):
        for idx, stays in enumerate(residence.is_resident):
            name, after = f"{number}.{idx}", tuple[str, ...]()
            if not stays:
                after = (f"{name}.load",)
                # the one that had the buffer before
                is_full = len(users) >= residence.num_buffers
                freed = (users[-residence.num_buffers],) if is_full else ()
                copy_s = residence.layer_bytes[idx] / bytes_per_s
                nodes.append(DagNode(name=after[0], resource=link, seconds=copy_s, after=freed))
                users.append(name)
            nodes.append(DagNode(name=name, resource="compute", seconds=layer_s[idx], after=after))
        ends.append(len(nodes) - 1)
    finish = critical_path(nodes).finish_s
    half = _NUM_PASSES // 2
    return (finish[ends[-1]] - finish[ends[half - 1]]) / (_NUM_PASSES - half)


def streamed_s(residence: Residence, forward: ForwardTime, costs: ModuleCosts) -> float:
    """Return the seconds of a forward pass whose streamed layers are copied once for all its rows.

    KV that lives in host memory comes over the same link, which both keep busy.
    """
    if not residence.streamed:
        return forward.seconds
    num_layers = len(residence.is_resident)
    byte_s = costs.to_device.copy_s(residence.buffer_bytes) / residence.buffer_bytes
    seconds = pass_time(
        residence,
        layer_s=[forward.seconds / num_layers] * num_layers,
        bytes_per_s=1 / max(byte_s, 1e-18),
        copies_overlap=costs.copies_overlap,
    )
    kv_s = forward.busy_fraction.get("to_device", 0.0) * forward.seconds
    return max(seconds, kv_s + residence.pass_bytes * byte_s)


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
        layer_bytes=sizes.layer_bytes,
        is_resident=is_resident,
        num_buffers=num_buffers,
        buffer_bytes=buffer_bytes,
        device_bytes=sizes.total_bytes - sum(passing) + num_buffers * buffer_bytes,
        pass_bytes=sum(passing),
    )
