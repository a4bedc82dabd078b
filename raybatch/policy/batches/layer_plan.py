"""One choice of batch sizes and residence: its record, what it needs to be priced, its memory."""

from dataclasses import dataclass

from raybatch.errors import ConfigError
from raybatch.policy.batches.layer_work import LayerShape, Workload
from raybatch.policy.cost.roofline import Roofline

# sub-batches whose KV is on the device while the rest is on the host
KV_SLOTS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchPlan:
    """Batch sizes of a forward pass, and where parameters and KV live.

    Args:
        attention_tokens: of one run of attention.
        gate_tokens: of one run of the experts, and of the forward pass.
        parameter_buffers: pieces of a layer's experts that the device holds at once, in a ring,
            while all experts are on the host; None keeps all of them on the device.
        has_kv_on_host: KV is on the host, and on the device for the running sub-batch and the next.

    Raises:
        ConfigError: there is no token or no buffer, or attention takes more tokens than the gate.
    """

    attention_tokens: int
    gate_tokens: int
    parameter_buffers: int | None = None
    has_kv_on_host: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.attention_tokens <= self.gate_tokens:
            raise ConfigError(
                f"attention_tokens is {self.attention_tokens}; it must be within "
                f"1..{self.gate_tokens}, the tokens at the gate"
            )
        if self.parameter_buffers is not None and self.parameter_buffers < 1:
            raise ConfigError(f"parameter_buffers is {self.parameter_buffers}; it must be >= 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """A model as layers that are all alike.

    Args:
        layer: its representative layer.
        num_layers: of the model.
        other_bytes: of weights that belong to no layer; they are always on the device.
        num_pieces: into which the experts of a layer are cut where they are streamed.

    Raises:
        ConfigError: a number is too small, or there are more pieces than experts.
    """

    layer: LayerShape
    num_layers: int
    other_bytes: int = 0
    num_pieces: int = 1

    def __post_init__(self) -> None:
        if self.num_layers < 1 or self.other_bytes < 0:
            raise ConfigError(
                f"a model has {self.num_layers} layers and {self.other_bytes} other bytes; it "
                "needs at least 1 and 0"
            )
        if not 1 <= self.num_pieces <= self.layer.num_experts:
            raise ConfigError(
                f"num_pieces is {self.num_pieces}; it must be within 1..{self.layer.num_experts}, "
                "the experts of a layer"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleCosts:
    """Measured costs of the parts of a layer.

    Args:
        attention: of one run, with the linears before and after it.
        ffn: of one run of the experts, or of the dense block.
        to_device: of a copy from the host.
        to_host: of a copy to the host.
        copies_overlap: copies run beside computation, in either direction; where they take the
            processor that computes, as on a CPU with one thread, they do not.
    """

    attention: Roofline
    ffn: Roofline
    to_device: Roofline
    to_host: Roofline
    copies_overlap: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryNeed:
    """Bytes that a plan takes.

    Args:
        device_bytes: parameters, KV and working memory on the device.
        host_bytes: parameters that are streamed, and KV that is kept there.
        kv_bytes: of all sequences of a pass, wherever they are; part of one of the two.
    """

    device_bytes: int
    host_bytes: int
    kv_bytes: int


def memory_need(model: ModelShape, plan: BatchPlan, workload: Workload) -> MemoryNeed:
    """Return the bytes that a plan takes on the device and on the host."""
    layer = model.layer
    context = workload.cached_tokens + workload.tokens_per_sequence
    kv = workload.num_sequences(plan.gate_tokens) * (context + workload.reserved_tokens)
    kv *= layer.kv_bytes_per_token * model.num_layers
    experts = layer.ffn_bytes * model.num_layers
    device = model.other_bytes + layer.attention_bytes * model.num_layers
    device += _workspace_bytes(layer, plan)
    host = 0
    if plan.parameter_buffers is None:
        device += experts
    else:
        host += experts
        device += plan.parameter_buffers * -(-layer.ffn_bytes // model.num_pieces)
    if plan.has_kv_on_host:
        host += kv
        num_sequences = workload.num_sequences(plan.attention_tokens)
        device += KV_SLOTS * num_sequences * context * layer.kv_bytes_per_token
    else:
        device += kv
    return MemoryNeed(device_bytes=device, host_bytes=host, kv_bytes=kv)


def _workspace_bytes(layer: LayerShape, plan: BatchPlan) -> int:
    """Return the bytes of hidden states, and of what one run of a module makes on the way."""
    hidden = 2 * plan.gate_tokens * layer.model_dim
    attention = plan.attention_tokens * (layer.projected_dim + layer.num_heads * layer.head_dim)
    ffn = plan.gate_tokens * layer.top_k * (2 * layer.ffn_dim + layer.model_dim)
    return (hidden + max(attention, ffn)) * layer.element_bytes
